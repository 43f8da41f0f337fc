"""What of ``memory``, ``parallel`` and ``compile`` does not go together, each said once.

A rule looks at a ``Setting``: a value for every axis, or ``auto`` where it is open. It is broken only if it is so
whatever open values come to be. Thus the same rule refuses a config, in its own words, and keeps the planner's search
(``planning.axes``) to what can be, where no value is open. Rules that need a machine are in ``planning.rules``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tonnage.config.contradiction import Contradiction
from tonnage.config.schema import Config

TIER_KEYS = ("optimizer_tier", "gradient_tier", "parameter_tier")
"""Keys of ``memory`` that may say disk."""


class Setting(NamedTuple):
    """What rules look at: values as a config says them, or as the search tries them."""

    zero: int | str
    recompute: str
    activation_tier: str
    moments: str
    optimizer_tier: str
    gradient_tier: str
    parameter_tier: str
    tiles: int | str
    sequence_tiles: int | str
    recompute_blocks: int | str
    optimizer_resident: int | str
    disk: int | str
    """Bytes of a machine's disks that may be used."""
    replicate: int
    tensor: int | str
    context: int | str
    pipeline: int | str
    schedule: str
    workers: int | str
    groups: int
    """Workers, or groups of them, that have tokens of their own; 1 while nobody has counted."""
    compile: str
    precision: str
    adapter: str
    """``none``, ``auto``, or how the base rests: ``unpacked`` or the form in which it is packed."""
    trains_part: bool
    """Whether ``train`` names what is trained."""
    scores: bool = False
    """Whether the model ends in a head of one number (``objective.kind`` reward)."""
    device: str = ""
    """Kind of the machine's devices; nothing while it is not known."""
    machine: str = ""
    """Name of the machine's devices."""
    optimizer: str = "adamw"
    adapter_kind: str = "lora"
    begins: str = "zero"
    """Where its additions begin (``adapter.init``)."""
    rounded: str = "none"
    """The scheme of ``quantize_aware``."""

    @property
    def trains_all(self) -> bool:
        """Whether all of the model's own parameters are trained; no where that is open."""
        return self.adapter == "none" and not self.trains_part

    @property
    def on_disk(self) -> list[str]:
        """The keys of ``memory`` that are disk."""
        return [key for key in TIER_KEYS if getattr(self, key) == "disk"]

    @property
    def together(self) -> int:
        """Workers that train the same packs, as far as that is said."""
        axes = (self.tensor, self.context, self.pipeline)
        return math.prod(int(size) for size in axes if size != "auto")

    @property
    def divides(self) -> bool:
        """Whether the workers can form such groups; yes while nobody has counted them."""
        return self.workers == "auto" or int(self.workers) % self.together == 0

    @property
    def tiled(self) -> bool:
        """Whether the largest weight comes in tiles, whatever is open."""
        return self.tiles not in ("auto", 1)

    @property
    def divides_rows(self) -> bool:
        """Whether workers divide the tokens of rows, whatever is open."""
        return self.context not in ("auto", 1)

    @property
    def tiles_rows(self) -> bool:
        """Whether MLPs go through rows in tiles of tokens, whatever is open."""
        return self.sequence_tiles not in ("auto", 1)

    @property
    def staged(self) -> bool:
        """Whether there is a pipeline, whatever is open."""
        return self.pipeline not in ("auto", 1)

    @staticmethod
    def of(config: Config, device: str = "", machine: str = "") -> Setting:
        memory, parallel, adapter = config.memory, config.parallel, config.adapter
        form = adapter if isinstance(adapter, str) else adapter.quantize
        values = {
            key: getattr(section, key)
            for section in (memory, parallel)
            for key in Setting._fields
            if key in type(section).model_fields
        }
        return Setting(
            **values,
            disk=memory.budget.disk,
            workers=config.launch.workers,
            groups=1 if config.launch.workers == "auto" else config.data_workers,
            compile=config.compile,
            precision=config.precision,
            adapter="unpacked" if not isinstance(adapter, str) and form in ("none", "widened") else form,
            trains_part=bool(config.train),
            scores=config.objective.scores,
            device=device,
            machine=machine,
            optimizer=config.optimizer.kind,
            adapter_kind="lora" if isinstance(adapter, str) else adapter.kind,
            begins="zero" if isinstance(adapter, str) else adapter.init,
            rounded=config.quantize_aware.scheme,
        )


