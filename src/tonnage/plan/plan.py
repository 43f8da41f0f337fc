"""The Plan: the frozen decision that workers carry out, stored in the run directory."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from tonnage.rundir import read_json, write_json


@dataclass(frozen=True)
class ModelProfile:
    """A model weighed without its weights."""

    model_type: str
    num_parameters: int
    embedding_parameters: int
    """Parameters of the token embedding that are not also the head's: looked up, not multiplied."""
    num_blocks: int
    hidden_size: int
    vocab_size: int


@dataclass(frozen=True)
class DataProfile:
    """The prepared data in numbers, and where it lies."""

    train_path: str
    validation_path: str | None
    num_packs: int
    num_tokens: int
    supervised_tokens: int
    max_length: int

    @property
    def key(self) -> str:
        """Content address of the prepared data: the same rows, prepared in the same way, have the same one."""
        return Path(self.train_path).parent.name


@dataclass(frozen=True)
class Plan:
    """What will be done. Bytes and tokens are for one worker where the name says so, else for the whole run."""

    workers: int
    threads_per_worker: int
    replicate: int
    """Groups of workers that each hold all states once."""
    zero: int
    recompute: Literal["none", "selective", "full"]
    precision: str
    moments: Literal["fp32", "bf16", "int8"]
    optimizer_tier: Literal["device", "disk"]
    gradient_tier: Literal["device", "disk"]
    parameter_tier: Literal["device", "disk"]
    packs_per_step: int
    micro_batch: int
    """Packs per forward."""
    micro_batches_per_step: int
    """Forward passes of one worker in a step."""
    num_packs: int
    """Packs trained in the whole run."""
    num_steps: int
    warmup_steps: int
    tokens_per_step: int
    """Average over the run."""
    weight_bytes_per_worker: int
    gradient_bytes_per_worker: int
    optimizer_bytes_per_worker: int
    """Where ``optimizer_tier`` says; on disk, as many are read and written at every step."""
    flops_per_step: float
    """Of the whole run's products, forward and backward, attention left out."""
    model: ModelProfile
    data: DataProfile

    def tiers_on_disk(self) -> list[str]:
        """The keys of what rests on disk."""
        keys = ("optimizer_tier", "gradient_tier", "parameter_tier")
        return [f"memory.{key}" for key in keys if getattr(self, key) == "disk"]

    def facts(self) -> dict[str, object]:
        """What a checkpoint says of the run that wrote it: its data, which must be the same later, and its layout."""
        data = {name: getattr(self.data, name) for name in ("key", "num_packs", "num_tokens", "supervised_tokens")}
        layout = {name: getattr(self, name) for name in ("workers", "replicate", "zero", "micro_batch", "precision")}
        return {"data": data, "layout": layout, "packs_per_step": self.packs_per_step, "num_steps": self.num_steps}

    def write(self, path: Path) -> None:
        """Store the plan."""
        write_json(path, asdict(self))

    @staticmethod
    def read(path: Path) -> Plan:
        """A stored plan."""
        return Plan.parse(read_json(path))

    @staticmethod
    def parse(fields: dict[str, object]) -> Plan:
        """A plan from its JSON form."""
        model, data = fields.pop("model"), fields.pop("data")
        assert isinstance(model, dict)
        assert isinstance(data, dict)
        return Plan(**fields, model=ModelProfile(**model), data=DataProfile(**data))  # type: ignore[arg-type]

    def to_json(self) -> str:
        """The plan as JSON text."""
        return json.dumps(asdict(self), indent=2)
