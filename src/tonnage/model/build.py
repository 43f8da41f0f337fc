"""Build a model on the meta device, and give it memory and weights once it is sharded.

The order matters and is the same for one rank and a thousand: build without memory, shard, allocate only the
shard, read only the shard. Weights come from safetensors by byte range, each into the place that ``matching`` found
for it, or from the model's own random initialisation, one unit at a time. No rank, rank 0 included, ever holds a full
copy.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from tonnage.errors import Problem, UserError, user_error
from tonnage.host.stored_forms import stored_form
from tonnage.kernels.gates import use_lean_gates
from tonnage.kernels.norms import use_fast_norms
from tonnage.kernels.products import use_fast_products
from tonnage.kernels.regions import fill_local, region_of
from tonnage.model import attention, experts
from tonnage.model.anatomy import Anatomy, dissect
from tonnage.model.kept import keep_in_fp32
from tonnage.model.scorer import auto_class, head_of
from tonnage.model.stored import StoredTensor, read
from tonnage.model.stored_layers import stored_values
from tonnage.model.zeroed import zero_rows

if TYPE_CHECKING:
    from tonnage.kernels.quantized import PackedWeight
    from tonnage.model.merging import Group, Match
    from tonnage.model.packed_layers import PackedLayer


MOST_SHOWN = 5
PIECE_BYTES = 16 << 20
"""Of a stored tensor that are read at a time, where it has four bytes a number."""
ROWS_BYTES = 256 << 20
"""Of the stored tensors that are stacked at a time, unless a single row takes more."""


def on_meta(config: PreTrainedConfig, dtype: torch.dtype, **how: Any) -> PreTrainedModel:
    """The causal language model, or scorer, that ``config`` describes, every tensor on the meta device, in ``dtype``
    but for those that transformers keeps in fp32.

    ``how`` goes to transformers. Code that came with the model runs if ``config`` names some, which it does only where
    the user allowed that (``files.read_model_config``).

    Raises:
        UserError: the configuration describes no model that can be built.
    """
    trusted = hasattr(config, "auto_map")
    try:
        with torch.device("meta"):
            model = auto_class(config).from_config(config, dtype=dtype, trust_remote_code=trusted, **how)
    except Exception as error:  # whatever the classes of 200 families stumble over
        if isinstance(error, KeyError) and error.args == (attention.NAME,):  # a table of a family's own
            raise UserError(attention.takes_no_function(config.model_type, "the family")) from error
        lines = str(error).strip().split("\n")
        raise user_error(
            where=f"model type {config.model_type}",
            found=f"no model can be built as config.json says ({type(error).__name__}: {lines[0][:300]})",
            needed="the configuration of a causal language model that the installed transformers can build",
            change="mend config.json, or choose another model",
        ) from error
    assert isinstance(model, PreTrainedModel)
    keep_in_fp32(model, dtype)
    return model


def dissected(config: PreTrainedConfig) -> tuple[PreTrainedModel, Anatomy]:
    """The model of ``config``, which stays as it is, in fp32 without memory, and its parts. Raises ``UserError``."""
    model = on_meta(copy.deepcopy(config), torch.float32)
    return model, dissect(model)


def build_on_meta(
    config: PreTrainedConfig, dtype: torch.dtype, vocab_size: int | None = None, attention_name: str = attention.NAME
) -> PreTrainedModel:
    """The model without memory: every tensor on the meta device, packed attention wired in.

    ``vocab_size`` larger than the configuration's grows the embedding and the head (the configuration is changed).
    With another ``attention_name`` attention is one of transformers' own, which knows no documents in a row.
    """
    if vocab_size is not None and vocab_size > config.vocab_size:
        config.vocab_size = vocab_size
    config.use_cache = False
    attention.register()
    model = on_meta(config, dtype, attn_implementation=attention_name, experts_implementation=experts.register())
    if attention_name == attention.NAME:
        attention.check_packable(model)
    use_fast_products(model)
    use_fast_norms(model)
    use_lean_gates(model)
    return model


def allocate(model: PreTrainedModel, device: torch.device, in_place: Iterable[nn.Parameter] = ()) -> None:
    """Give every parameter (or shard of one) and buffer memory on ``device``; compute the buffers.

    Parameters are left uninitialised; those ``in_place`` have memory elsewhere, and keep it. Buffers that checkpoints
    do not hold (rotary frequencies) are computed by the model's own initialisation.

    Raises:
        UserError: a buffer is left without a value, so the family cannot be built this way.
    """
    kept_ids = set(map(id, in_place))
    model._apply(lambda tensor: tensor if id(tensor) in kept_ids else torch.empty_like(tensor, device=device))
    head = head_of(model)
    if head is not None and next(head.parameters(), None) is not None:  # a stage without a head has none to tie
        model.tie_weights()
    buffers = dict(model.named_buffers())
    for buffer in buffers.values():
        if buffer.is_floating_point():
            buffer.fill_(float("nan"))
    _compute_buffers(model, model.modules())
    unset = [name for name, buffer in buffers.items() if buffer.is_floating_point() and buffer.isnan().any()]
    if unset:  # by the family's initialisation: then by its constructors
        filled = dict(_with_buffers(model.config).named_buffers())
        for name in unset:
            if name in filled:
                buffers[name].copy_(filled[name])
    _check_set(model, {name: buffers[name] for name in unset})


def allocate_part(model: PreTrainedModel, names: Collection[str], device: torch.device) -> None:
    """Give those parameters and buffers of ``model`` memory that are named, and compute the buffers, as ``allocate``
    does with all. Raises ``UserError`` where a buffer is left without a value."""
    computed: dict[str, Tensor] = {}
    parts: list[nn.Module] = []
    for path, module in model.named_modules():
        for members in (module._parameters, module._buffers):
            for leaf, tensor in members.items():
                name = f"{path}.{leaf}" if path else leaf
                if tensor is None or name not in names:
                    continue
                empty = torch.empty_like(tensor, device=device)
                if isinstance(tensor, nn.Parameter):
                    members[leaf] = nn.Parameter(empty, requires_grad=False)
                    continue
                members[leaf] = computed[name] = empty.fill_(float("nan")) if empty.is_floating_point() else empty
                parts.append(module)
    _compute_buffers(model, dict.fromkeys(parts))
    _check_set(model, computed)


def _check_set(model: PreTrainedModel, buffers: Mapping[str, Tensor]) -> None:
    if unset := [name for name, value in buffers.items() if value.is_floating_point() and value.isnan().any()]:
        raise user_error(
            where=f"model type {model.config.model_type}",
            found=f"buffers with no initial value: {', '.join(unset[:3])}",
            needed="a family whose buffers transformers can compute",
            change="choose another model family",
        )


@torch.no_grad()
def fill_part(model: PreTrainedModel, places: Mapping[str, StoredTensor]) -> None:
    """Fill those parameters and buffers that ``places`` names from files. Raises ``UserError`` for other shapes."""
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    by_key = {stored.key: tensors[name] for name, stored in places.items()}
    for stored, view in read(list(places.values())):
        target = by_key[stored.key]
        is_other = target.is_floating_point() and not stored.is_float
        if is_other or stored.shape != tuple(target.shape):
            observed = f"{stored.key} of type {stored.dtype} and shape {stored.shape}"
            needed = f"numbers of {tuple(target.shape)} that are no packed ones"
            raise user_error(observed, needed, "choose a model whose tower is as config.json says", str(stored.file))
        target.copy_(view[...])


@torch.no_grad()
def _compute_buffers(model: PreTrainedModel, modules: Iterable[nn.Module]) -> None:
    initialises = {
        id(part): one for one in model.modules() if isinstance(one, PreTrainedModel) for part in one.modules()
    }
    for module in modules:
        if next(module.buffers(recurse=False), None) is not None:
            with _parameters_on_meta(module):
                initialises[id(module)]._init_weights(module)


def _with_buffers(config: PreTrainedConfig) -> PreTrainedModel:
    """The model whose buffers its constructors filled, all parameters on the meta device."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        on_meta = None if parameter is None else nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        register(module, name, on_meta)

    nn.Module.register_parameter = register_on_meta  # type: ignore[assignment, method-assign]
    try:
        model = auto_class(config).from_config(config, trust_remote_code=hasattr(config, "auto_map"))
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
    assert isinstance(model, PreTrainedModel)
    return model