Words = str | Callable[[Setting], str]
"""What is said of a setting; in a text, ``{at.zero}`` stands for its value."""


@dataclass(frozen=True)
class Rule:
    """What does not go together."""

    keys: tuple[str, ...] | Callable[[Setting], tuple[str, ...]]
    """Dotted, of the config."""
    is_broken: Callable[[Setting], bool]
    found: Words
    needed: Words
    change: Words
    searched: bool = True
    """Whether the search heeds it; else it is only about what is said, and the search does without that."""

    def of(self, at: Setting) -> Contradiction:
        keys = self.keys if isinstance(self.keys, tuple) else self.keys(at)
        said = (self.found, self.needed, self.change)
        return Contradiction(keys, *(words.format(at=at) if isinstance(words, str) else words(at) for words in said))


def broken(rules: Iterable[Rule], setting: Setting) -> Iterator[Contradiction]:
    """What is said of a setting by the rules that it breaks."""
    return (rule.of(setting) for rule in rules if rule.is_broken(setting))


def _other_numbers(at: Setting) -> str:
    lower = int(at.workers) - int(at.workers) % at.together
    return f"set {f'launch.workers={lower} or ' if lower else ''}launch.workers={lower + at.together}"


def _unequal(at: Setting) -> str:
    alike = int(at.workers) // at.groups
    times = "" if alike == 1 else f"times {alike} "
    return f"{at.groups} {times}workers cannot form {at.replicate} equal groups"


def _equal(at: Setting) -> str:
    fitting = [number for number in range(1, at.groups + 1) if at.groups % number == 0]
    return f"parallel.replicate that divides {at.groups}: {', '.join(map(str, fitting))}"


def _without_disks(at: Setting) -> str:
    keys = [f"memory.{key}" for key in at.on_disk]
    return f"memory.budget.disk is 0, and {' and '.join(keys)} {'is' if len(keys) == 1 else 'are'} disk"


def _shared(at: Setting) -> list[str]:
    """Why a worker of a pipeline has not the weights of its stages as they are computed with."""
    shared = {
        f"{at.groups} groups of workers shard the parameters": at.groups > 1,
        f"parallel.tensor is {at.tensor}": at.tensor != 1,
        "precision is fp16": at.precision == "fp16",
    }
    return [why for why, holds in shared.items() if holds]


class Value(NamedTuple):
    """A value of a key that goes with some values of others and not with the rest."""

    key: str
    is_so: Callable[[Setting], bool]
    shown: str


TENSOR = Value("parallel.tensor", lambda at: at.tensor not in ("auto", 1), "{at.tensor}")
STAGES = Value("parallel.pipeline", lambda at: at.staged, "{at.pipeline}")
ZERO_BUBBLE = Value("parallel.schedule", lambda at: at.staged and at.schedule == "zero_bubble", "zero_bubble")
TILES = Value("memory.tiles", lambda at: at.tiled, "{at.tiles}")
TILED_ROWS = Value("memory.sequence_tiles", lambda at: at.tiles_rows, "{at.sequence_tiles}")
ON_HOST = Value("memory.parameter_tier", lambda at: at.parameter_tier == "host", "host")
COMPILED = Value("compile", lambda at: at.compile == "on", "on")
QUANTISED = Value("adapter.quantize", lambda at: at.adapter not in ("none", "auto", "unpacked"), "{at.adapter}")
NO_LORA = Value("adapter.kind", lambda at: at.adapter_kind != "lora", "{at.adapter_kind}")
ROUNDED = Value("quantize_aware", lambda at: at.rounded != "none", "{at.rounded}")
IN_FP8 = Value("precision", lambda at: at.precision in ("fp8", "fp8-emulated"), "{at.precision}")
BY_MUON = Value("optimizer.kind", lambda at: at.optimizer == "muon", "muon")
FROZEN = "what is frozen is not computed in tiles so far"
SCORES = Value("objective.kind", lambda at: at.scores, "reward")


