"""``train_runs`` with tiles so small that the state of a tiny model is many of them."""

import train_runs

from tonnage.optim import on_disk, on_host


def main(paths: list[str]) -> None:
    on_disk.TILE_BYTES = on_host.TILE_BYTES = 1 << 15
    train_runs.main(paths)
