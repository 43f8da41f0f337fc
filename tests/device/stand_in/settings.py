"""What the walk walks: every setting that a run on GPUs can have, as commands on pretended machines.

In a command ``{run}`` is the directory of the setting's own run, ``{rows}`` the rows, ``{folder}`` a directory for what
else it writes, and ``{models}`` that of the models. It begins as ``train NAME.yaml`` where nothing else is said.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from device.stand_in.machine import Pretended

DONE = "done"


@dataclass(frozen=True)
class Setting:
    """Something that a user does."""

    name: str
    changes: str = ""
    """What the command says beside the config, in words as a shell takes them."""
    config: str = "llama"
    on: Pretended = field(default_factory=Pretended)
    command: str = "train {config} {changes} output={run}"
    after: tuple[str, ...] = ()
    """Commands that follow, each if the one before went well."""
    given: str = ""
    """Input of the commands."""
    expected: str = DONE
    """``done``, or what a refusal says."""
    expected_of: Mapping[str, str] = field(default_factory=dict)
    """The same of versions of torch of which something else is expected."""
    seconds: float = 300.0
    """Longest that a command may take."""
    compiles: bool = False
    """Whether ``compile`` is on, which takes a minute or more."""


TWO, FOUR = Pretended(devices=2), Pretended(devices=4)
ZEROS = {"STAND_IN_ZEROS": "1"}
"""For what goes another way with the numbers that other tensors have left behind."""
EMPTY, TWO_EMPTY, FOUR_EMPTY = (Pretended(devices=number, more=ZEROS) for number in (1, 2, 4))
RACES = Pretended(watched_by=("counts", "races"))
HOST = "memory.optimizer_tier=host memory.gradient_tier=host"
ON_DISK = "memory.optimizer_tier=disk memory.gradient_tier=disk"
ALL_HOST = f"{HOST} memory.recompute=full memory.activation_tier=host memory.micro_batch=1"


def settings() -> Iterator[Setting]:
    """All of them."""
    yield from _models()
    yield from _one_gpu()
    yield from _adapters()
    yield from _several_gpus()
    yield from _commands()
    yield from _cards()
    yield from _in_fp8()
    yield from _refusals()
    yield from _compiled()
    yield from _races()


def _models() -> Iterator[Setting]:
    for name in ("llama", "untied", "neox", "mixture", "gemma2", "mistral", "qwen3", "head20", "head256", "head320"):
        yield Setting(f"model {name}", config=name)


def _one_gpu() -> Iterator[Setting]:
    for precision in ("fp32", "fp16"):
        yield Setting(f"precision {precision}", f"precision={precision}")
    for moments in ("fp32", "bf16", "int8"):
        yield Setting(f"moments {moments}", f"memory.moments={moments}")
        yield Setting(f"moments {moments}, optimizer on host", f"memory.moments={moments} memory.optimizer_tier=host")
    for recompute in ("none", "selective", "full"):
        yield Setting(f"recompute {recompute}", f"memory.micro_batch=1 memory.recompute={recompute}")
    yield Setting("activations on host", "memory.recompute=full memory.activation_tier=host memory.micro_batch=1")
    yield Setting("gradients on host", "memory.gradient_tier=host memory.micro_batch=1")
    yield Setting("gradients on host, one micro-batch", "memory.gradient_tier=host memory.micro_batch=8")
    yield Setting("gradients and optimizer on host", f"{HOST} memory.micro_batch=1")
    yield Setting("all on host", f"{ALL_HOST} memory.optimizer_resident=1MB", config="untied")
    yield Setting("all on host, fp16", f"{ALL_HOST} precision=fp16")
    for name, changes in (
        ("parameters on host", f"{HOST} memory.parameter_tier=host"),
        ("parameters on host, the rest on disk", f"{ON_DISK} memory.parameter_tier=host"),
        ("all on disk", f"{ON_DISK} memory.parameter_tier=disk"),
        ("tiles from the host", f"{HOST} memory.parameter_tier=host memory.tiles=4"),
        ("tiles from disk", f"{ON_DISK} memory.parameter_tier=disk memory.tiles=4"),
        ("state and gradients on disk", ON_DISK),
        ("gradients alone on disk", "memory.optimizer_tier=host memory.gradient_tier=disk"),
        ("recompute full in two blocks", "memory.recompute=full memory.recompute_blocks=2"),
    ):
        yield Setting(name, f"{changes} memory.micro_batch=1")
        yield Setting(f"{name}, resumed", f"{changes} memory.micro_batch=1 steps=2", after=(_RESUME,))
    yield Setting("padded rows", "data.pack=false")
    yield Setting("padded rows, two a forward, fp32", "data.pack=false memory.micro_batch=2 precision=fp32")
    yield Setting("clipping off", "optimizer.clip=off")
    yield Setting("answers at evaluations", "evaluate.prompts=2 evaluate.max_new_tokens=4")
    yield Setting("trained in part", "train=['model.layers.3.*']")
    for name, changes, config in (
        ("bf16", "", "llama"),
        ("fp32, padded", "precision=fp32 data.pack=false", "llama"),
        ("a window and caps", "", "gemma2"),
        ("a mixture", "", "mixture"),
        ("int8, all on host", f"memory.moments=int8 {ALL_HOST}", "untied"),
        ("adapter nf4 with dropout", "adapter.rank=4 adapter.quantize=nf4 adapter.dropout=0.1", "llama"),
    ):
        yield Setting(f"deterministic: {name}", f"deterministic=true {changes}", config=config)
    yield Setting("saved every step, kept one", "checkpoint.every=1 checkpoint.keep=1")


def _adapters() -> Iterator[Setting]:
    rank = "adapter.rank=4"
    for quantize in ("none", "nf4", "nf4-double", "int8"):
        exports = ("export {run} {folder}/adapter", "export {run} {folder}/merged --merge")
        yield Setting(f"adapter, base {quantize}", f"{rank} adapter.quantize={quantize}", after=exports)
    yield Setting("adapter, dropout, padded", f"{rank} adapter.dropout=0.1 data.pack=false", on=EMPTY)
    also = f"{rank} adapter.dropout=0.1 adapter.also=embeddings"
    yield Setting("adapter, dropout, embeddings too", also, on=EMPTY)
    yield Setting("adapter nf4, all on host", f"{rank} adapter.quantize=nf4 {ALL_HOST}")
    yield Setting("adapter nf4 on a mixture", f"{rank} adapter.quantize=nf4", config="mixture")
    for zero in (0, 2, 3):
        changes = f"{rank} adapter.quantize=nf4 launch.workers=2 memory.zero={zero}"
        old = {"2.11.0": "change: memory.zero=2"} if zero == 3 else {}
        yield Setting(f"adapter nf4, ZeRO {zero} on 2", changes, on=TWO, expected_of=old)
    yield Setting("adapter, resumed", f"{rank} steps=2", after=(_RESUME,))


def _several_gpus() -> Iterator[Setting]:
    yield Setting("all GPUs by default, 2", "memory.micro_batch=1", on=TWO)
    for on in (TWO, FOUR):
        workers = f"launch.workers={on.devices} memory.micro_batch=1"
        for zero in range(4):
            yield Setting(f"ZeRO {zero} on {on.devices}", f"{workers} memory.zero={zero}", on=on)
        yield Setting(f"ZeRO 3 on {on.devices}, all on host", f"{workers} memory.zero=3 {ALL_HOST}", on=on)
        yield Setting(f"tensor {on.devices}", f"{workers} parallel.tensor={on.devices}", config="neox", on=on)
        for schedule in ("gpipe", "1f1b", "interleaved", "zero_bubble"):
            config = "deep" if schedule == "interleaved" else "llama"
            changes = f"{workers} parallel.pipeline={on.devices} parallel.schedule={schedule}"
            yield Setting(f"pipeline {schedule} on {on.devices}", changes, config=config, on=on)
    hybrid = "launch.workers=4 memory.micro_batch=1 parallel.replicate=2"
    for zero in (1, 2, 3):
        yield Setting(f"hybrid, ZeRO {zero} on 2 x 2", f"{hybrid} memory.zero={zero}", on=FOUR)
    both = "launch.workers=4 memory.micro_batch=1 parallel.tensor=2 parallel.pipeline=2"
    yield Setting("tensor 2 x pipeline 2", both, on=FOUR)
    everything = {"host": f"{HOST} memory.parameter_tier=host", "disk": f"{ON_DISK} memory.parameter_tier=disk"}
    for name, rests in everything.items():
        all_ = f"memory.zero=3 {rests}"
        on_two = f"launch.workers=2 memory.micro_batch=1 {all_}"
        yield Setting(f"tensor 2, all on {name}", f"{on_two} parallel.tensor=2", on=TWO)
        for schedule in ("1f1b", "interleaved", "zero_bubble"):
            changes = f"{on_two} parallel.pipeline=2 parallel.schedule={schedule}"
            yield Setting(f"pipeline {schedule} on 2, all on {name}", changes, config="deep", on=TWO)
        yield Setting(f"tensor 2 x pipeline 2, all on {name}", f"{both} {all_}", on=FOUR)
        shared = f"launch.workers=4 parallel.tensor=2 memory.micro_batch=1 {all_}"
        yield Setting(f"tensor 2, ZeRO 3 on 2 x 2, all on {name}", shared, on=FOUR_EMPTY)
    inputs = f"parallel.pipeline=2 {HOST} memory.recompute=full memory.activation_tier=host"
    yield Setting("pipeline of 2, inputs of blocks on host", inputs, on=TWO)
    yield Setting("tensor 2, ZeRO 3 on 2 x 2", "launch.workers=4 parallel.tensor=2 memory.zero=3", on=FOUR_EMPTY)
    yield Setting("ZeRO 2, fp16, recompute full", "launch.workers=2 memory.zero=2 precision=fp16", on=TWO)
    yield Setting("deterministic: ZeRO 3 on 2", "launch.workers=2 memory.zero=3 deterministic=true", on=TWO)
    yield Setting("ZeRO 3 of a mixture", "launch.workers=2 memory.zero=3", config="mixture", on=TWO)
    yield Setting("resumed on 1 of 2", "launch.workers=2 steps=2", on=TWO, after=(_RESUME + " launch.workers=1",))
    yield Setting("resumed on 4 of 2", "launch.workers=2 steps=2", on=FOUR, after=(_RESUME + " launch.workers=4",))


_RESUME = "train --resume {run} steps=4 --allow-changes"


def _commands() -> Iterator[Setting]:
    yield Setting("resumed", "steps=2", after=(_RESUME,))
    yield Setting("resumed, all on host", f"steps=2 {ALL_HOST}", after=(_RESUME,))
    after = (
        "eval {run} --data {rows} --exact-match 2 --max-new-tokens 4",
        "generate {run} --prompt hello --max-new-tokens 8",
        "generate {run} --prompt hello --max-new-tokens 8 --temperature 1",
        "export {run} {folder}/export --dtype fp16",
        "verify {run}",
        "report {run}",
    )
    yield Setting("evaluated, generated from, exported, verified, reported", after=after)
    yield Setting("evaluated with a window and caps", config="gemma2", after=after[:2])
    yield Setting("talked to", after=("chat {run} --max-new-tokens 4",), given="hello\nand again\n/quit\n")
    yield Setting("doctor", command="doctor --quick --json")
    yield Setting("doctor on 2", command="doctor --again", on=TWO)
    yield Setting("plan", command="plan {config} {changes}")
    yield Setting("plan for other hardware", command="plan {config} launch.workers=8 --hardware 8xH100")
    yield Setting("plan, largest micro-batch", command="plan {config} --largest micro_batch")
    yield Setting("profile", "steps=12", command="profile {config} {changes} --steps 2 --output {folder}/profile")
    profile = "profile {config} {changes} --steps 1 --output {folder}/profile"
    yield Setting("profile on 2", "steps=12 launch.workers=2", command=profile, on=TWO)
    yield Setting("init", command="init {models}/llama {rows} --output {folder}/config.yaml data.template=plain")
    yield Setting("prepared, not run", command="train {config} --prepare output={run}")


def _cards() -> Iterator[Setting]:
    for card, expected in (("T4", DONE), ("V100", "whose kernels are for 7.5 and newer")):
        on, host = Pretended(card), "precision=fp32 memory.optimizer_tier=host"
        yield Setting(f"{card}, bf16", on=on, expected="precision=fp16")
        yield Setting(f"{card}, fp16", "precision=fp16", on=on, expected=expected)
        yield Setting(f"{card}, fp32, optimizer on host", host, on=on, expected=expected)
    for card in ("A100", "H200", "RTX4090", "RTX5090"):
        yield Setting(f"{card}, bf16", on=Pretended(card))
        yield Setting(f"{card}, nf4", "adapter.rank=4 adapter.quantize=nf4", on=Pretended(card))


def _in_fp8() -> Iterator[Setting]:
    """Products in fp8, of layers whose sizes are multiples of 16."""
    fp8, adapter = "precision=fp8", "adapter={rank: 4, dropout: 0.1}"
    for card in ("H100", "RTX5090"):
        yield Setting(f"fp8, {card}", f"{fp8} memory.recompute=none", config="fp8", on=Pretended(card))
        yield Setting(f"fp8, {card}, recompute full", f"{fp8} memory.recompute=full", config="fp8", on=Pretended(card))
        changes = f"{fp8} compile=on memory.recompute=none memory.micro_batch=1"
        yield Setting(f"compiled, fp8, {card}", changes, config="fp8", on=Pretended(card), seconds=600, compiles=True)
    yield Setting("fp8, recompute selective", f"{fp8} memory.recompute=selective", config="fp8")
    yield Setting("fp8, padded rows", f"{fp8} data.pack=false", config="fp8")
    yield Setting("fp8, all on host", f"{fp8} {ALL_HOST}", config="fp8")
    yield Setting("fp8, adapter with dropout", f"{fp8} '{adapter}'", config="fp8")
    yield Setting("fp8, resumed", f"{fp8} steps=2", config="fp8", after=(_RESUME,))
    for name, changes, on in (
        ("ZeRO 3 on 2", "launch.workers=2 memory.zero=3 memory.micro_batch=1", TWO_EMPTY),
        ("adapter with dropout", f"'{adapter}' memory.micro_batch=1", EMPTY),
    ):
        yield Setting(
            f"compiled, fp8, {name}", f"{fp8} compile=on {changes}", config="fp8", on=on, seconds=600, compiles=True
        )
    yield Setting("refused: fp8 on A100", fp8, config="fp8", on=Pretended("A100"), expected="fp8 on A100-80GB, whose")


def _refusals() -> Iterator[Setting]:
    yield Setting("refused: 3 workers on 2", "launch.workers=3", on=TWO, expected="needed: a GPU for each worker")
    yield Setting("refused: 2 workers on 1", "launch.workers=2", expected="needed: a GPU for each worker")
    few = Pretended(more={"STAND_IN_LOCK_MIB": "0"})
    locked = "memory.optimizer_tier=host memory.optimizer_resident=0"
    yield Setting("refused: memory that cannot be locked", locked, config="deep", on=few, expected="to be locked")
    small = Pretended(more={"STAND_IN_MIB": "900"})
    yield Setting("refused: a card that is too small", config="deep", on=small, expected="needed:")
    hidden = Pretended(more={"CUDA_VISIBLE_DEVICES": ""})
    yield Setting("no GPU to be seen: trained on the CPU", on=hidden)


def _compiled() -> Iterator[Setting]:
    for name, changes, config, on in (
        ("compiled", "", "deep", Pretended()),
        ("compiled, recompute full", "memory.micro_batch=1 memory.recompute=full", "llama", Pretended()),
        (
            "compiled, recompute full in two blocks, inputs on host",
            "memory.micro_batch=1 memory.recompute=full memory.recompute_blocks=2 memory.activation_tier=host",
            "llama",
            Pretended(),
        ),
        ("compiled, ZeRO 3 on 2", "launch.workers=2 memory.zero=3 memory.micro_batch=1", "llama", TWO_EMPTY),
        ("compiled, adapter nf4", "adapter.rank=4 adapter.quantize=nf4", "llama", Pretended()),
        ("compiled, adapter with dropout", "'adapter={rank: 4, dropout: 0.1}' memory.micro_batch=1", "llama", EMPTY),
        ("compiled, RTX5090", "", "llama", Pretended("RTX5090")),
        ("compiled, T4, fp16", "precision=fp16", "llama", Pretended("T4")),
    ):
        yield Setting(name, f"compile=on {changes}", config=config, on=on, seconds=600, compiles=True)


def _races() -> Iterator[Setting]:
    for name, changes in (
        ("optimizer on host", "memory.optimizer_tier=host"),
        ("optimizer on host, int8, some of it resident", "memory.optimizer_tier=host memory.moments=int8"),
        ("gradients on host", "memory.gradient_tier=host memory.micro_batch=1"),
        ("gradients and optimizer on host", f"{HOST} memory.micro_batch=1"),
        ("all on host", f"{ALL_HOST} memory.optimizer_resident=1MB"),
        ("adapter nf4, all on host", f"adapter.rank=4 adapter.quantize=nf4 {ALL_HOST}"),
    ):
        yield Setting(f"races: {name}", f"steps=2 {changes}", config="untied", on=RACES)
    two = Pretended(devices=2, watched_by=("counts", "races"))
    yield Setting("races: ZeRO 3 on 2, all on host", f"steps=2 launch.workers=2 memory.zero=3 {ALL_HOST}", on=two)
