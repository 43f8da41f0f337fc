"""Image files: opened within bounds, or refused in a sentence; and what becomes of their rows."""

from __future__ import annotations

import base64
import io
import json
import os
import struct
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tonnage.config import Data
from tonnage.data import DataError, Prepared, prepare
from tonnage.data.images.opening import MOST_PIXELS, EncodedImage, decode, digest_of, load_image
from tonnage.data.images.processing import ImageRecipe, process_row, tower_inputs
from tonnage.data.images.shown import KIND, MOST_BYTES, thumbnail
from tonnage.data.images.table import ImageTable, ImageTableWriter
from tonnage.data.prepare import ModelFacts
from tonnage.forms.conversation import Image, RowError

pytest.importorskip("PIL")
from PIL import Image as Pillow

from visions import IMAGE_ID, LISTS_ONLY, TEMPLATE, draw_image, write_vision


def encoded(image: Any, kind: str = "PNG", **how: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **how)
    return file.getvalue()


def colours(mode: str) -> Any:
    return Pillow.open(io.BytesIO(draw_image(3))).convert(mode)


def png_of(width: int, height: int) -> bytes:
    """A file that says that it has so many pixels, and holds none."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 64)) + chunk(b"IEND", b"")
    )


def moving() -> bytes:
    frames = [colours("RGB").rotate(angle) for angle in (0, 90)]
    return encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])


REFUSED: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "is empty"),
    "a text": (lambda: b"hello " * 100, "no image of a kind that is read"),
    "a program of PostScript": (lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "no image of a kind"),
    "cut": (lambda: draw_image(1, (300, 300))[:-900], "is damaged"),
    "cut in its header": (lambda: draw_image(1)[:20], "is damaged|no image of a kind"),
    "a cut JPEG": (lambda: encoded(colours("RGB"), "JPEG")[:-200], "is damaged"),
    "100,000 pixels a side": (lambda: png_of(100_000, 100_000), f"at most {MOST_PIXELS:,} are decoded"),
    "a bomb": (lambda: png_of(20_000, 20_000), f"at most {MOST_PIXELS:,} are decoded"),
    "a line": (lambda: encoded(Pillow.new("RGB", (3000, 1))), "one side may be 200 times the other"),
    "moving": (moving, "2 frames or pages"),
    "pages": (
        lambda: encoded(colours("RGB"), "TIFF", save_all=True, append_images=[colours("RGB")]),
        "2 frames or pages",
    ),
    "floats": (lambda: encoded(Pillow.new("F", (9, 9), 0.5), "TIFF"), "pixels of mode F"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_image_is_refused(case: str) -> None:
    make, reason = REFUSED[case]
    with pytest.raises(RowError, match=reason):
        decode(EncodedImage(make(), "digest", "it.png"))


@pytest.mark.parametrize("seed", range(40))
def test_damaged_files_give_an_image_or_a_sentence(seed: int) -> None:
    chance = np.random.default_rng(seed)
    kind = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")[seed % 7]
    content = bytearray(encoded(colours("RGB"), kind))
    for _ in range(int(chance.integers(1, 30))):
        content[int(chance.integers(len(content)))] = int(chance.integers(256))
    reasons = []
    try:
        assert decode(EncodedImage(bytes(content), "digest")).mode == "RGB"
    except RowError as error:
        reasons.append(error)
    assert all(reason.kind == "image" and len(reason.reason) < 500 for reason in reasons)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "RGB"])
def test_every_mode_becomes_what_pillow_makes_of_it(mode: str) -> None:
    image = colours(mode)
    kind = "TIFF" if mode == "CMYK" else "PNG"
    ours = decode(EncodedImage(encoded(image, kind), "digest"))
    assert ours.mode == "RGB"
    assert ours.tobytes() == Pillow.open(io.BytesIO(encoded(image, kind))).convert("RGB").tobytes()


def test_of_sixteen_bits_the_high_ones_are_left() -> None:
    numbers = np.linspace(0, 65535, 64, dtype=np.uint16).reshape(8, 8)
    image = decode(EncodedImage(encoded(Pillow.fromarray(numbers)), "digest"))
    assert np.array_equal(np.asarray(image)[..., 0], (numbers >> 8).astype(np.uint8))


def test_a_turned_photograph_is_turned_back() -> None:
    exif = Pillow.Exif()
    exif[0x0112] = 6
    content = encoded(Pillow.new("RGB", (40, 20)), "JPEG", exif=exif.tobytes())
    assert decode(EncodedImage(content, "digest")).size == (20, 40)


def test_paths_stay_in_their_folder(tmp_path: Path) -> None:
    folder, outside = tmp_path / "rows", tmp_path / "secret.png"
    (folder / "deep").mkdir(parents=True)
    outside.write_bytes(draw_image(1))
    (folder / "deep" / "own.png").write_bytes(draw_image(2))
    (folder / "link.png").symlink_to(outside)
    (folder / "loop.png").symlink_to(folder / "loop.png")
    os.mkfifo(folder / "pipe.png")
    for path in ("deep/own.png", "./deep/../deep/own.png", str(folder / "deep" / "own.png")):
        assert load_image(Image(path), folder).content == draw_image(2)
    for path in ("../secret.png", str(outside), "link.png", "/etc/passwd"):
        with pytest.raises(RowError, match="leads out of"):
            load_image(Image(path), folder)
    for path in ("none.png", "deep", "pipe.png", "loop.png", "a\0b", "x" * 5000):
        with pytest.raises(RowError, match=r"is not there|no regular file|no name of a file"):
            load_image(Image(path), folder)
    assert load_image(Image(str(outside)), Path("/")).content == draw_image(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision(tmp_path_factory.mktemp("vision") / "model", "llava", template=LISTS_ONLY)


def prepared(model: Path, folder: Path, rows: list[dict[str, Any]] | None = None, **keys: Any) -> Prepared:
    if rows is not None:
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    from transformers import AutoTokenizer

    source = {"path": str(folder / "rows.jsonl")} | keys.pop("source", {})
    data = Data.model_validate({"train": [source], "max_length": 128} | keys)
    facts = ModelFacts(images=ImageRecipe(str(model), IMAGE_ID))
    return prepare(data, AutoTokenizer.from_pretrained(model), cache=folder / "cache", model=facts)


def row(*paths: str, words: str = "What?", answer: str = "a cat") -> dict[str, Any]:
    content = "<image>" * len(paths) + words
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "images": list(paths)} if paths else {"messages": messages}


def draw(folder: Path, *names: str) -> None:
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(draw_image(number))


def test_rows_are_tokenised_as_the_processor_does_and_accounted_for(model: Path, tmp_path: Path) -> None:
    from transformers import AutoProcessor

    draw(tmp_path, "a.png", "b.png")
    made = prepared(model, tmp_path, [row("a.png"), row("a.png", "b.png", words="Two?"), row(words="None.")])
    processor = AutoProcessor.from_pretrained(model)
    pixels = [Pillow.open(tmp_path / name) for name in ("a.png", "b.png")]
    conversation = [
        {"role": "user", "content": [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "Two?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "a cat"}]},
    ]
    text = processor.apply_chat_template(conversation)
    expected = processor(text=[text], images=[pixels])["input_ids"][0]
    source = made.train.source
    assert source.tokens(1).tolist() == expected
    (span,) = source.spans(1)
    assert bytes(source.tokens(1)[span[0] : span[1] - 1].tolist()) != b""
    assert made.tokenizer.decode(source.tokens(1)[span[0] : span[1]]) == "a cat<|end|>"
    total = made.account.total
    assert (total.rows_with_images, total.images, total.image_tokens) == (2, 3, 12)
    assert [len(source.images(at)) for at in range(3)] == [1, 2, 0]
    table, number = source.images(0)[0]
    assert table.load(number).content == (tmp_path / "a.png").read_bytes()
    assert made.train.images
    assert made.train.common_prefixes == ()


def test_a_template_of_strings_gets_lists_only_of_images(tmp_path: Path) -> None:
    folder = write_vision(tmp_path / "model", "llava", template=TEMPLATE)
    draw(tmp_path, "a.png")
    made = prepared(folder, tmp_path, [row("a.png"), row(words="None.")])
    assert made.recipe.scripts[0].template.parts == "images"
    assert made.account.total.rows_train == 2


def test_rows_whose_image_is_bad_are_bad_and_never_trained_without(model: Path, tmp_path: Path) -> None:
    draw(tmp_path, "a.png")
    (tmp_path / "b.png").write_bytes(b"no image")
    rows = [row("a.png"), row("b.png"), row("none.png"), row("../a.png")]
    with pytest.raises(DataError, match="no image of a kind") as caught:
        prepared(model, tmp_path, rows)
    assert "'none.png' is not there" in str(caught.value)
    assert "leads out of" in str(caught.value)
    made = prepared(model, tmp_path, on_bad_row="skip")
    total = made.account.total
    assert (total.rows_train, dict(total.bad_kinds), total.images) == (1, {"image": 3}, 1)


def test_a_file_that_changes_or_comes_makes_other_documents(model: Path, tmp_path: Path) -> None:
    draw(tmp_path, "a.png")
    rows = [row("a.png"), row("later.png", answer="later")]
    first = prepared(model, tmp_path, rows, on_bad_row="skip")
    assert prepared(model, tmp_path, on_bad_row="skip").train.path == first.train.path
    draw(tmp_path, "x.png", "later.png")
    second = prepared(model, tmp_path, on_bad_row="skip")
    assert (first.account.total.rows_train, second.account.total.rows_train) == (1, 2)
    (tmp_path / "a.png").write_bytes(draw_image(77))
    third = prepared(model, tmp_path, on_bad_row="skip")
    assert third.train.source.path not in (first.train.source.path, second.train.source.path)
    table, number = third.train.source.images(0)[0]
    assert table.load(number).content == draw_image(77)


def test_equal_words_beside_other_images_are_no_duplicates(model: Path, tmp_path: Path) -> None:
    draw(tmp_path, "a.png", "b.png", "c.png")
    (tmp_path / "c.png").write_bytes((tmp_path / "a.png").read_bytes())
    made = prepared(model, tmp_path, [row("a.png"), row("b.png"), row("c.png")], duplicates="drop")
    assert (made.account.total.rows_train, made.account.total.rows_duplicate_dropped) == (2, 1)


def test_pixels_of_a_row_are_counted_together(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tonnage.data.images import rows as images_of_rows

    monkeypatch.setattr(images_of_rows, "MOST_PIXELS", 40 * 30 * 2)
    draw(tmp_path, "a.png")
    with pytest.raises(DataError, match="images of more than 2,400 pixels in one row"):
        prepared(model, tmp_path, [row("a.png", "a.png"), row("a.png", "a.png", "a.png")])


def test_the_bytes_of_files_are_not_held_until_the_part_is_done(tmp_path: Path) -> None:
    writer = ImageTableWriter(tmp_path / "table.images")
    tracemalloc.start()
    for number in range(100):
        content = os.urandom(100_000)
        writer.add(EncodedImage(content, digest_of(content), f"{number}.png", len(content), number))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    writer.close()
    assert held < 1_000_000
    table = ImageTable.open(tmp_path / "table.images")
    assert [table.path_of(number) for number in (0, 99)] == ["0.png", "99.png"]


@pytest.mark.parametrize("policy", ["truncate", "split", "drop"])
def test_a_row_that_is_too_long_is_dropped_and_not_cut(model: Path, tmp_path: Path, policy: str) -> None:
    draw(tmp_path, "a.png")
    long = row("a.png", answer="yes " * 100)
    made = prepared(
        model, tmp_path, [row("a.png"), long, row(words="x", answer="no " * 100)], over_length=policy, max_loss=1
    )
    total = made.account.total
    assert total.rows_dropped == (2 if policy == "drop" else 1)
    kept_documents = {int(one) for pack in range(made.train.num_packs) for one in made.train.documents(pack)}
    assert 1 not in kept_documents
    assert 0 in kept_documents


def test_where_all_is_trained_images_are_not(model: Path, tmp_path: Path) -> None:
    draw(tmp_path, "a.png", "b.png")
    made = prepared(model, tmp_path, [row("a.png", "b.png", words="Two?"), row(words="None.")], train_on="all")
    source = made.train.source
    trained = np.zeros(len(source.tokens(0)), dtype=bool)
    for first, last, _ in source.spans(0):
        trained[first:last] = True
    assert np.array_equal(~trained[1:], source.tokens(0)[1:] == IMAGE_ID)  # nothing stands before the first
    assert (~trained).sum() == 1 + 8
    assert [tuple(span) for span in source.spans(1)] == [(1, len(source.tokens(1)), 1)]


def test_sizes_of_images_are_limited_before_the_processor(tmp_path: Path) -> None:
    from transformers import AutoProcessor

    folder = write_vision(tmp_path / "model", "qwen2_5_vl")
    sizes = {"large.png": (90, 70), "small.png": (28, 28), "fits.png": (52, 48)}
    limited = {"large.png": (58, 45), "small.png": (48, 48), "fits.png": (52, 48)}
    for number, (name, size) in enumerate(sizes.items()):
        (tmp_path / name).write_bytes(draw_image(number, size))
    recipe = ImageRecipe(str(folder), IMAGE_ID, min_pixels=2400, max_pixels=2700)
    plain = ImageRecipe(str(folder), IMAGE_ID)
    assert recipe.key() != plain.key() == ImageRecipe(str(folder), IMAGE_ID).key()
    processor = AutoProcessor.from_pretrained(folder)
    num_tokens = []
    for name in sizes:
        image = Pillow.open(tmp_path / name)
        expected = processor(text=["<image>"], images=[[image.resize(limited[name])]], return_tensors="pt")
        made, ids = tower_inputs(recipe, [image])
        assert ids == expected["input_ids"][0].tolist() == process_row(recipe, "<image>", [image]).ids.tolist()
        assert torch.equal(made["pixel_values"], expected["pixel_values"])
        num_tokens.append((len(ids), len(tower_inputs(plain, [image])[1])))
    assert num_tokens == [(4, 6), (4, 1), (4, 4)]


def test_control_tokens_in_words_stay_words_beside_images(model: Path, tmp_path: Path) -> None:
    draw(tmp_path, "a.png")
    made = prepared(model, tmp_path, [row("a.png", words="What is <|bot|> for?")])
    tokens = made.train.source.tokens(0).tolist()
    assert tokens.count(made.tokenizer.convert_tokens_to_ids("<|bot|>")) == 1
    assert tokens.count(IMAGE_ID) == 4


def test_parquet_holds_images_and_folders_lie_elsewhere(model: Path, tmp_path: Path) -> None:
    import datasets

    content = draw_image(5)
    messages = [[{"role": "user", "content": "<image> Hm"}, {"role": "assistant", "content": "yes"}]] * 2
    table = datasets.Dataset.from_dict(
        {"messages": messages, "image": [{"bytes": content, "path": None}, {"bytes": draw_image(6), "path": None}]},
        features=datasets.Features(
            {
                "messages": datasets.List({"role": datasets.Value("string"), "content": datasets.Value("string")}),
                "image": datasets.Image(),
            }
        ),
    )
    table.to_parquet(tmp_path / "rows.parquet")
    made = prepared(model, tmp_path, source={"path": str(tmp_path / "rows.parquet")})
    stored, number = made.train.source.images(0)[0]
    assert stored.load(number).content == content
    assert not stored.load(number).path

    draw(tmp_path, "rows/unused.png", "pictures/a.png")
    (tmp_path / "rows" / "rows.jsonl").write_text(json.dumps(row("a.png")) + "\n")
    elsewhere = {"path": str(tmp_path / "rows" / "rows.jsonl"), "images": str(tmp_path / "pictures")}
    assert prepared(model, tmp_path, source=elsewhere).account.total.images == 1


@pytest.mark.slow
def test_several_processes_make_the_same_documents(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tonnage.data.reading import rows as reading
    from tonnage.data.sources import files

    draw(tmp_path, "a.png", "b.png")
    rows = [row(("a.png", "b.png")[at % 2], words=f"What {at}?") for at in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    for module in (reading, files):
        monkeypatch.setattr(module, "PART_BYTES", 500)
    from transformers import AutoTokenizer

    data = Data.model_validate({"train": [{"path": str(tmp_path / "rows.jsonl")}], "max_length": 128})
    facts, tokenizer = ModelFacts(images=ImageRecipe(str(model), IMAGE_ID)), AutoTokenizer.from_pretrained(model)
    alone, together = (
        prepare(data, tokenizer, cache=tmp_path / f"cache-{processes}", model=facts, processes=processes)
        for processes in (0, 2)
    )
    assert len(alone.train.source.parts) > 1
    for at in range(12):
        assert np.array_equal(alone.train.source.tokens(at), together.train.source.tokens(at))
        digests = [[table.digest(number) for table, number in one.train.source.images(at)] for one in (alone, together)]
        assert digests[0] == digests[1]


def test_images_of_equal_rows_are_those_beside_them(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two directories with the same rows, each read from within, and one cache."""
    from transformers import AutoTokenizer

    data = Data.model_validate({"train": [{"path": "rows.jsonl"}], "max_length": 128})
    facts, tokenizer = ModelFacts(images=ImageRecipe(str(model), IMAGE_ID)), AutoTokenizer.from_pretrained(model)
    digests = []
    for number, name in enumerate(("first", "second")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "cat.png").write_bytes(draw_image(number))
        (folder / "rows.jsonl").write_text(json.dumps(row("cat.png")) + "\n")
        monkeypatch.chdir(folder)
        made = prepare(data, tokenizer, cache=tmp_path / "cache", model=facts)
        ((table, at),) = made.train.source.images(0)
        digests.append(table.digest(at))
    assert digests[0] != digests[1]


