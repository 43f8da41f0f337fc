"""What a teacher expects after the tokens of packs: files of its likeliest tokens and their log-probabilities.

A directory of a few arrays:

    index.npy        int64 (packs, 5), of all packs that a run sees: data set (0 trained on, 1 validation), pack,
                     chunk, first row in it, rows
    000000.npy ...   chunks, ``row_type`` (rows,): of every supervised token of some packs, in their order, what the
                     teacher expects there

Chunks are mapped into memory, and nothing is read that is not asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tonnage.data.packs.features import INDEX, chunk_name


def row_type(top_k: int, precision: str) -> np.dtype[np.void]:
    """Of a row: int32 tokens, the likeliest first, and their log-probabilities, fp16 or fp32."""
    return np.dtype([("tokens", "<i4", (top_k,)), ("logprobs", "<f4" if precision == "fp32" else "<f2", (top_k,))])


@dataclass(frozen=True)
class Taught:
    """What a teacher expects of the packs of a data set."""

    directory: Path
    places: np.ndarray
    """int64 (packs of the data set, 3): chunk, first row in it, and number of rows; -1 rows of what no run sees."""
    _chunks: dict[int, np.ndarray] = field(default_factory=dict)

    @staticmethod
    def open(directory: Path, data_set: int, num_packs: int) -> Taught:
        """That of one of the data sets. Raises ``OSError`` and ``ValueError`` where the files are damaged."""
        index = np.load(directory / INDEX, allow_pickle=False)
        places = np.full((num_packs, 3), -1)
        of_set = index[index[:, 0] == data_set]
        places[of_set[:, 1]] = of_set[:, 2:]
        return Taught(directory, places)

    def of_pack(self, pack: int) -> np.ndarray:
        """Of every supervised token of a pack, (supervised,)."""
        chunk, first, number = self.places[pack].tolist()
        if number < 0:
            raise IndexError(f"pack {pack}, of which the teacher was not asked ({self.directory})")
        if chunk not in self._chunks:
            self._chunks[chunk] = np.load(self.directory / chunk_name(chunk), mmap_mode="r", allow_pickle=False)
        return np.array(self._chunks[chunk][first : first + number])
