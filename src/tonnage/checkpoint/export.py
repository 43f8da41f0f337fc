"""Turn a checkpoint into a Hugging Face model directory, without a gather and without the ranks that wrote it.

Tensors are put together from the shards one output file at a time: a file's tensors, and what renaming and splitting
them for the family's file format takes, are all that is in memory, so never more than twice an output file. Where the
run was started from weights, tensors have the names that they had there, and what was not trained is taken from there
as it is (``origin``). The directory is written under a temporary name, read back through the same door as any model to
be trained, and renamed. ``checksums.json`` lists what was written, for ``tonnage verify``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, rename_source_key, revert_weight_conversion

from tonnage.checkpoint.adapter import Additions
from tonnage.checkpoint.compare import Trained
from tonnage.checkpoint.description import describe
from tonnage.checkpoint.origin import Origin, read_origin
from tonnage.checkpoint.publishing import check_empty, published
from tonnage.checkpoint.shards import CHUNK_BYTES, PUBLIC_HASH, Part, Shards, counting, hash_file, write_file
from tonnage.checkpoint.verify import write_checksums
from tonnage.errors import Problem, UserError
from tonnage.host.quantized import Format
from tonnage.kernels.adamw import LOW, join
from tonnage.model.adapters import Adapter
from tonnage.model.build import on_meta
from tonnage.model.matching import sort
from tonnage.model.merging import Match, faults
from tonnage.model.names import Names
from tonnage.model.stored import Stored, read, read_headers

SHARD_BYTES = 4 * 10**9
CARD = "README.md"


@dataclass(frozen=True)
class Form:
    """What is written beside the weights, and their type."""

    config: PreTrainedConfig
    tokenizer: Path
    """A directory whose files are copied."""
    stop_tokens: Sequence[int]
    """End a turn; added to those of the generation configuration that the model has from which a run was started."""
    dtype: torch.dtype


@dataclass(frozen=True)
class Start:
    """What a run was started from."""

    directory: Path
    from_weights: bool = False
    """Whether it was the weights there: tensors have their names then, and what was not trained is taken over."""
    carried_digest: str = ""
    """Of what is no parameter and taken over."""
    base_digest: str = ""
    """Of what was not trained; empty where all of it was."""
    adapter: Adapter | None = None
    """Whose additions were trained."""
    quantize: Format | None = None
    """How weights under it were packed."""

    def origin(self, model: PreTrainedModel) -> Origin | None:
        """The model's own files, where weights came from there."""
        if not self.from_weights:
            return None
        return read_origin(self.directory, model, self.carried_digest, self.base_digest)


