"""Plans over a grid of configs and machines, and the whole text of what is refused.

Pure arithmetic: models are numbers (``MODELS``), machines come from the catalogue, and no torch is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from functools import cache
from typing import Any

from planning.profiles import DATA, MODEL, block
from tonnage.config import Config, as_overrides, read_config
from tonnage.errors import UserError
from tonnage.planning.budgets import Free
from tonnage.planning.layout import Layout
from tonnage.planning.machine import Machine, parse_hardware
from tonnage.planning.plan import Plan
from tonnage.planning.planner import make_plan
from tonnage.planning.profile import Frozen, Matrices, ModelProfile
from tonnage.planning.scales import Scales
from tonnage.planning.ways import choose
from tonnage.planning.workers import decided

Case = dict[str, Any]


def shape(blocks: int, block_parameters: int, hidden: int, vocabulary: int, kilobytes: float) -> ModelProfile:
    """A dense model whose blocks keep so many kB of a token."""
    outside = 2 * vocabulary * hidden
    costs = {
        "none": block(1000 * kilobytes, 1200 * kilobytes, 1),
        "selective": block(500 * kilobytes, 1300 * kilobytes, 1.2),
    }
    costs["full"] = block(2.0 * hidden, 1400 * kilobytes, 2)
    products = 2.0 * block_parameters / 400_000
    for kind, cost in costs.items():
        forward, backward = cost.forward_flops, cost.backward_flops
        costs[kind] = replace(
            cost,
            forward_flops=replace(forward, per_token=forward.per_token * products),
            backward_flops=replace(backward, per_token=backward.per_token * products),
        )
    rows = (
        (hidden, block_parameters * blocks // 2),
        (4 * hidden, block_parameters * blocks - block_parameters * blocks // 2),
    )
    large = Matrices(4 * hidden, hidden, 2, stacked=False)
    return replace(
        MODEL,
        num_parameters=outside + blocks * block_parameters,
        embedding_parameters=vocabulary * hidden,
        outside_parameters=outside,
        num_blocks=blocks,
        block_parameters=block_parameters,
        hidden_size=hidden,
        attention_size=hidden,
        vocab_size=vocabulary,
        blocks=costs,
        shares_prefixes=True,
        largest_matrix=4 * hidden * hidden,
        rows=rows,
        large_weights=(replace(large, number=2 * blocks),),
        large_weights_of_block=(large,),
    )


MODELS = {
    "160m": shape(12, 7_000_000, 768, 50_000, 50),
    "3b": shape(32, 80_000_000, 2560, 50_000, 150),
    "8b": shape(32, 218_000_000, 4096, 128_000, 220),
    "70b": shape(80, 856_000_000, 8192, 128_000, 430),
}


def adapted(model: ModelProfile, bytes_each: float, form: str) -> ModelProfile:
    """A model whose blocks have additions of a hundredth, and rest in so many bytes a parameter."""
    additions = model.block_parameters // 100
    outside, in_blocks = model.outside_parameters, model.num_blocks * model.block_parameters
    frozen = Frozen(
        model.num_parameters,
        outside,
        model.block_parameters,
        round(2 * outside + bytes_each * in_blocks),
        2 * outside,
        round(bytes_each * model.block_parameters),
        head=True,
        embedding=True,
        rows=((model.hidden_size, round(bytes_each * in_blocks)),),
    )
    return replace(
        model,
        num_parameters=model.num_parameters + model.num_blocks * additions,
        block_parameters=model.block_parameters + additions,
        frozen=frozen,
        adapted=("q_proj", form),
        rows=((64, model.num_blocks * additions),),
        large_weights=(),
        large_weights_of_block=(),
    )


def part(model: ModelProfile, degree: int) -> ModelProfile:
    """What one of so many ranks of a tensor axis has."""
    if degree == 1:
        return model
    frozen, blocks = model.frozen, {}
    for kind, cost in model.blocks.items():
        lines = tuple(replace(line, per_token=line.per_token / degree**0.8) for line in cost.backward_peak.lines)
        blocks[kind] = replace(
            cost,
            saved=replace(cost.saved, per_token=cost.saved.per_token / degree**0.8),
            backward_peak=replace(cost.backward_peak, lines=lines),
            forward_flops=replace(cost.forward_flops, per_token=cost.forward_flops.per_token / degree),
            backward_flops=replace(cost.backward_flops, per_token=cost.backward_flops.per_token / degree),
        )
    smaller = {name: getattr(frozen, name) // degree for name in ("parameters", "outside", "block")}
    smaller |= {name: getattr(frozen, name) // degree for name in ("num_bytes", "outside_bytes", "block_bytes")}
    names = ("num_parameters", "embedding_parameters", "outside_parameters", "block_parameters", "attention_size")
    return replace(
        model,
        **{name: getattr(model, name) // degree for name in (*names, "vocab_size")},
        blocks=blocks,
        frozen=replace(frozen, **smaller),
        large_weights=(),
        large_weights_of_block=(),
        keeps_blocks=degree < 4,
    )


@cache
def weighed(name: str, form: str, arrangement: str) -> dict[int, ModelProfile]:
    """The parts of a model, by sizes of the tensor axis."""
    model = MODELS[name]
    if form != "full":
        model = adapted(model, {"none": 2.0, "nf4": 0.53, "nf4-double": 0.51, "int8": 1.01}[form], form)
    if arrangement == "padded":
        model = replace(model, arrangement="padded", chunk=64, shares_prefixes=False)
    return {degree: part(model, degree) for degree in (1, 2, 4, 8)}


def parts_for(config: Config, name: str, arrangement: str) -> dict[int, ModelProfile]:
    """The model as a config trains it."""
    return weighed(name, "full" if isinstance(config.adapter, str) else config.adapter.quantize, arrangement)


def planned(
    config: Config, case: Mapping[str, Any], machine: Machine, before: Layout | None = None, *, force: bool = False
) -> Plan:
    """The plan of a config, in which what is trained is said."""
    parts = parts_for(config, case["model"], case.get("rows", "packed"))
    length = config.data.max_length
    packs = case.get("packs", 4000)
    data = replace(
        DATA,
        num_packs=packs,
        num_tokens=round(0.9 * packs * length),
        supervised_tokens=round(0.4 * packs * length),
        max_length=length,
        document_tokens=length / 4,
        validation_path="/validation",
    )
    return make_plan(
        config,
        Scales(parts[1], data, machine, parts={degree: parts[degree] for degree in case.get("degrees", (1,))}),
        threads_per_worker=2,
        before=before,
        force=force,
        free=Free(**case.get("free", {})),
    )


def machine_of(case: Mapping[str, Any]) -> Machine:
    """The machine of a case, with other memories where it says so."""
    return replace(parse_hardware(case["on"]), **case.get("machine", {}))


def told(case: Mapping[str, Any]) -> Case:
    """The plan of a case, or why there is none."""
    try:
        return {"plan": asdict(made(case))}
    except UserError as error:
        return {"refused": [asdict(problem) for problem in error.problems]}


def made(case: Mapping[str, Any], before: Layout | None = None) -> Plan:
    """The plan of a case; raises where it is refused."""
    machine = machine_of(case)
    words = as_overrides({"model": "m", "data": {"train": "rows.jsonl"}})
    config = decided(read_config(None, [*words, *case["words"]], check_files=False), machine)
    force = bool(case.get("force"))
    if (earlier := case.get("before")) is not None:
        before = made({**case, **earlier, "before": None}).layout
    if config.adapter != "auto":
        return planned(config, case, machine, before, force=force)

    def asked(config: Config, anyway: bool) -> list[Plan]:
        return [planned(config, case, machine, before, force=anyway)]

    config, why = choose(config, asked, machine.kind, force=force)
    plan = planned(config, case, machine, before, force=force)
    return replace(plan, reasons=plan.reasons | {"adapter": why})


COMMON = ["epochs=1", "data.max_length=2048", "batch.sequences=32"]
MEMORY = (
    "zero=0",
    "zero=1",
    "zero=2",
    "zero=3",
    "recompute=none",
    "recompute=selective",
    "recompute=full",
    "recompute_blocks=4",
    "recompute_blocks=999",
    "moments=fp32",
    "moments=bf16",
    "moments=int8",
    "optimizer_tier=device",
    "optimizer_tier=host",
    "optimizer_tier=disk",
    "gradient_tier=host",
    "gradient_tier=disk",
    "parameter_tier=device",
    "parameter_tier=host",
    "parameter_tier=disk",
    "activation_tier=host",
    "tiles=4",
    "micro_batch=2",
    "budget.disk=0",
    "budget.disk=40GB",
    "budget.host=30GB",
    "budget.device=10GB",
)
"""Said one by one."""
TOGETHER = (
    "optimizer_tier=disk gradient_tier=disk parameter_tier=disk",
    "optimizer_tier=host gradient_tier=host parameter_tier=host",
    "optimizer_tier=device gradient_tier=disk",
    "optimizer_tier=host optimizer_resident=2GB",
    "optimizer_tier=device optimizer_resident=2GB",
    "parameter_tier=host tiles=8",
    "parameter_tier=disk tiles=8",
    "parameter_tier=host zero=2",
    "tiles=8 zero=2",
    "tiles=8 zero=3",
    "recompute=selective activation_tier=host",
    "recompute=full activation_tier=host moments=bf16",
    "moments=fp32 optimizer_tier=device gradient_tier=device parameter_tier=device recompute=none micro_batch=4",
    "recompute=none tiles=1 zero=3",
    "budget.disk=0 optimizer_tier=disk",
    "recompute_blocks=4 recompute=none",
)
SMALL = {"cpu:4c:16GB": "160m", "2xcpu:8c:32GB": "3b", "H100": "8b", "RTX4090": "3b", "8xA100-80GB": "8b"}
"""A machine, and a model that is not small on it."""


def _one(name: str, on: str, model: str, words: list[str], **more: Any) -> tuple[str, Case]:
    return f"{model} on {on}: {name}", {"on": on, "model": model, "words": [*COMMON, *words], **more}


def _memory_cases() -> Iterator[tuple[str, Case]]:
    for on, model in SMALL.items():
        for said in (*MEMORY, *TOGETHER):
            yield _one(said, on, model, [f"memory.{word}" for word in said.split()])
    for on, model in {"H100": "70b", "RTX4090": "8b", "cpu:4c:16GB": "3b", "2xRTX4090": "70b"}.items():
        for said in ("budget.disk=auto", *MEMORY[4:21], *TOGETHER[:3], TOGETHER[12]):
            yield _one(f"tight, {said}", on, model, [f"memory.{word}" for word in said.split()])


def _adapter_cases() -> Iterator[tuple[str, Case]]:
    forms = ("none", "auto", "{rank: 16}", "{rank: 16, quantize: nf4}", "{rank: 16, quantize: int8}")
    memories = ("", "memory.parameter_tier=host", "memory.parameter_tier=disk", "memory.optimizer_tier=disk")
    for on, model in {**SMALL, "RTX4090:32GB": "70b", "4xRTX4090": "70b", "cpu:16c:64GB": "8b"}.items():
        for form in forms:
            for memory in memories if form != "none" else memories[:1]:
                yield _one(f"adapter {form} {memory}", on, model, [f"adapter={form}", *memory.split()])
        yield _one("adapter auto, little", on, model, ["adapter=auto", "memory.budget.device=3GB"])
        yield _one("adapter auto, kept", on, model, ["adapter=auto", "memory.recompute=none", "memory.moments=fp32"])
        yield _one("adapter auto, less", on, model, ["adapter=auto", "memory.budget.device=1GB"])
        yield _one("adapter and tiles", on, model, ["adapter={rank: 8}", "memory.tiles=4"])
        yield _one("adapter in force", on, model, ["adapter=auto", "memory.budget.device=1GB"], force=True)


def _axis_cases() -> Iterator[tuple[str, Case]]:
    degrees = (1, 2, 4, 8)
    for on, model in {"8xA100-80GB": "70b", "2x8xA100-80GB": "70b", "4xcpu:8c:32GB": "3b"}.items():
        for tensor in ("1", "2", "4"):
            for pipeline in ("1", "2", "3"):
                words = [f"parallel.tensor={tensor}", f"parallel.pipeline={pipeline}"]
                yield _one(f"axes {tensor} {pipeline}", on, model, words, degrees=degrees)
        for line in (
            "parallel.tensor=2 memory.moments=int8",
            "parallel.tensor=4 memory.moments=int8",
            "parallel.tensor=2 memory.tiles=4",
            "parallel.pipeline=2 memory.activation_tier=host",
            "parallel.pipeline=2 memory.recompute_blocks=4",
            "parallel.pipeline=2 memory.optimizer_tier=disk",
            "parallel.pipeline=2 memory.parameter_tier=host",
            "parallel.pipeline=2 parallel.schedule=zero_bubble",
            "parallel.pipeline=2 parallel.schedule=interleaved",
            "parallel.pipeline=2 parallel.schedule=gpipe compile=on",
            "parallel.pipeline=64 launch.workers=64",
            "parallel.replicate=2 memory.zero=0",
            "parallel.replicate=2 memory.zero=3",
            "parallel.replicate=3",
            "parallel.tensor=auto",
            "parallel.pipeline=auto",
            "parallel.pipeline=auto parallel.schedule=zero_bubble",
        ):
            yield _one(line, on, model, line.split(), degrees=degrees)
    both = ["parallel.tensor=auto", "parallel.pipeline=auto", "batch.sequences=128"]
    for on, model in {"8xA100-80GB": "8b", "2x8xA100-80GB": "70b", "2xcpu:8c:32GB": "3b"}.items():
        yield _one("both axes open", on, model, both, degrees=degrees)
        yield _one("both axes open, exact", on, model, [*both, "memory.moments=fp32"], degrees=degrees)
    yield _one("both axes open", "16x8xH100", "70b", [*both, "memory.recompute=full"], degrees=degrees)
    yield _one("both axes open, little", "8xRTX4090", "70b", [*both, "memory.tiles=1"], degrees=degrees)


def _other_cases() -> Iterator[tuple[str, Case]]:
    for on, model in SMALL.items():
        for words in (
            "precision=fp16",
            "precision=fp32",
            "compile=on",
            "compile=on memory.recompute=selective",
            "compile=on memory.parameter_tier=host",
            "compile=off",
            "checkpoint.every=auto",
            "checkpoint.every=100",
            "batch=auto",
            "kernels={adamw: off}",
            "epochs=300",
            "data.max_length=8192",
            "launch.workers=3",
            "launch.workers=64",
        ):
            yield _one(words, on, model, words.split())
        yield _one("padded", on, model, [], rows="padded")
        yield _one("padded, recomputed", on, model, ["memory.recompute=full"], rows="padded")
        yield _one("few packs", on, model, ["epochs=1"], packs=3)
        yield _one("in force", on, model, ["memory.budget.device=1MB"], force=True)
        yield _one("resumed", on, model, [], before={"words": [*COMMON, "memory.recompute=full"]})
        yield _one("resumed in less", on, model, ["memory.budget.device=6GB"], before={"words": COMMON})
        yield _one(
            "resumed elsewhere", on, model, ["memory.zero=1"], before={"words": [*COMMON, "memory.moments=bf16"]}
        )
        yield _one("little is free", on, model, [], free={"memory": 5e9, "host": 20e9})
        yield _one("disks are full", on, model, ["memory.budget.device=6GB"], free={"disk": 8e9})
        yield _one(
            "disks are assumed",
            on,
            model,
            ["memory.optimizer_tier=disk"],
            free={"disk": 8e9, "disks_are_assumed": True},
        )
        yield _one("little may be locked", on, model, ["memory.optimizer_tier=host"], free={"lockable": 1e9})
        yield _one("less may be locked", on, model, ["memory.parameter_tier=host"], free={"lockable": 1e6})
        yield _one("a small host", on, model, ["memory.optimizer_tier=host"], machine={"host_bytes": 10**10})
    for on in ("V100-16GB", "4xT4"):
        for words in ("precision=bf16", "precision=fp16", "precision=fp16 adapter=auto"):
            yield _one(words, on, "3b", words.split())


def cases() -> dict[str, Case]:
    """All of the grid, by name."""
    return {name: case for some in (_memory_cases, _adapter_cases, _axis_cases, _other_cases) for name, case in some()}


def record(every: int = 1) -> dict[str, Case]:
    """What became of every case, or of each of so many."""
    return {name: told(case) for name, case in list(cases().items())[::every]}
