"""Rows with images: files of every kind and mode, right ones that must be counted, and files, links and placeholders
that must not pass. Whatever comes of a row, it is never trained without its image."""

from __future__ import annotations

import base64
import io
import json
import os
import random
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hostile import mutations
from hostile.case import Case
from hostile.forking import Ended
from hostile.stock import Stock
from visions import draw_image

Row = dict[str, Any]
Content = Callable[[random.Random], bytes]
ANSWER = {"role": "assistant", "content": "a cat"}


def make(chance: random.Random, folder: Path, stock: Stock) -> Case:
    """Rows of one form, of which some may be broken."""
    work = folder / "work"
    kind = chance.choice(("sound", "sound", "broken", "broken", "broken", "changed", "placed"))
    in_place = kind == "broken" and chance.randrange(3) == 0
    form = chance.choice([name for name in FORMS if not in_place or name not in HOLD_BYTES])
    rows = []
    for number in range(chance.choice((1, 1, 2, 5))):
        contents = [SOUND[chance.choice(sorted(SOUND))](chance) for _ in range(chance.choice((1, 1, 2, 3)))]
        rows.append(FORMS[form](work, f"{number}", contents))
    sound, broken = sum(map(_images_in, rows)), ""
    at = chance.randrange(len(rows))
    if kind != "sound":
        sound -= _images_in(rows[at])
    if in_place:
        broken = chance.choice(sorted(PLACES))
        rows[at] = _asked([{"type": "image", "path": PLACES[broken](work, folder)}])
    elif kind == "broken":
        broken = chance.choice(sorted(BROKEN))
        rows[at] = FORMS[form](work, "broken", [BROKEN[broken](chance)])
    elif kind == "changed":
        content = mutations.content(chance, SOUND[chance.choice(sorted(SOUND))](chance))
        rows[at] = FORMS[form](work, "changed", [content])
    elif kind == "placed":
        broken = chance.choice(sorted(MISPLACED))
        rows[at] = MISPLACED[broken](work)
    return _case(chance, work, stock, rows, sound=sound, broken=broken, is_sound=kind == "sound")


def _case(
    chance: random.Random, work: Path, stock: Stock, rows: list[Row], *, sound: int, broken: str, is_sound: bool
) -> Case:
    skips = chance.randrange(2) == 0
    name = _write(work, rows)
    keys: dict[str, Any] = {"train": name, "max_length": 512, "template": "auto"}
    if skips:
        keys["on_bad_row"] = "skip"
    config = stock.config(model=str(stock.model("vision")), data=keys, output="run")
    (work / "config.yaml").write_text(json.dumps(config))

    def counts(ended: Sequence[Ended]) -> str:
        if ended[-1].status:
            return ""
        total = json.loads(ended[-1].out)["account"]["total"]
        bad, with_images = total["rows_bad"], total["rows_with_images"]
        if total["rows_read"] != len(rows) or bad + with_images != len(rows):
            return f"{len(rows)} rows, each with an image; {with_images} are trained with one, {bad} are bad"
        if (is_sound or broken) and (total["images"], bad) != (sound, int(bool(broken))):
            return f"{total['images']} images of {sound}, and {bad} bad rows"
        return ""

    if is_sound and chance.randrange(6) == 0:
        return Case([["train", "config.yaml", "--prepare"], ["work", "run"]], sound=True)
    named = ("rows_bad",) if skips else ()
    return Case([["inspect", "config.yaml", "--json"]], broken=broken, sound=is_sound, check=counts, named=named)


