"""Bytes of one worker at every instant of a run, by category. The peak is the largest instant, and it has a name.

What stays through a step (weights, masters, moments, gradients of several micro-batches) and what comes and goes
(activations, gathered parameters, the loss) are added up at the instants at which one of them is largest:

    load │ forward: last block, loss │ backward: last ... first block, embedding or reduction │ update │ evaluation

Sources: a block's activations and workspace are measured on tensors without content (``training.weigh``); states follow
the ZeRO paper (Rajbhandari et al. 2020, section 3) with the masters of ``parallel.Precision``; gathered parameters
follow FSDP2: while a block is computed the next one is gathered, or more (``Layout.blocks_ahead``), and gradients are
reduced in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tonnage.offload.residency import GRADIENTS, INPUTS
from tonnage.planning.context import in_slices
from tonnage.planning.layout import Layout
from tonnage.planning.profile import HEAD_PIECE, BlockCost, ModelProfile, TowerCost, share_of
from tonnage.planning.schedule import rows_held
from tonnage.planning.stages import workers_parts
from tonnage.planning.states import (
    between_operations,
    frozen_bytes,
    held_states,
    masters_bytes,
    of_a_matrix,
    of_a_step,
    states,
)
from tonnage.planning.tiling import beside_tiles, without_tiles

LOADING = "load"
"""The instant before all others, when the heap has nothing to keep."""
CUBLAS_BYTES = 2 * (32 << 20)
"""Workspaces that torch gives cuBLAS on Hopper cards, one for the thread of the forward pass and one for that of the
backward pass. On other cards they take a quarter of it, and are planned as large."""
MAPPED_BYTES = 16 << 20
"""Of weight files, mapped at a time, and of a tensor that is read (``model.stored``, ``model.build``)."""


@dataclass(frozen=True)
class Instant:
    """An instant of a run."""

    name: str
    bytes: dict[str, float]
    """By category."""

    @property
    def total(self) -> float:
        return sum(self.bytes.values())

    def with_workspace(self, num_bytes: float) -> Instant:
        """The same with so much more of it."""
        return Instant(self.name, {**self.bytes, "workspace": self.bytes.get("workspace", 0.0) + num_bytes})


def instants(layout: Layout, model: ModelProfile, *, evaluates: bool = False) -> list[Instant]:
    """What a worker holds at the instants of a run, in their order, where every row is as full as ``layout`` says; in
    a pipeline, the worker that holds most."""
    parts = workers_parts(model, layout.stages, layout.pipeline)
    first = {id(part): worker for worker, part in reversed([*enumerate(parts)])}  # of those alike, the fullest
    of_workers = [_instants(layout, parts[worker], worker, evaluates) for worker in first.values()]
    return max(of_workers, key=lambda held: max(instant.total for instant in held))


def _instants(layout: Layout, model: ModelProfile, worker: int, evaluates: bool) -> list[Instant]:
    """Those of a worker that has ``model``."""
    if layout.context > 1:
        model = in_slices(layout, model)
    held = held_states(layout, model)
    load = {"weights": held.weights, "workspace": _read_bytes(layout, model)}
    stays: dict[str, float] = {"weights": held.weights, "optimizer": held.optimizer}
    if model.tower is not None and layout.device == "cpu":
        stays["images"] = (2 if model.tower.trained else 1) * model.tower.input_bytes * layout.row_image_tokens
    if layout.saves_beside and layout.device == "cpu":
        whole = states(layout, model)
        weights, where = held.weights, layout.parameter_tier
        if layout.update_tier == "host":
            weights = masters_bytes(layout, model)
        if model.frozen.parameters:
            weights, where = whole.weights - frozen_bytes(layout, model), "device"
        stays["save"] = sum(
            size
            for size, tier in ((weights, where), (whole.optimizer, layout.optimizer_tier))
            if tier != "disk"  # what rests on disk is copied there
        )
    if layout.device == "cpu":
        stays["host"] = of_a_step(layout, model)
    if layout.stages:
        stays["in flight"] = _in_flight(layout, model, worker)
    rest = model if layout.tiles == 1 else without_tiles(layout, model)
    parts_at = (_sharded if layout.sharded else _alone)(layout, rest)
    if model.tower is not None:
        parts_at = _looking(layout, rest, model.tower, parts_at)
    if evaluates:
        parts_at += [_evaluation(layout, rest)]
    if layout.tiles > 1:
        parts_at = [(name, beside_tiles(layout, model, name, parts)) for name, parts in parts_at]
    held_at = [(LOADING, load), *((name, stays | parts) for name, parts in parts_at)]
    return [Instant(name, {key: float(size) for key, size in parts.items() if size}) for name, parts in held_at]


def _read_bytes(layout: Layout, model: ModelProfile) -> float:
    """Bytes of weight files that are mapped while a worker loads its part, and of what is read of a tensor at a time:
    some rows, or all of one that is packed. Files are mapped, and weights packed, in the host's memory."""
    matrix = model.largest_matrix or model.block_parameters
    tensor = layout.width * max(model.vocabulary_parameters, matrix) / layout.shards
    if layout.device != "cpu":
        return min(tensor, MAPPED_BYTES)
    mapped = min(MAPPED_BYTES, layout.width * model.num_parameters)
    packed = layout.width * matrix if model.frozen.num_bytes < layout.width * model.frozen.parameters else 0
    return max(mapped, packed) + max(min(tensor, MAPPED_BYTES), packed)