@contextmanager
def _parameters_on_meta(module: nn.Module) -> Iterator[None]:
    """A module whose parameters can be initialised at no cost, and without a word to other ranks that have parts."""
    parameters, before = module._parameters, dict(module._parameters)
    for name, parameter in before.items():
        if parameter is not None:
            parameters[name] = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"))
    try:
        yield
    finally:
        parameters.update(before)


def initialise_randomly(
    model: PreTrainedModel,
    seed: int,
    progress: Callable[[], None] = lambda: None,
    names: Collection[str] | None = None,
    packed: Mapping[str, PackedLayer] = MappingProxyType({}),
) -> None:
    """Fill the (sharded) parameters, or those of some ``names``, by the model's own random initialisation.

    Each unit (a block, or a module outside the blocks) is built whole on the CPU, initialised by transformers under a
    seed of its own, and copied shard by shard (or ``packed``, by the weight's name), so the values depend on ``seed``
    and on nothing else: not on the number of ranks, the sharding or the order of units.
    """
    if _where_they_lie:
        _fill_where_they_lie(model, seed, names, packed)
        return
    twin = on_meta(model.config, torch.float32)
    targets = {name: parameter for name, parameter in model.named_parameters() if names is None or name in names}
    for path, unit in _units(twin):
        if not any(name in targets or name in packed for name, _ in unit.named_parameters(prefix=path)):
            continue  # in another stage, or loaded
        unit.to_empty(device="cpu")
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_of(path, seed))
            _mark(unit)
            for module in reversed(list(unit.modules())):
                twin._init_weights(module)
            _fill_marked(unit, float(getattr(twin.config, "initializer_range", 0.02)))
        for name, value in unit.named_parameters(prefix=path):
            if name in targets:
                fill_local(targets[name], value)
            elif name in packed:
                packed[name].fill(value)
        unit.to("meta")
        progress()


