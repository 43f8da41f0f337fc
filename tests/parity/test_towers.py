"""A tower that looks at images while the model is trained, and learns with it: the numbers of plain transformers."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from ready import run_of
from torch import Tensor, nn

from forked import train
from tonnage.checkpoint.save import checkpoint_path
from tonnage.checkpoint.shards import Shards
from tonnage.decide.decision import Decision
from tonnage.decide.exports import export_checkpoint
from tonnage.decide.handing import PLAIN
from tonnage.errors import UserError
from tonnage.model.adapters import initialise

pytest.importorskip("PIL")
from test_images import Make, assembled, check_steps, images_of, logits_of, make, plain_model, steps_of

from visions import draw_image

__all__ = ["make"]
STEPS = 5
SEEN: dict[str, Any] = {"data": {"image_features": "computed"}}
MATRIX = pytest.mark.matrix


def documents_of(decision: Decision, step: int) -> list[tuple[Tensor, Tensor, int]]:
    """Of a step the documents: token ids, whether they are supervised, and the number in the data set."""
    data, documents, packs = decision.prepared.train, [], decision.config.packs_per_step
    for position in range(step * packs, (step + 1) * packs):
        pack = data.pack(data.pack_at(position, decision.config.seed))
        lengths = pack.lengths.tolist()
        ids = torch.from_numpy(pack.input_ids.astype("int64")).split(lengths)
        supervised = torch.from_numpy(pack.weights > 0).split(lengths)
        documents += list(zip(ids, supervised, pack.documents.tolist(), strict=True))
    return documents


@dataclass
class Plain:
    """What plain transformers came to."""

    model: Any
    steps: list[dict[str, float]]
    """Loss and gradient norm of each."""
    sizes: dict[str, Tensor]
    """Of the gradients of each trained parameter, elementwise."""


def in_plain_transformers(
    decision: Decision, trains: Callable[[str], bool], change: Callable[[Any], Any] = lambda model: model
) -> Plain:
    """Steps in which those parameters of the whole model are trained that ``trains`` names, one row at a time. What the
    rows of some steps do not reach has a gradient of zeros there."""
    model = change(plain_model(decision.config.model))
    processor = transformers.AutoProcessor.from_pretrained(decision.config.model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trains(name))
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    settings = decision.config.optimizer
    optimizer = torch.optim.AdamW(
        trained.values(), lr=settings.lr, betas=settings.betas, eps=settings.eps, weight_decay=0.0
    )
    records, reached = [], set[str]()
    for step in range(decision.plan.num_steps):
        optimizer.zero_grad()
        documents, total = documents_of(decision, step), 0.0
        number = sum(int(supervised[1:].sum()) for _, supervised, _ in documents)
        for ids, supervised, document in documents:
            logits, targets = logits_of(model, processor, ids, images_of(decision, document)), supervised[1:]
            loss = F.cross_entropy(logits[:-1][targets], ids[1:][targets], reduction="sum") / number
            if loss.requires_grad:
                loss.backward()
            total += loss.item()
        reached |= {name for name, parameter in trained.items() if parameter.grad is not None}
        for name in reached:
            if trained[name].grad is None:
                trained[name].grad = torch.zeros_like(trained[name])
        norm = nn.utils.clip_grad_norm_(trained.values(), settings.clip)
        optimizer.step()
        records.append({"loss": total, "grad_norm": norm.item()})
    sizes = {name: optimizer.state[one]["exp_avg_sq"].sqrt() for name, one in trained.items() if name in reached}
    return Plain(model, records, sizes)


def is_text(name: str) -> bool:
    return any(part in name for part in ("language_model", "text_model", "lm_head"))


def is_projector(name: str) -> bool:
    return any(part in name for part in ("multi_modal_projector", "visual.merger", "connector"))


def every(_: str) -> bool:
    return True


PROJECTORS = {"llava": "*multi_modal_projector*", "qwen2_5_vl": "visual.merger*", "idefics3": "*connector*"}
PARTS: dict[str, tuple[Callable[[str], Sequence[str]], Callable[[str], bool]]] = {
    "projector": (lambda family: [PROJECTORS[family]], is_projector),
    "tower": (lambda _: ["tower.*"], lambda name: not is_text(name)),
    "all": (lambda _: ["*", "tower.*"], every),
}


def check_export(decision: Decision, plain: Plain, folder: Path) -> None:
    """What is exported is the trained model, tower and all, to plain transformers. Numbers without a gradient (a key's
    bias) go where rounding takes them, and are taken as they are."""
    export_checkpoint(run_of(decision), folder)
    exported, theirs = plain_model(folder), dict(plain.model.named_parameters())
    before = dict(plain_model(decision.config.model).named_parameters())
    processor = transformers.AutoProcessor.from_pretrained(folder)
    moved = 0
    for name, value in exported.named_parameters():
        if name not in plain.sizes:
            assert torch.equal(value, before[name]), name
            continue
        has_gradient = plain.sizes[name] > 1e-6
        moved += int(has_gradient.any())
        torch.testing.assert_close(value[has_gradient], theirs[name][has_gradient], rtol=1e-3, atol=2e-5, msg=name)
        theirs[name].data.copy_(torch.where(has_gradient, theirs[name].data, value.data))
    assert moved
    for ids, _, document in documents_of(decision, 0):
        images = images_of(decision, document)
        with torch.no_grad():
            ours, expected = (logits_of(one, processor, ids, images) for one in (exported, plain.model))
        assert float((ours - expected).abs().max()) < 1e-4 * float(expected.abs().max())


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("family", "precision"),
    [("llava", "fp32"), ("qwen2_5_vl", "bf16"), ("gemma3", "fp32"), ("qwen3_vl", "fp32")],
)
def test_what_is_computed_in_every_step_is_what_is_cached(make: Make, family: str, precision: str) -> None:
    """To the bit, as rows are looked at one by one in either way; in evaluations, too."""
    keys: dict[str, Any] = {"precision": precision, "seed": 3, "evaluate": {"before": True}}
    runs = [make(family, data={"image_features": way, "validation": 0.2}, **keys) for way in ("computed", "cached")]
    for decision, sees in zip(runs, (True, False), strict=True):
        assert decision.plan.data.sees is sees
        assert (decision.plan.data.features_path is None) is sees
        train((1, [run_of(decision)]))
    figures = ("loss", "grad_norm", "eval_loss")
    first, second = (
        [[record.get(figure) for figure in figures] for record in run_of(decision).read_metrics()] for decision in runs
    )
    assert first == second
    assert sum(evaluated is not None for _, _, evaluated in first) == 2


def in_layout(layout: str) -> dict[str, Any]:
    """``1 worker``, or the ZeRO stage of two."""
    if layout == "1 worker":
        return {}
    return {"workers": 2, "memory": {"micro_batch": 1, "zero": int(layout[-1])}}


OTHERS = ("tied", "llava_next", "internvl", "mistral3")
CASES = [
    (family, part, layout) for family in PROJECTORS for part in PARTS for layout in ("1 worker", "zero 0", "zero 3")
]
CASES += [(family, "all", "zero 3") for family in OTHERS]
SLICE = {
    ("llava", "projector", "zero 3"),
    ("qwen2_5_vl", "all", "zero 3"),
    ("idefics3", "tower", "zero 0"),
    ("llava", "all", "1 worker"),
}


@pytest.mark.parametrize(
    ("family", "part", "layout"),
    [pytest.param(*case, marks=pytest.mark.slow if case in SLICE else MATRIX) for case in CASES],
)
def test_towers_learn_as_in_plain_transformers(make: Make, tmp_path: Path, family: str, part: str, layout: str) -> None:
    patterns, trains = PARTS[part]
    decision = make(family, steps=STEPS, train=list(patterns(family)), **in_layout(layout))
    assert decision.plan.data.sees
    train((decision.plan.workers, [run_of(decision)]))
    plain = in_plain_transformers(decision, trains)
    check_steps(run_of(decision), plain.steps)
    check_export(decision, plain, tmp_path / "export")


@pytest.mark.matrix
@pytest.mark.parametrize("zero", [0, 3])
def test_a_worker_whose_rows_have_no_images_takes_part(make: Make, tmp_path: Path, zero: int) -> None:
    """In the second step one worker has a row of text alone, and the other an image."""
    patterns, trains = PARTS["tower"]
    decision = make(
        "llava",
        2,
        steps=STEPS,
        train=list(patterns("llava")),
        data={"pack": False, "order": "given"},
        batch={"sequences": 2},
        memory={"micro_batch": 1, "zero": zero},
    )
    has_images = [bool(images_of(decision, document)) for _, _, document in documents_of(decision, 1)]
    assert has_images == [False, True]
    train((2, [run_of(decision)]))
    plain = in_plain_transformers(decision, trains)
    check_steps(run_of(decision), plain.steps)
    check_export(decision, plain, tmp_path / "export")


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["1 worker", "zero 3"])
def test_a_stopped_run_goes_on_with_the_same_bits(make: Make, layout: str) -> None:
    keys = {"train": ["*", "tower.*"], "checkpoint": {"every": 2, "keep": 9}, "seed": 8} | in_layout(layout)
    whole = make("qwen2_5_vl", steps=4, **keys)
    train((whole.plan.workers, [run_of(whole)]))
    later = make("qwen2_5_vl", steps=4, start=(run_of(whole), 2), **keys)
    train((later.plan.workers, [run_of(later)]))
    first, rest = steps_of(run_of(whole)), steps_of(run_of(later))
    assert [(one["loss"], one["grad_norm"]) for one in first[2:]] == [(one["loss"], one["grad_norm"]) for one in rest]
    paths = [checkpoint_path(run_of(one).checkpoints, 4) for one in (whole, later)]
    saved = [Shards(path) for path in paths]
    names = list(saved[0].names("model."))
    assert any(name.startswith("model.tower.") for name in names)
    for name in [*names, *saved[0].names("optimizer.")]:
        assert torch.equal(*(shards.read(name) for shards in saved)), name


TARGETS = {"llava": "*vision_tower*", "qwen2_5_vl": "visual.blocks.*", "idefics3": "*vision_model*"}


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("family", "layout"), [("llava", "1 worker"), ("qwen2_5_vl", "zero 3"), ("idefics3", "zero 0")]
)
def test_additions_to_text_and_tower_are_those_of_peft(make: Make, tmp_path: Path, family: str, layout: str) -> None:
    targets = ["all-linear", TARGETS[family]]
    decision = make(family, steps=STEPS, adapter={"rank": 4, "alpha": 12, "targets": targets}, **in_layout(layout))
    train((decision.plan.workers, [run_of(decision)]))
    export_checkpoint(run_of(decision), tmp_path / "adapter")
    described = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    whole = plain_model(decision.config.model)
    paths = {name for name, module in whole.named_modules() if isinstance(module, nn.Linear)}
    adapted = {
        name for name in paths if any(name == one or name.endswith(f".{one}") for one in described["target_modules"])
    }
    assert any(is_text(name) for name in adapted)
    assert any(not is_text(name) for name in adapted)

    def change(model: Any) -> Any:
        made = get_peft_model(model, LoraConfig(r=4, lora_alpha=12, target_modules=described["target_modules"]))
        with torch.no_grad():
            for name, parameter in made.named_parameters():
                if "lora_" in name:
                    own = name.removeprefix("base_model.model.").removesuffix(".default.weight")
                    ours = (
                        own.replace(".language_model", "").replace(".text_model", "")
                        if is_text(own)
                        else f"tower.{own}"
                    )
                    start = {ours: torch.empty_like(parameter)}
                    initialise(start, decision.config.seed)
                    parameter.copy_(start[ours])
        return made

    plain = in_plain_transformers(decision, lambda name: "lora_" in name, change)
    check_steps(run_of(decision), plain.steps)
    processor = transformers.AutoProcessor.from_pretrained(decision.config.model)
    loaded = PeftModel.from_pretrained(plain_model(decision.config.model), tmp_path / "adapter").eval()
    wishes = replace(PLAIN, merge=True)
    export_checkpoint(run_of(decision), tmp_path / "merged", wishes=wishes)
    merged = plain_model(tmp_path / "merged")
    for ids, _, document in documents_of(decision, 0):
        images = images_of(decision, document)
        with torch.no_grad():
            expected = logits_of(plain.model, processor, ids, images)
            for model in (loaded, merged):
                assert float((logits_of(model, processor, ids, images) - expected).abs().max()) < 1e-4 * float(
                    expected.abs().max()
                )


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "cached": ({"train": ["*vision_tower*"], "data": {"image_features": "cached"}}, r"data\.image_features"),
    "tier": (
        {"train": ["tower.*"], "memory": {"optimizer_tier": "host"}},
        r"memory\.optimizer_tier is host, and a vis",
    ),
    "pipeline": ({"workers": 2, "parallel": {"pipeline": 2}} | SEEN, r"parallel\.pipeline is 2, and a vision tower"),
    "tensor": ({"workers": 2, "parallel": {"tensor": 2}} | SEEN, r"parallel\.tensor is 2, and a vision tower"),
    "patterns": (
        {"adapter": {"rank": 2, "targets": ["*vision_tower*"], "patterns": [{"match": "*q_proj", "rank": 4}]}},
        r"adapter\.patterns is given, and \*vision_tower\* of the vision tower",
    ),
    "dora": (
        {"adapter": {"rank": 2, "kind": "dora", "targets": ["*vision_tower*"]}},
        r"adapter\.kind is given, and \*vision_tower\*",
    ),
    "pissa": (
        {"adapter": {"rank": 2, "init": "pissa", "targets": ["*vision_tower*"]}},
        r"adapter\.init is given, and \*vision_tower\*",
    ),
    "dora, rounded": (
        {"adapter": {"rank": 2, "kind": "dora"}, "quantize_aware": "int4"},
        r"quantize_aware is int4, and adapter\.kind is dora",
    ),
    "dropout": ({"adapter": {"rank": 2, "targets": ["*vision_tower*"], "dropout": 0.1}}, "of the vision tower among"),
    "nothing": ({"train": ["*vision_towel*"]}, "no parameters of the model"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_go_together_is_refused(make: Make, case: str) -> None:
    keys, message = REFUSED[case]
    with pytest.raises(UserError, match=message):
        make("llava", **copy.deepcopy(keys))


def test_a_tower_without_rows_of_images_is_refused(make: Make, tmp_path: Path) -> None:
    make("llava")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "Words", "completion": "and words"}) + "\n")
    with pytest.raises(UserError, match=r"\*vision_tower\*, of the vision tower, and no row has images"):
        make("llava", train=["*vision_tower*"], data={"train": str(rows)}, batch={"sequences": 1})


def test_where_features_have_no_room_they_are_computed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from tonnage.decide import images

    plan = make("llava", seed=61).plan
    assert not plan.data.sees
    assert "cached" in plan.reasons["images"]
    assert plan.model.tower is None
    monkeypatch.setattr(images, "free_bytes", lambda place: 0)
    plan = make("llava", seed=62).plan
    assert plan.data.sees
    assert plan.model.tower is not None
    assert plan.model.tower.trained == 0
    assert {"forward of the tower", "backward of the tower"} & {one.name for one in plan.choice.instants} == {
        "forward of the tower"
    }
    with pytest.raises(UserError, match=r"data\.image_features=computed"):
        make("llava", seed=63, data={"image_features": "cached"})


def test_an_image_that_has_changed_stops_the_run(make: Make) -> None:
    decision = make("llava", seed=64, **SEEN)
    source = decision.prepared.train.source
    tables = [place for document in range(len(source)) for place in source.images(document)]
    files = {Path(table.path_of(number)) for table, number in tables if table.path_of(number)}
    kept = {file: file.read_bytes() for file in files}
    try:
        for number, file in enumerate(sorted(files)):
            file.write_bytes(draw_image(1000 + number))
        job = assembled(decision)
        batches = (batch for step in job.steps(job.cursor) for batch in step.micro_batches)
        with pytest.raises(UserError, match="other bytes than when its row was prepared"):
            job.pipeline.stages[0].states(next(batch for batch in batches if batch.opening is not None))
    finally:
        for file, content in kept.items():
            file.write_bytes(content)