def _evaluation(layout: Layout, model: ModelProfile) -> PartsAt:
    """The fullest instant of an evaluation, which goes forward only, in rows like those of training."""
    row, stays, comes, received = _Row.of(layout, model), 0.0, 0.0, 0.0
    first: dict[str, float] = {}
    if layout.sharded and layout.gathers:  # as in the forward pass of a first micro-batch
        gathering = _Gathering.of(layout, model)
        unit, outside = gathering.unit, gathering.outside
        if layout.shards > 1:  # what no block holds is there as it was received, too, until the first block is
            first = {
                "gathered": 2 * outside + unit,
                "activations": row.evaluated_entered,
                "workspace": unit,
            }
        whole = layout.zero == 3
        stays = outside if whole else gathering.everything
        comes, received = unit if whole else 0, unit if layout.shards > 1 else 0
        comes += gathering.ahead(model.num_blocks) * (unit if whole else unit - gathering.mean_unit)
    in_block = {"gathered": stays + received + comes, "activations": row.evaluated_entered, "workspace": row.evaluated}
    in_loss = {
        "gathered": stays + received,
        "activations": row.evaluated_final,
        "loss": row.evaluated_loss,
    }
    looking: dict[str, float] = {}
    if (tower := model.tower) is not None:
        features = layout.width * model.hidden_size
        most = tower.most(tower.evaluated, layout.row_image_tokens, saves=features)
        looking = {"gathered": stays + received, "workspace": most}
    return "evaluation", max(first, in_block, in_loss, looking, key=lambda parts: sum(parts.values()))


def _in_flight(layout: Layout, model: ModelProfile, worker: int) -> int:
    """Bytes of activations that a pipeline's worker holds besides those of one micro-batch in each of its stages, and
    of hidden states on their way: one that is received and one that is awaited, in each direction."""
    assert model.outside is not None
    per_worker = layout.stages_per_worker
    rows = rows_held(layout.schedule, worker, layout.pipeline, per_worker, layout.micro_batches)
    row = model.outside.embedded(layout.row_tokens)
    saved = model.blocks[layout.recompute].saved(layout.row_tokens)
    # Of inputs that leave, what the last block puts out stays, from which the backward pass begins.
    row += saved if layout.activation_tier == "host" else model.num_blocks / per_worker * saved
    hidden = layout.width * model.own_hidden * layout.row_tokens
    return round(max(0, rows - per_worker) * row + 4 * hidden)


@dataclass(frozen=True)
class _Block:
    """What a block costs on the rows of a layout, in bytes."""

    saved: float
    """For its backward pass."""
    forward: float
    """Most in its forward pass."""
    backward: float
    """Most in its backward pass, its gradients included."""
    bare_backward: float
    """Most in its backward pass, if gradients leave at once."""

    @staticmethod
    def of(cost: BlockCost, tokens: int) -> _Block:
        """A block of that cost on a row of so many tokens."""
        peaks = (cost.forward_peak, cost.backward_peak, cost.backward_bare_peak)
        return _Block(cost.saved(tokens), *(peak(tokens) for peak in peaks))