def _one_of(
    first: Value, second: Value, why: str, change: str, needed: str = "one of them", *, searched: bool = True
) -> Rule:
    """Two values that do not go together."""
    is_first, is_second = first.is_so, second.is_so
    return Rule(
        (first.key, second.key),
        lambda at: is_first(at) and is_second(at),
        f"{first.key} is {first.shown}, and {second.key} is {second.shown}{why}",
        needed,
        change,
        searched,
    )


def _updated_on_host(key: str) -> Rule:
    """Parameters that are trained are updated where they rest."""
    return Rule(
        ("memory.parameter_tier", f"memory.{key}"),
        lambda at: at.parameter_tier == "host" and at.trains_all and getattr(at, key) == "device",
        f"memory.parameter_tier is host, where parameters are updated, and memory.{key} is device",
        f"memory.{key} of host or disk",
        f"set memory.{key} to host, or leave memory.parameter_tier out",
    )


def _not_in_tiles(value: Value, why: str, *, searched: bool = True) -> Rule:
    needed, change = f"one of memory.tiles and {value.key}", f"set memory.tiles=1, or leave {value.key} out"
    return _one_of(TILES, value, f": {why}", change, needed, searched=searched)


def _not_of_scores(value: Value, what: str) -> Rule:
    key, why = value.key, f", whose head of one number {what} so far"
    return _one_of(value, SCORES, why, f"set {key} to 1", f"{key} of 1")


def _not_by_muon(value: Value, needed: str, change: str) -> Rule:
    return _one_of(BY_MUON, value, "", f"{change}, or optimizer.kind=adamw", needed)


def _not_rounded(value: Value, why: str, change: str) -> Rule:
    needed = f"one of quantize_aware and {value.key}"
    return _one_of(ROUNDED, value, f": {why}", f"set {change}, or quantize_aware=none", needed)


def _not_in_fp8(value: Value, why: str, change: str) -> Rule:
    needed = f"one of precision {{at.precision}} and {value.key}, so far"
    return _one_of(IN_FP8, value, f": {why}", f"set {change}, or precision=bf16", needed)


