"""``python -m tonnage.prove``: the proof where there is no typer; says first what else is missing."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def main(words: list[str]) -> int:
    """Carry it out; returns 1 where a check failed, 2 where something is missing."""
    parser = argparse.ArgumentParser(prog="python -m tonnage.prove", description=__doc__)
    parser.add_argument("--directory", type=Path, default=Path(), help="results go into its tonnage-prove/")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="this piece alone, once more")
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="prove on several GPUs too")
    parser.add_argument("--again", action="store_true", help="once more what was proven before")
    parser.add_argument("--quick", action="store_true", help="a slice of every piece")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="after which a piece is ended")
    arguments = parser.parse_args(words)
    from tonnage.prove.machine import missing
    from tonnage.prove.pieces import PIECES

    if absent := missing():
        print(f"error: not installed: {', '.join(absent)}", file=sys.stderr)
        return 2
    if unknown := set(arguments.only) - {piece.name for piece in PIECES}:
        parser.error(f"no piece is called {', '.join(unknown)}: {', '.join(piece.name for piece in PIECES)}")
    from tonnage.prove.conduct import conduct
    from tonnage.prove.page import lines, verdict

    record = conduct(
        arguments.directory / "tonnage-prove",
        gpus=arguments.gpus,
        only=arguments.only,
        again=arguments.again,
        brief=arguments.quick,
        limit_seconds=arguments.limit,
        tell=lambda doing, done, total: print(f"{done + 1}/{total} {doing}", flush=True) if doing else None,
    )
    for name, status, line in lines(record):
        print(f"{name:18} {status:8} {line}")
    print(verdict(record))
    return 1 if record.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
