"""Rows with images: the numbers of plain transformers, one row at a time, in every layout; and what comes out of it."""

from __future__ import annotations

import base64
import copy
import inspect
import io
import json
import shutil
from collections.abc import Callable, Container, Iterable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from peft import LoraConfig, get_peft_model
from plain import metrics
from ready import Start, ready, run_of
from torch import Tensor

from forked import train
from tonnage.data import PackedDataset
from tonnage.data.packs.features import Features
from tonnage.decide.decision import Decision
from tonnage.decide.exports import export_checkpoint
from tonnage.errors import UserError
from tonnage.files.reading import read_record
from tonnage.model.adapters import initialise
from tonnage.rundir.directory import RunDirectory
from tonnage.rundir.samples import Prompts, read_samples
from tonnage.training.chunks import parts_of

pytest.importorskip("PIL")
from visions import FAMILIES, IMAGE_ID, LISTS_ONLY, OF_ONE_SHAPE, TEMPLATE, draw_image, paligemma, write_vision

STEPS, SEQUENCES = 3, 4
SIZES = ((40, 30), (64, 33), (30, 50))
Make = Callable[..., Decision]


def rows_with_images(folder: Path, number: int, same_size: bool) -> list[dict[str, Any]]:
    """Rows in several forms: one image or two, in front of the words or among them; some with none."""
    rows: list[dict[str, Any]] = []
    for at in range(number):
        sizes = (SIZES[0],) if same_size else SIZES
        images = [draw_image(at * 2 + side, sizes[(at + side) % len(sizes)]) for side in range(2)]
        paths = [f"{at}-{side}.png" for side in range(2)]
        for path, content in zip(paths, images, strict=True):
            (folder / path).write_bytes(content)
        words = "abcdefghijklmnop"[: at % 9 + 3]
        answer = {"role": "assistant", "content": words.upper()}
        match at % 5:
            case 0:
                parts: list[dict[str, Any]] = [
                    {"type": "image", "path": paths[0]},
                    {"type": "text", "text": f"Say {words}"},
                ]
                rows.append({"messages": [{"role": "user", "content": parts}, answer]})
            case 1:
                text = f"<image>\nIs it <image> {words}?"
                rows.append({"messages": [{"role": "user", "content": text}, answer], "images": paths})
            case 2:
                rows.append({"messages": [{"role": "user", "content": f"Words, {words}"}, answer]})
            case 3:
                uri = "data:image/png;base64," + base64.b64encode(images[0]).decode()
                parts = [{"type": "text", "text": f"Hm {words}"}, {"type": "image_url", "image_url": {"url": uri}}]
                more = [{"role": "user", "content": "And?"}, {"role": "assistant", "content": words}]
                rows.append({"messages": [{"role": "user", "content": parts}, answer, *more]})
            case _:  # the images of an earlier row
                text = f"Again {words}: <image>"
                rows.append({"messages": [{"role": "user", "content": text}, answer], "images": [f"{at - 4}-0.png"]})
    return rows


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Makes runs of tiny models of each family on rows with images."""
    folder, number = tmp_path_factory.mktemp("images"), count()

    def made(family: str, workers: int = 1, start: Start | None = None, **keys: Any) -> Decision:
        own = folder / family
        if not own.exists():
            own.mkdir()
            template = LISTS_ONLY if family == "llava" else TEMPLATE
            refused = paligemma if family == "paligemma" else None
            write_vision(own / "model", family, template=template, make=refused)
            rows = rows_with_images(own, 24, same_size=family in OF_ONE_SHAPE)
            (own / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        text = {
            "model": str(own / "model"),
            "data": {"train": str(own / "rows.jsonl"), "max_length": 256, "cache": str(folder / "cache")},
            "batch": {"sequences": SEQUENCES},
            "steps": STEPS,
            # With an epsilon of 1e-8, Adam would make weights of the rounding of gradients that are nearly zero.
            "optimizer": {"lr": 1e-3, "schedule": "constant", "warmup": 0, "weight_decay": 0.0, "eps": 1e-6},
            "precision": "fp32",
            "compile": "off",
            "memory": {"micro_batch": 2} | keys.pop("memory", {}),
            "launch": {"workers": workers, "threads": 1},
            "checkpoint": {"every": STEPS, "keep": 9},
            "output": str(folder / f"run-{next(number)}"),
            "seed": 5,
        }
        text["data"] |= keys.pop("data", {})
        return ready(folder, text | keys, start)

    return made


def steps_of(run: RunDirectory) -> list[dict[str, Any]]:
    return [record for record in metrics(run) if "grad_norm" in record]


def images_of(decision: Decision, document: int) -> list[Any]:
    """The images of a document's row, read by Pillow alone."""
    from PIL import Image

    file, number = decision.prepared.train.where(document)
    row = json.loads(Path(file).read_text().splitlines()[number - 1])
    sources: list[Any] = list(row.get("images", []))
    for part in row["messages"][0]["content"]:
        if isinstance(part, dict):
            sources += [value for value in (part.get("path"), (part.get("image_url") or {}).get("url")) if value]
    opened = []
    for source in sources:
        inside = source.startswith("data:")
        content = base64.b64decode(source.split(",")[1]) if inside else (Path(file).parent / source).read_bytes()
        opened.append(Image.open(io.BytesIO(content)).convert("RGB"))
    return opened


