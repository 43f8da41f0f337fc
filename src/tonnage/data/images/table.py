"""The images of a part's documents: a table in an Arrow file beside them, each image once.

An image that is a file of its own is named, with its size and the time of its last change; the bytes of one that stood
in a row are kept. What could not be read is there too, without a digest: were it mended, the part would be another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tonnage.data.images.opening import EncodedImage, digest_of, load_file
from tonnage.errors import user_error
from tonnage.forms.conversation import RowError

BATCH_BYTES = 32 << 20
Stamp = tuple[str, int, int]
"""Path, size and time of change of a file; -1 where it is not there."""


class ImageTableWriter:
    def __init__(self, path: Path) -> None:
        import pyarrow as pa

        self._pa, self._path = pa, path
        self._schema = pa.schema(
            [
                ("digest", pa.string()),
                ("path", pa.string()),
                ("size", pa.int64()),
                ("modified", pa.int64()),
                ("content", pa.binary()),
            ]
        )
        self._writer: Any = None
        self._waiting: list[EncodedImage] = []
        self._bytes = 0
        self._places: dict[tuple[str, str], int] = {}

    def add(self, image: EncodedImage) -> int:
        """The number of an image in the table."""
        place = self._places.get((image.digest, image.path))
        if place is None:
            place = self._places[image.digest, image.path] = len(self._places)
            self._waiting.append(replace(image, content=b"") if image.path else image)
            self._bytes += len(self._waiting[-1].content)
            if self._bytes >= BATCH_BYTES:
                self._flush()
        return place

    def close(self) -> None:
        if self._waiting:
            self._flush()
        if self._writer is not None:
            self._writer.close()
            self._sink.close()

    def _flush(self) -> None:
        if self._writer is None:
            self._sink = self._pa.OSFile(str(self._path), "wb")
            self._writer = self._pa.ipc.new_file(self._sink, self._schema)
        names = ("digest", "path", "size", "modified")
        columns: dict[str, list[Any]] = {name: [getattr(image, name) for image in self._waiting] for name in names}
        columns["content"] = [None if image.path else image.content for image in self._waiting]
        self._writer.write_batch(self._pa.record_batch(columns, schema=self._schema))
        self._waiting, self._bytes = [], 0


@dataclass(frozen=True)
class ImageTable:
    """The table of a part, mapped into memory."""

    path: Path
    _columns: dict[str, Any]

    @staticmethod
    def open(path: Path) -> ImageTable:
        """A table that ``ImageTableWriter`` has written."""
        import pyarrow as pa

        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        return ImageTable(path, {name: table.column(name) for name in table.column_names})

    def digest(self, number: int) -> str:
        """By which the bytes of an image are known."""
        return str(self._columns["digest"][number].as_py())

    def path_of(self, number: int) -> str:
        """The file of an image; empty of one that stood in its row."""
        return str(self._columns["path"][number].as_py())

    def load(self, number: int) -> EncodedImage:
        """An image. Raises ``UserError`` where its file is another one than when rows were prepared."""
        digest, path = self.digest(number), self.path_of(number)
        if not path:
            content = self._columns["content"][number].as_py()
            image = EncodedImage(content, digest_of(content))
        else:
            try:
                image = load_file(Path(path))
            except RowError as error:
                raise _changed(path, error.reason) from error
        if image.digest != digest:
            raise _changed(path or str(self.path), "other bytes than when its row was prepared")
        return image

    def stamps(self) -> Iterator[Stamp]:
        """Those of the files that it names."""
        columns = (self._columns[name].to_pylist() for name in ("path", "size", "modified"))
        return ((path, size, modified) for path, size, modified in zip(*columns, strict=True) if path)


def _changed(path: str, observed: str) -> Exception:
    return user_error(observed, "the image that its row was prepared with", "start the run once more", path)


def stamps_now(stamps: Iterable[Stamp]) -> list[Stamp]:
    """Of the same files, as they are now."""
    now: list[Stamp] = []
    for path, _, _ in stamps:
        try:
            stat = Path(path).stat()
            now.append((path, stat.st_size, stat.st_mtime_ns))
        except OSError:
            now.append((path, -1, -1))
    return now