@dataclass(frozen=True)
class _Row:
    """What the rows of a layout cost, in bytes."""

    entered: float
    """At the start of the first block."""
    evaluated_entered: float
    """Of that, what there is where no gradient is wanted."""
    blocks: int
    recomputed: int
    """Blocks that recompute, the first ones."""
    early: _Block
    """Each of these."""
    late: _Block
    """Each of those after them or, where there are none, of these."""
    most_saved: float
    """By the first ones that are not in their backward pass, however many they are."""
    final: float
    """By the final norm."""
    loss: float
    """Most while the loss runs."""
    slopes: float
    """What it keeps for the backward pass."""
    picked: float
    """Of that, the gradient of the hidden states that the loss has picked, which goes on from it."""
    in_chunks: bool
    """Whether the gradient of the head's weight is among that already."""
    evaluated: float
    """Most in a block's forward pass where no gradient is wanted, beside what there was at the start of the first."""
    evaluated_final: float
    """At the loss, where no gradient is wanted."""
    evaluated_loss: float
    """Most while the loss runs, where no gradient is wanted."""
    held: float
    """Of inputs of blocks, by their callers, to the end of the forward pass."""
    final_forward: float
    """Most in the forward pass of the final norm."""
    final_backward: float
    """Most in its backward pass."""
    slope: float
    """The gradient that goes from block to block, in place of the activation that it belongs to."""

    @property
    def saved_by_norm(self) -> float:
        """Of the final norm, without its output: the loss picks rows of that."""
        return max(0.0, self.final - self.slope)

    @property
    def held_by_norm(self) -> float:
        """What is ``held`` when the last block has returned, whose input then is not."""
        return max(0.0, self.held - self.slope)

    def of_head(self, gradient: float) -> float:
        """What the backward pass makes of the gradient of the head's weight."""
        return 0.0 if self.in_chunks else gradient

    def block(self, number: int) -> _Block:
        """A block, from 0."""
        return self.early if number < self.recomputed else self.late

    @property
    def first_input(self) -> float:
        """The first block's input while blocks run, whose caller holds it, where that is not counted as ``entered``: it
        has left, and in its place there is the input of the first block that keeps its own."""
        both = INPUTS.slots < self.recomputed < self.blocks and self.most_saved < math.inf
        return self.early.saved if both else 0.0

    def kept(self, number: int) -> float:
        """At the start of the first block, and by a number of blocks for their backward pass."""
        first = min(number, self.recomputed)
        return self.entered + min(first * self.early.saved, self.most_saved) + (number - first) * self.late.saved

    @property
    def last_recomputed(self) -> dict[int, str]:
        """The last block that recomputes where the next one does not, by number. In the backward pass what is held
        grows or shrinks evenly before it, and evenly after it."""
        return {self.recomputed - 1: "last recomputed"} if 0 < self.recomputed < self.blocks else {}

    @staticmethod
    def of(layout: Layout, model: ModelProfile) -> _Row:
        """The fullest row of a layout."""
        assert model.outside is not None, "a model that was only counted has no instants"
        outside = model.outside
        tokens, supervised = layout.row_tokens, layout.row_supervised
        hidden_bytes = layout.width * model.hidden_size
        in_chunks = supervised > outside.chunk
        multiplied = 0.0 if in_chunks or model.frozen.head else hidden_bytes * supervised  # hidden states, later on
        kinds = layout.kinds_of(model.num_blocks) or [(layout.recompute, 0)]
        (first, recomputed), (last, _) = kinds[0], kinds[-1]
        early, late = (_Block.of(model.blocks[kind], tokens) for kind in (first, last))
        block = model.blocks[last]
        of_images = 0.0
        if model.tower is not None and model.tower.trained:
            of_images = model.tower.saved * layout.row_image_tokens
        return _Row(
            entered=outside.embedded(tokens) + of_images,
            evaluated_entered=outside.embedded(tokens),
            blocks=model.num_blocks,
            recomputed=recomputed,
            early=early,
            late=late,
            most_saved=INPUTS.slots * layout.stages_per_worker * early.saved
            if layout.activation_tier == "host"
            else math.inf,
            final=outside.final(tokens),
            loss=outside.head(supervised).peak(supervised) + hidden_bytes * supervised,
            slopes=outside.head(supervised).saved(supervised) + multiplied,
            picked=hidden_bytes * supervised,
            in_chunks=in_chunks,
            evaluated=block.evaluation_peak(tokens),
            evaluated_final=outside.evaluated(tokens),
            evaluated_loss=outside.head(supervised).evaluation_peak(supervised) + hidden_bytes * supervised,
            held=block.held(tokens),
            final_forward=outside.final_forward(tokens),
            final_backward=outside.final_backward(tokens),
            slope=layout.width * model.own_hidden * tokens,
        )


