"""Weigh a model without its weights: what it holds, and what a row of tokens costs it.

Parameters are counted on the meta device. For the rest a backbone of three blocks runs forward and backward at two row
lengths, on fake tensors (as on CPU) or meta tensors (as on CUDA): the very code that trains, down to recompute and the
attention of packs, but no number is computed. A ledger sees every tensor come and go, so it knows what a block keeps
for its backward pass and what it needs on top while it runs, and it counts what is multiplied and what is read and
written. All of this grows linearly with the tokens of a row (documents of a fixed length side by side), so two lengths
tell all others. That holds for the bytes at each moment, but not for their peak: in longer rows it may come at another
moment. The head and its loss are run by themselves, as they cost by supervised tokens.

What it cannot see: workspaces that kernels allocate by themselves, and what the allocator loses.
"""

from __future__ import annotations

import copy
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from tonnage.errors import TonnageError, user_error
from tonnage.host.cachedir import remembered
from tonnage.kernels.fake_quantized import check_torchao
from tonnage.kernels.moments import keeps_blocks, row_length
from tonnage.kernels.muon import iteration_dtype, orthogonal_flops
from tonnage.kernels.switches import switched_off
from tonnage.kernels.widening import processor_is_slow
from tonnage.model.adapters import (
    EVERYTHING,
    AdapterSpec,
    Trains,
    attach,
    count_adapted,
    embedding_at,
    is_addition,
    prepare,
)
from tonnage.model.anatomy import Anatomy, dissect, mlps_of
from tonnage.model.attention import PackedRow
from tonnage.model.build import build_on_meta
from tonnage.model.fake_quantized import fake_quantize
from tonnage.model.fp8 import compute_in_fp8
from tonnage.model.groups import matrices_of
from tonnage.model.packed_layers import check_part, pack_layers
from tonnage.model.tensor_plan import tensor_plan
from tonnage.model.tiny import SHARING_LAYERS, count_layers, is_by_layer, overrides_of
from tonnage.parallel.parallelize import Precision
from tonnage.parallel.recompute import recompute_blocks
from tonnage.parallel.sequence_tiles import tile_sequence
from tonnage.parallel.tensor import divide_in_shape
from tonnage.planning.layout import PACKED, Arrangement, Recompute
from tonnage.planning.profile import (
    HEAD_CHUNK,
    NOTHING_FROZEN,
    BlockCost,
    Envelope,
    Frozen,
    HeadCost,
    Heads,
    Line,
    Matrices,
    ModelProfile,
    OutsideCost,
    Rows,
)
from tonnage.training.head import Head
from tonnage.training.ledger import Ledger, Mark, pretending
from tonnage.training.tiling import large_weights
from tonnage.training.vocabulary import Soft

DeviceType = Literal["cpu", "cuda"]
FORMAT = 46
"""Of profiles in the cache, and of how they are measured: a change of either is a new number."""
ALL: tuple[Recompute, ...] = get_args(Recompute)
NEVER = 1 << 20
NO_HEAD = HeadCost(Line(0, 0), Line(0, 0), Line(0, 0), Line(0, 0), Line(0, 0), Line(0, 0))
BLOCKS = 3
"""Blocks that are run. The costs are those of the last: the inputs of the first ones are still held by their caller."""


@dataclass(frozen=True)
class Conditions:
    """How a run uses a model: what it weighs depends on that."""

    precision: str = "bf16"
    """Of the forward and backward pass."""
    document_tokens: int = 0
    """Tokens of each document in its rows; with 0, parameters are counted and nothing is run."""
    device_type: DeviceType = "cpu"
    tensor: int = 1
    """Ranks that divide every block; the profile is of what one of them has and computes."""
    sequence_tiles: int = 1
    """Tiles of tokens in which MLPs of blocks go through a row."""
    arrangement: Arrangement = "packed"
    attention: str = PACKED
    """As ``isolation`` has them."""
    trains: Trains = EVERYTHING
    teacher: tuple[int, float, float] | None = None
    """Of a teacher, if there is one: how many of its tokens are kept, the share of the targets' own loss, and the
    temperature."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the numbers that are multiplied."""
        return Precision.of(self.precision, 1).compute


NO_ROWS = Conditions()
"""Those in which parameters are counted alone."""


