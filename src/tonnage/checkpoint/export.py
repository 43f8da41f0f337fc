"""Turn a checkpoint into a Hugging Face model directory, without a gather and without the ranks that wrote it.

Tensors are put together from the shards one output file at a time: a file's tensors, and what renaming and splitting
them for the family's file format takes, are all that is in memory, so never more than twice an output file. Where the
run was started from weights, tensors have the names that they had there, and what was not trained is taken from there
as it is (``origin``). The directory is written under a temporary name, read back through the same door as any model to
be trained, and renamed. ``checksums.json`` lists what was written, for ``tonnage verify``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ByteSize, TypeAdapter, ValidationError
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, rename_source_key, revert_weight_conversion

from tonnage.checkpoint.adapter import CARD, Additions
from tonnage.checkpoint.compare import RunParameters
from tonnage.checkpoint.description import ExportForm, describe
from tonnage.checkpoint.origin import Origin, read_origin, trains_tower, with_tower
from tonnage.checkpoint.publishing import check_empty, published
from tonnage.checkpoint.shards import CHUNK_BYTES, PUBLIC_HASH, Shards, TensorPart, counting, write_file
from tonnage.checkpoint.verify import check_written, write_checksums
from tonnage.errors import user_error
from tonnage.host.quantized import Format
from tonnage.kernels.adamw import LOW, join
from tonnage.model.adapters import AdapterSpec
from tonnage.model.build import on_meta
from tonnage.model.matching import sort
from tonnage.model.merging import Match, faults
from tonnage.model.names import Names
from tonnage.model.starts import Origins
from tonnage.model.stored import StoredTensor, read, read_headers
from tonnage.model.towers import in_tower

SHARD_BYTES = 4 * 10**9


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
    adapter: AdapterSpec | None = None
    """Whose additions were trained."""
    quantize: Format | None = None
    """How weights under it were packed."""
    origins: Origins | None = None
    """Where its additions began, if that was a part of the weights."""


def export(
    checkpoint: Path,
    directory: Path,
    form: ExportForm,
    start: Start,
    *,
    shard_bytes: int = SHARD_BYTES,
    card: Callable[[Sequence[str]], str] | None = None,
    finish: Callable[[Path, RunParameters], list[str]] | None = None,
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
    source = None
    if start.from_weights:
        source = read_origin(start.directory, model, start.carried_digest, start.base_digest)
    if trains_tower(Shards(checkpoint)):
        source = with_tower(model, start.directory)
    weights = _Weights(checkpoint, model, form.dtype, source, start)
    origin = source or Origin(Match(()), {})
    layout = _Layout(weights, model, origin, shard_bytes)
    advance = counting(2 * layout.total, progress)
    with published(directory, f"{layout.total:,} bytes for the weights") as temporary:
        digests = _write_weights(layout, temporary, advance)
        notes = describe(temporary, layout.model, form, start.directory, is_part=layout.model is not model)
        if start.from_weights and source is None:
            unnamed = f"the model's own files are not in {start.directory} now"
            notes.append(f"names of tensors: as transformers has them, for {unnamed}")
        merged = weights.said()
        notes += merged
        if card is not None:
            (temporary / CARD).write_text(card(merged), encoding="utf-8")
        notes += _check(temporary, model, origin, digests, advance)
        if finish is not None:
            of_text = [name for name in weights.names if not in_tower(name)]
            written = {name: (temporary / name).stat().st_mtime_ns for name in digests}
            notes += finish(temporary, RunParameters(model, of_text, weights.read))
            left = {path.name: path.stat().st_mtime_ns for path in temporary.iterdir()}
            digests = {name: digest for name, digest in digests.items() if left.get(name) == written[name]}
        write_checksums(temporary, digests, checkpoint.name)
    return notes


class _Weights:
    """The parameters of an export in its data types, by names without the ``model.`` prefix: those of the checkpoint
    and, of a run that trained only a part of its model or additions to it, the origin's, to whose weights additions are
    added in fp32."""

    def __init__(
        self, checkpoint: Path, model: PreTrainedModel, dtype: torch.dtype, origin: Origin | None, start: Start
    ) -> None:
        self._shards, self._model, self._dtype = Shards(checkpoint), model, dtype
        self._dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
        self.names = [name.removeprefix("model.") for name in self._shards.names("model.")]
        """All of them, in order."""
        self._trained = set(self.names)
        self._additions: Additions | None = None
        self._found = Match(())
        if start.base_digest:
            if origin is None:
                raise user_error(
                    where=str(checkpoint),
                    found="a run that trained a part of its model, whose own files are gone",
                    needed="the files of the model that the run was started from",
                    change="put them back (or download the model again), then export once more",
                )
            self.names, self._found = list(self._dtypes), origin.found
            if start.adapter is not None:
                self._additions = Additions(self._shards, model, start.adapter, start.quantize, start.origins)
        self._places = {name: stored for stored, name in self._found.places}
        self._groups = {name: group for group in self._found.groups for name in group.parameters.values()}

    def said(self) -> list[str]:
        """What there is to say of a merge, when all have been read."""
        return self._additions.said() if self._additions is not None else []

    def num_bytes(self, name: str) -> int:
        """Size of one in the data type of the export."""
        trained = name in self._trained
        shape = self._shards.shape(f"model.{name}") if trained else self._model.get_parameter(name).shape
        return math.prod(shape) * self._dtype_of(name).itemsize

    def read(self, name: str) -> Tensor:
        """One of them, whole, with what was added to it."""
        if name in self._trained:
            return self._read_trained(name)
        if name in self._places:
            ((_, view),) = read([self._places[name]])
            value = view[...]
        else:
            whole = self._found.whole
            value = self._groups[name].read(whole.model if whole is not None else self._model)[name]
        if self._additions is not None:
            value = self._additions.merged(name, value)
        result: Tensor = value.to(self._dtype_of(name))
        return result

    def _read_trained(self, name: str) -> Tensor:
        """A parameter of the checkpoint.

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
        rows = max(1, CHUNK_BYTES // (4 * max(1, math.prod(shape[1:]))))
        for start in range(0, shape[0], rows):
            region = (slice(start, min(start + rows, shape[0])), *(slice(0, size) for size in shape[1:]))
            whole[region].copy_(join(self._shards.read(stored, region), self._shards.read(low, region)))
        return whole

    def _dtype_of(self, name: str) -> torch.dtype:
        return self._dtypes.get(name, self._dtype)


@dataclass(frozen=True)
class _Unit:
    """What goes into one file: parameters that are converted together, or a tensor of the origin."""

    num_bytes: int
    parameters: tuple[str, ...] = ()
    carried: StoredTensor | None = None


class _Layout:
    """Under which names, and in which files, the parameters of a model and what is carried are written."""

    def __init__(self, weights: _Weights, model: PreTrainedModel, origin: Origin, shard_bytes: int) -> None:
        self._weights, whole = weights, origin.found.whole
        self.model = whole.model if whole is not None else model
        """Whose files these are."""
        self._outer = {own: name for name, own in whole.own.items()} if whole is not None else {}
        self._keys = origin.keys
        taken_over = (_Unit(tensor.num_bytes, carried=tensor) for tensor in origin.found.carried)
        self.files = list(_filled([*self._trained(), *taken_over], shard_bytes))
        self.total = sum(unit.num_bytes for units in self.files for unit in units)

    def _trained(self) -> Iterator[_Unit]:
        together: dict[str, list[str]] = {}
        converters = _reverse_converters(self.model)
        for name in self._weights.names:
            outer = self._outer.get(name, name)
            unit = outer if name in self._keys else rename_source_key(outer, [], converters)[0]
            together.setdefault(unit, []).append(name)
        for names in together.values():
            yield _Unit(
                sum(self._weights.num_bytes(one) * max(1, len(self._keys.get(one, ()))) for one in names), tuple(names)
            )

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
    """What turns parameters into stored tensors: those together to which one of them gives the same name."""
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
        parts = [TensorPart(name, (0,) * tensor.dim(), tensor) for name, tensor in tensors.items()]
        digests[file] = write_file(directory / file, parts, advance, in_parts=False, hash_name=PUBLIC_HASH)
        weight_map |= dict.fromkeys(tensors, file)
        del tensors, parts
    if len(files) > 1:
        metadata = {"total_size": layout.total}
        index: dict[str, Any] = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return digests


def _check(
    directory: Path, model: PreTrainedModel, origin: Origin, digests: dict[str, str], advance: Callable[[int], None]
) -> list[str]:
    """Read back what was written: byte for byte, and by name and shape as a model of this family.

    Returns what is to be said of the names.
    """
    check_written(directory, digests, advance)
    written = read_headers([directory / name for name in digests])
    before, whole = origin.found, origin.found.whole
    names = Names(model, whole)
    places = sort(names, written)
    by_key = {tensor.key: tensor for tensor in written}
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
        raise user_error(
            where=str(directory),
            found=f"an export without {', '.join([*lost, *wrong]) or 'nothing'} and with "
            f"{', '.join(tensor.key for tensor in places.unplaced) or 'nothing'} besides",
            needed="exactly the tensors of the model",
            change="report this: it is a defect",
        )
    renamed = [tensor.key for tensor in before.sources if tensor.key not in by_key]
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
    has_unit, size = text.strip()[-1:].isalpha(), 0
    with suppress(ValidationError):
        size = int(TypeAdapter(ByteSize).validate_python(text)) if has_unit else 0
    if size < 1:
        needed = "a number and a unit, as 500MB, 4GB or 2GiB"
        raise user_error(f"a size of {text!r}", needed, where="--shard-size")
    return size