PartsAt = tuple[str, dict[str, float]]


def _beside_an_update(layout: Layout, model: ModelProfile, row: _Row, gathered: float = 0.0) -> dict[str, float]:
    """What there is while parameters are updated: where the loops of a CPU, which need nothing, do not do it, what lies
    between the update's operations; where it goes on in the background, the next step's first block, and what it has
    ``gathered``."""
    between = between_operations(layout, model) if layout.update_tier == "device" or layout.device == "cpu" else 0
    between = max(between, of_a_matrix(layout, model))
    if layout.optimizer_tier == "device":
        return {"workspace": between}
    return {"workspace": between + row.early.forward, "activations": row.entered, "gathered": gathered}


@dataclass(frozen=True)
class _Gradients:
    """Gradients of one worker that holds its parameters as they are."""

    stay: float
    """Bytes through forward and backward passes."""
    whole: float
    """Bytes at the update."""
    leave: bool
    """Whether each leaves its parameter once it is whole: to a sum of micro-batches, or to another tier."""
    added: int
    """Bytes of a number of a gradient while it becomes whole."""
    of_block: float = 0.0
    """Bytes on their way to the host and, to be added to, back: of a block."""
    of_first_block: float = 0.0
    """Of the first block's last ones."""
    of_head: float = 0.0
    """Of the head's."""

    @staticmethod
    def of(layout: Layout, model: ModelProfile) -> _Gradients:
        """By where they rest, and how many micro-batches are summed."""
        sums, width = layout.micro_batches > 1, layout.width
        if layout.gradient_tier != "device":  # itself; where it is added to what rests elsewhere, both in fp32
            added = 8 if sums else width
            if layout.update_tier == "host" and layout.gradient_tier == "disk":  # it is added to that there
                added = 4 if sums else width
            gradients = _Gradients(0, held_states(layout, model).gradients, True, added)
        else:  # sums are in memory of their own, to which autograd adds a gradient in their type
            whole = states(layout, model).gradients
            added = width + (4 if sums and not _adds_sums(layout) else 0)
            gradients = _Gradients(whole if sums else 0, whole, sums, added)
        if layout.gradient_tier != "host" and layout.update_tier != "host":
            return gradients
        each = 4 if sums else width  # bytes of a number on its way
        of_block = of_first_block = gradients.added * model.trained_block
        if layout.gradient_tier == "host" and (largest := model.largest_matrix):
            of_first_block = min(of_block, GRADIENTS["host"].slots * each * largest)
            # and the one that is made
            of_block = of_block if sums else min(of_block, of_first_block + each * largest)
        of_head = each * model.head_parameters if model.trains_head else 0.0
        return replace(gradients, of_block=of_block, of_first_block=of_first_block, of_head=of_head)


def _adds_sums(layout: Layout) -> bool:
    """Whether ``kernels.sums``, which takes whole weights alone, adds gradients to their sums."""
    return layout.tensor == 1 and layout.uses_on_cpu("sums")


def _adds_rows(layout: Layout) -> bool:
    """Whether ``kernels.embedding``, which takes whole weights alone, adds the rows of an embedding's gradient."""
    return layout.tensor == 1 and layout.uses_on_cpu("embedding")


