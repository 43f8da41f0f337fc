"""The packed weights of a frozen base, in the cache: packed once, then only read, by as many runs as want them at once.

    packed/KEY/weights      the tensors of all packed layers, one after the other
    packed/KEY/index.json   where each is, and its digest

The key (``planning.space``) stands for the weights, their files and the form. What sharding gives each of several
workers are rows of the same tensors, which they map from one file. An entry is there whole, or not at all
(``data.cache``). It is read and compared with its digests when a run begins; one that is damaged since is removed, and
made again.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from tonnage.data.cache import discard, entry
from tonnage.errors import UserError
from tonnage.files.reading import read_record
from tonnage.kernels.regions import region_of
from tonnage.model.build import packed_values
from tonnage.model.merging import Match
from tonnage.model.packed_layers import PackedLayer
from tonnage.offload.pages import FileRange

WEIGHTS, INDEX = "weights", "index.json"
ALIGNED = 64
"""Bytes of which the start of every tensor is a multiple."""
READ_BYTES = 8 << 20


@dataclass(frozen=True)
class Packed:
    """A tensor in the file."""

    name: str
    """As a parameter of the model."""
    start: int
    num_bytes: int
    digest: str


@dataclass(frozen=True)
class Index:
    """What an entry says of itself."""

    tensors: list[Packed]


def packed_base(
    directory: Path,
    model: PreTrainedModel,
    match: Match,
    layers: Sequence[PackedLayer],
    progress: Callable[[], None] = lambda: None,
    log: Callable[[str], None] = lambda message: None,
) -> dict[str, FileRange]:
    """Where the packed tensors of ``layers`` of ``model`` lie in the cache's ``directory``, by the names of their
    parameters: packed now from where ``match`` says that the weights are, if they are not there yet.

    ``progress`` is called after every layer, and while another process packs the same ones.

    Raises:
        UserError: the cache cannot be written, or others may have written it; a weight is not finite.
    """
    names = {f"{layer.path}_{part}" for layer in layers for part in layer.parameters()}

    def build(new: Path) -> None:
        log(f"packing {len(layers):,} weights, once: {directory}")
        _write(new, model, match, layers, progress)

    def read() -> dict[str, FileRange] | None:
        return _read(directory, names, progress)

    if entry(directory, build, progress):
        log("packed; later runs only read them")
    places = read()
    if places is None:
        log(f"{directory} is damaged: its weights are packed again")
        discard(directory, lambda: read() is None)
        entry(directory, build, progress)
        places = read()
        assert places is not None, "what was just written is not what is read"
    return places


def _write(
    directory: Path, model: PreTrainedModel, match: Match, layers: Sequence[PackedLayer], progress: Callable[[], None]
) -> None:
    tensors = list[Packed]()
    with (directory / WEIGHTS).open("wb") as file:
        for layer, value in packed_values(match, layers, model):
            for part, tensor in layer.packed(value).named().items():
                content = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
                digest = hashlib.blake2b(content, digest_size=16).hexdigest()
                tensors.append(Packed(f"{layer.path}_{part}", file.tell(), content.nbytes, digest))
                file.write(content)
                file.write(bytes(-file.tell() % ALIGNED))
            progress()
    (directory / INDEX).write_text(json.dumps(asdict(Index(tensors))), encoding="utf-8")


def _read(directory: Path, names: set[str], progress: Callable[[], None]) -> dict[str, FileRange] | None:
    """The places of tensors by their ``names``; None if these are not what is there, undamaged."""
    try:
        tensors = read_record(directory / INDEX, Index).tensors
        if {tensor.name for tensor in tensors} != names:
            return None
        with (directory / WEIGHTS).open("rb") as file:
            for tensor in tensors:
                file.seek(tensor.start)
                digest, left = hashlib.blake2b(digest_size=16), tensor.num_bytes
                while left and (content := file.read(min(READ_BYTES, left))):
                    digest.update(content)
                    left -= len(content)
                if left or digest.hexdigest() != tensor.digest:
                    return None
                progress()
    except (OSError, UserError):
        return None
    return {tensor.name: FileRange(directory / WEIGHTS, tensor.start, tensor.num_bytes) for tensor in tensors}


def shards_of(model: PreTrainedModel, whole: Mapping[str, FileRange]) -> dict[str, FileRange]:
    """Of tensors that lie ``whole`` in a file, the places of the rows that this rank has."""
    shards = {}
    for name, parameter in model.named_parameters():
        if (place := whole.get(name)) is not None:
            local, region = region_of(parameter.data)
            each = place.num_bytes // math.prod(parameter.shape[:1])
            start = region[0].start if region else 0
            shards[name] = FileRange(place.file, place.start + start * each, local.nbytes)
    return shards


@torch.no_grad()
def fill(model: PreTrainedModel, places: Mapping[str, FileRange]) -> None:
    """Copy what lies at ``places`` into the parameters of ``model``."""
    parameters = dict(model.named_parameters())
    for name, place in places.items():
        local, _ = region_of(parameters[name].data)
        if place.num_bytes:
            with place.file.open("rb") as file:
                file.seek(place.start)
                content = bytearray(file.read(place.num_bytes))
            local.copy_(torch.frombuffer(content, dtype=local.dtype).view(local.shape))
