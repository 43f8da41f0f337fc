"""What a worker holds where large weights come in tiles (``parallel.tiled``): that of the rest of the model, and beside
it what tiles take.

The largest weight comes in ``Layout.tiles``; embedding, head, linear layers and experts in as many as it takes for no
tile to be larger than one of those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tonnage.offload.residency import GRADIENTS, TILES
from tonnage.planning.layout import Layout
from tonnage.planning.profile import HEAD_CHUNK, HEAD_PIECE, BlockCost, Envelope, Line, Matrices, ModelProfile


def tiles_of(numel: int, largest: int, number: int) -> int:
    """In how many tiles a weight comes where the ``largest`` comes in a ``number``: no tile is larger than its own."""
    return -(-numel // -(-largest // number))


def vocabulary_in_tiles(layout: Layout, model: ModelProfile) -> int:
    """Parameters of embedding and head, if they come in tiles."""
    return model.head_parameters + model.embedding_parameters if layout.tiles > 1 else 0


def blocks_in_tiles(layout: Layout, model: ModelProfile) -> int:
    """Parameters of all blocks that come in tiles."""
    return sum(one.number * one.size for one in _tiled(layout, model, model.large_weights))


def block_in_tiles(layout: Layout, model: ModelProfile) -> int:
    """Parameters of the largest block that come in tiles."""
    return sum(one.number * one.size for one in _tiled(layout, model, model.large_weights_of_block))


def vocabulary_tile(layout: Layout, model: ModelProfile) -> int:
    """Parameters of a tile of embedding or head, gathered."""
    return _tile(layout, model, model.vocab_size, model.hidden_size)


def block_tile(layout: Layout, model: ModelProfile) -> int:
    """Parameters of the largest tile of a block, gathered; 0 if there is none."""
    tiled = _tiled(layout, model, model.large_weights_of_block)
    return max((_tile(layout, model, one.rows, one.columns) for one in tiled), default=0)


def largest_tile(layout: Layout, model: ModelProfile) -> int:
    """Parameters of the largest tile, gathered."""
    return max(vocabulary_tile(layout, model), block_tile(layout, model)) if layout.tiles > 1 else 0


def gathered_bytes(layout: Layout, tile: int) -> float:
    """Bytes of a tile as it is computed with, where that is other memory than the one in which it rests."""
    return layout.width * tile if layout.sharded and layout.gathers else 0.0


def without_tiles(layout: Layout, model: ModelProfile) -> ModelProfile:
    """The model that is left if what comes in tiles is not looked at, but for what head and loss cost."""
    assert model.outside is not None
    vocabulary, in_block = vocabulary_in_tiles(layout, model), block_in_tiles(layout, model)
    logits = _logits(layout, model)
    small, large = Line(0.0, logits / HEAD_CHUNK), Line(logits, 0.0)
    # Between the passes there are the hidden states that the loss picked: with one chunk they are counted already.
    picked = Line(0.0, float(layout.width * model.hidden_size))
    small_head = replace(model.outside.small_head, peak=small, evaluation_peak=small, saved=Line(0.0, 0.0))
    large_head = replace(model.outside.large_head, peak=large, evaluation_peak=large, saved=picked)
    blocks = model.blocks
    if in_block:
        beside = float(layout.width * (model.block_parameters - in_block))
        blocks = {kind: _leaving_at_once(cost, beside) for kind, cost in blocks.items()}
    return replace(
        model,
        num_parameters=model.num_parameters - vocabulary - blocks_in_tiles(layout, model),
        outside_parameters=model.outside_parameters - vocabulary,
        block_parameters=model.block_parameters - in_block,
        embedding_parameters=0,
        vocab_size=0,
        large_weights=(),
        large_weights_of_block=(),
        blocks=blocks,
        outside=replace(model.outside, small_head=small_head, large_head=large_head, chunk=HEAD_CHUNK),
    )


def beside_tiles(layout: Layout, model: ModelProfile, name: str, parts: Mapping[str, float]) -> dict[str, float]:
    """What is held at a moment of ``without_tiles``, and for tiles."""
    in_vocabulary, in_block = vocabulary_tile(layout, model), block_tile(layout, model)
    head, several = model.head_parameters, layout.micro_batches > 1
    number, of_blocks = _gradient_bytes(layout), blocks_in_tiles(layout, model)
    complete = number * (vocabulary_in_tiles(layout, model) + of_blocks)  # of gradients, when all have come
    added: dict[str, float] = {"gradients": complete if several else 0.0}
    match name:
        case "loss":
            added["gathered"] = gathered_bytes(layout, in_vocabulary)
        case "evaluation":
            added["gathered"] = gathered_bytes(layout, max(in_vocabulary, in_block))
            added["workspace"] = layout.row_tokens * _widest(layout, model)[0]
        case "forward of the last block":
            added["gathered"] = gathered_bytes(layout, in_block)
            added["workspace"] = layout.row_tokens * _widest(layout, model)[0]
        case "gradient of the head":
            rows = min(layout.row_supervised, HEAD_CHUNK)
            while_multiplied = _logits(layout, model) * rows / HEAD_CHUNK + layout.width * HEAD_PIECE
            added["gathered"] = gathered_bytes(layout, in_vocabulary)
            added["loss"] = 4.0 * model.hidden_size * layout.row_supervised
            added["workspace"] = max(while_multiplied + 4.0 * in_vocabulary, _leaving(layout, in_vocabulary))
            added["gradients"] = max(added["gradients"], number * head)
        case "backward of the embedding" | "reduction outside the blocks":
            added["workspace"] = _leaving(layout, in_vocabulary)
            added["gradients"] = complete
        case "update":
            tile = largest_tile(layout, model) / layout.shards
            added["gradients"] = complete
            if layout.update_tier == "host":  # where none of that is on the device
                tile = 0
            if layout.gradient_tier != "device":
                added["gradients"] = TILES.slots * (4 if layout.sharded or several else layout.width) * tile
            if layout.parameter_tier == "disk":  # which is changed in a copy
                added["workspace"] = (4 if layout.sharded else layout.width) * tile
        case _ if name.startswith("backward of the") and name.endswith("block"):
            done = of_blocks if name == "backward of the first block" else of_blocks / max(1, model.num_blocks)
            added["gathered"] = gathered_bytes(layout, in_block)
            if in_block:  # in place of a whole gradient, which is among what the block was measured to hold
                in_tiles = _leaving(layout, in_block) + layout.row_tokens * sum(_widest(layout, model))
                added["workspace"] = max(0.0, in_tiles - layout.width * _smallest(layout, model))
            added["gradients"] = max(added["gradients"], number * (head + done))
        case _ if name.startswith("backward"):
            added["gradients"] = max(added["gradients"], number * head)
    return {key: parts.get(key, 0.0) + added.get(key, 0.0) for key in {**parts, **added}}


def _tiled(layout: Layout, model: ModelProfile, weights: Sequence[Matrices]) -> list[Matrices]:
    """Those that come in more than one tile."""
    largest = _largest(model)
    return [one for one in weights if layout.tiles > 1 and tiles_of(one.size, largest, layout.tiles) > 1]


def _largest(model: ModelProfile) -> int:
    return max(model.head_parameters, *(one.size for one in model.large_weights), 1)


def _tile(layout: Layout, model: ModelProfile, rows: int, columns: int) -> int:
    each = -(-rows // layout.shards)
    return -(-each // max(1, tiles_of(rows * columns, _largest(model), layout.tiles))) * layout.shards * columns


def _logits(layout: Layout, model: ModelProfile) -> float:
    """Bytes of those of a chunk in a tile, as they are multiplied, and widened."""
    tokens = vocabulary_tile(layout, model) / model.hidden_size
    return HEAD_CHUNK * tokens * (4 if layout.width == 4 else 4 + layout.width)


def _leaving_at_once(cost: BlockCost, beside: float) -> BlockCost:
    """What a block costs whose gradients leave tile by tile, but for some bytes that stay ``beside``."""
    lines = tuple(Line(line.fixed + beside, line.per_token) for line in cost.backward_bare_peak.lines)
    return replace(cost, backward_peak=Envelope(lines))


def _widest(layout: Layout, model: ModelProfile) -> tuple[float, float]:
    """Bytes a token of what the widest tile of a linear layer gives, and of the sum that is the gradient of inputs."""
    linears = [one for one in _tiled(layout, model, model.large_weights_of_block) if not one.stacked]
    outputs = max((_tile(layout, model, one.rows, one.columns) / one.columns for one in linears), default=0.0)
    return layout.width * outputs, 4.0 * max((one.columns for one in linears), default=0)


def _smallest(layout: Layout, model: ModelProfile) -> int:
    """Parameters of the smallest weight of a block that comes in tiles."""
    return min((one.size for one in _tiled(layout, model, model.large_weights_of_block)), default=0)


def _leaving(layout: Layout, tile: int) -> float:
    """Bytes of a tile's gradient, and of the part of it that is handed on."""
    if layout.sharded:
        return (4 + 4 / layout.shards) * tile
    if layout.update_tier == "host" and layout.gradient_tier == "disk":  # there are some more on their way
        sent = GRADIENTS["disk"]
        return 4 * (1 + (sent.slots if 4 * tile <= sent.unit_bytes else 2)) * tile
    several = layout.micro_batches > 1
    if layout.update_tier == "host" and several:  # what earlier ones came to comes back
        return 8 * tile
    rounded = layout.gradient_tier != "device" and not several and layout.width < 4
    return (4 + (layout.width if rounded else 0)) * tile


def _gradient_bytes(layout: Layout) -> float:
    """Bytes of a number of a gradient that stays beside the parameters, on one worker."""
    if layout.gradient_tier != "device":
        return 0.0
    return 4 / layout.shards if layout.sharded else 4 if layout.micro_batches > 1 else layout.width