def weigh_once(
    config: PreTrainedConfig,
    vocab_size: int | None,
    conditions: Conditions,
    *,
    cache: Path,
    kernels_off: Sequence[str] = (),
) -> ModelProfile:
    """As ``weigh``, which takes some seconds; the profile is kept in ``profiles`` of ``cache`` for the next time.

    A model of the same shape in another directory is not weighed again. ``kernels_off`` are the kernels that the run
    will do without.
    """
    trains = conditions.trains
    if trains.adapter is not None:  # the factor of additions changes nothing here
        patterns = tuple(replace(ranked, alpha=1.0, factor=1.0) for ranked in trains.adapter.patterns)
        trains = replace(trains, adapter=replace(trains.adapter, factor=1.0, patterns=patterns))
        conditions = replace(conditions, trains=trains)
    versions = [version(name) for name in ("tonnage", "torch", "transformers")]
    if trains.aware is not None or trains.fp8 is not None:
        versions.append(check_torchao() if trains.fp8 is None else check_torchao("precision", "precision=bf16"))
    described, fields_by_name = config.to_dict(), sorted(vars(conditions).items())
    if not described.get("auto_map"):  # else its code lies where it was read from
        described.pop("_name_or_path", None)
    with switched_off(off := sorted(kernels_off)):
        processor = (processor_is_slow(conditions.dtype),) if conditions.device_type == "cpu" else ()
        inputs = [described, vocab_size, fields_by_name, processor, FORMAT, versions, off]
        place, otherwise = (cache, "profiles", ""), "models are weighed again every time"
        return remembered(place, inputs, ModelProfile, lambda: weigh(config, vocab_size, conditions), otherwise)