def _mark(unit: nn.Module) -> None:
    """Let it be seen what is not filled."""
    for value in unit.parameters():
        if value.is_floating_point() and value.numel():
            value.view(-1)[0] = torch.nan


def _fill_marked(unit: nn.Module, deviation: float) -> None:
    """Fill what its class's own rule has not, such as routers of ERNIE 4.5 with transformers 5.17."""
    for name, value in unit.named_parameters():
        if value.is_floating_point() and value.numel() and value.view(-1)[0].isnan():
            _fill(name, value, deviation)


def _fill(name: str, values: Tensor, deviation: float) -> None:
    """Matrices normal, biases zero, other vectors one."""
    if values.dim() > 1:
        values.normal_(std=deviation)
    else:
        values.fill_(0.0 if name.endswith("bias") else 1.0)


_where_they_lie = False


@contextmanager
def filling_where_they_lie() -> Iterator[None]:
    """Within it, random weights are drawn by the device that holds them: in a moment, but other ones for every layout
    and kind of device. For measurements of models that have no weights."""
    global _where_they_lie
    before, _where_they_lie = _where_they_lie, True
    try:
        yield
    finally:
        _where_they_lie = before


@torch.no_grad()
def _fill_where_they_lie(
    model: PreTrainedModel, seed: int, names: Collection[str] | None, packed: Mapping[str, PackedLayer]
) -> None:
    """Of the family's own rules, the deviation alone counts. A GPU draws for what lies on its host too. Every weight
    has a seed of its own, so it does not matter which others there are."""
    draws = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    deviation = float(getattr(model.config, "initializer_range", 0.02))
    with torch.random.fork_rng():
        of_packed = {id(part) for layer in packed.values() for part in layer.parameters().values()}
        for name, parameter in model.named_parameters():
            if id(parameter) in of_packed or (names is not None and name not in names):
                continue
            local, _ = region_of(parameter.data)
            drawn = local if local.device.type == draws.type else torch.empty_like(local, device=draws)
            torch.manual_seed(seed_of(name, seed))
            _fill(name, drawn, deviation)
            if drawn is not local:
                local.copy_(drawn)
        for path, layer in packed.items():
            device = next(iter(layer.parameters().values())).device
            torch.manual_seed(seed_of(path, seed))
            layer.fill(torch.randn(layer.shape, device=device).mul_(deviation))


