"""Where the log-probabilities of answers under the reference lie: an address made of all that decides them."""

from __future__ import annotations

import math
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tonnage.config import Config
from tonnage.data import Progress
from tonnage.data import cache as store
from tonnage.decide.models import ModelFound
from tonnage.decide.other_model import OtherModel, digests_of
from tonnage.planning.plan import Plan


def reference_of(config: Config, model: ModelFound, other: OtherModel | None, plan: Plan, progress: Progress) -> Path:
    """The cache's entry for a run, which need not be there: of the model as it is, or of the ``other`` one."""
    from tonnage.model.files import CONFIG

    packs = Path(plan.data.train_path).parent
    cache, files = packs.parent.parent, model.files if other is None else other.files
    is_random = config.init == "random" and other is None
    adapter = sorted(files.adapter.directory.glob("adapter_*")) if files.adapter is not None else []
    weights = [*sorted(files.weights), *adapter] if not is_random else []
    weights.append(files.directory / CONFIG)  # what is made of it in memory changes as it is weighed
    own = None if other is not None or isinstance(config.adapter, str) else config.adapter
    parts: dict[str, Any] = {
        "weights": digests_of(cache, weights, "the reference's", progress),
        "seed": config.seed if is_random else None,
        "left": [config.allow_missing, config.allow_unexpected],
        "packs": packs.name,
        "visited": [plan.num_packs, config.seed] if plan.num_packs < plan.data.num_packs else [],
        "precision": config.precision,
        "quantize": None if own is None else own.quantize,
        "versions": [version(name) for name in ("torch", "transformers")],
    } | ({"begins": own.model_dump()} if own is not None and own.init != "zero" else {})
    if config.rope is not None and other is None:
        parts["rope"] = config.rope.parameters
    return cache / "references" / store.key(parts)


def with_reference(plan: Plan, entry: Path | None = None, name: str | None = None) -> Plan:
    """The plan with what becomes of the reference, and where its log-probabilities lie, where that is known. ``name``:
    of another model."""
    from tonnage.training.reference import SCORES

    steps = math.ceil(min(plan.num_packs, plan.data.num_packs) / plan.packs_per_step)
    seconds = steps * plan.choice.seconds.total / (3 + plan.layout.recomputed_part)  # a forward pass of each
    has = f"computed once, before training, in about {max(1, round(seconds)):,} s"
    if name is not None:
        has = "computed once, before training, by the run's workers, who share its weights until then"
    if entry is not None and (entry / SCORES).exists():
        has = "the cache has them from an earlier run"
    why = f"log-probabilities of the answers under {name or 'the model as it was'} ({has}); no second model is held"
    data = replace(plan.data, reference_path=None if entry is None else str(entry))
    return replace(plan, data=data, reasons=plan.reasons | {"objective.reference": why})
