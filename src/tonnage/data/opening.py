"""Files opened as they are, or unpacked on the way."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from pathlib import Path
from typing import IO, cast

PACKED = (".gz", ".zst", ".bz2", ".xz")
"""Endings of files that are unpacked while they are read."""
DAMAGED = (OSError, EOFError, ValueError, lzma.LZMAError, zlib.error)
"""What reading may raise where a packed file is damaged, or none."""


def packing_of(path: Path) -> str:
    """The ending of a file that has to be unpacked; nothing for one that has not."""
    return next((ending for ending in PACKED if path.name.lower().endswith(ending)), "")


def kind_suffix(path: Path) -> str:
    """The ending that says what a file holds, in small letters, apart from that of its packing."""
    name = path.name.lower().removesuffix(packing_of(path))
    return Path(name).suffix


def open_file(path: Path) -> IO[bytes]:
    """The bytes of a file. Reading may raise any of ``DAMAGED``."""
    match packing_of(path):
        case ".gz":
            return cast(IO[bytes], gzip.open(path, "rb"))
        case ".bz2":
            return bz2.open(path, "rb")
        case ".xz":
            return lzma.open(path, "rb")
        case ".zst":
            return _zstandard(path)
        case _:
            return path.open("rb")


def _zstandard(path: Path) -> IO[bytes]:
    import pyarrow as pa

    return cast(IO[bytes], io.BufferedReader(pa.CompressedInputStream(pa.OSFile(str(path), "rb"), "zstd"), 1 << 20))