def load_weights(
    model: PreTrainedModel,
    match: Match,
    seed: int,
    progress: Callable[[], None] = lambda: None,
    packed: Sequence[PackedLayer] = (),
    in_place: Collection[str] = (),
    changed: Callable[[str, Tensor], Tensor] = lambda name, value: value,
) -> None:
    """Read this rank's part of every parameter from where ``match``, of the whole model, says that it is stored.

    Only the byte ranges of the local shard are read. Parameters that are allowed to be missing are initialised
    randomly; what is in other stages alone is passed over. A grown embedding keeps the stored rows; the new rows get
    the mean of the old ones. Tensors are merged or split on the CPU, one group at a time. Rows that transformers sets
    to zero on loading are zero. ``progress`` is called after every tensor, or group of them. The weights of ``packed``
    layers are packed as they are read, one at a time, each as it is ``changed`` first; parameters that are ``in_place``
    are only checked to be finite.

    Raises:
        UserError: a weight is not finite.
    """
    targets = dict(model.named_parameters())
    narrow = {layer.path: layer for layer in packed}
    places = dict(match.places)
    problems = []
    for stored, view in read([stored for stored, name in match.places if name in targets]):
        if places[stored] in in_place:
            num_lost = num_not_finite(targets[places[stored]].data)
        else:
            num_lost = _read_shard(targets[places[stored]], view, stored.shape)
            if places[stored] in match.zeroed:
                zero_rows(targets[places[stored]], match.zeroed[places[stored]])
        if num_lost > 0:
            problems.append(_not_finite(stored, num_lost, targets[places[stored]].dtype))
        progress()
    groups = [group for group in match.groups if not targets.keys().isdisjoint(group.parameters.values())]
    twin = match.whole.model if match.whole is not None else None
    for group in groups:
        twin = twin or on_meta(copy.deepcopy(model.config), torch.bfloat16)
        held = {name: targets[name] for name in group.parameters.values() if name in targets}
        problems += [_not_finite(group.sources[0][0], *lost) for lost in _read_group(held, group, twin)]
        progress()
    for layer, whole in packed_values(match, list(narrow.values()), model, twin):
        layer.fill(changed(layer.path, whole) if isinstance(whole, Tensor) else whole)
        progress()
    if problems:
        raise UserError(*problems[:MOST_SHOWN])
    if match.missing:
        initialise_randomly(model, seed, progress, match.missing)


def values_of(
    match: Match, names: Collection[str], model: PreTrainedModel, twin: PreTrainedModel | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Whole parameters as they are stored, of some ``names``; ``twin`` is the model of the files on the meta device, if
    there is one."""
    if twin is None and match.whole is not None:
        twin = match.whole.model
    places = {stored: name for stored, name in match.places if name in names}
    for stored, view in read(list(places)):
        yield places[stored], view[...]
    for group in match.groups:
        if of_group := [name for name in group.parameters.values() if name in names]:
            twin = twin or on_meta(copy.deepcopy(model.config), torch.bfloat16)
            values = group.read(twin)
            for name in of_group:
                yield name, values.pop(name)


def packed_values(
    match: Match, layers: Sequence[PackedLayer], model: PreTrainedModel, twin: PreTrainedModel | None = None
) -> Iterator[tuple[PackedLayer, Tensor | PackedWeight]]:
    """What is stored for ``layers``, whole: numbers, or what already has a layer's form. ``twin`` as for
    ``values_of``."""
    if twin is None and match.whole is not None:
        twin = match.whole.model
    by_path = {layer.path: layer for layer in layers}
    forms = {path: layer.form for path, layer in by_path.items() if stored_form(layer.form) is not None}
    if forms:
        twin = twin or on_meta(copy.deepcopy(model.config), torch.bfloat16)
        for name, packed in stored_values(match, forms, twin):
            yield by_path[name], packed
    for name, value in values_of(match, by_path.keys() - forms.keys(), model, twin):
        yield by_path[name], value


def load_buffers(model: PreTrainedModel, matched: Match) -> None:
    """Read what is stored, by ``matched``, beside the parameters, such as the bias of a router, whole on every rank.

    A buffer keeps the type that it has in the model.
    """
    places = dict(matched.buffers)
    buffers = dict(model.named_buffers())
    for stored, view in read([stored for stored, name in matched.buffers if name in buffers]):
        name, buffer = places[stored], buffers[places[stored]]
        owner, _, last = name.rpartition(".")
        model.get_submodule(owner)._buffers[last] = view[...].to(buffer.device, buffer.dtype)


def _not_finite(stored: StoredTensor, number: int, dtype: torch.dtype) -> Problem:
    return Problem(
        where=f"{stored.file}: {stored.key}",
        found=f"{number:,} of the values that were read are not finite as {str(dtype).removeprefix('torch.')}",
        needed="weights without NaN and infinity",
        change="use a whole copy of the model, or an earlier checkpoint of it",
    )


def _units(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """Blocks, and every module outside them that holds parameters of its own; (path, module)."""
    block_names = set(model._no_split_modules or ())
    inside: tuple[str, ...] = ()
    for path, module in model.named_modules():
        if path.startswith(inside) and inside:
            continue
        is_block = type(module).__name__ in block_names
        if is_block or next(module.parameters(recurse=False), None) is not None:
            inside = (*inside, path + ".")
            yield path, module


def seed_of(path: str, seed: int) -> int:
    """The seed of the random numbers of a unit or parameter."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{path}".encode()).digest()[:7], "big")


