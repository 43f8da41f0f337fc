"""What each worker of a pipeline has of a model, as a profile of its own."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from tonnage.planning.profile import HeadCost, Line, ModelProfile

_NOTHING = Line(0.0, 0.0)
_NO_HEAD = HeadCost(_NOTHING, _NOTHING, _NOTHING, _NOTHING, _NOTHING, _NOTHING)


@lru_cache(maxsize=1024)
def workers_parts(model: ModelProfile, stages: tuple[int, ...], workers: int) -> tuple[ModelProfile, ...]:
    """The profile of each worker's part; of the whole model, if there are no ``stages``.

    Blocks are alike. The first stage has the embedding, the last the final norm and the head, which with tied
    embeddings is the embedding once more. Workers whose parts are alike share one profile.
    """
    if not stages:
        return (model,)
    blocks, frozen = model.num_parameters - model.outside_parameters, model.frozen
    parts: dict[tuple[int, bool, bool], ModelProfile] = {}
    kinds = [(sum(stages[worker::workers]), worker == 0, worker == workers - 1) for worker in range(workers)]
    for number, first, last in dict.fromkeys(kinds):
        outside, still = model.head_parameters + model.embedding_additions if first else 0, 0
        if last:
            outside = model.outside_parameters - model.embedding_parameters - model.embedding_additions
        if first and frozen.embedding:
            still = model.head_parameters
        elif last:
            still = frozen.outside - (model.embedding_parameters if frozen.embedding else 0)
        still_bytes = round(frozen.outside_bytes * still / max(1, frozen.outside))
        share = number / model.num_blocks
        cost = model.outside
        if cost is not None and not last:
            cost = replace(cost, final=_NOTHING, small_head=_NO_HEAD, large_head=_NO_HEAD)
        parts[number, first, last] = replace(
            model,
            num_parameters=round(blocks * share) + outside,
            frozen=replace(
                frozen,
                parameters=round((frozen.parameters - frozen.outside) * share) + still,
                outside=still,
                num_bytes=round((frozen.num_bytes - frozen.outside_bytes) * share) + still_bytes,
                outside_bytes=still_bytes,
            ),
            embedding_parameters=model.embedding_parameters if first else 0,
            embedding_additions=model.embedding_additions if first else 0,
            outside_parameters=outside,
            num_blocks=number,
            attending_blocks=None if model.attending_blocks is None else round(model.attending_blocks * share),
            vocab_size=model.vocab_size if first or last else 0,
            outside=cost,
            has_embedding=first,
            has_head=last,
        )
    return tuple(parts[kind] for kind in kinds)


@lru_cache(maxsize=1024)
def different_parts(model: ModelProfile, stages: tuple[int, ...], workers: int) -> tuple[ModelProfile, ...]:
    """As ``workers_parts``, each profile once."""
    return tuple({id(part): part for part in workers_parts(model, stages, workers)}.values())