def weigh(
    config: PreTrainedConfig,
    vocab_size: int | None = None,
    conditions: Conditions = NO_ROWS,
    *,
    recomputes: Sequence[Recompute] = ALL,
) -> ModelProfile:
    """Weigh the model that ``config`` describes, its vocabulary grown to ``vocab_size`` if smaller.

    ``recomputes`` are those that ``blocks`` of the profile will have.

    Raises:
        UserError: the family's parts cannot be found, it cannot train on packs, or it cannot be divided.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")  # it prints what fails, which is said below
    was, log.disabled = log.disabled, True
    try:
        return _weigh(config, vocab_size, conditions, recomputes)
    except TonnageError:
        raise
    except Exception as error:  # of the model's classes, in as many ways as there are families and sizes
        message = str(error).strip().split("\n")[0][:200]
        observed = f"a model that does not run on rows as training has them ({type(error).__name__}: {message})"
        needed = "a family, and sizes in config.json, with which its own classes run"
        change = "choose another model family; or, if config.json was changed by hand, the one that came with it"
        raise user_error(observed, needed, change, f"model type {config.model_type}") from error
    finally:
        log.disabled = was


def _weigh(
    config: PreTrainedConfig, vocab_size: int | None, conditions: Conditions, recomputes: Sequence[Recompute]
) -> ModelProfile:
    trains, tensor = conditions.trains, conditions.tensor
    model = build_on_meta(config, conditions.dtype, vocab_size, conditions.attention)
    anatomy = dissect(model)
    targets = prepare(model, anatomy, trains, conditions.dtype)
    counts = count_adapted(model, anatomy, targets) if trains.adapter is not None else ()
    in_fp8 = _round(model, trains)
    embeddings = [target for target in targets if target.embeds]
    adapters = {target.path: trains.adapter for target in embeddings if trains.adapter is not None}
    backbone = _Backbone(config, conditions, _frozen_outside(model, anatomy), adapters)
    kinds = [(layer, number, copy.deepcopy(anatomy.blocks[layer])) for layer, number in _kinds(anatomy.blocks).items()]
    whole = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    token_ranks = _divide(model, anatomy, whole, conditions) if tensor > 1 else 1
    of_blocks = [sum(parameter.numel() for parameter in block.parameters()) for block in anatomy.blocks]
    matrix_share, flops_of_each = _matrices(model, anatomy, whole)
    traced = _trace(backbone, kinds, recomputes, model, anatomy) if conditions.document_tokens else _Traced()
    return ModelProfile(
        model_type=config.model_type,
        num_parameters=(num_parameters := sum(parameter.numel() for parameter in model.parameters())),
        embedding_parameters=0 if anatomy.tied else anatomy.embedding.weight.numel(),
        outside_parameters=num_parameters - sum(of_blocks),
        num_blocks=len(anatomy.blocks),
        block_parameters=max(of_blocks),
        hidden_size=anatomy.head.in_features,
        attention_size=round(fmean(number * size for number, size in traced.heads)) if traced.heads else 0,
        vocab_size=anatomy.embedding.num_embeddings if anatomy.scores else len(anatomy.head.weight),
        scores=anatomy.scores,
        blocks=traced.blocks,
        outside=traced.outside,
        shares_prefixes=bool(traced.rows) and all(row.can_share for row in traced.rows),
        arrangement=conditions.arrangement,
        chunk=traced.chunk,
        attention=conditions.attention,
        attending_blocks=len(traced.heads) if conditions.document_tokens else None,
        frozen=NOTHING_FROZEN if trains.all else _frozen(model, anatomy, trains),
        largest_matrix=max(parameter.numel() for block in anatomy.blocks for parameter in block.parameters()),
        adapted_matrices=counts,
        adapted=tuple(dict.fromkeys(target.path.rpartition(".")[2] for target in targets)),
        adapts_experts=any(target.experts for target in targets),
        embedding_additions=sum(
            parameter.numel()
            for target in embeddings
            for name, parameter in target.owner.named_parameters()
            if is_addition(name)
        ),
        rows=_rows((one, one.numel()) for block in anatomy.blocks for one in block.parameters() if one.requires_grad),
        large_weights=_large_weights(anatomy.blocks),
        large_weights_of_block=_large_weights([anatomy.blocks[of_blocks.index(max(of_blocks))]]),
        matrix_share=matrix_share,
        orthogonal_flops=flops_of_each,
        orthogonal_width=iteration_dtype(conditions.device_type).itemsize,
        keeps_blocks=_keeps_blocks(model, whole, tensor),
        in_fp8=in_fp8,
        heads=tuple(Heads(*kind) for kind in sorted(set().union(*(row.heads for row in traced.rows)))),
        token_ranks=token_ranks,
        tokenwise_blocks=sum(bool(mlps_of(block)) for block in anatomy.blocks),
    )


def _round(model: PreTrainedModel, trains: Trains) -> str:
    """Let linear layers round what they multiply, as ``trains`` says; of fp8, which do in words."""
    if trains.aware is not None:
        fake_quantize(model, dissect(model), trains.aware)
    return "" if trains.fp8 is None else str(compute_in_fp8(model, dissect(model), trains.fp8))


def _frozen_outside(model: PreTrainedModel, anatomy: Anatomy) -> frozenset[str]:
    """Names of parameters outside the blocks that are not trained."""
    inside = {id(parameter) for block in anatomy.blocks for parameter in block.parameters()}
    return frozenset(
        name
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad and id(parameter) not in inside
    )


def _divide(
    model: PreTrainedModel, anatomy: Anatomy, whole: Mapping[str, tuple[int, ...]], conditions: Conditions
) -> int:
    """Divide a model between the ranks of ``conditions.tensor``; ``whole`` are the shapes of its parameters before.
    Returns how many of them divide tokens as well.

    Raises ``UserError`` where what is packed cannot be divided.
    """
    trains = conditions.trains
    forms = dict(trains.stored)
    divide_in_shape(model, plan := tensor_plan(model, anatomy), conditions.tensor)
    if trains.packs:
        divided = {id(module.weight) for module in (*plan.columns, *plan.rows)}
        for name, parameter in model.named_parameters():
            form = trains.quantize or forms.get(name)
            if id(parameter) in divided and form is not None:
                check_part(name, whole[name], tuple(parameter.shape), form)
    return plan.token_ranks(conditions.tensor)


def _keeps_blocks(model: PreTrainedModel, whole: Mapping[str, tuple[int, ...]], tensor: int) -> bool:
    """As ``ModelProfile.keeps_blocks``; ``whole`` are the shapes of the parameters before ``tensor`` ranks divided
    them."""
    return all(
        whole[name][1:] == parameter.shape[1:] or keeps_blocks(row_length(whole[name]), tensor)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    )


def _rows(tensors: Iterable[tuple[Tensor, int]]) -> Rows:
    """How much there is of all tensors that have so many rows."""
    sizes = Counter[int]()
    for tensor, size in tensors:
        sizes[tensor.shape[0] if tensor.dim() else 1] += size
    return tuple(sorted(sizes.items()))


def _frozen(model: PreTrainedModel, anatomy: Anatomy, trains: Trains) -> Frozen:
    """What of a model, divided as it is, is not trained; of what is packed, the bytes in which it is."""
    inside = {id(parameter) for block in anatomy.blocks for parameter in block.parameters()}
    still = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    outside = [parameter for parameter in still if id(parameter) not in inside]
    largest = max(anatomy.blocks, key=lambda block: sum(parameter.numel() for parameter in block.parameters()))
    block = [parameter for parameter in largest.parameters() if not parameter.requires_grad]

    of_all, of_outside, of_block = (sum(one.numel() for one in those) for those in (still, outside, block))
    pack_layers(model, anatomy.blocks, trains.quantize)

    def num_bytes(module: nn.Module) -> int:
        return sum(one.nbytes for one in module.parameters() if not one.requires_grad)

    return Frozen(
        parameters=of_all,
        outside=of_outside,
        block=of_block,
        num_bytes=num_bytes(model),
        outside_bytes=sum(one.nbytes for one in outside),
        block_bytes=num_bytes(largest),
        head=not anatomy.head.weight.requires_grad,
        embedding=not anatomy.embedding.weight.requires_grad,
        rows=_rows((one, one.nbytes) for part in anatomy.blocks for one in part.parameters() if not one.requires_grad),
    )


def _matrices(model: PreTrainedModel, anatomy: Anatomy, whole: Mapping[str, tuple[int, ...]]) -> tuple[float, float]:
    """Which part of the blocks' trained parameters are matrices that Muon updates whole, and the products of their
    update, for each of their parameters; ``whole`` are their shapes before a tensor axis divides them."""
    names = matrices_of(model, anatomy)
    number = sum(parameter.numel() for name, parameter in model.named_parameters() if name in names)
    trained = {id(one): one.numel() for block in anatomy.blocks for one in block.parameters() if one.requires_grad}
    flops = sum(orthogonal_flops(whole[name]) for name in names)
    return number / max(1, sum(trained.values())), flops / max(1, number)


def _large_weights(blocks: Sequence[nn.Module]) -> tuple[Matrices, ...]:
    shapes = Counter(tuple(getattr(*holder).shape) for block in blocks for holder in large_weights(block))
    return tuple(
        Matrices(rows, math.prod(others), number, stacked=len(others) > 1) for (rows, *others), number in shapes.items()
    )


Runs = list[tuple[int, list[Mark]]]
"""Tokens and marks of each run, in pairs: of few tokens and, where that is not enough, of many."""
FEW, MANY = (1, 3), (9, 15)
"""Documents of the rows that are run; of many only where more documents are more operations."""
SHORT, LONGEST_CHUNK = 16, 1024
"""Tokens of the shortest document that is tried for chunks, and of the longest chunk that is looked for."""
LINEAR, ALL_BUT_CONSTANT = 1e-3, 0.4
"""By which share twice a document takes fewer products, or fewer bytes, than two where it is computed in chunks."""
SCANNED = (16, 32, 64)
"""Tokens of the documents of which blocks are run that go through one token by token, which takes long."""


@dataclass(frozen=True)
class _Backbone:
    """What a backbone is built from, but for its last blocks."""

    config: PreTrainedConfig
    conditions: Conditions
    frozen: frozenset[str]
    """Names of parameters outside the blocks that are not trained."""
    adapters: Mapping[str, AdapterSpec]
    """Of embeddings, by their path."""


@dataclass(frozen=True)
class _Traced:
    """What runs tell of a model; by default nothing, of a model that is not run."""

    blocks: dict[str, BlockCost] = field(default_factory=dict)
    outside: OutsideCost | None = None
    rows: Sequence[PackedRow] = ()
    """All that blocks were run on, where documents are packed."""
    heads: Sequence[tuple[int, int]] = ()
    """Of each block that has attention: how many of queries, and their size."""
    chunk: int = 1
    """Tokens of the largest chunk of any block."""


def _trace(
    backbone: _Backbone,
    kinds: Sequence[tuple[int, int, nn.Module]],
    recomputes: Sequence[Recompute],
    model: PreTrainedModel,
    anatomy: Anatomy,
) -> _Traced:
    """Run blocks of all ``kinds`` (the number of the first one, how many there are, and one of them), without gradients
    and with every kind of recompute, and the head. What is outside of blocks is seen in the last of these runs."""
    conditions = backbone.conditions
    by_recompute: dict[Recompute, list[tuple[BlockCost, int]]] = {kind: [] for kind in recomputes}
    rows, heads, chunk = list[PackedRow](), list[tuple[int, int]](), 1
    for layer, number, block in kinds:
        small = replace(backbone, config=_of_one_kind(backbone.config, BLOCKS, conditions.tensor, layer))
        run = partial(_run_backbone, small, block, rows)
        lengths, of_chunk = _lengths_of(run, conditions)
        evaluated = [_at_two_lengths(length, partial(run, length, kind="none", trains=False)) for length in lengths]
        for kind in recomputes:
            trained = [_at_two_lengths(length, partial(run, length, kind=kind, trains=True)) for length in lengths]
            by_length = list(map(_block_cost, trained, evaluated))
            by_recompute[kind].append((_in_documents_of(conditions.document_tokens, by_length), number))
        heads += number * [mark.heads for mark in evaluated[-1][0][1] if mark.heads is not None][-1:]
        chunk = max(chunk, of_chunk)
    blocks: dict[str, BlockCost] = {kind: _mean(costs) for kind, costs in by_recompute.items()}
    chunk_of_head, small_head, large_head = _trace_head(anatomy, conditions)
    outside = OutsideCost(
        embedded=_line(trained[-1], lambda m: m[-1].live),
        final=_line(trained[-1], lambda m: m[4].live - m[3].live + _held(m)),
        final_forward=_most(trained[-1], lambda m: m[4].heights, 3),
        final_backward=_most(trained[-1], lambda m: m[5].heights, 5),
        small_head=small_head,
        large_head=large_head,
        evaluated=_line(evaluated[-1], lambda m: m[4].live),
        chunk=chunk_of_head,
    )
    return _Traced(blocks, outside, rows, heads, chunk)


def _lengths_of(run: Callable[..., list[Mark]], conditions: Conditions) -> tuple[list[int], int]:
    """Tokens of the documents that a block is run on, and of the chunks in which it computes them."""
    parts = conditions.sequence_tiles * conditions.tensor
    tokens = -(-conditions.document_tokens // parts) * parts  # no last tile of fewer, and ranks divide them
    if conditions.arrangement == "padded" and tokens > max(SCANNED):
        if _scans(run):
            return list(SCANNED), 1
        if (chunk := _chunk_of(run)) > 1:
            return [math.ceil(tokens / chunk) * chunk], chunk
    return [tokens], 1


def _scans(run: Callable[..., list[Mark]]) -> bool:
    """Whether a block runs more operations on a longer document, as state spaces without kernels do."""
    few, more = (run(length, 1, kind="none", trains=False) for length in SCANNED[:2])
    return [len(mark.heights) for mark in few] != [len(mark.heights) for mark in more]


def _chunk_of(run: Callable[..., list[Mark]]) -> int:
    """The power of two of whose tokens a block computes a multiple in every document, as a gated delta rule or a state
    space does that goes through it in chunks; 1 where it does not.

    Products tell it, or else bytes: the state space of transformers 5.17 multiplies number by number.
    """

    @cache
    def costs(tokens: int) -> tuple[float, float]:
        mark = run(tokens, 1, kind="none", trains=False)[BLOCKS]
        return mark.flops, max(mark.heights)

    by_products = _chunk_by(lambda tokens: costs(tokens)[0], LINEAR)
    return by_products if by_products > 1 else _chunk_by(lambda tokens: costs(tokens)[1], ALL_BUT_CONSTANT)


def _chunk_by(cost: Callable[[int], float], least: float) -> int:
    """The power of two of tokens below which a document of twice the length costs less than two of them, by the share
    ``least`` or more, and from which on it does not; 1 if there is none. What a document costs once is no chunk: each
    doubling saves half as much of it as the one before."""
    tokens, few, before = SHORT, cost(SHORT), 0.0
    while tokens <= LONGEST_CHUNK:
        twice = cost(2 * tokens)
        saved = 1 - twice / (2 * few)
        if before and saved < before / 4:
            return tokens
        if saved < least:
            break
        tokens, few, before = 2 * tokens, twice, saved
    return 1


def _in_documents_of(document: int, costs: Sequence[BlockCost]) -> BlockCost:
    """What a block costs on documents of so many tokens, from what it costs on those of ``SCANNED``.

    A token costs a + b / d + c d in a document of d tokens: b is for a state that a document has once, c for gradients
    of single tokens, each of which is a document of zeros. The highest bytes are those of the longest of ``SCANNED``:
    a state for each of so few tokens is a little too much.
    """
    *_, last = costs
    if len(costs) == 1:
        return last
    few, some, many = SCANNED
    lines = {each.name: getattr(last, each.name) for each in fields(last)}
    lines = {name: line for name, line in lines.items() if isinstance(line, Line)}
    for name, line in lines.items():
        # Of a document: a d + b + c d^2, through three points.
        at = [getattr(cost, name).per_token * length for cost, length in zip(costs, SCANNED, strict=True)]
        slopes = (at[1] - at[0]) / (some - few), (at[2] - at[1]) / (many - some)
        c = (slopes[1] - slopes[0]) / (many - few)
        a = slopes[1] - c * (some + many)
        b = at[2] - a * many - c * many**2
        lines[name] = Line(line.fixed, a + b / document + c * document)
    return replace(last, **lines)


def _at_two_lengths(document: int, run: Callable[[int], list[Mark]]) -> Runs:
    runs = [(number * document, run(number)) for number in FEW]
    if len({tuple(len(mark.heights) for mark in marks) for _, marks in runs}) > 1:  # other operations in a longer row
        runs += [(number * document, run(number)) for number in MANY]
    return runs


def _line(runs: Runs, take: Callable[[list[Mark]], float]) -> Line:
    return Line.through(*((tokens, take(marks)) for tokens, marks in runs[-2:]))


def _most(runs: Runs, take: Callable[[list[Mark]], list[int]], start: int) -> Envelope:
    """Heights above what is there at mark ``start``, moment by moment; where longer rows have other moments, the
    highest alone, of rows of few documents and of many."""
    heights = [(tokens, [height - marks[start].live for height in take(marks)]) for tokens, marks in runs]
    if len({len(those) for _, those in heights}) == 1:
        return Envelope.over(*heights[-2:])
    highest = [(tokens, [max(those)]) for tokens, those in heights]
    pairs = (Envelope.over(*highest[at : at + 2]) for at in range(0, len(highest), 2))
    return Envelope(tuple(line for pair in pairs for line in pair.lines))


def _held(marks: list[Mark]) -> int:
    """What is there after all blocks beside what was there before and what each of them keeps."""
    return marks[BLOCKS].live - marks[0].live - BLOCKS * (marks[BLOCKS].live - marks[BLOCKS - 1].live)


def _block_cost(trained: Runs, evaluated: Runs) -> BlockCost:
    # Marks: start of block 1, ends of blocks 1, 2, 3, end of the backbone; backward: start and end of block 3. (Those
    # are the last three; the mark at the end is none of theirs.)
    return BlockCost(
        saved=_line(trained, lambda m: m[3].live - m[2].live),
        forward_peak=_most(trained, lambda m: m[3].heights, 2),
        backward_peak=_most(trained, lambda m: m[6].heights, 5),
        backward_bare_peak=_most(trained, lambda m: m[6].bare_heights, 5),
        evaluation_peak=_most(evaluated, lambda m: m[3].heights, -1),
        forward_flops=_line(trained, lambda m: m[3].flops),
        backward_flops=_line(trained, lambda m: m[6].flops),
        forward_traffic=_line(trained, lambda m: m[3].traffic),
        backward_traffic=_line(trained, lambda m: m[6].traffic),
        forward_made=_line(trained, lambda m: m[3].made),
        backward_made=_line(trained, lambda m: m[6].made),
        fp8_flops=_line(trained, lambda m: m[3].fp8_flops + m[6].fp8_flops),
        fp8_numbers=_line(trained, lambda m: m[3].fp8_numbers + m[6].fp8_numbers),
        held=_line(trained, _held),
    )


class _Enough(Exception):
    """The backward pass of the last block is over: of the others nothing is asked."""


def _run_backbone(
    backbone: _Backbone,
    block: nn.Module,
    rows: list[PackedRow],
    document: int,
    num_documents: int,
    *,
    kind: Recompute,
    trains: bool,
) -> list[Mark]:
    """One forward pass of a backbone whose last blocks are like ``block``, and a backward pass down to the last of
    them if it ``trains``; the marks between its parts, and at the end the one at the first block of all. A gradient
    goes down to the embedding in any case.

    The row that it ran on, where documents are packed, is added to ``rows``.
    """
    conditions = backbone.conditions
    model = _build_backbone(backbone, block)
    with pretending(conditions.device_type) as device, Ledger() as ledger, torch.set_grad_enabled(trains):
        anatomy = dissect(model)
        token_ranks = 1
        if conditions.tensor > 1:
            divide_in_shape(model, plan := tensor_plan(model, anatomy), conditions.tensor)
            token_ranks = plan.token_ranks(conditions.tensor)
        pack_layers(model, anatomy.blocks, conditions.trains.quantize)
        move_without_content(model, device)
        if (number := conditions.sequence_tiles) > 1:
            tile_sequence(anatomy.blocks, document * num_documents // (number * token_ranks), walk=ledger.some)
        recompute_blocks(anatomy.blocks, kind)
        ledger.leave_out(iter((*model.parameters(), *model.buffers())))
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(ledger.is_whole)
        on_cuda = conditions.device_type == "cuda"
        borders = torch.zeros(num_documents + 1, dtype=torch.int32, device=device) if on_cuda else None
        packed = conditions.arrangement == "packed"
        shape = (1, document * num_documents) if packed else (num_documents, document)
        ids = torch.zeros(shape, dtype=torch.int64, device=device)
        marks, at_first_block = _mark_parts(ledger, anatomy, trains=trains)
        ledger.mark()
        arguments: dict[str, Any] = {}
        if packed:
            rows.append(row := PackedRow((document,) * num_documents, borders))
            arguments = {"position_ids": torch.zeros(shape, dtype=torch.int64, device=device), "row": row}
        hidden = anatomy.backbone(ids, use_cache=False, **arguments).last_hidden_state
        marks.append(ledger.mark())
        if trains:
            with suppress(_Enough):
                hidden.backward(torch.empty_like(hidden))
    return [*marks, *at_first_block]


def _build_backbone(backbone: _Backbone, block: nn.Module) -> PreTrainedModel:
    """A model on the meta device whose last blocks are like ``block``, and whose embedding has a gradient."""
    conditions = backbone.conditions
    model = build_on_meta(copy.deepcopy(backbone.config), conditions.dtype, attention_name=conditions.attention)
    _let_last_be(model, block, BLOCKS)
    for name, parameter in model.named_parameters():
        if name in backbone.frozen:
            parameter.requires_grad_(False)
    model.get_input_embeddings().requires_grad_(True)
    for path, adapter in backbone.adapters.items():
        attach(embedding_at(model, path), adapter, conditions.dtype)
    _round(model, conditions.trains)
    model.eval()
    return model


def _mark_parts(ledger: Ledger, anatomy: Anatomy, *, trains: bool) -> tuple[list[Mark], list[Mark]]:
    """Lists of marks that are taken as a backbone runs: between its last blocks, and at the first block of all.

    If it ``trains``, the backward pass ends with the last block.
    """
    marks: list[Mark] = []
    at_first_block: list[Mark] = []

    def note(*_: Any) -> None:
        marks.append(ledger.mark())

    def note_the_end(*_: Any) -> None:
        note()
        raise _Enough

    anatomy.blocks[0].register_forward_pre_hook(lambda *_: at_first_block.append(ledger.mark()), prepend=True)
    for number, block in enumerate(anatomy.blocks[-BLOCKS:]):
        if number == 0:
            block.register_forward_pre_hook(note, prepend=True)
        block.register_forward_hook(note)
    if trains:
        last = anatomy.blocks[-1]
        last.register_forward_pre_hook(lambda _, inputs: _first(inputs).register_hook(note_the_end) and None)
        last.register_forward_hook(lambda _, inputs, output: _first(output).register_hook(note) and None)
    return marks, at_first_block


def move_without_content(model: nn.Module, device: torch.device, *, buffers: bool = True) -> None:
    """Let parameters, and buffers, be without content on another device (``to_empty`` cannot swap in fake ones)."""
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                fresh = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                module._parameters[name] = moved.setdefault(id(parameter), fresh)
        for name, buffer in module._buffers.items():
            if buffers and buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)


def _first(values: Any) -> Tensor:
    tensor = values[0] if isinstance(values, (tuple, list)) else values
    assert isinstance(tensor, Tensor)
    return tensor


def _kinds(blocks: Sequence[nn.Module]) -> dict[int, int]:
    """Of every kind of block, the number of the first one and how many there are."""
    first: dict[str, int] = {}
    counts = Counter[int]()
    for number, block in enumerate(blocks):
        parts = [(type(module).__name__, getattr(module, "sliding_window", None)) for module in block.modules()]
        shapes = [(name, tuple(one.shape), one.requires_grad) for name, one in block.named_parameters()]
        forms = [form for module in block.modules() if (form := module.__dict__.get("stored_forms"))]
        counts[first.setdefault(repr((parts, shapes, forms)), number)] += 1
    return counts


def _mean(costs: Sequence[tuple[BlockCost, int]]) -> BlockCost:
    """The cost of a block on average, of so many of each kind; of what is there for a moment, the most of any kind."""
    if len(costs) == 1:
        return costs[0][0]
    total = sum(number for _, number in costs)

    def of(name: str) -> Line | Envelope:
        values = [(getattr(cost, name), number) for cost, number in costs]
        if isinstance(values[0][0], Envelope):
            return Envelope.of_all([line for envelope, _ in values for line in envelope.lines])
        return Line(
            sum(line.fixed * number for line, number in values) / total,
            sum(line.per_token * number for line, number in values) / total,
        )

    means: dict[str, Any] = {each.name: of(each.name) for each in fields(BlockCost)}
    return BlockCost(**means)


def _of_one_kind(config: PreTrainedConfig, number: int, tensor: int, layer: int) -> PreTrainedConfig:
    """The same model with other blocks, the last ``number`` of which are like ``layer``, and a vocabulary of no weight.

    Where the configuration has a value for each layer, there is a block of every other kind before them: some families
    look for one of each.
    """
    small, described = copy.deepcopy(config), config.to_dict()
    count, layers = count_layers(described)
    by_layer = {key: value for key, value in described.items() if is_by_layer(key, value, layers)}
    sharing = getattr(config, SHARING_LAYERS, 0)
    kinds = {repr([value[at] for value in by_layer.values()]): at for at in reversed(range(layers))}
    before = sorted(kinds.values()) if len(kinds) > 1 or sharing else []
    order = (*before, *[layer] * number)
    for key, value in by_layer.items():
        setattr(small, key, [value[at] for at in order])
    if count:
        setattr(small, count, len(order))
    if overrides := described.get("per_layer_config"):
        small.per_layer_config = overrides_of(overrides, order)
    for key in [key for key, value in described.items() if key.endswith("_layer_period") and isinstance(value, int)]:
        offset = key.replace("period", "offset")  # a kind of block comes again after so many: now always, or never
        comes = layer % described[key] == described.get(offset, 0)
        setattr(small, key, 1 if comes else NEVER)
        setattr(small, offset, 0 if comes else NEVER - 1)
    if sharing:  # the last ones have keys and values of others
        setattr(small, SHARING_LAYERS, number if layer >= layers - sharing else 0)
    small.vocab_size = 8 * tensor
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if getattr(small, name, None) is not None:  # some classes take no other than a number there
            setattr(small, name, 0)
    return small


def _let_last_be(model: PreTrainedModel, block: nn.Module, number: int) -> None:
    """Make the last ``number`` of the blocks of ``model`` like ``block``, where they are not; all are on the meta
    device."""

    def kind(of_block: nn.Module) -> list[tuple[torch.Size, bool]]:
        return [(parameter.shape, parameter.requires_grad) for parameter in of_block.parameters()]

    last = dissect(model).blocks[-number:]
    others = {id(candidate) for candidate in last if kind(candidate) != kind(block)}
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            for position, child in enumerate(module):
                if id(child) in others:
                    module[position] = copy.deepcopy(block)


def _trace_head(anatomy: Anatomy, conditions: Conditions) -> tuple[int, HeadCost, HeadCost]:
    """Supervised tokens of a chunk, at most, and costs of head and loss: up to a chunk, and beyond. That of scores
    takes one row of each answer, and costs next to nothing."""
    if anatomy.scores:
        return HEAD_CHUNK, NO_HEAD, NO_HEAD
    dtype, device_type = conditions.dtype, conditions.device_type

    def head_on(device: torch.device, chunk: int | None = None, *, trains: bool = True) -> Head:
        weight, bias = anatomy.head.weight, anatomy.head.bias
        of_run: Any = {"dtype": dtype, "device": device, "requires_grad": trains and weight.requires_grad}
        own_bias = None if bias is None else torch.empty(bias.shape, **of_run)
        own_weight = torch.empty(weight.shape, **of_run)
        return Head(own_weight, own_bias, anatomy.logit_scale, anatomy.logit_softcap, chunk)

    def soft_targets(tokens: int, device: torch.device) -> Soft | None:
        if conditions.teacher is None:
            return None
        top_k, share, temperature = conditions.teacher
        of_teacher = torch.zeros(tokens, top_k, device=device)
        return Soft(of_teacher.long(), of_teacher, share, temperature)

    with pretending(device_type) as device:
        chunk = head_on(device).most_loss_tokens(soft_targets(1, device))

    def run(tokens: int, trains: bool = True) -> dict[str, float]:
        with pretending(device_type) as device, Ledger() as ledger:
            head = head_on(device, chunk, trains=trains)
            hidden = torch.empty(tokens, anatomy.head.in_features, dtype=dtype, device=device, requires_grad=trains)
            targets = torch.zeros(tokens, dtype=torch.int64, device=device)
            weights, soft = torch.ones(tokens, device=device), soft_targets(tokens, device)
            before = ledger.mark()
            loss = head.loss(hidden, targets, weights, soft)
            forward = ledger.mark()
            if not trains:
                return {"evaluation_peak": max(forward.heights) - before.live}
            loss.backward()
            backward = ledger.mark()
        return run(tokens, trains=False) | {
            "peak": max(forward.heights) - before.live,
            "saved": forward.live - before.live,
            "flops": forward.flops + backward.flops,
            "traffic": forward.traffic + backward.traffic,
            "made": forward.made + backward.made,
        }

    costs = []
    for few, many in ((chunk // 2, chunk), (2 * chunk, 4 * chunk)):
        first, second = run(few), run(many)
        costs.append(HeadCost(**{key: Line.through((few, first[key]), (many, second[key])) for key in first}))
    return chunk, costs[0], costs[1]