def _parts_at(name: str, **parts: float) -> PartsAt:
    return name, parts


def _alone(layout: Layout, model: ModelProfile) -> list[PartsAt]:
    """The instants of one worker that holds its parameters as they are."""
    row, blocks = _Row.of(layout, model), model.num_blocks
    gradients = _Gradients.of(layout, model)
    stay = gradients.stay
    return [
        _parts_at(
            "forward of the last block",
            gradients=stay,
            activations=row.kept(blocks - 1) + row.first_input + row.held,
            workspace=row.late.forward,
        ),
        _parts_at(
            "forward of the final norm",
            gradients=stay,
            activations=row.kept(blocks) + row.held_by_norm,
            workspace=row.final_forward,
        ),
        _parts_at("loss", gradients=stay, activations=row.kept(blocks) + row.final, loss=row.loss),
        *_backward_alone(layout, model, row, gradients),
        _parts_at("update", gradients=gradients.whole, **_beside_an_update(layout, model, row)),
    ]


def _backward_alone(layout: Layout, model: ModelProfile, row: _Row, gradients: _Gradients) -> list[PartsAt]:
    """Those of the backward pass, in which the gradients come that the blocks, the head and the embedding keep."""
    blocks, stay, leave = model.num_blocks, gradients.stay, gradients.leave
    head: float = layout.width * model.head_parameters if model.trains_head else 0
    workspace = _made_for_the_head(layout, model, row, gradients.added) if model.trains_head else 0
    mean = 0 if leave else layout.width * model.mean_trained_block  # of a block's gradients
    if leave:  # but the head's is held until the embedding's, with which it is one
        head = _awaiting_the_embedding(layout, head) if model.is_tied and model.trains_head else 0
    of_head = max(head, gradients.of_head)

    def backward(number: int) -> float:
        block = row.block(number)
        return block.bare_backward if leave else block.backward

    return [
        _parts_at(
            "gradient of the head",
            gradients=stay,
            activations=row.kept(blocks) + row.saved_by_norm,
            loss=row.slopes,
            workspace=workspace,
        ),
        _parts_at(
            "backward of the final norm",
            gradients=stay + of_head,
            activations=row.kept(blocks),
            workspace=row.final_backward,
        ),
        _parts_at(
            "backward of the last block",
            gradients=stay + of_head + gradients.of_block,
            activations=row.kept(blocks),
            workspace=backward(blocks - 1),
        ),
        *(
            _parts_at(
                f"backward of the {name} block",
                gradients=stay + head + (blocks - 1 - number) * mean + gradients.of_block,
                activations=row.kept(number + 1),
                workspace=backward(number),
            )
            for number, name in (row.last_recomputed | {0: "first"}).items()
        ),
        _parts_at(
            "backward of the embedding",
            gradients=stay + head + blocks * mean + gradients.of_first_block,
            activations=row.slope,
            workspace=_made_for_the_embedding(layout, model, gradients.added),
        ),
    ]


def _made_for_the_head(layout: Layout, model: ModelProfile, row: _Row, added: int) -> float:
    """Bytes of the gradient of the head's weight as it becomes whole, of which each number takes ``added``."""
    vocabulary = model.head_parameters
    # While it becomes whole, what is left of the loss is what it picked and the gradient of that.
    num_bytes = max(row.of_head(layout.width * vocabulary), added * vocabulary - (row.slopes - 2 * row.picked))
    # Added where it is computed (``training.loss``), it is never there as a whole.
    in_place = (
        _adds_sums(layout)
        and layout.uses_on_cpu("products")
        and layout.micro_batches > 1
        and layout.gradient_tier == "device"
        and not row.in_chunks
        and not model.is_tied
    )
    return min(num_bytes, layout.width * HEAD_PIECE) if in_place else num_bytes


def _awaiting_the_embedding(layout: Layout, head: float) -> float:
    """Bytes of the head's gradient that wait for the embedding's, with which it is one, where gradients leave or are
    summed: none where ``kernels.sums`` has added it to the sum; in the type of the sum where autograd waits."""
    if _adds_rows(layout) or layout.micro_batches == 1:
        return head
    return 0.0 if _adds_sums(layout) and layout.gradient_tier == "device" else 4 / layout.width * head


