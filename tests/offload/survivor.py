"""A process to be killed, ``survivor.py DIRECTORIES NUM_TILES TILE_BYTES``: rewrites every tile, commits, and again."""

import os
import sys
from pathlib import Path

import numpy as np

from tonnage.offload.store import Shape, TileStore


def content(generation: int, tile: int, size: int) -> np.ndarray:
    return np.random.default_rng((generation, tile)).integers(0, 256, size, dtype=np.uint8)


def main(joined: str, num_tiles: int, tile_bytes: int) -> None:
    directories = [Path(part) for part in joined.split(os.pathsep)]
    shape = Shape(tile_bytes, num_tiles, num_buffers=3)
    if (directories[0] / "manifest.json").exists():
        store = TileStore.open(directories, shape)
    else:
        store = TileStore.create(directories, shape)
    generation = store.note.get("generation", 0)
    while True:
        generation += 1
        for tile in range(num_tiles):
            store.prefetch((tile + 1) % num_tiles)
            buffer = np.frombuffer(store.fetch(tile), np.uint8)
            if generation > 1 and not np.array_equal(buffer, content(generation - 1, tile, tile_bytes)):
                sys.exit(f"tile {tile} is not of generation {generation - 1}")
            buffer[:] = content(generation, tile, tile_bytes)
            store.store(tile)
        store.commit({"generation": generation})
        print(generation, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
