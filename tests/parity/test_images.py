"""Rows with images: the numbers of plain transformers, one row at a time, in every layout; and what comes out of it."""

from __future__ import annotations

import base64
import copy
import io
import json
import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from plain import final_weights, metrics
from ready import ready, run_of
from torch import Tensor

from forked import train
from tonnage.data import PackedDataset
from tonnage.decide.decision import Decision
from tonnage.rundir.directory import RunDirectory

pytest.importorskip("PIL")
from visions import FAMILIES, IMAGE_ID, LISTS_ONLY, TEMPLATE, draw_image, gemma3, write_vision

STEPS, SEQUENCES = 3, 4
SIZES = ((40, 30), (64, 33), (30, 50))
Make = Callable[..., Decision]
PADDED: tuple[str, ...] = ()


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
                parts = [{"type": "image", "path": paths[0]}, {"type": "text", "text": f"Say {words}"}]
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

    def made(family: str, workers: int = 1, **keys: Any) -> Decision:
        own = folder / family
        if not own.exists():
            own.mkdir()
            template = LISTS_ONLY if family == "llava" else TEMPLATE
            write_vision(own / "model", family, template=template, make=gemma3 if family == "gemma3" else None)
            rows = rows_with_images(own, 24, same_size=family == "mistral3")
            (own / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        text = {
            "model": str(own / "model"),
            "data": {"train": str(own / "rows.jsonl"), "max_length": 256, "cache": str(folder / "cache")},
            "batch": {"sequences": SEQUENCES},
            "steps": STEPS,
            "optimizer": {"lr": 1e-3, "schedule": "constant", "warmup": 0},
            "precision": "fp32",
            "compile": "off",
            "memory": {"micro_batch": 2} | keys.pop("memory", {}),
            "launch": {"workers": workers, "threads": 1},
            "output": str(folder / f"run-{next(number)}"),
            "seed": 5,
        }
        text["data"] |= keys.pop("data", {})
        return ready(folder, text | keys)

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
        inputs = dict(processor(text=["<image>" * len(images)], images=[images], return_tensors="pt"))
        inputs = {name: value for name, value in inputs.items() if name not in ("input_ids", "attention_mask")}
        if "mm_token_type_ids" in inputs:
            inputs["mm_token_type_ids"] = (ids == IMAGE_ID).long()[None]
    logits: Tensor = model(input_ids=ids[None], attention_mask=torch.ones_like(ids)[None], use_cache=False, **inputs).logits
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


@pytest.mark.parametrize("family", FAMILIES)
def test_every_step_is_that_of_plain_transformers(make: Make, family: str) -> None:
    """Packed, with several rows with images in a pack, and full training of the language model; the export is the
    whole model, and answers alike."""
    decision = make(family, optimizer={"lr": 1e-3, "schedule": "constant", "warmup": 0, "weight_decay": 0.0})
    data = decision.prepared.train
    assert isinstance(data, PackedDataset)
    assert data.images
    assert decision.prepared.account.total.rows_with_images == 19
    train((1, [run_of(decision)]))
    expected, model = in_plain_transformers(decision)
    assert any(len(documents_of(decision, step)) > SEQUENCES for step in range(STEPS)), "packs of several rows"
    check_steps(run_of(decision), expected)
    del model
