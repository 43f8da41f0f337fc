"""Files of tensors: one per rank, written in one pass, read by byte range on any number of ranks.

A file is safetensors in the form of torch's DCP (``torch.distributed.checkpoint.hf_storage``): its metadata holds, for
every tensor, at which offset of the whole tensor the stored part lies. So ``HuggingFaceStorageReader`` reads it, and
so does everything that reads safetensors. It is written here and not by DCP because DCP's writer builds the file in
memory before it writes it (a second copy of the state), and gathers and scatters a plan over the ranks first. Which
rank writes what follows from the mesh alone (``held_parts``), so a save needs no collective, and can go on in the
background while the ranks' collectives belong to training.

Bytes are hashed on their way to the disk, past the page cache. A file is on the disk when ``write_file`` returns.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from tonnage.errors import user_error
from tonnage.kernels.regions import Region, region_of
from tonnage.model.dtypes import DTYPES
from tonnage.offload.files import NewFile

OFFSETS_KEY = "DCP_SHARDING_INFO"
CHUNK_BYTES = 16 << 20

FAST_HASH, PUBLIC_HASH = "xxh3_128", "sha256"
HASHES: dict[str, Callable[[], Any]] = {FAST_HASH: xxhash.xxh3_128, PUBLIC_HASH: hashlib.sha256}
"""What says that a file is as it was written. Checkpoints have the first: a save goes on beside training, and a core
does 12 GB/s of it where SHA-256 does 1.5. Exports have the second, which others compare as well."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorPart:
    """What one rank holds of a tensor."""

    name: str
    offset: tuple[int, ...]
    """Where it lies in the whole tensor."""
    tensor: Tensor
    """Its values: memory of the rank, on any device."""


def held_parts(tensors: Mapping[str, Tensor], mesh: DeviceMesh) -> list[TensorPart]:
    """The parts that this rank has to save: together, the ranks save everything once.

    What several ranks hold is dealt to them, each time to the one with the fewest bytes so far; every rank computes the
    same. They are those along the axes of ``mesh`` on which a tensor is replicated or not distributed at all (what is
    frozen below ZeRO 3). A stage of a pipeline alone has its tensors.
    """
    parts = []
    loads: dict[int, list[int]] = {}
    for name, tensor in tensors.items():
        values, region = region_of(tensor)
        place, num_places = _place_among_replicas(tensor, mesh)
        taken = loads.setdefault(num_places, [0] * num_places)
        taker = taken.index(min(taken))
        taken[taker] += tensor.nbytes
        if place == taker and values.numel():
            parts.append(TensorPart(name, tuple(r.start for r in region), values))
    return parts


def _place_among_replicas(tensor: Tensor, mesh: DeviceMesh) -> tuple[int, int]:
    """This rank's number among those that hold the same part of a tensor, and how many they are."""
    placements: dict[str, Placement] = {}
    if isinstance(tensor, DTensor):
        names = tensor.device_mesh.mesh_dim_names
        assert names is not None
        placements = dict(zip(names, tensor.placements, strict=True))
    place, num_places = 0, 1
    for axis in mesh.mesh_dim_names or ():
        if axis != "pipeline" and isinstance(placements.get(axis, Replicate()), Replicate):
            place = place * mesh[axis].size() + mesh.get_local_rank(axis)
            num_places *= mesh[axis].size()
    return place, num_places


def in_file_order(parts: Iterable[TensorPart]) -> list[TensorPart]:
    """Wide data types first, so that every tensor is aligned in a file, or a buffer, that holds one after another."""
    return sorted(parts, key=lambda part: (-part.tensor.element_size(), part.name))


def counting(total: int, progress: Callable[[int, int], None]) -> Callable[[int], None]:
    """A function that takes numbers of bytes, one after another, and tells ``progress`` how many of ``total`` are
    done."""
    done = 0

    def advance(num_bytes: int) -> None:
        nonlocal done
        done = min(done + num_bytes, total)
        progress(done, total)

    return advance