def _write(work: Path, rows: Sequence[Row]) -> str:
    if any(isinstance(value, dict) and "bytes" in value for row in rows for value in row.values()):
        schema = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        columns = {"messages": pa.array([json.dumps(row["messages"]) for row in rows])}
        columns["image"] = pa.array([row.get("image") for row in rows], schema)
        pq.write_table(pa.table(columns), work / "rows.parquet")
        return "rows.parquet"
    (work / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return "rows.jsonl"


def _encoded(image: Any, kind: str, **how: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **how)
    return file.getvalue()


def _drawn(chance: random.Random, mode: str = "RGB", size: tuple[int, int] | None = None) -> Any:
    from PIL import Image

    sides = size or (chance.randrange(8, 200), chance.randrange(8, 200))
    return Image.open(io.BytesIO(draw_image(chance.randrange(10**6), sides))).convert(mode)


def _of(kind: str, mode: str = "RGB", **how: Any) -> Content:
    return lambda chance: _encoded(_drawn(chance, mode), kind, **how)


def _turned(chance: random.Random) -> bytes:
    image = _drawn(chance)
    exif = image.getexif()
    exif[0x0112] = chance.randrange(0, 12)
    return _encoded(image, "JPEG", exif=exif)


def _of_sixteen_bits(chance: random.Random) -> bytes:
    import numpy as np
    from PIL import Image

    numbers = np.random.default_rng(chance.randrange(99)).integers(0, 65536, (chance.randrange(8, 60), 40))
    return _encoded(Image.fromarray(numbers.astype(np.uint16)), chance.choice(("PNG", "TIFF")))


SOUND: dict[str, Content] = {
    **{kind: _of(kind) for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")},
    **{f"PNG of mode {mode}": _of("PNG", mode) for mode in ("1", "L", "LA", "P", "RGBA")},
    **{f"{kind} of CMYK": _of(kind, "CMYK") for kind in ("JPEG", "TIFF")},
    "progressive": _of("JPEG", progressive=True, quality=30),
    "interlaced palette": _of("GIF", "P", interlace=1),
    "turned": _turned,
    "16 bits": _of_sixteen_bits,
    "a photograph": lambda chance: _encoded(_drawn(chance, size=(2400, 1600)), "JPEG"),
    "transparent": lambda chance: _encoded(_drawn(chance, "P"), "PNG", transparency=0),
    "one pixel": lambda chance: _encoded(_drawn(chance, size=(1, 1)), "PNG"),
}
"""Files that are images."""


def _png(width: int, height: int, *chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG that says that it has so many pixels, and holds few."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    inside = [(b"IHDR", header), *chunks, (b"IDAT", zlib.compress(b"\0" * 64)), (b"IEND", b"")]
    parts = [
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in inside
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def _text_bomb(chance: random.Random) -> bytes:
    """Compressed text of 256 MB beside few pixels."""
    return _png(9, 9, (b"zTXt", b"Comment\0\0" + zlib.compress(b"\0" * (256 << 20))))


def _moving(chance: random.Random) -> bytes:
    frames = [_drawn(chance, size=(20, 20)) for _ in range(chance.randrange(2, 5))]
    kind = chance.choice(("GIF", "PNG", "WEBP", "TIFF"))
    return _encoded(frames[0], kind, save_all=True, append_images=frames[1:])


def _cut(chance: random.Random) -> bytes:
    content = _encoded(_drawn(chance, size=(160, 160)), chance.choice(("PNG", "JPEG", "BMP", "TIFF", "WEBP")))
    return content[: chance.randrange(1, len(content) * 3 // 4)]


def _numbers(mode: str, kind: str) -> Content:
    def content(chance: random.Random) -> bytes:
        from PIL import Image

        return _encoded(Image.new(mode, (9, 9), 3), kind)

    return content


BROKEN: dict[str, Content] = {
    "cut": _cut,
    "moving": _moving,
    "a side of 100,000 pixels": lambda chance: _png(100_000, chance.choice((100_000, 2_000, 700))),
    "a bomb": lambda chance: _png(chance.choice((11_000, 60_000)), 11_000),
    "a bomb of text": _text_bomb,
    "floats": _numbers("F", "TIFF"),
    "32 bits": _numbers("I", "TIFF"),
    "a line": lambda chance: _encoded(_drawn(chance, size=(chance.choice((500, 5000)), 1)), "PNG"),
    "empty": lambda chance: b"\n",
    "a text": lambda chance: mutations.text(chance).encode(errors="replace") + b" hello",
    "PostScript": lambda chance: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(x) print\n",
    "SVG": lambda chance: b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'><rect/></svg>",
    "an icon": _of("ICO"),
    "PDF": lambda chance: b"%PDF-1.4\n1 0 obj\n<<>>\nendobj\n",
    "noise": lambda chance: chance.randbytes(chance.randrange(1, 5000)),
}
"""Files that are none, or none that may be used."""


def _linked(target: Callable[[Path], Path]) -> Callable[[Path, Path], str]:
    def place(work: Path, folder: Path) -> str:
        (work / "link.png").symlink_to(target(folder))
        return "link.png"

    return place


def _outside(folder: Path) -> Path:
    path = folder / "home" / "cat.png"
    path.write_bytes(draw_image(1))
    return path


def _fifo(work: Path, folder: Path) -> str:
    os.mkfifo(work / "pipe.png")
    return "pipe.png"


def _directory(work: Path, folder: Path) -> str:
    (work / "folder.png").mkdir()
    return "folder.png"


def _in_circles(work: Path, folder: Path) -> str:
    (work / "round.png").symlink_to("round.png")
    return "round.png"


def _relative(work: Path, folder: Path) -> str:
    return os.path.relpath(_outside(folder), work)


PLACES: dict[str, Callable[[Path, Path], str]] = {
    "a link to a secret": _linked(lambda folder: folder / "outside" / "secret.txt"),
    "a link to an image outside": _linked(_outside),
    "a link to all zeros": _linked(lambda folder: Path("/dev/zero")),
    "a link to nothing": _linked(lambda folder: folder / "nowhere"),
    "a path that climbs": _relative,
    "a path of the machine": lambda work, folder: str(_outside(folder)),
    "a pipe": _fifo,
    "a directory": _directory,
    "a circle": _in_circles,
    "no file": lambda work, folder: "none.png",
    "a long name": lambda work, folder: "x" * 5000 + ".png",
    "a name with a zero": lambda work, folder: "a\0b.png",
    "an address": lambda work, folder: "https://example.com/cat.png",
    "a home": lambda work, folder: "~/cat.png",
    "nothing": lambda work, folder: "",
    "data that are no image": lambda work, folder: "data:text/html;base64,AAAA",
    "data that are not coded": lambda work, folder: "data:image/png,abc",
    "data that are cut": lambda work, folder: "data:image/png;base64,iVBORw0KGgo",
}
"""What rows name that leads to no image, or to none of theirs."""


def _asked(parts: Sequence[Row], **more: Any) -> Row:
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}, ANSWER], **more}


def _files(work: Path, name: str, contents: Sequence[bytes]) -> list[str]:
    paths = [f"{name}-{number}.bin" for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        (work / path).write_bytes(content)
    return paths


def _coded(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _marked(paths: Sequence[str]) -> list[Row]:
    return [{"role": "user", "content": "<image>" * len(paths) + "What?"}, ANSWER]


FORMS: dict[str, Callable[[Path, str, Sequence[bytes]], Row]] = {
    "OpenAI, paths": lambda work, name, contents: _asked(
        [{"type": "image_url", "image_url": {"url": path}} for path in _files(work, name, contents)]
    ),
    "OpenAI, data": lambda work, name, contents: _asked(
        [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{_coded(one)}"}} for one in contents]
    ),
    "transformers, paths": lambda work, name, contents: _asked(
        [{"type": "image", "image": path} for path in _files(work, name, contents)]
    ),
    "transformers, base64": lambda work, name, contents: _asked(
        [{"type": "image", "base64": _coded(one)} for one in contents]
    ),
    "a column of paths": lambda work, name, contents: {
        "messages": _marked(contents),  # type: ignore[arg-type]
        "images": _files(work, name, contents),
    },
    "parts and a column": lambda work, name, contents: _asked(
        [{"type": "image"}] * len(contents), images=_files(work, name, contents)
    ),
    "LLaVA": lambda work, name, contents: {
        "conversations": [
            {"from": "human", "value": "<image>\n" * len(contents) + "What?"},
            {"from": "gpt", "value": "a cat"},
        ],
        "image": _files(work, name, contents),
    },
    "LLaMA-Factory": lambda work, name, contents: {
        "instruction": "<image>" * len(contents) + "What?",
        "input": "",
        "output": "a cat",
        "images": _files(work, name, contents),
    },
    "datasets": lambda work, name, contents: {
        "messages": _marked(contents[:1]),  # type: ignore[arg-type]
        "image": {"bytes": contents[0], "path": name},
    },
}
"""Rows as people write them."""
HOLD_BYTES = ("datasets", "LLaVA", "LLaMA-Factory")
"""Whose files have no room for a row of parts."""


def _images_in(row: Row) -> int:
    text = json.dumps({name: value for name, value in row.items() if name not in ("image", "images")})
    return text.count("<image>") or text.count('"type": "image')


MISPLACED: dict[str, Callable[[Path], Row]] = {
    "an image without a place": lambda work: {**_asked([]), "images": _files(work, "y", [draw_image(1)])},
    "a place without an image": lambda work: {**_asked([{"type": "image"}]), "images": []},
    "two places for an image": lambda work: {
        "messages": _marked(["", ""]),
        "images": _files(work, "y", [draw_image(1)]),
    },
    "an image in an answer": lambda work: {
        "messages": [{"role": "user", "content": "Draw."}, {"role": "assistant", "content": "<image>"}],
        "images": _files(work, "y", [draw_image(1)]),
    },
    "the mark itself": lambda work: {
        "messages": [{"role": "user", "content": "<image>\U0010fffc What?"}, ANSWER],
        "images": _files(work, "y", [draw_image(1)]),
    },
    "two columns": lambda work: {
        "messages": _marked([""]),
        "images": _files(work, "y", [draw_image(1)]),
        "image": _files(work, "z", [draw_image(2)]),
    },
    "a sound": lambda work: _asked([{"type": "audio", "audio": "a.wav"}]),
    "a film": lambda work: _asked([{"type": "video", "video": "a.mp4"}]),
}
"""Rows whose images and places differ, or that hold something else."""