def documents_of(decision: Decision, step: int) -> list[tuple[Tensor, Tensor, int]]:
    data, documents = decision.prepared.train, []
    for position in range(step * SEQUENCES, (step + 1) * SEQUENCES):
        pack = data.pack(data.pack_at(position, decision.config.seed))
        lengths = pack.lengths.tolist()
        ids = torch.from_numpy(pack.input_ids.astype("int64")).split(lengths)
        supervised = torch.from_numpy(pack.weights > 0).split(lengths)
        documents += list(zip(ids, supervised, pack.documents.tolist(), strict=True))
    return documents


def plain_model(directory: Path | str) -> Any:
    described = json.loads((Path(directory) / "config.json").read_text())
    kind = getattr(transformers, described["architectures"][0])
    model = kind.from_pretrained(directory, dtype=torch.float32).eval()
    model.requires_grad_(False)
    return model


def logits_of(model: Any, processor: Any, ids: Tensor, images: list[Any]) -> Tensor:
    """What plain transformers computes of a row, with whatever its processor gives it."""
    inputs: dict[str, Any] = {}
    if images:
        inputs = dict(processor(text=[processor.image_token * len(images)], images=[images], return_tensors="pt"))
        inputs = {name: value for name, value in inputs.items() if name not in ("input_ids", "attention_mask")}
        takes = inspect.signature(getattr(model, "get_base_model", lambda: model)().forward).parameters
        for name in ("mm_token_type_ids", "token_type_ids"):  # as the families' own processors give them
            if name in takes:
                inputs[name] = (ids == IMAGE_ID).long()[None]
    logits: Tensor = model(
        input_ids=ids[None], attention_mask=torch.ones_like(ids)[None], use_cache=False, **inputs
    ).logits
    return logits[0]