def write_file(
    path: Path,
    parts: Iterable[TensorPart],
    advanced: Callable[[int], None] = lambda num_bytes: None,
    *,
    in_parts: bool = True,
    hash_name: str = FAST_HASH,
) -> str:
    """Write parts as a new file; returns its hash (one of ``HASHES``) once all of it is on the disk.

    No more memory is taken than a chunk for values that lie on another device. ``advanced`` is called with the bytes of
    every chunk written. ``in_parts=False``: the tensors are whole, and the file says nothing of offsets.
    """
    parts = in_file_order(parts)
    described: dict[str, Any] = {}
    end = 0
    for part in parts:
        described[part.name] = {
            "dtype": _NAMES[part.tensor.dtype],
            "shape": list(part.tensor.shape),
            "data_offsets": [end, end + part.tensor.nbytes],
        }
        end += part.tensor.nbytes
    described["__metadata__"] = {"format": "pt"}
    if in_parts:
        offsets = {part.name: {"saved_offsets": list(part.offset)} for part in parts}
        described["__metadata__"] |= {OFFSETS_KEY: json.dumps(offsets), "DCP_VERSION": "1.0"}
    header = json.dumps(described, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)

    digest = HASHES[hash_name]()
    file = NewFile(path)
    try:

        def put(data: memoryview) -> None:
            digest.update(data)
            file.put(data)
            advanced(len(data))

        put(memoryview(len(header).to_bytes(8, "little") + header))
        for part in parts:
            flat = part.tensor.detach().contiguous().view(-1).view(torch.uint8)
            for chunk in flat.split(CHUNK_BYTES):
                put(memoryview(chunk.cpu().numpy()))
        file.finish()
    finally:
        file.close()
    return str(digest.hexdigest())


@dataclass(frozen=True)
class PartOnDisk:
    """Where a part of a tensor lies on disk."""

    file: Path
    dtype: torch.dtype
    position: int
    """First byte of its values in the file."""
    offset: tuple[int, ...]
    """Where it lies in the whole tensor."""
    shape: tuple[int, ...]

    def overlap(self, region: Region) -> tuple[Region, Region] | None:
        """What this part has of ``region``: as a region of this part and as one of ``region``; None if nothing."""
        inside: list[slice] = []
        outside: list[slice] = []
        for wanted, offset, size in zip(region, self.offset, self.shape, strict=True):
            start, stop = max(wanted.start, offset), min(wanted.stop, offset + size)
            if start >= stop:
                return None
            inside.append(slice(start - offset, stop - offset))
            outside.append(slice(start - wanted.start, stop - wanted.start))
        return tuple(inside), tuple(outside)


class Shards:
    """The tensors of a checkpoint, read region by region from whatever files hold them.

    Opening reads the files' headers. A read takes the bytes of its region (of whole rows, if a region cuts other
    dimensions than the first) through a buffer of ``CHUNK_BYTES``: files are not mapped, so that what is resident is
    what was asked for, and a file that was cut short is an error and not a signal.

    Raises:
        UserError: a file is not whole safetensors.
    """

    def __init__(self, checkpoint: Path) -> None:
        self.path = checkpoint
        self._stored: dict[str, list[PartOnDisk]] = defaultdict(list)
        for file in sorted(checkpoint.glob("*.safetensors")):
            for name, stored in read_header(file).items():
                if any(len(other.shape) != len(stored.shape) for other in self._stored[name]):
                    observed = f"parts of {name} with another number of dimensions than elsewhere"
                    raise user_error(observed, "the file as it was written", where=str(file))
                self._stored[name].append(stored)

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def names(self, prefix: str = "") -> list[str]:
        """Names of the tensors that begin with ``prefix``, in order."""
        return sorted(name for name in self._stored if name.startswith(prefix))

    def dtype(self, name: str) -> torch.dtype:
        """Data type of a tensor as it is stored."""
        return self._stored[name][0].dtype

    def shape(self, name: str) -> tuple[int, ...]:
        ends = ([o + n for o, n in zip(part.offset, part.shape, strict=True)] for part in self._stored[name])
        return tuple(max(sizes) for sizes in zip(*ends, strict=True))

    @torch.no_grad()
    def read_into(self, target: Tensor, name: str, region: Region) -> None:
        """Fill ``target`` with a region of a tensor, in the data type and on the device of ``target``.

        Raises:
            UserError: the files do not hold all of the region.
        """
        filled = 0
        for part in self._stored.get(name, ()):
            if (overlap := part.overlap(region)) is not None:
                inside, outside = overlap
                _read(part, inside, target[outside])
                filled += math.prod(side.stop - side.start for side in inside)
        missing = math.prod(side.stop - side.start for side in region)
        if filled != missing:
            raise user_error(
                where=str(self.path),
                found=f"{filled:,} of {missing:,} values of {name}",
                needed="every shard of the checkpoint",
                change="restore the missing files, or use an earlier checkpoint",
            )

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """A region of a tensor, or all of it, as it is stored. Raises as ``read_into``."""
        if region is None:
            region = tuple(slice(0, size) for size in self.shape(name))
        target = torch.empty([side.stop - side.start for side in region], dtype=self.dtype(name))
        self.read_into(target, name, region)
        return target