def test_rows_of_text_need_neither_pillow_nor_torchvision(tmp_path: Path, model: Path) -> None:
    """They are trained on where neither is installed; what a row with an image needs is said then."""
    draw(tmp_path, "a.png")
    (tmp_path / "text.jsonl").write_text(json.dumps(row(words="Hello")) + "\n")
    (tmp_path / "rows.jsonl").write_text(json.dumps(row("a.png")) + "\n")
    code = f"""
import sys
sys.modules |= {{"PIL": None, "torchvision": None}}
from pathlib import Path
from transformers import PreTrainedTokenizerFast
from tonnage.config import Data
from tonnage.data import prepare
from tonnage.data.images.processing import ImageRecipe
from tonnage.data.images.shown import KIND, MOST_BYTES, thumbnail
from tonnage.data.images.table import ImageTable, ImageTableWriter
from tonnage.data.prepare import ModelFacts
from tonnage.errors import UserError
folder = Path({str(tmp_path)!r})
tokenizer = PreTrainedTokenizerFast.from_pretrained({str(model)!r})
facts = ModelFacts(images=ImageRecipe({str(model)!r}, {IMAGE_ID}))
def prepared(name):
    data = Data.model_validate({{"train": [{{"path": str(folder / name)}}], "max_length": 64}})
    return prepare(data, tokenizer, cache=folder / "cache", model=facts)
assert prepared("text.jsonl").account.total.rows_train == 1
try:
    prepared("rows.jsonl")
except UserError as error:
    assert "pip install 'tonnage[pictures]'" in str(error), error
else:
    raise AssertionError("an image without Pillow")
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_inspect_shows_images_once_with_the_number_of_their_tokens(model: Path, tmp_path: Path) -> None:
    from rich.console import Console

    from tonnage.cli.data_report import documents_as_json, show_account, show_documents
    from tonnage.data.pictures import pictures

    draw(tmp_path, "a.png")
    made = prepared(model, tmp_path, [row("a.png", "a.png"), row(words="None.")])
    console = Console(file=io.StringIO(), width=160, no_color=True)
    show_account(made.account, console)
    show_documents(made, 2, 0, console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "2 images in 1 rows, 8 tokens of theirs" in shown
    assert "  of images" in shown
    assert "<image: a.png, 40 x 30, 4 tokens><image: a.png, 40 x 30, 4 tokens>What?" in shown
    assert "2 images, pack" in shown
    listed = documents_as_json(made, 2, 0)
    image = {"file": "a.png", "width": 40, "height": 30, "tokens": 4}
    assert sorted((document["images"] for document in listed), key=len) == [[], [image, image]]
    (source,) = pictures(made, 0)["sources"]
    pieces = [piece for one in source["rows"] for piece in one["pieces"]]
    small = [piece["thumbnail"] for piece in pieces if piece["text"] == "<image: a.png, 40 x 30, 4 tokens>"]
    assert len(small) == 2
    assert small[0].startswith(KIND)
    opened = Pillow.open(io.BytesIO(base64.b64decode(small[0].removeprefix(KIND))))
    assert (opened.format, opened.size) == ("JPEG", (40, 30))
    assert sum(bool(piece["thumbnail"]) for piece in pieces) == 2


def test_images_that_are_gone_are_shown_as_tokens(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tonnage.data.pictures import pictures

    draw(tmp_path, "a.png")
    made = prepared(model, tmp_path, [row("a.png", "a.png"), row(words="None.")])
    texts = []
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "PIL", None)
        texts.append(str(pictures(made, 0)))
    (tmp_path / "a.png").unlink()
    texts.append(str(pictures(made, 0)))
    assert all("<image>×8" in text and KIND not in text for text in texts)


def test_a_long_image_leaves_room_for_the_words_of_its_row(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tonnage.data import pictures

    draw(tmp_path, "a.png")
    made = prepared(model, tmp_path, [row("a.png", words="What?" * 9)])
    monkeypatch.setattr(pictures, "MOST_TOKENS", 9)
    (source,) = pictures.pictures(made, 0)["sources"]
    assert "".join(piece["text"] for piece in source["rows"][0]["pieces"]).endswith("4 tokens>What?Wha")


@pytest.mark.parametrize("size", [(4000, 3000), (20, 4000), (1, 1)])
def test_pictures_are_small_in_bytes_and_pixels(size: tuple[int, int]) -> None:
    noise = Pillow.effect_noise(size, 100.0).convert("RGB")
    content = base64.b64decode(thumbnail(noise).removeprefix(KIND))
    assert 0 < len(content) <= MOST_BYTES
    assert max(Pillow.open(io.BytesIO(content)).size) <= 160
