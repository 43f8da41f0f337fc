"""What weight files hold, by their headers alone: names, types and shapes, no weight.

A header is checked by the safetensors library (sizes, offsets and types that do not add up are refused there, and
nothing is allocated for what a header claims); here its refusals become sentences, and what is no safetensors file at
all is called by its name. What else a stranger has written, as JSON, is read within bounds as well.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from tonnage.errors import Problem, UserError, user_error

HALF_A_PAIR = re.compile(r"\\u[dD][89a-fA-F]")
LARGEST_JSON = 64 << 20
"""Bytes of an index or a configuration; the largest index that is published has 16 MB."""
ROWS = 4096
"""Of two matrices that are compared at a time."""
MAPPED_BYTES = 16 << 20
"""Bytes of a file, counted with its numbers in fp32, that are mapped at a time."""
MOST_TENSORS = 500_000
"""Tensors in all files of a model. The largest that is published (384 experts in 61 blocks, quantised) has some
280,000."""
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
"""Types, in the words of safetensors, whose numbers are weights as they stand."""
WIDTHS = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 1),
}
"""Bytes of a number, by the words of safetensors, where it is not 4."""
BEGINNINGS = (
    (b"PK\x03\x04", "a pickle of torch.save"),
    (b"\x80", "a pickle"),
    (b"GGUF", "a GGUF file"),
    (b"version https://git-lfs", "a pointer of git-lfs, not the file"),
    (b"\x93NUMPY", "an array of numpy"),
    (b"\x89HDF", "an HDF5 file"),
)


@dataclass(frozen=True)
class StoredTensor:
    key: str
    file: Path
    dtype: str
    """In the words of safetensors, such as ``BF16``."""
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * WIDTHS.get(self.dtype, 4)

    def view(self) -> Any:
        """Reads parts of a tensor whose file stores it in another form than this describes; None for any other."""
        return None

    @property
    def is_float(self) -> bool:
        """Whether its numbers are weights as they stand."""
        return self.dtype in FLOATS


def read_headers(files: Sequence[Path], index: Mapping[str, str] | None = None) -> tuple[StoredTensor, ...]:
    """All tensors of safetensors ``files``, in the order of the files.

    Of a tensor that several files hold, the one in the file that ``index`` (its name -> name of a file) says counts,
    else the last.

    Raises:
        UserError: a file is no whole safetensors file; every such file is named.
    """
    tensors: dict[str, StoredTensor] = {}
    problems = []
    for file in files:
        try:
            with safe_open(file, framework="pt") as source:
                for key in source.keys():  # noqa: SIM118
                    view = source.get_slice(key)
                    if key not in tensors or (index or {}).get(key) in (None, file.name):
                        tensors[key] = StoredTensor(key, file, view.get_dtype(), tuple(view.get_shape()))
        except (SafetensorError, OSError, ValueError, OverflowError) as error:
            problems.append(_no_safetensors(file, error))
        if len(tensors) > MOST_TENSORS:
            needed = f"at most {MOST_TENSORS:,}"
            raise user_error(f"more than {MOST_TENSORS:,} tensors", needed, "give a model", str(file))
    if problems:
        raise UserError(*problems)
    return tuple(tensors.values())


def place_of(tensor: StoredTensor) -> tuple[int, int]:
    """Offset and size in its file, in bytes, of the numbers of a tensor that the file stores as it is."""
    with tensor.file.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    start, end = header[tensor.key]["data_offsets"]
    return 8 + length + start, end - start


class Reopened:
    """Slices of a tensor whose file is mapped while one is read, and no longer."""

    def __init__(self, stored: StoredTensor) -> None:
        self._one = stored

    def __getitem__(self, where: Any) -> Any:
        with safe_open(self._one.file, framework="pt") as source:
            return source.get_slice(self._one.key)[where]


def read(stored: Sequence[StoredTensor]) -> Iterator[tuple[StoredTensor, Any]]:
    """The tensors of weight files as (what is stored, slice to read from), file by file in the order of the files.

    A file is mapped, and pages that were read count as this process's memory until it is unmapped, so it is opened
    anew after every ``MAPPED_BYTES``, and for every slice of a tensor that is larger.
    """
    by_file: dict[Path, list[StoredTensor]] = {}
    for tensor in stored:
        by_file.setdefault(tensor.file, []).append(tensor)
    for file, waiting in by_file.items():
        waiting.reverse()
        while waiting:
            mapped = 0
            with safe_open(file, framework="pt") as source:
                while waiting and mapped < MAPPED_BYTES:
                    tensor = waiting.pop()
                    large = 4 * math.prod(tensor.shape) > MAPPED_BYTES
                    view = tensor.view() or (Reopened(tensor) if large else source.get_slice(tensor.key))
                    mapped += 0 if large else 4 * math.prod(tensor.shape)
                    yield tensor, view
                    del view


def _no_safetensors(file: Path, error: Exception) -> Problem:
    try:
        with file.open("rb") as source:
            beginning = source.read(32)
    except OSError:
        beginning = b""
    kind = next((what for start, what in BEGINNINGS if beginning.startswith(start)), None)
    reason = str(error).removeprefix("Error while deserializing header: ").split("\n")[0][:200]
    if "not fully covered" in reason:
        reason = "it is cut short, or longer than its header says"
    change = "git lfs pull" if kind and "git-lfs" in kind else "download it again, or save the model as safetensors"
    return Problem(
        where=str(file),
        found=f"{kind} that is named as safetensors" if kind else f"no whole safetensors file: {reason}",
        needed="a safetensors file",
        change=change,
    )


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON file of a stranger's that holds one object.

    Raises:
        UserError: it does not, or it is too large to be what it should be.
    """
    observed = ""
    try:
        if not path.is_file():
            observed = "no regular file"
        elif (size := path.stat().st_size) > LARGEST_JSON:
            observed = f"a file of {size:,} bytes"
        else:
            text = path.read_bytes().decode("utf-8")
            value = json.loads(text)
            if HALF_A_PAIR.search(text):
                json.dumps(value, ensure_ascii=False).encode("utf-8")
            if isinstance(value, dict):
                return value
            observed = f"JSON that is {_kind(value)}, not an object"
    except UnicodeError:
        observed = "text that is not UTF-8"
    except (ValueError, RecursionError) as error:
        observed = f"no JSON ({'nested too deep' if isinstance(error, RecursionError) else str(error)[:100]})"
    except OSError as error:
        observed = f"a file that cannot be read ({error.strerror})"
    needed = f"a JSON object of at most {LARGEST_JSON >> 20} MiB"
    raise user_error(observed, needed, "download the model again, or mend the file", str(path))


def _kind(value: object) -> str:
    kinds = {list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return kinds.get(type(value), "null")


def same_numbers(first: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors hold the same numbers, in whatever types."""
    if first.shape != other.shape:
        return False
    for start in range(0, first.shape[0], ROWS):
        rows = slice(start, start + ROWS)
        (_, a), (_, b) = next(read([first])), next(read([other]))
        if not (a[rows].float() == b[rows].float()).all():
            return False
    return True
