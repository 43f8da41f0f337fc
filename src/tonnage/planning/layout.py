"""How a step is cut up: what the planner chooses, and the sizes it has to cope with."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from tonnage.config.rules import TIER_KEYS
from tonnage.planning.schedule import Schedule, passes_held

Recompute = Literal["none", "selective", "full"]
Tier = Literal["device", "host", "disk"]
Arrangement = Literal["packed", "padded"]
"""Documents of a forward in one row, one after another, or each in a row of its own, padded at the right."""
PACKED = "tonnage_packed"
"""Name of the attention that keeps documents of a row apart (``model.attention``)."""
MOST_AHEAD = 2
"""Blocks that are gathered on GPUs while one runs, where there is room."""
COMPUTE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True)
class Layout:
    """How a step is cut up: what the planner chooses, and the sizes it has to cope with."""

    workers: int
    replicate: int
    """Groups of workers that each hold all states once."""
    zero: int
    recompute: Recompute
    precision: Literal["bf16", "fp16", "fp32"]
    """Type of weights and activations in the forward and backward pass."""
    moments: Literal["fp32", "bf16", "int8"]
    optimizer_tier: Tier
    gradient_tier: Tier
    parameter_tier: Tier
    micro_batch: int
    """Packs per forward."""
    micro_batches: int
    """Forward passes of a worker in a step."""
    row_tokens: int
    """In one forward at most."""
    row_supervised: int
    """Supervised tokens in one forward at most."""
    row_image_tokens: int = 0
    """Tokens that stand for images at which the model looks, in one forward at most; the next are the mean."""
    mean_image_tokens: float = 0.0
    optimizer: Literal["adamw", "muon"] = "adamw"
    device: Literal["cpu", "cuda"] = "cpu"
    returns_memory: bool = True
    """On a CPU: whether large tensors that are freed go back to the system. That takes time; otherwise the heap keeps
    places for them (``plan.Choice.heap_bytes``)."""
    saves_beside: bool = False
    """Whether checkpoints are saved while training goes on, from a copy in host memory."""
    tensor: int = 1
    """Workers that compute every block together."""
    context: int = 1
    """Workers that divide the tokens of each row: what is told of rows is told of one's part."""
    pipeline: int = 1
    """Workers that have successive blocks."""
    schedule: Schedule = "1f1b"
    stages: tuple[int, ...] = ()
    """Blocks of each stage of a pipeline, first to last; empty without one. Workers have them in turn."""
    activation_tier: Literal["device", "host"] = "device"
    """Where the inputs of blocks rest that are recomputed whole."""
    update_tier: Literal["device", "host"] = "device"
    """Where a GPU's parameters are updated: there, or by the processor, in whose memory they rest then."""
    optimizer_resident: int = 0
    """Bytes of a worker's optimizer state that stay on its device where the rest of it is elsewhere."""
    mean_row_tokens: float = 0.0
    """In one forward on average."""
    share_prefixes: bool = False
    """Whether what documents of a row begin with alike is computed once."""
    spared_tokens: float = 0.0
    """The part of the documents' tokens that are not computed for it."""
    arrangement: Arrangement = "packed"
    attention: str = PACKED
    """Name of the attention function in transformers' registry."""
    padding: float = 0.0
    """The part of the computed tokens that is padding."""
    compiled: bool = False
    """Whether blocks are compiled on a GPU, where that works (``compile``)."""
    kernels_off: tuple[str, ...] = ()
    """Names of the kernels that are switched off: what they do is computed by torch alone (``kernels.switches``)."""
    recomputed: tuple[int, int] | None = None
    """With ``recompute`` full: how many blocks of how many are recomputed, the first ones (``parallel.recompute``). The
    others keep everything. None is all of them."""

    tiles: int = 1
    """In how many parts the largest weight comes, forward and backward (``parallel.tiled``); 1 is whole, as all are."""
    sequence_tiles: int = 1
    """In how many tiles of tokens MLPs of blocks go through the fullest row (``parallel.sequence_tiles``); 1 is whole.
    Shorter rows have fewer of as many tokens."""
    blocks_ahead: int = 1
    """Blocks that are gathered while one runs (``parallel.gather_ahead``); 1 is FSDP2's own order."""

    def kinds_of(self, blocks: int) -> list[tuple[Recompute, int]]:
        """How the first ones of so many blocks recompute and how many they are, and the same of those after them."""
        first = self.recomputed[0] if self.recomputed else blocks
        kinds: list[tuple[Recompute, int]] = [(self.recompute, first), ("none", blocks - first)]
        return [(kind, number) for kind, number in kinds if number]

    def passes_under_way(self, worker: int = 0) -> int:
        """Micro-batches that have gone forward and not backward through a stage of a pipeline's worker, at most; the
        first worker has most of them. Without a pipeline it is one."""
        if not self.stages:
            return 1
        return passes_held(self.schedule, worker, self.pipeline, self.stages_per_worker, self.micro_batches)

    @property
    def recomputed_part(self) -> float:
        """The part of the blocks whose forward pass runs twice, products and all: none of those that are recomputed
        selectively."""
        if self.recompute != "full":
            return 0.0
        return self.recomputed[0] / self.recomputed[1] if self.recomputed else 1.0

    @cached_property
    def data_workers(self) -> int:
        """Workers, or groups of them, that have tokens of their own, and may share states."""
        return self.workers // (self.tensor * self.pipeline)

    @property
    def stages_per_worker(self) -> int:
        """Stages of a pipeline that each of its workers has; 1 without one."""
        return max(1, len(self.stages) // self.pipeline)

    @cached_property
    def shards(self) -> int:
        """Workers that share one copy of the states (of a stage's, of the parts that the tensor axis leaves)."""
        return self.data_workers // self.replicate

    def uses_on_cpu(self, kernel: str) -> bool:
        """Whether a kernel computes in its loops for CPUs. What a GPU has of it costs what its plain twin does."""
        return self.device == "cpu" and kernel not in self.kernels_off

    @property
    def width(self) -> int:
        """Bytes of a number in the forward pass."""
        return COMPUTE_BYTES[self.precision]

    @cached_property
    def sharded(self) -> bool:
        """Whether parameters are gathered from fp32 shards (alone with its packs a worker holds them as they are)."""
        return self.data_workers > 1

    @property
    def updates_by_loops(self) -> bool:
        """Whether the loops of a CPU update parameters, which do not know fp16."""
        by_cpu = self.device == "cpu" or self.update_tier == "host"
        return by_cpu and "adamw" not in self.kernels_off and (self.sharded or self.precision != "fp16")

    @property
    def tiers_on_disk(self) -> list[str]:
        """The keys of what rests on disk."""
        return [f"memory.{key}" for key in TIER_KEYS if getattr(self, key) == "disk"]

    @property
    def uses_host(self) -> bool:
        """Whether anything rests in the host's memory, or is updated there."""
        return any(getattr(self, key) == "host" for key in (*TIER_KEYS, "activation_tier", "update_tier"))

    @property
    def gathers_frozen(self) -> bool:
        """Whether parameters that are not trained are divided, and gathered; else every worker has them whole."""
        return self.sharded and self.zero == 3 and self.shards > 1

    @property
    def may_gather_ahead(self) -> bool:
        """Whether blocks may be gathered earlier than FSDP2 does by itself: where several GPUs share them, and nothing
        of them rests elsewhere, comes in tiles or is updated while the next step begins."""
        tiers = {self.parameter_tier, self.optimizer_tier, self.update_tier}
        return self.device != "cpu" and self.shards > 1 and tiers == {"device"} and self.tiles == 1

    @property
    def gathers(self) -> bool:
        """Whether parameters are computed with in other memory than that of their shard."""
        return self.shards > 1 or self.precision != "fp32"


PLAIN = Layout(
    workers=1,
    replicate=1,
    zero=3,
    recompute="none",
    precision="fp32",
    moments="fp32",
    optimizer_tier="device",
    gradient_tier="device",
    parameter_tier="device",
    micro_batch=1,
    micro_batches=1,
    row_tokens=0,
    row_supervised=0,
)
"""All that a worker has rests on its device, and nothing is computed twice."""