def in_plain_transformers(
    decision: Decision, change: Callable[[Any], Any] | None = None
) -> tuple[list[dict[str, float]], Any]:
    """Loss and gradient norm of every step, one row at a time, and the model."""
    model = plain_model(decision.config.model)
    processor = transformers.AutoProcessor.from_pretrained(decision.config.model)
    text = getattr(model.base_model, "language_model", None) or model.base_model.text_model
    for part in (text, model.lm_head):
        part.requires_grad_(True)
    if change is not None:
        model = change(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    settings = decision.config.optimizer
    optimizer = torch.optim.AdamW(trained, lr=settings.lr, betas=settings.betas, eps=settings.eps, weight_decay=0.0)
    records = []
    for step in range(STEPS):
        optimizer.zero_grad()
        documents = documents_of(decision, step)
        number = sum(int(supervised[1:].sum()) for _, supervised, _ in documents)
        total = 0.0
        for ids, supervised, document in documents:
            logits = logits_of(model, processor, ids, images_of(decision, document))
            targets = supervised[1:]
            loss = F.cross_entropy(logits[:-1][targets], ids[1:][targets], reduction="sum") / number
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(trained, settings.clip)
        optimizer.step()
        records.append({"loss": total, "grad_norm": norm.item()})
    return records, model


def check_steps(run: RunDirectory, expected: list[dict[str, float]], tolerance: float = 1e-5) -> None:
    steps = steps_of(run)
    assert len(steps) == len(expected)
    for step, record in zip(steps, expected, strict=True):
        for figure, value in record.items():
            assert step[figure] == pytest.approx(value, rel=tolerance, abs=1e-6), (step["step"], figure)


def some_quick(names: Iterable[str], quick: Container[str], slow: Container[str] = ()) -> list[Any]:
    """Parameters of which some are ``quick`` and some ``slow``; the others are of the matrix."""
    rest = [pytest.mark.matrix]
    marks = {name: [] if name in quick else [pytest.mark.slow] if name in slow else rest for name in names}
    return [pytest.param(name, marks=of_name) for name, of_name in marks.items()]


@pytest.mark.parametrize("family", some_quick(FAMILIES, {"llava"}, {"qwen2_5_vl"}))
def test_every_step_is_that_of_plain_transformers(make: Make, tmp_path: Path, family: str) -> None:
    """Packed, with several rows with images in a pack, the language model trained in full; and the export is the whole
    model with its processor, which plain transformers loads and which computes the same."""
    decision = make(family)
    data = decision.prepared.train
    assert isinstance(data, PackedDataset)
    assert data.images
    assert decision.prepared.account.total.rows_with_images == 19
    train((1, [run_of(decision)]))
    expected, model = in_plain_transformers(decision)
    assert any(len(documents_of(decision, step)) > SEQUENCES for step in range(STEPS)), "packs of several rows"
    check_steps(run_of(decision), expected)

    export_checkpoint(run_of(decision), tmp_path / "export")
    exported = plain_model(tmp_path / "export")
    processor = transformers.AutoProcessor.from_pretrained(tmp_path / "export")
    towers = {name: value for name, value in plain_model(decision.config.model).state_dict().items() if is_tower(name)}
    assert towers
    for name, value in towers.items():
        assert torch.equal(exported.state_dict()[name], value), name
    for ids, _, document in documents_of(decision, 0):
        images = images_of(decision, document)
        with torch.no_grad():
            ours, theirs = (logits_of(one, processor, ids, images) for one in (exported, model))
        assert float((ours - theirs).abs().max()) < 1e-4 * float(theirs.abs().max())


def is_tower(name: str) -> bool:
    return not any(part in name for part in ("language_model", "text_model", "lm_head"))


LAYOUTS: dict[str, dict[str, Any]] = {
    "micro-batches of one": {"memory": {"micro_batch": 1}},
    "not packed": {"data": {"pack": False}},
    "2 workers, zero 3": {"workers": 2, "memory": {"zero": 3, "micro_batch": 1}},
    "pipeline 2": {"workers": 2, "parallel": {"pipeline": 2}, "memory": {"micro_batch": 1}},
}
"""Ways to train; all but the second change no number."""


@pytest.mark.parametrize("layout", some_quick(LAYOUTS, (), ()))
def test_every_layout_is_plain_transformers(make: Make, layout: str) -> None:
    """Of a family whose tokens have positions of three dimensions; features are computed anew in each."""
    decision = make("qwen2_5_vl", seed=20 + list(LAYOUTS).index(layout), **copy.deepcopy(LAYOUTS[layout]))
    shutil.rmtree(entry_of(decision), ignore_errors=True)
    train((decision.plan.workers, [run_of(decision)]))
    check_steps(run_of(decision), in_plain_transformers(decision)[0])


@pytest.mark.matrix
@pytest.mark.parametrize("family", ["llava", pytest.param("gemma3", marks=pytest.mark.matrix)])
def test_matrices_may_be_divided(make: Make, family: str) -> None:
    decision = make(family, 2, seed=70, parallel={"tensor": 2}, memory={"micro_batch": 1})
    assert decision.plan.layout.tensor == 2
    train((2, [run_of(decision)]))
    check_steps(run_of(decision), in_plain_transformers(decision)[0])


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["2 workers, zero 3", "pipeline 2"])
def test_features_behind_blocks_reach_every_stage(make: Make, layout: str) -> None:
    """Of a family that adds features behind more blocks than the first stage has; blocks are computed again. What is
    kept are the model's own features, to the bit."""
    keys = copy.deepcopy(LAYOUTS[layout])
    keys["memory"]["recompute"] = "full"
    decision = make("qwen3_vl", seed=60, **keys)
    train((decision.plan.workers, [run_of(decision)]))
    check_steps(run_of(decision), in_plain_transformers(decision)[0])
    check_features(decision)


