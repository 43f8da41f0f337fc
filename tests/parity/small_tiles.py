"""``train_runs.py`` with tiles so small that the state of a tiny model is many of them."""

import sys

import train_runs

from tonnage.optim import on_disk, on_host

if __name__ == "__main__":
    on_disk.TILE_BYTES = on_host.TILE_BYTES = 1 << 15
    train_runs.main(sys.argv[1:])
