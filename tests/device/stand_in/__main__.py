"""Walk what runs on GPUs without one.

python -m tests.device.stand_in environments      CUDA builds of torch, 5 GB each, once
python -m tests.device.stand_in on -- tonnage doctor
python -m tests.device.stand_in waits             where the host waits for the device, by line
python -m tests.device.stand_in walk --output benchmarks/results/cuda_walk.json
python -m tests.device.stand_in prove --output benchmarks/results/prove_stand_in.json
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from device.stand_in import proof, waits
from device.stand_in.build import build
from device.stand_in.cards import CARDS
from device.stand_in.environments import VERSIONS, make
from device.stand_in.machine import Pretended
from device.stand_in.report import write
from tonnage.prove.pieces import PIECES


def main() -> int:
    """Returns 1 where something did not end as expected."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.device.stand_in",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("environments", help="make the environments")
    one.add_argument("versions", nargs="*", help="of torch; all without any")
    one = commands.add_parser("on", help="run a command as if there were GPUs")
    one.add_argument("--torch", default=min(VERSIONS), choices=VERSIONS)
    one.add_argument("--card", default="H100", choices=CARDS)
    one.add_argument("--devices", type=int, default=1)
    one.add_argument("words", nargs="+")
    one = commands.add_parser("waits", help="count where the host waits for the device")
    one.add_argument("--torch", default=min(VERSIONS), choices=VERSIONS)
    one.add_argument("--work", type=Path, default=Path("runs/stand_in"))
    one.add_argument("shapes", nargs="*", help="names of shapes; all without any")
    one = commands.add_parser("walk", help="walk all settings")
    one.add_argument("--torch", nargs="*", default=list(VERSIONS), choices=VERSIONS)
    one.add_argument("--work", type=Path, default=Path("runs/stand_in"))
    one.add_argument("--only", default="", help="settings and shapes in whose names this regular expression is found")
    one.add_argument("--output", type=Path, help="where the results go; those that are there and not walked stay")
    one = commands.add_parser("prove", help="carry out the proof, as far as there is anything to see")
    one.add_argument("--torch", nargs="*", default=list(VERSIONS), choices=VERSIONS)
    one.add_argument("--card", default="H200", choices=CARDS)
    one.add_argument("--devices", type=int, default=2)
    one.add_argument("--work", type=Path, default=Path("runs/stand_in"))
    names = [piece.name for piece in PIECES]
    help_ = "this piece alone, once more; repeat it"
    one.add_argument("--only", action="append", default=[], choices=names, metavar="NAME", help=help_)
    one.add_argument("--output", type=Path, help="where the records go")
    given = parser.parse_args()

    if given.command == "environments":
        for version in given.versions or VERSIONS:
            make(version)
        build()
        return 0
    build()
    if given.command == "on":
        environment = Pretended(given.card, given.devices, watched_by=()).environment(given.torch)
        os.execvpe(given.words[0], given.words, environment)
    if given.command == "waits":
        return waits.show(given.shapes, given.torch, given.work.absolute())
    if given.command == "prove":
        return proof.prove(given.torch, given.card, given.devices, given.work.absolute(), given.only, given.output)
    return write(given.torch, given.work.absolute(), given.only, given.output)


if __name__ == "__main__":
    sys.exit(main())