def check_features(decision: Decision) -> None:
    """What is kept of the first step's images are the features that plain transformers computes."""
    data, (own,) = decision.prepared.train.source, run_of(decision).features.iterdir()
    model, features = plain_model(decision.config.model), Features.open(own)
    processor = transformers.AutoProcessor.from_pretrained(decision.config.model)
    with_images = [document for *_, document in documents_of(decision, 0) if data.images(document)]
    assert with_images
    for document in with_images:
        images = images_of(decision, document)
        inputs = dict(processor(text=[processor.image_token * len(images)], images=[images], return_tensors="pt"))
        accepts = inspect.signature(model.model.get_image_features).parameters
        own_inputs = {name: value for name, value in inputs.items() if name in accepts}
        seen = model.model.get_image_features(**own_inputs, return_dict=True)
        levels = [seen.pooler_output, *(getattr(seen, "deepstack_features", None) or ())]
        expected = torch.cat([torch.cat(tuple(level)) for level in levels], dim=1)
        (kept,) = features.of_pack([document], [data.tokens(document)])
        assert kept is not None
        assert torch.equal(torch.from_numpy(kept.rows.read()), expected)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("family", "workers"),
    [
        pytest.param("llava", 1, marks=pytest.mark.matrix),
        *(pytest.param(name, 2, marks=pytest.mark.matrix) for name in ("qwen2_5_vl", "gemma3")),
    ],
)
def test_additions_are_those_of_peft(make: Make, family: str, workers: int) -> None:
    keys: dict[str, Any] = {"memory": {"zero": 3, "micro_batch": 1}} if workers > 1 else {}
    decision = make(family, workers, adapter={"rank": 4, "alpha": 12}, **keys)
    train((workers, [run_of(decision)]))

    def change(model: Any) -> Any:
        targets = r".*(language_model|text_model)\..*_proj"
        adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=12, target_modules=targets))
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                assert parameter.requires_grad == ("lora_" in name), name
                if parameter.requires_grad:
                    own = name.removeprefix("base_model.model.").removesuffix(".default.weight")
                    start = {own.replace(".language_model", ""): torch.empty_like(parameter)}
                    initialise(start, decision.config.seed)
                    parameter.copy_(next(iter(start.values())))
        return adapted

    expected, _ = in_plain_transformers(decision, change)
    check_steps(run_of(decision), expected)


def entry_of(decision: Decision) -> Path:
    return Path(str(decision.plan.data.features_path))


