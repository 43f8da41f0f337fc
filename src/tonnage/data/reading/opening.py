"""Files opened as they are, or unpacked on the way."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from pathlib import Path
from typing import IO, Any, cast

from tonnage.forms.conversation import RowError

PACKED = (".gz", ".zst", ".bz2", ".xz")
"""Endings of files that are unpacked while they are read."""
DAMAGED = (OSError, EOFError, ValueError, lzma.LZMAError, zlib.error)
"""What reading may raise where a packed file is damaged, or none."""


def not_unpacked(path: Path, error: BaseException) -> RowError:
    """The place in a packed file from which on it cannot be unpacked. All of its bytes count as not read: the sums that
    would prove those before stand at the end."""
    return RowError("truncated", f"the file cannot be unpacked from here on ({error})").leaving(path.stat().st_size)


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
            return _buffered(_Unpacking(cast(IO[bytes], gzip.open(path, "rb"))))
        case ".bz2":
            return bz2.open(path, "rb")
        case ".xz":
            return _buffered(_Unpacking(lzma.open(path, "rb")))
        case ".zst":
            import pyarrow as pa

            return _buffered(pa.CompressedInputStream(pa.OSFile(str(path), "rb"), "zstd"))
        case _:
            return path.open("rb")


class _Unpacking(io.RawIOBase):
    """What a library unpacks, whose own kinds of errors become ``OSError``."""

    def __init__(self, opened: IO[bytes]) -> None:
        self._opened = opened

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Raises ``OSError``."""
        try:
            # In pieces, or what was unpacked before the damage would be lost with it.
            return self._opened.readinto1(buffer)  # type: ignore[attr-defined, no-any-return]
        except (zlib.error, lzma.LZMAError) as error:
            raise OSError(str(error)) from error

    def close(self) -> None:
        self._opened.close()
        super().close()


def _buffered(unpacked: Any) -> IO[bytes]:
    return cast(IO[bytes], io.BufferedReader(unpacked, 1 << 20))