def _made_for_the_embedding(layout: Layout, model: ModelProfile, added: int) -> float:
    """Bytes of the embedding's gradient as it becomes whole, of which each number takes ``added``."""
    vocabulary, by_rows = model.vocabulary_parameters, _adds_rows(layout)
    sums, additions = layout.micro_batches > 1, added * model.embedding_additions
    # Of an embedding that is the head, rows are added to the head's, which is there.
    in_heads = by_rows and model.is_tied and model.has_head and added == layout.width
    if not model.trains_embedding or in_heads:
        return additions
    if sums and layout.gradient_tier == "device" and not by_rows:  # whole, and once more in fp32
        return (layout.width + 4) * vocabulary + additions
    as_made = layout.width if sums and layout.gradient_tier == "host" and not by_rows else 0  # in its own type
    return (added + as_made) * vocabulary + additions


def _looking(layout: Layout, model: ModelProfile, tower: TowerCost, parts_at: Sequence[PartsAt]) -> list[PartsAt]:
    """The instants of a step with those in which a tower looks at images, and learns."""
    by_name, tokens = dict(parts_at), layout.row_image_tokens
    forward = by_name["forward of the last block"]
    stays = {name: size for name, size in forward.items() if name in ("gradients", "gathered")}
    images = 2 * tower.input_bytes * tokens if layout.device == "cpu" else 0.0  # these, and the next ones
    saves = tower.saved if tower.trained else layout.width * float(model.hidden_size)
    looks = {**stays, "workspace": tower.most(tower.forward, tokens, saves=saves), "images": images}
    around = [_parts_at("forward of the tower", **looks), *parts_at]
    if not tower.trained:
        return around
    if layout.sharded:
        whole = 0.0 if layout.micro_batches > 1 and _reduced_once(layout) else layout.width * model.trained_outside
        own = 0.0 if not whole else layout.width * tower.trained
        before = by_name.get("backward of the first block", forward)
        gathered = _Gathering.of(layout, model).outside
        gradients, peak = before.get("gradients", 0.0) + whole - own, tower.backward
    else:
        before, gathered = by_name["backward of the embedding"], 0.0
        leave = _Gradients.of(layout, model).leave
        vocabulary = model.vocabulary_parameters if model.trains_embedding and not leave and not model.is_tied else 0
        gradients = before["gradients"] + layout.width * vocabulary
        peak = tower.bare_backward if leave else tower.backward
    learns = _parts_at(
        "backward of the tower",
        gathered=gathered,
        gradients=gradients,
        activations=tower.saved * tokens,
        workspace=peak,
    )
    update = next(at for at, (name, _) in enumerate(around) if name in ("reduction outside the blocks", "update"))
    return [*around[:update], learns, *around[update:]]