@pytest.mark.matrix
def test_features_are_computed_once_and_are_those_of_the_model_bit_by_bit(
    make: Make, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """What was interrupted goes on behind the last chunk, and another run finds all of them; equal images of several
    rows are looked at once, all of them in the size that they may have."""
    from tonnage.training import features

    monkeypatch.setattr(features, "CHUNK_BYTES", 5 * 4 * 64)
    sizes = {"image_max_pixels": 1000}
    decision = make("llava", seed=40, steps=6, data=dict(sizes))
    looked, whole = list[int](), features._Eye.look

    def interrupted(self: Any, chunk: Any) -> Any:
        if len(looked) == 2:
            raise KeyboardInterrupt
        looked.append(len(chunk))
        return whole(self, chunk)

    monkeypatch.setattr(features._Eye, "look", interrupted)
    with pytest.raises(KeyboardInterrupt):
        assembled(decision)
    assert len(list(parts_of(entry_of(decision)).glob("*.npy"))) == 2
    looked.append(0)  # no more interruptions
    job = assembled(decision)
    data = job.train_data
    source = data.source
    with_images = [at for at in range(len(source)) if source.images(at)]
    assert sum(looked) == len({tuple(table.digest(n) for table, n in source.images(at)) for at in with_images}) == 15
    model = plain_model(decision.config.model)
    processor = transformers.AutoProcessor.from_pretrained(decision.config.model)
    smaller = {(40, 30): (36, 27), (64, 33): (44, 22), (30, 50): (24, 40)}
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    torch.set_num_threads(1)  # as the run, since a product's last bits depend on it
    for document in with_images:
        images = [image.resize(smaller.get(image.size, image.size)) for image in images_of(decision, document)]
        pixels = processor(text=["<image>" * len(images)], images=[images], return_tensors="pt")["pixel_values"]
        expected = torch.cat(model.model.get_image_features(pixels, return_dict=True).pooler_output)
        (own,) = data.features.of_pack([document], [source.tokens(document)])
        assert torch.equal(torch.from_numpy(own.rows.read()), expected)

    looked.clear()
    again = make("llava", seed=40, steps=6, data=dict(sizes), optimizer={"lr": 1e-6})
    assert entry_of(again) == entry_of(decision)
    assert "has them from an earlier run" in again.plan.reasons["images"]
    assembled(again)
    assert not looked
    assert entry_of(make("llava", seed=40, steps=6)) != entry_of(decision)


def assembled(decision: Decision) -> Any:
    """A job in this process."""
    from tonnage.parallel.world import join_world
    from tonnage.rundir.positions import PositionFile
    from tonnage.training.assemble import assemble
    from tonnage.training.memory import Phases
    from tonnage.training.setting import WorkerSetting

    run = run_of(decision)
    run.workers.mkdir(exist_ok=True)
    threads = torch.get_num_threads()
    try:
        with join_world() as world:
            phases = Phases(PositionFile(run.worker_position(0)))
            return assemble(WorkerSetting(decision.config, decision.plan, world, lambda line: None, phases))
    finally:
        torch.set_num_threads(threads)


def test_a_run_goes_on_with_the_same_bits_and_without_the_cache(make: Make) -> None:
    whole = make("llava", seed=31, checkpoint={"every": 2, "keep": 9})
    train((1, [run_of(whole)]))
    later = make("llava", seed=31, checkpoint={"every": 2, "keep": 9}, start=(run_of(whole), 2))
    shutil.copytree(run_of(whole).features, run_of(later).features)
    shutil.rmtree(entry_of(whole))
    train((1, [run_of(later)]))
    assert not entry_of(whole).exists()
    (step,) = steps_of(run_of(later))
    assert step["loss"] == steps_of(run_of(whole))[2]["loss"]


def test_evaluations_see_the_images_of_validation_rows(make: Make) -> None:
    decision = make("llava", seed=33, steps=1, data={"validation": 0.3}, evaluate={"before": True})
    train((1, [run_of(decision)]))
    assert evaluated(decision, 0) == pytest.approx(validation_loss(decision, decision.config.model), rel=1e-5)


def evaluated(decision: Decision, step: int) -> float:
    records = run_of(decision).read_metrics()
    return float(next(record["eval_loss"] for record in records if "eval_loss" in record and record["step"] == step))


def validation_loss(decision: Decision, directory: Path | str) -> float:
    """What plain transformers computes."""
    model = plain_model(directory)
    processor = transformers.AutoProcessor.from_pretrained(decision.config.model)
    data, loss, number = decision.prepared.validation, 0.0, 0
    assert isinstance(data, PackedDataset)
    with torch.no_grad():
        for pack in map(data.pack, range(data.num_packs)):
            ids = torch.from_numpy(pack.input_ids.astype("int64")).split(pack.lengths.tolist())
            weights = torch.from_numpy(pack.weights > 0).split(pack.lengths.tolist())
            for tokens, supervised, document in zip(ids, weights, pack.documents.tolist(), strict=True):
                logits = logits_of(model, processor, tokens, images_of(decision, document))
                targets = supervised[1:]
                loss += F.cross_entropy(logits[:-1][targets], tokens[1:][targets], reduction="sum").item()
                number += int(targets.sum())
    return loss / number


@pytest.mark.slow
def test_tokens_that_are_added_stand_beside_images(make: Make, tmp_path: Path) -> None:
    """A vocabulary that grows: rows are what the processor of the export makes of them, and so is the loss."""
    data_keys = {"added_tokens": [*(f"<new_{number}>" for number in range(5)), "Say"], "validation": 0.3}
    decision = make("llava", seed=61, steps=1, data=data_keys)
    train((1, [run_of(decision)]))
    export_checkpoint(run_of(decision), tmp_path / "export")
    processor = transformers.AutoProcessor.from_pretrained(tmp_path / "export")
    new = processor.tokenizer.convert_tokens_to_ids("Say")
    data = decision.prepared.train
    assert isinstance(data, PackedDataset)
    tokens = np.concatenate([data.source.tokens(at) for at in range(len(data.source)) if data.source.images(at)])
    assert new in tokens
    assert new >= plain_model(decision.config.model).get_input_embeddings().weight.shape[0]
    assert evaluated(decision, 1) == pytest.approx(validation_loss(decision, tmp_path / "export"), rel=1e-5)


@pytest.mark.matrix
def test_half_precision_sees_images_in_half_precision(make: Make) -> None:
    decision = make("qwen2_5_vl", seed=51, steps=1, precision="bf16")
    train((1, [run_of(decision)]))
    (own,) = run_of(decision).features.iterdir()
    rows = np.load(own / "000000.npy", allow_pickle=False)
    assert rows.dtype == np.uint16
    (step,) = steps_of(run_of(decision))
    model = plain_model(decision.config.model)
    processor = transformers.AutoProcessor.from_pretrained(decision.config.model)
    documents, loss = documents_of(decision, 0), 0.0
    with torch.no_grad():
        for ids, supervised, document in documents:
            logits = logits_of(model, processor, ids, images_of(decision, document))
            loss += F.cross_entropy(logits[:-1][supervised[1:]], ids[1:][supervised[1:]], reduction="sum").item()
    number = sum(int(supervised[1:].sum()) for _, supervised, _ in documents)
    assert step["loss"] == pytest.approx(loss / number, rel=2e-2)


def test_a_prompt_whose_tokens_all_see_each_other_is_refused(make: Make) -> None:
    with pytest.raises(UserError, match="paligemma: rows with images, and tokens that do more with an image"):
        make("paligemma")


ASKED = 20
ANSWERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llava": ("llava", {}),
    "qwen2_5_vl": ("qwen2_5_vl", {}),
    "padded": ("qwen3_5", {}),
    "2 workers, zero 3": ("qwen2_5_vl", {"workers": 2, "memory": {"zero": 3, "micro_batch": 1}}),
    "pipeline 2": (
        "qwen2_5_vl",
        {"workers": 2, "parallel": {"pipeline": 2}, "memory": {"micro_batch": 1}},
    ),
}