def read_header(file: Path) -> dict[str, PartOnDisk]:
    """The tensors that a file holds, by name. Raises ``UserError`` if it is not whole safetensors."""
    try:
        return _read_header(file)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
        raise user_error(
            where=str(file),
            found=f"a file that is not whole safetensors: {error}",
            needed="the file as it was written",
            change="restore it, or use an earlier checkpoint",
        ) from error


def _read_header(file: Path) -> dict[str, PartOnDisk]:
    size = file.stat().st_size
    with file.open("rb") as source:
        length = int.from_bytes(source.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(f"its header does not fit into {size:,} bytes")
        described = json.loads(source.read(length))
    sharding = json.loads(described.pop("__metadata__", {}).get(OFFSETS_KEY, "{}"))
    start = end = 8 + length
    tensors = {}
    for name, entry in described.items():
        dtype, shape = DTYPES[entry["dtype"]], _sizes(entry["shape"])
        first, last = _sizes(entry["data_offsets"])
        if last - first != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"the size of {name} is not that of its shape")
        end = max(end, start + last)
        offset = _sizes(sharding[name]["saved_offsets"]) if name in sharding else (0,) * len(shape)
        if len(offset) != len(shape):
            raise ValueError(f"the place of {name} has {len(offset)} dimensions, its shape {len(shape)}")
        tensors[name] = PartOnDisk(file, dtype, start + first, offset, shape)
    if end != size:
        raise ValueError(f"{size:,} bytes instead of {end:,}")
    return tensors


def _sizes(values: list[Any]) -> tuple[int, ...]:
    """A list of sizes or positions. Raises ``TypeError`` for what is none."""
    if not all(type(value) is int and value >= 0 for value in values):
        raise TypeError(f"{str(values)[:60]} are no sizes")
    return tuple(values)


def _read(part: PartOnDisk, region: Region, target: Tensor) -> None:
    """Fill ``target`` with a region of a stored part."""
    shape = part.shape
    if not shape:
        shape, region, target = (1,), (slice(0, 1),), target.view(1)
    row_bytes = math.prod(shape[1:]) * part.dtype.itemsize
    rows, first = max(1, CHUNK_BYTES // row_bytes), region[0].start
    with part.file.open("rb", buffering=0) as file:
        for start in range(first, region[0].stop, rows):
            stop = min(start + rows, region[0].stop)
            buffer = torch.empty((stop - start) * row_bytes, dtype=torch.uint8)
            _fill(file, part.position + start * row_bytes, buffer.numpy())
            values = buffer.view(part.dtype).view(stop - start, *shape[1:])
            target[start - first : stop - first].copy_(values[(slice(None), *region[1:])])


def _fill(file: FileIO, position: int, target: Any) -> None:
    """Fill an array of bytes from a position of a file on."""
    buffer = memoryview(target)
    file.seek(position)
    while buffer:
        count = file.readinto(buffer)
        if not count:
            raise user_error(where=str(file.name), found="a file that was cut short", needed="all of it")
        buffer = buffer[count:]


def hash_file(path: Path, hash_name: str, advanced: Callable[[int], None] = lambda num_bytes: None) -> str:
    """A hash of a file (one of ``HASHES``), read in chunks."""
    digest = HASHES[hash_name]()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            advanced(len(chunk))
    return str(digest.hexdigest())