def export(
    checkpoint: Path,
    directory: Path,
    form: Form,
    start: Start | None = None,
    *,
    shard_bytes: int = SHARD_BYTES,
    card: Callable[[Sequence[str]], str] | None = None,
    finish: Callable[[Path, Trained], list[str]] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[str]:
    """Write ``checkpoint`` as a model directory that plain transformers loads.

    ``shard_bytes`` is the largest size of a weight file, unless a single tensor is larger. ``card`` makes the model
    card from sentences on the merge. ``finish`` completes the directory before it has its final name, given the run's
    parameters, and returns sentences to report. ``progress`` is told bytes done (written, then read back) and bytes in
    all.

    Returns a sentence for each change to the model's own files, and for what there is to say of the merge.

    Raises:
        UserError: ``directory`` exists and is not empty, the checkpoint is damaged, the origin has not any more what is
            to be carried, or what was written does not load.
    """
    check_empty(directory)
    model = on_meta(form.config, form.dtype)
    source = start.origin(model) if start is not None else None
    weights = _Weights(checkpoint, model, form.dtype)
    if start is not None and start.base_digest:
        weights = _Completed(checkpoint, model, form.dtype, source, start.adapter, start.quantize)
    layout = _Layout(weights, model, source, shard_bytes)
    advance = counting(2 * layout.total, progress)
    with published(directory, f"{layout.total:,} bytes for the weights") as temporary:
        digests = _write_weights(layout, temporary, advance)
        notes = describe(
            temporary,
            layout.model,
            form.config,
            dtype=form.dtype,
            tokenizer=form.tokenizer,
            stop_tokens=form.stop_tokens,
            origin=start.directory if start is not None else None,
            is_part=layout.model is not model,
        )
        if start is not None and start.from_weights and source is None:
            unnamed = f"the model's own files are not in {start.directory} now"
            notes.append(f"names of tensors: as transformers has them, for {unnamed}")
        merged = weights.said()
        notes += merged
        if card is not None:
            (temporary / CARD).write_text(card(merged), encoding="utf-8")
        notes += _check(temporary, model, source, digests, advance)
        if finish is not None:
            notes += finish(temporary, Trained(model, weights.names(), weights.read))
            digests = {name: digest for name, digest in digests.items() if (temporary / name).is_file()}
        write_checksums(temporary, digests, checkpoint.name)
    return notes


class _Weights:
    """The parameters of a checkpoint in the data types of the export; names without the ``model.`` prefix."""

    def __init__(self, checkpoint: Path, model: PreTrainedModel, dtype: torch.dtype) -> None:
        self._shards = Shards(checkpoint)
        self._dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
        self._dtype = dtype

    def names(self) -> list[str]:
        """All of them, in order."""
        return [name.removeprefix("model.") for name in self._shards.names("model.")]

    def said(self) -> list[str]:
        """What there is to say of a merge, when all have been read."""
        return []

    def num_bytes(self, name: str) -> int:
        """Size of one in the data type of the export."""
        return torch.Size(self._shards.shape(f"model.{name}")).numel() * self._dtype_of(name).itemsize

    def read(self, name: str) -> Tensor:
        """One of them, whole.

        A weight of 16 bits has an fp32 master. Where it is asked for in its own type, it is what was trained with, bit
        for bit; in another type, it is the master that is converted. What the model's class has in fp32 whatever
        the type of the rest is exported so.
        """
        stored, low, dtype = f"model.{name}", f"optimizer.{name}.low", self._dtype_of(name)
        shape = self._shards.shape(stored)
        whole = torch.empty(shape, dtype=dtype)
        is_split = self._shards.dtype(stored) in LOW and low in self._shards
        if not is_split or dtype == self._shards.dtype(stored):
            self._shards.read_into(whole, stored, tuple(slice(0, size) for size in shape))
            return whole
        rows = max(1, CHUNK_BYTES // (4 * max(1, torch.Size(shape[1:]).numel())))
        for start in range(0, shape[0], rows):
            region = (slice(start, min(start + rows, shape[0])), *(slice(0, size) for size in shape[1:]))
            whole[region].copy_(join(self._shards.read(stored, region), self._shards.read(low, region)))
        return whole

    def _dtype_of(self, name: str) -> torch.dtype:
        return self._dtypes.get(name, self._dtype)


class _Completed(_Weights):
    """The same of a run that trained only a part of its model, or additions to it: the rest is the origin's, and
    additions are added to its weights in fp32."""

    def __init__(
        self,
        checkpoint: Path,
        model: PreTrainedModel,
        dtype: torch.dtype,
        origin: Origin | None,
        adapter: Adapter | None,
        quantize: Format | None,
    ) -> None:
        super().__init__(checkpoint, model, dtype)
        if origin is None:
            raise UserError(
                Problem(
                    where=str(checkpoint),
                    found="a run that trained a part of its model, whose own files are gone",
                    needed="the files of the model that the run was started from",
                    change="put them back (or download the model again), then export once more",
                )
            )
        self._model, self._origin = model, origin
        self._trained = set(super().names())
        self._additions = Additions.of(self._shards, model, adapter, quantize) if adapter is not None else None
        self._places = {name: stored for stored, name in origin.found.places}
        self._groups = {name: group for group in origin.found.groups for name in group.parameters.values()}

    def names(self) -> list[str]:
        """All parameters of the model, in its order."""
        return [name for name, _ in self._model.named_parameters()]

    def said(self) -> list[str]:
        """What there is to say of a merge, when all have been read."""
        return self._additions.said() if self._additions is not None else []

    def num_bytes(self, name: str) -> int:
        """Size of one in the data type of the export."""
        return self._model.get_parameter(name).numel() * self._dtype_of(name).itemsize

    def read(self, name: str) -> Tensor:
        """One of them, whole, with what was added to it."""
        if name in self._trained:
            return super().read(name)
        if name in self._places:
            ((_, view),) = read([self._places[name]])
            value = view[...]
        else:
            group, whole = self._groups[name], self._origin.found.whole
            tensors = {stored: view[...] for stored, view in read([stored for stored, _ in group.sources])}
            value = group.converted(tensors, whole.model if whole is not None else self._model)[name]
        if self._additions is not None:
            value = self._additions.merged(name, value)
        result: Tensor = value.to(self._dtype_of(name))
        return result


@dataclass(frozen=True)
class _Unit:
    """What goes into one file: parameters that are converted together, or a tensor of the origin."""

    num_bytes: int
    parameters: tuple[str, ...] = ()
    carried: Stored | None = None


class _Layout:
    """Under which names, and in which files, the parameters of a model and what is carried are written."""

    def __init__(self, weights: _Weights, model: PreTrainedModel, origin: Origin | None, shard_bytes: int) -> None:
        self._weights, self._origin = weights, origin
        whole = origin.found.whole if origin is not None else None
        self.model = whole.model if whole is not None else model
        """Whose files these are."""
        self._outer = {own: name for name, own in whole.own.items()} if whole is not None else {}
        self._keys = origin.keys if origin is not None else {}
        self.carried = origin.found.carried if origin is not None else ()
        self.files = list(_filled([*self._trained(), *self._taken_over()], shard_bytes))
        self.total = sum(unit.num_bytes for units in self.files for unit in units)

    def _trained(self) -> Iterator[_Unit]:
        together: dict[str, list[str]] = {}
        converters = _reverse_converters(self.model)
        for name in self._weights.names():
            outer = self._outer.get(name, name)
            unit = outer if name in self._keys else rename_source_key(outer, [], converters)[0]
            together.setdefault(unit, []).append(name)
        for names in together.values():
            yield _Unit(
                sum(self._weights.num_bytes(one) * max(1, len(self._keys.get(one, ()))) for one in names), tuple(names)
            )

    def _taken_over(self) -> Iterator[_Unit]:
        for tensor in self.carried:
            yield _Unit(tensor.num_bytes, carried=tensor)

    def read(self, units: Sequence[_Unit]) -> dict[str, Tensor]:
        """The tensors of a file, under their names there."""
        tensors: dict[str, Tensor] = {}
        converted: dict[str, Tensor] = {}
        for name in (one for unit in units for one in unit.parameters):
            value = self._weights.read(name)
            tensors |= dict.fromkeys(self._keys.get(name, ()), value)
            if name not in self._keys:
                converted[self._outer.get(name, name)] = value
        tensors |= revert_weight_conversion(self.model, converted)
        tensors |= {one.key: view[...] for one, view in read([unit.carried for unit in units if unit.carried])}
        return tensors


def _reverse_converters(model: PreTrainedModel) -> list[Any]:
    """What turns parameters into stored tensors; parameters that one of them names alike are turned together."""
    transforms = get_model_conversion_mapping(model, add_legacy=False)[::-1]
    return [transform.reverse_transform() for transform in transforms if isinstance(transform, WeightConverter)]


def _filled(units: Sequence[_Unit], shard_bytes: int) -> Iterator[list[_Unit]]:
    """The units of every file."""
    group: list[_Unit] = []
    filled = 0
    for unit in units:
        if group and filled + unit.num_bytes > shard_bytes:
            yield group
            group, filled = [], 0
        group.append(unit)
        filled += unit.num_bytes
    yield group


def _write_weights(layout: _Layout, directory: Path, advance: Callable[[int], None]) -> dict[str, str]:
    """Write the weights under the names that files of this family have (transformers renames some on loading).

    Returns the SHA-256 of every file.
    """
    files, digests = layout.files, {}
    weight_map: dict[str, str] = {}
    for number, units in enumerate(files, start=1):
        file = "model.safetensors" if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        tensors = layout.read(units)
        parts = [Part(name, (0,) * tensor.dim(), tensor) for name, tensor in tensors.items()]
        digests[file] = write_file(directory / file, parts, advance, in_parts=False, hash_name=PUBLIC_HASH)
        weight_map |= dict.fromkeys(tensors, file)
        del tensors, parts
    if len(files) > 1:
        metadata = {"total_size": layout.total}
        index: dict[str, Any] = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return digests


def _check(
    directory: Path,
    model: PreTrainedModel,
    origin: Origin | None,
    digests: dict[str, str],
    advance: Callable[[int], None],
) -> list[str]:
    """Read back what was written: byte for byte, and by name and shape as a model of this family.

    Returns what is to be said of the names.
    """
    problems = [
        Problem("other content than was written", "a disk that keeps what it is given", where=str(directory / name))
        for name, digest in digests.items()
        if hash_file(directory / name, PUBLIC_HASH, advance) != digest
    ]
    if problems:
        raise UserError(*problems)
    written = read_headers([directory / name for name in digests])
    whole = origin.found.whole if origin is not None else None
    names = Names(model, whole)
    places = sort(names, written)
    by_key = {tensor.key: tensor for tensor in written}
    before = origin.found if origin is not None else Match(())
    lost = [
        *places.missing,
        *(tensor.key for tensor in before.carried if by_key.get(tensor.key, tensor).shape != tensor.shape),
    ]
    lost += [tensor.key for tensor in before.carried if tensor.key not in by_key]
    wrong = [name for tensor, name in places.places.items() if tensor.shape != tuple(model.get_parameter(name).shape)]
    wrong += [
        problem.found for problem in faults(places.groups, names, whole.model if whole else model, str(directory))
    ]
    if lost or places.unplaced or wrong:
        raise UserError(
            Problem(
                where=str(directory),
                found=f"an export without {', '.join([*lost, *wrong]) or 'nothing'} and with "
                f"{', '.join(tensor.key for tensor in places.unplaced) or 'nothing'} besides",
                needed="exactly the tensors of the model",
                change="report this: it is a defect",
            )
        )
    trained = [tensor for tensor, _ in before.places] + [
        tensor for group in before.groups for tensor, _ in group.sources
    ]
    renamed = [tensor.key for tensor in trained if tensor.key not in by_key]
    if not renamed:
        return []
    several = f"{len(renamed):,} tensors are" if len(renamed) > 1 else "1 tensor is"
    return [
        f"{several} under other names than in the model's files, as transformers has them now ({renamed[0]} was one)"
    ]


def parse_size(text: str) -> int:
    """Bytes of ``500MB``, ``4GB`` or ``2GiB``.

    Raises:
        UserError: it is no such size.
    """
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
    number = text.upper().rstrip("KMGIB").strip()
    unit = text.upper()[len(number) :].strip()
    try:
        size = float(number) * units[unit]
        if size < 1:
            raise ValueError
    except (ValueError, KeyError) as error:
        needed = "a number and a unit, as 500MB, 4GB or 2GiB"
        raise UserError(Problem(f"a size of {text!r}", needed, where="--shard-size")) from error
    return int(size)
