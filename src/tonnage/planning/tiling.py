"""What a worker holds where embedding and head come in tiles (``parallel.tiled``): that of the rest of the model, and
beside it what tiles take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tonnage.planning.layout import Layout
from tonnage.planning.profile import HEAD_CHUNK, HEAD_PIECE, Line, ModelProfile

AHEAD = 2
"""Tiles that are in memory where they come from disk: the one that is computed with, and the next."""


def tiled_parameters(layout: Layout, model: ModelProfile) -> int:
    """Parameters of what comes in tiles."""
    return model.head_parameters + model.embedding_parameters if layout.tiles > 1 else 0


def tile_parameters(layout: Layout, model: ModelProfile) -> int:
    """Parameters of a tile, gathered."""
    each = -(-model.vocab_size // layout.shards)
    return -(-each // layout.tiles) * layout.shards * model.hidden_size


def without_tiles(layout: Layout, model: ModelProfile) -> ModelProfile:
    """The model that is left if what comes in tiles is not looked at, but for what head and loss cost."""
    assert model.outside is not None
    in_tiles, width = tiled_parameters(layout, model), layout.width
    logits = _logits(layout, model)
    small, large = Line(0.0, logits / HEAD_CHUNK), Line(logits, 0.0)
    # Between the passes there are the hidden states that the loss picked: with one chunk they are counted already.
    kept = Line(0.0, float(width * model.hidden_size))
    small_head = replace(model.outside.small_head, peak=small, evaluation_peak=small, saved=Line(0.0, 0.0))
    large_head = replace(model.outside.large_head, peak=large, evaluation_peak=large, saved=kept)
    return replace(
        model,
        num_parameters=model.num_parameters - in_tiles,
        outside_parameters=model.outside_parameters - in_tiles,
        embedding_parameters=0,
        vocab_size=0,
        outside=replace(model.outside, small_head=small_head, large_head=large_head, chunk=HEAD_CHUNK),
    )


def beside_tiles(layout: Layout, model: ModelProfile, name: str, parts: Mapping[str, float]) -> dict[str, float]:
    """What is held at a moment of ``without_tiles``, and for tiles."""
    tile, supervised, head = tile_parameters(layout, model), layout.row_supervised, model.head_parameters
    number = _gradient_bytes(layout)
    in_all, several = number * tiled_parameters(layout, model), layout.micro_batches > 1
    there = number * head  # of gradients, from the head's on
    added: dict[str, float] = {"gradients": in_all if several else 0.0}
    match name:
        case "loss" | "evaluation":
            added["gathered"] = gathered_bytes(layout, model)
        case "gradient of the head":
            rows = min(supervised, HEAD_CHUNK)
            while_multiplied = _logits(layout, model) * rows / HEAD_CHUNK + layout.width * HEAD_PIECE
            added["gathered"] = gathered_bytes(layout, model)
            added["loss"] = 4.0 * model.hidden_size * supervised
            added["workspace"] = max(while_multiplied + 4.0 * tile, _leaving(layout, tile))
            added["gradients"] = max(added["gradients"], there)
        case "backward of the embedding" | "reduction outside the blocks":
            added["workspace"] = _leaving(layout, tile)
            added["gradients"] = max(added["gradients"], in_all)
        case "update":
            added["gradients"] = in_all
            if layout.gradient_tier != "device":
                added["gradients"] = AHEAD * (4 if layout.sharded or several else layout.width) * tile / layout.shards
            if layout.parameter_tier == "disk":  # which is changed in a copy
                added["workspace"] = (4 if layout.sharded else layout.width) * tile / layout.shards
        case _ if name.startswith("backward"):
            added["gradients"] = max(added["gradients"], there)
    return {key: parts.get(key, 0.0) + added.get(key, 0.0) for key in {**parts, **added}}


def gathered_bytes(layout: Layout, model: ModelProfile) -> float:
    """Bytes of a tile as it is computed with, where that is other memory than the one in which it rests."""
    return layout.width * tile_parameters(layout, model) if layout.sharded and layout.gathers else 0.0


def _logits(layout: Layout, model: ModelProfile) -> float:
    """Bytes of those of a chunk in a tile, as they are multiplied, and widened."""
    tokens = tile_parameters(layout, model) / model.hidden_size
    return HEAD_CHUNK * tokens * (4 if layout.width == 4 else 4 + layout.width)


def _leaving(layout: Layout, tile: int) -> float:
    """Bytes of a tile's gradient, and of the part of it that is handed on."""
    if layout.sharded:
        return (4 + 4 / layout.shards) * tile
    rounded = layout.gradient_tier != "device" and layout.micro_batches == 1 and layout.width < 4
    return (4 + (layout.width if rounded else 0)) * tile


def _gradient_bytes(layout: Layout) -> float:
    """Bytes of a number of a gradient that stays beside the parameters, on one worker."""
    if layout.gradient_tier != "device":
        return 0.0
    return 4 / layout.shards if layout.sharded else 4 if layout.micro_batches > 1 else layout.width
