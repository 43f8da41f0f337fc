"""``train_runs`` with tiles so small that the state of a tiny model is many of them."""

from dataclasses import replace

import train_runs

from tonnage.offload.residency import OPTIMIZER


def main(paths: list[str]) -> None:
    for tier in OPTIMIZER:
        OPTIMIZER[tier] = replace(OPTIMIZER[tier], unit_bytes=1 << 15)
    train_runs.main(paths)