@dataclass(frozen=True)
class _Gathering:
    """Bytes that a worker gathers from shards (FSDP2), with room for as many as large as the largest. What no block
    holds is one unit, gathered from first to last."""

    layout: Layout
    num_blocks: int
    outside: float
    """Of what no block holds."""
    unit: float
    """Of the largest block."""
    mean_unit: float
    """Of a block on average."""
    received: float
    """Of what was gathered last, as it was received."""

    @staticmethod
    def of(layout: Layout, model: ModelProfile) -> _Gathering:
        """What a layout gathers of a model."""
        frozen, shards = model.frozen, layout.shards
        width, frozen_width = float(layout.width if layout.gathers else 0), float(layout.gathers_frozen)
        outside = width * model.trained_outside + frozen_width * frozen.outside_bytes
        width *= shards * model.share(shards)
        frozen_width *= shards * share_of(frozen.rows, shards)
        mean = width * model.mean_trained_block + frozen_width * model.mean_frozen_block_bytes
        unit = width * model.trained_block + frozen_width * frozen.block_bytes
        # FSDP2 keeps what it gathered last until it gathers again; below ZeRO 3 only the first micro-batch gathers.
        keeps = shards > 1 and (layout.zero == 3 or layout.micro_batches == 1)
        return _Gathering(layout, model.num_blocks, outside, unit, mean, unit if keeps else 0.0)

    @property
    def everything(self) -> float:
        """Of the whole model."""
        return self.outside + self.num_blocks * self.mean_unit

    @property
    def after_forward(self) -> float:
        """Of what stays after the forward pass."""
        return self.outside if self.layout.zero == 3 else self.everything

    def ahead(self, others: int) -> int:
        """Of so many ``others`` those that are on their way while a block runs forward, if they are gathered earlier
        than FSDP2 does by itself, which gathers the next one when it has given up this one."""
        return min(self.layout.blocks_ahead, others) if self.layout.blocks_ahead > 1 else 0

    def forward(self, number: int) -> float:
        """While a block runs forward, the first being 0, with all that are on their way meanwhile."""
        later = self.num_blocks - 1 - number
        own = self.unit if self.layout.zero == 3 else -later * self.mean_unit
        return self.after_forward + (1 + self.ahead(later)) * self.received + own

    def backward(self, number: int) -> float:
        """In the backward pass of a block, the first being 0."""
        layout = self.layout
        if layout.zero == 3:  # its own; the next ones' are received, by gloo in a copy of its own
            copies = 2 if layout.device == "cpu" else 1
            return self.outside + self.unit + min(layout.blocks_ahead, number) * copies * self.received
        if _reduced_once(layout):  # given up in the last backward pass
            return self.outside + (number + 1) * self.mean_unit
        return self.everything


@dataclass(frozen=True)
class _Reduction:
    """Bytes of gradients of a worker that reduces them to shards (FSDP2). In the backward pass of a block its gradients
    become whole in the compute type, are copied together in fp32 and are reduced; that copy lives until the next
    block's."""

    stay: float
    """Reduced ones, where every micro-batch is reduced."""
    grown: float
    """Reduced ones that each block adds, where they are reduced once."""
    updated: float
    """At the update."""
    unreduced: int
    """Bytes of a number that is summed before it is reduced."""
    leaving: float
    """On their way to the host."""
    copy: float
    """Of a number in fp32, with room for as many shards as large as the largest."""
    sent_before: float
    """Of what was sent last, which lives until more is sent; with several micro-batches, through the next forward
    pass."""

    @staticmethod
    def of(layout: Layout, model: ModelProfile) -> _Reduction:
        """What a layout reduces of a model's gradients."""
        shards, once = layout.shards, _reduced_once(layout)
        part = 4 * model.share(shards)
        leaves = layout.gradient_tier == "host" or (layout.gradient_tier == "disk" and layout.update_tier == "host")
        vocabulary = 0 if model.frozen.head else model.head_parameters
        leaving = 2 * part * max(model.trained_block, vocabulary) if leaves else 0.0
        # FSDP2 holds what replicas sum to the pass's end, but not what ``parallel.cpu_collectives`` sums
        held = layout.replicate > 1 and (shards > 1 or layout.device != "cpu")
        stays = layout.gradient_tier == "device" or held
        reduced = 4.0 * model.part(shards) if stays else 0.0
        return _Reduction(
            stay=0.0 if once else reduced,
            grown=part * model.mean_trained_block if once and stays else 0.0,
            updated=reduced if layout.gradient_tier == "device" else held_states(layout, model).gradients,
            unreduced=4 if once and layout.micro_batches > 1 else 0,
            leaving=leaving,
            copy=part * shards,
            sent_before=0 if once else 4 * model.trained_outside,
        )


def _reduced_once(layout: Layout) -> bool:
    """Whether the gradients of all micro-batches are summed before they are reduced."""
    return layout.micro_batches == 1 or layout.zero <= 1