@pytest.mark.parametrize("case", some_quick(ANSWERS, {"llava"}, {"qwen2_5_vl"}))
def test_validation_rows_are_answered_as_by_plain_transformers(make: Make, tmp_path: Path, case: str) -> None:
    """While it is trained, from the features that the run has: prompts with one image, several and none, side by side;
    and so are the rows that are scored."""
    family, keys = ANSWERS[case]
    evaluate = {"before": True, "prompts": ASKED, "max_new_tokens": 12, "scorer": "exact_match", "answers": ASKED}
    keys = copy.deepcopy(keys) | {"data": {"validation": 0.5}}
    decision = make(family, steps=1, seed=7, evaluate=evaluate, **keys)
    run = run_of(decision)
    train((decision.plan.workers, [run]))
    export_checkpoint(run, tmp_path / "export")
    prompts = read_record(run.prompts, Prompts)
    assert {prompt.document is None for prompt in prompts.prompts} == {True, False}
    assert all("<image><image>" not in prompt.text for prompt in prompts.prompts)
    samples = [sample for sample in read_samples(run) if sample.step == 1]
    assert len(samples) == len(prompts.prompts) > 8
    model = plain_model(tmp_path / "export")
    processor = transformers.AutoProcessor.from_pretrained(decision.config.model)
    answers = set()
    for prompt, sample in zip(prompts.prompts, samples, strict=True):
        images = [] if prompt.document is None else images_of(decision, prompt.document)
        answer = answer_of(model, processor, torch.tensor([prompt.ids]), images, prompts.stop_tokens)
        assert sample.answer == answer
        answers.add(answer)
    assert len(answers) > 3
    (scored, *_) = [record for record in run.read_metrics() if "exact_match" in json.dumps(record)]
    assert scored["step"] in (0, 1)


def answer_of(model: Any, processor: Any, ids: Tensor, images: list[Any], stops: list[int]) -> str:
    inputs: dict[str, Any] = {}
    if images:
        output = dict(processor(text=["<image>" * len(images)], images=[images], return_tensors="pt"))
        inputs = {name: value for name, value in output.items() if name in ("pixel_values", "image_grid_thw")}
        if "mm_token_type_ids" in output:
            inputs["mm_token_type_ids"] = (ids == IMAGE_ID).long()
    written = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=stops,
        pad_token_id=257,
        **inputs,
    )
    tokens = [token for token in written[0, ids.shape[1] :].tolist() if token not in stops]
    return str(processor.tokenizer.decode(tokens, skip_special_tokens=True))


def test_prompts_of_a_file_have_no_images(make: Make, tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(draw_image(1))
    content = [{"type": "image", "path": "cat.png"}, {"type": "text", "text": "What?"}]
    (tmp_path / "asked.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": content}]}))
    with pytest.raises(UserError, match=r"row 1 has images\n  needed: rows of text"):
        make("llava", data={"validation": 0.3}, evaluate={"prompts": str(tmp_path / "asked.jsonl")})


@pytest.mark.matrix
def test_a_family_whose_rows_are_padded_is_one_of_them(make: Make) -> None:
    assert make("qwen3_5").plan.layout.arrangement == "padded"
    assert make("llava").plan.layout.arrangement == "packed"