IN_FRONT: tuple[Rule, ...] = (
    Rule(
        lambda at: (
            "parallel.tensor",
            *(["parallel.context"] if at.divides_rows else []),
            "parallel.pipeline",
            "launch.workers",
        ),
        lambda at: not at.divides,
        lambda at: (
            f"{at.workers} workers, parallel.tensor {at.tensor}"
            + (f", parallel.context {at.context}" if at.divides_rows else "")
            + f" and parallel.pipeline {at.pipeline}"
        ),
        "a multiple of {at.together} workers",
        _other_numbers,
    ),
    Rule(
        ("parallel.replicate", "launch.workers"),
        lambda at: at.workers != "auto" and at.divides and at.groups % at.replicate != 0,
        _unequal,
        _equal,
        "set parallel.replicate to one of them",
    ),
    Rule(
        ("parallel.tensor", "adapter.kind"),
        lambda at: NO_LORA.is_so(at) and TENSOR.is_so(at),
        lambda at: (
            f"parallel.tensor is {at.tensor}, and adapter.kind is {at.adapter_kind}, which needs "
            + ("the lengths of whole rows" if at.adapter_kind == "dora" else "all inputs of a layer")
        ),
        "parallel.tensor of 1, with {at.adapter_kind} so far",
        "set parallel.tensor to 1, or adapter.kind to lora",
    ),
    _not_rounded(TENSOR, "a row that shares a scale would be divided", "parallel.tensor=1"),
    _not_in_fp8(TENSOR, "parts of matrices are multiplied in 16 bits", "parallel.tensor=1"),
    _not_of_scores(TENSOR, "is not divided"),
    _not_of_scores(STAGES, "is in no stage of its own"),
)
"""How workers form groups, and which of them a model of scores has none of."""
WITHIN: tuple[Rule, ...] = (
    Rule(
        ("memory.zero", "parallel.replicate"),
        lambda at: (
            at.zero == 0
            and at.workers != "auto"
            and at.divides
            and at.groups % at.replicate == 0
            and at.replicate not in (1, at.groups)
        ),
        "memory.zero is 0 (every worker holds everything), but parallel.replicate is {at.replicate}",
        "memory.zero of 1 to 3 inside the groups",
        "set memory.zero to 3, or leave parallel.replicate out",
    ),
    Rule(
        ("memory.parameter_tier", "memory.zero"),
        lambda at: at.parameter_tier in ("host", "disk") and at.zero in (0, 1, 2) and at.groups > 1 and at.divides,
        "memory.parameter_tier is {at.parameter_tier}, but with memory.zero {at.zero} every worker keeps "
        "all parameters in memory",
        "memory.zero of 3",
        "set memory.zero to 3",
    ),
    Rule(
        ("memory.parameter_tier", "adapter.init", "adapter.quantize"),
        lambda at: at.begins != "zero" and at.adapter != "unpacked" and at.parameter_tier == "disk",
        "memory.parameter_tier is disk, where quantised weights are those of every run, and adapter.init is "
        "{at.begins}, which quantises others",
        "quantised weights in memory, of a device or the host, where additions begin so",
        "memory.parameter_tier=device, or adapter.init=zero",
    ),
    Rule(
        ("memory.optimizer_resident", "memory.optimizer_tier"),
        lambda at: at.optimizer_tier == "device" and at.optimizer_resident not in ("auto", 0),
        "memory.optimizer_resident is {at.optimizer_resident}, and memory.optimizer_tier is device, "
        "where all of the state is in memory",
        "a part of it to keep there only where the rest is elsewhere",
        "leave memory.optimizer_resident out, or set memory.optimizer_tier to host or disk",
        searched=False,
    ),
    Rule(
        lambda at: ("memory.budget.disk", *(f"memory.{key}" for key in at.on_disk)),
        lambda at: at.disk == 0 and bool(at.on_disk),
        _without_disks,
        "room on the disks of a machine for what must rest there",
        lambda at: f"memory.budget.disk=auto, or {' '.join(f'memory.{key}=auto' for key in at.on_disk)}",
    ),
    Rule(
        ("memory.recompute_blocks", "memory.recompute"),
        lambda at: at.recompute_blocks != "auto" and at.recompute in ("none", "selective"),
        "memory.recompute_blocks is {at.recompute_blocks}, and memory.recompute is {at.recompute}",
        "memory.recompute of full where some blocks are recomputed whole",
        "set memory.recompute to full, or leave memory.recompute_blocks out",
    ),
    Rule(  # in a pipeline not so far: its first stages would need it more
        ("memory.recompute_blocks", "parallel.pipeline"),
        lambda at: at.recompute_blocks != "auto" and at.pipeline != 1,
        "memory.recompute_blocks is {at.recompute_blocks}, and parallel.pipeline is {at.pipeline}: first stages hold "
        "more activations than last ones",
        "all blocks recomputed, or none, in a pipeline so far",
        "leave memory.recompute_blocks out, or set parallel.pipeline to 1",
    ),
    _one_of(
        COMPILED,
        Value("memory.recompute", lambda at: at.recompute == "selective", "selective"),
        "",
        "set memory.recompute=full or memory.recompute=none, or leave compile out",
        "one of them: selective recompute keeps results of single operations, which a compiled block fuses",
    ),
    _not_in_fp8(
        Value("compile", lambda at: at.compile == "on" and at.recompute == "full", "on beside memory.recompute full"),
        "torch 2.13 fails where a compiled block in fp8 runs again",
        "memory.recompute=none",
    ),
    Rule(
        ("memory.activation_tier", "memory.recompute"),
        lambda at: at.activation_tier == "host" and at.recompute in ("none", "selective"),
        "memory.activation_tier is host, and memory.recompute is {at.recompute}: blocks keep more than their inputs",
        "memory.recompute of full where inputs of blocks are kept elsewhere",
        "set memory.recompute to full, or leave memory.activation_tier out",
    ),
    _updated_on_host("optimizer_tier"),
    _updated_on_host("gradient_tier"),
    _one_of(
        ON_HOST,
        COMPILED,
        ": a compiled block expects its parameters where they were",
        "set compile to off, or leave memory.parameter_tier out",
    ),
    _not_in_tiles(TENSOR, "workers divide matrices along it already"),
    _not_in_tiles(STAGES, "stages have them whole"),
    _not_in_tiles(COMPILED, "a compiled block has its weights whole", searched=False),
    _not_in_tiles(Value("adapter", lambda at: at.adapter != "none", "given"), FROZEN),
    _not_in_tiles(Value("train", lambda at: at.trains_part, "given"), FROZEN),
    _one_of(
        TILED_ROWS,
        TILES,
        ": every tile of weights would come, and its gradient leave, once for each tile of the sequence",
        "set memory.tiles to 1, or leave memory.sequence_tiles out",
    ),
    _not_by_muon(TILES, "matrices that a worker can have whole, as its update takes them", "set memory.tiles to 1"),
    _not_by_muon(
        Value("adapter", lambda at: at.adapter not in ("none", "auto"), "given"),
        "matrices of the model's own: those of an addition mean something as a product alone",
        "leave adapter out",
    ),
    _not_rounded(TILES, "tiles are computed as they are", "memory.tiles=1"),
    _not_rounded(QUANTISED, "a base that is quantised already is rounded by its own scheme", "adapter.quantize=none"),
    _not_rounded(NO_LORA, "it is computed with weights and inputs as they are", "adapter.kind=lora"),
    _not_rounded(
        Value("adapter.init", lambda at: at.begins != "zero", "{at.begins}"),
        "what additions begin as is a part of weights as they are",
        "adapter.init=zero",
    ),
    _not_rounded(COMPILED, "layers quantise again in their backward pass", "compile=off"),
    _not_rounded(
        Value("precision", lambda at: at.precision == "fp16" and at.rounded in ("mxfp4", "nvfp4"), "fp16"),
        "torchao takes numbers of bf16 or fp32 to 4-bit floats",
        "precision=bf16",
    ),
    _not_in_fp8(TILES, "tiles are multiplied in 16 bits", "memory.tiles=1"),
    _not_in_fp8(QUANTISED, "a base that is quantised is multiplied by kernels of its own", "adapter.quantize=none"),
    _not_in_fp8(NO_LORA, "it is computed with weights and inputs as they are", "adapter.kind=lora"),
    _not_in_fp8(ROUNDED, "what is rounded as a quantised model has it is multiplied in 16 bits", "quantize_aware=none"),
    _not_of_scores(TILES, "does not come in tiles"),
    Rule(
        ("memory.tiles", "memory.zero"),
        lambda at: at.tiled and at.zero in (0, 1, 2) and at.parameter_tier not in ("host", "disk"),
        "memory.tiles is {at.tiles}, and with memory.zero {at.zero} every worker keeps all parameters",
        "memory.zero of 3, where they are gathered",
        "set memory.zero to 3, or memory.tiles=1",
    ),
)
"""What memory holds, and how."""
OF_SCHEDULES: tuple[Rule, ...] = (
    _not_in_fp8(ZERO_BUBBLE, "gradients of weights come with the rest of the backward pass", "parallel.schedule=1f1b"),
    _one_of(
        ZERO_BUBBLE,
        TILED_ROWS,
        ": gradients of weights come later, from what a tile has by then forgotten",
        "set parallel.schedule to 1f1b, or leave memory.sequence_tiles out",
    ),
    _not_rounded(
        ZERO_BUBBLE, "gradients of rounded weights come with the rest of the backward pass", "parallel.schedule=1f1b"
    ),
    Rule(
        ("parallel.schedule", "launch.workers", "parallel.tensor", "precision"),
        lambda at: ZERO_BUBBLE.is_so(at) and bool(_shared(at)),
        lambda at: f"parallel.schedule is zero_bubble, and {' and '.join(_shared(at))}",
        "{at.pipeline} workers, which hold the weights of their stages as they are computed with: their "
        "gradients come later than those of a shard",
        "set parallel.schedule to 1f1b",
    ),
    _one_of(
        ZERO_BUBBLE,
        COMPILED,
        ": what is compiled has its backward pass in one piece",
        "set parallel.schedule to 1f1b, or compile to off",
    ),
)
"""What a pipeline's schedule cannot do."""
OF_AXES = (*IN_FRONT, *OF_SCHEDULES)
"""Broken or not by the sizes of axes, whatever memory holds."""
RULES = (*IN_FRONT, *WITHIN, *OF_SCHEDULES)
"""In the order in which they are reported."""