def _sharded(layout: Layout, model: ModelProfile) -> list[PartsAt]:
    """The instants of a worker that gathers its parameters from shards (FSDP2)."""
    row, blocks = _Row.of(layout, model), model.num_blocks
    gathering, reduction = _Gathering.of(layout, model), _Reduction.of(layout, model)
    after_forward, received = gathering.after_forward, gathering.received
    head = layout.width * model.head_parameters if model.has_head and not model.frozen.head else 0
    gradients = reduction.stay + reduction.unreduced * model.trained_parameters

    def forward(number: int, name: str) -> PartsAt:
        return _parts_at(
            f"forward of the {name}",
            gathered=gathering.forward(number),
            gradients=gradients,
            activations=row.kept(number) + row.first_input,
            workspace=row.block(number).forward + reduction.sent_before,
        )

    return [
        *([forward(max(0, blocks - 3), "last block but two")] if layout.blocks_ahead > 1 else []),
        forward(blocks - 1, "last block"),
        _parts_at(
            "loss",
            gathered=after_forward + received,
            gradients=gradients,
            activations=row.kept(blocks) + row.final,
            workspace=reduction.sent_before,
            loss=row.loss,
        ),
        _parts_at(
            "gradient of the head",
            gathered=after_forward + (received if layout.zero == 3 else 0),
            gradients=gradients,
            activations=row.kept(blocks) + row.saved_by_norm,
            workspace=reduction.sent_before + row.of_head(head),
            loss=row.slopes,
        ),
        *_backward_sharded(layout, model, row, gathering, reduction, head),
        _parts_at(
            "update",
            gradients=reduction.updated,
            **_beside_an_update(layout, model, row, gathering.outside + 2 * gathering.unit),
        ),
    ]


def _backward_sharded(
    layout: Layout, model: ModelProfile, row: _Row, gathering: _Gathering, reduction: _Reduction, head: float
) -> list[PartsAt]:
    """Those of the backward pass, with a gradient of the head of so many bytes."""
    blocks, shards = model.num_blocks, layout.shards
    outside, copy, unreduced = model.trained_outside, reduction.copy, reduction.unreduced
    alone = shards == 1  # with its shard, which is all of it
    copies = 1 if not alone else 0 if layout.device == "cpu" else 2  # beside the sum, of what FSDP2 collects
    own = unreduced or layout.width  # bytes of a number before it is copied
    # Of the head's gradient autograd holds a copy to the end of its pass.
    held = 0 if model.is_tied or model.frozen.head else model.head_parameters
    last = 0 if alone and layout.device != "cpu" else own * held
    reducing = max(own + copy, copies * copy + copy / shards) * model.trained_block

    def backward(number: int, name: str) -> PartsAt:
        reduced, cost = blocks - 1 - number, row.block(number)
        unreduced_numbers = outside + (number + 1) * model.mean_trained_block
        copied = max(cost.backward + copy * model.trained_block, reducing - cost.saved)
        return _parts_at(
            f"backward of the {name} block",
            gathered=gathering.backward(number),
            gradients=reduction.stay
            + unreduced * unreduced_numbers
            + head
            + reduced * reduction.grown
            + reduction.leaving,
            activations=row.kept(number + 1),
            workspace=copied if reduced else cost.backward + reduction.sent_before,
        )

    # Between the last but one and the second all of it grows or shrinks evenly, but for a change of kind.
    names = row.last_recomputed | {1: "second", blocks - 2: "last but one", blocks - 1: "last", 0: "first"}
    if 1 < layout.blocks_ahead < blocks - 2:
        names |= {layout.blocks_ahead: "third"}
    return [
        *(backward(number, names[number]) for number in sorted(names, reverse=True) if 0 <= number < blocks),
        _parts_at(
            "reduction outside the blocks",
            gathered=0 if _reduced_once(layout) or layout.zero == 3 else gathering.everything,
            gradients=reduction.stay + blocks * reduction.grown + 4 / shards * outside + reduction.leaving,
            # Copied together, when nothing is reduced yet, or reduced.
            workspace=max((own + 4 - 4 / shards) * outside + (last if alone else 0), 4 * copies * outside + last),
        ),
        *(
            [
                _parts_at(
                    "sums outside the blocks",
                    gathered=gathering.outside,
                    gradients=reduction.stay + unreduced * outside + blocks * reduction.grown + reduction.leaving,
                    # The last micro-batch's gradients, which are made fp32 to be added.
                    workspace=layout.width * (outside + held) + 4 * min(model.head_parameters, outside),
                )
            ]
            if unreduced and layout.device == "cpu"
            else []
        ),
    ]