@torch.no_grad()
def _read_shard(target: Tensor, view: Any, shape: tuple[int, ...]) -> int:
    """Copy the rows of ``view`` (a safetensors slice of ``shape``) that the local shard of ``target`` holds; returns
    how many of the values are not finite there."""
    local, region = region_of(target.data)
    if not local.numel():
        return 0
    if not shape:
        local.copy_(view[...])
        return num_not_finite(local)
    rows = region[0]
    stop = min(rows.stop, shape[0])
    some = max(1, PIECE_BYTES // max(1, local[:1].numel() * 4))
    for start in range(rows.start, stop, some):
        piece = slice(start, min(start + some, stop))
        local[start - rows.start : piece.stop - rows.start].copy_(view[(piece, *region[1:])])
    if rows.stop > shape[0]:
        fresh = local[max(0, shape[0] - rows.start) :]
        total = torch.zeros(target.shape[1:], dtype=torch.float32)
        for start in range(0, shape[0], 4096):
            total += view[start : min(start + 4096, shape[0])].float().sum(0)
        fresh.copy_((total / shape[0]).expand_as(fresh))
    return num_not_finite(local)


@torch.no_grad()
def _read_group(targets: Mapping[str, Tensor], group: Group, twin: PreTrainedModel) -> list[tuple[int, torch.dtype]]:
    """Fill the local shards of ``targets`` with what comes of a group. Returns, for each with values that are not
    finite, their number and the type.

    ``twin`` is the model of the files on the meta device. Where rows of the parameter are whole tensors, those of the
    shard's rows are read, some at a time; else all of the group.
    """
    shards = {name: region_of(parameter.data) for name, parameter in targets.items()}
    shards = {name: (local, region) for name, (local, region) in shards.items() if local.numel()}
    if not shards:
        return []
    rows = group.row_sources()
    if rows is None:
        values = group.read(twin)
        for name, (local, region) in shards.items():
            local.copy_(values.pop(name)[region])
    else:
        ((name, (local, region)),) = shards.items()
        several = max(1, ROWS_BYTES // max(1, sum(stored.num_bytes for stored in rows[0])))
        for start in range(region[0].start, region[0].stop, several):
            stop = min(start + several, region[0].stop)
            value = group.read(twin, rows[start:stop])[name]
            local[start - region[0].start : stop - region[0].start].copy_(value[(slice(None), *region[1:])])
    lost = [(num_not_finite(local), local.dtype) for local, _ in shards.values()]
    return [(number, dtype) for number, dtype in lost if number]


def num_not_finite(values: Tensor) -> int:
    """Whether any is not, the least and the largest tell in half the time of a copy, and without memory for one."""
    if all(bool(end.isfinite()) for end in values.aminmax()):
        return 0
    return int(values.numel() - values.isfinite().sum())
