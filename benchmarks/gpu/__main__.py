"""What a lent GPU is asked first, in pieces, each of which writes its result as soon as it has one:

    python -m benchmarks.gpu --list                      the pieces, how long each takes, and which are done
    python -m benchmarks.gpu --minutes 14                those that fit, first of all what was never measured
    python -m benchmarks.gpu --again "8B adapters"       this piece, and then what is still missing
    python -m benchmarks.gpu --stand-in                  all of it where no GPU is: see tests/device/stand_in

Results are in ``benchmarks/results/gpu.json`` (``--output``), by piece, with date, versions and the card. A piece is
done if it came to its end with the same code of tonnage, torch, transformers and peers on the same card. Models have
random weights of a known shape, rows are made here: nothing is fetched. Needs a checkout, and what tonnage needs; for
pieces of kind 3 trl, peft and accelerate, and liger-kernel if there is one.

Under the stand-in kernels do nothing: commands, graphs, launches and bytes are the real ones, and no number and no
speed is told. Its results go to ``gpu_stand_in.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.pieces import PIECES, Piece, fitting, in_turn

from tonnage.prove.record import write

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
WHAT = "what one GPU showed, piece by piece (python -m benchmarks.gpu)"
PRETENDED = "the same commands without a GPU, under tests/device/stand_in: no number and no speed is told"
COUNTED = ("torch", "transformers", "triton", "trl", "peft", "liger-kernel", "flash-attn", "flash-attn-3")
"""Packages with whose versions a result is done."""
PATIENCE, STAND_IN_SECONDS = 2.5, 3600
"""How many times its seconds a piece may take, and how long under the stand-in."""
MOST_TOLD = 3000
SPEED = re.compile(r"((recorded_)?step_|build_|floor_)?seconds|\w+_per_second|causes|rates")
"""Keys of what a result says of time."""


@dataclass(frozen=True)
class Machine:
    """Where pieces run."""

    python: str
    environment: Mapping[str, str]
    spared: Mapping[str, str]
    """The environment of models whose weights nobody needs."""
    pretends: bool = False

    def described(self) -> dict[str, Any]:
        """Versions, code and GPUs, found by a process of its own. Raises ``SystemExit``."""
        done = subprocess.run(
            [self.python, "-m", "tonnage.prove.machine"], env=self.environment, capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(f"the machine could not be described:\n{done.stderr[-MOST_TOLD:]}")
        return dict(json.loads(done.stdout.splitlines()[-1]))


def this_machine() -> Machine:
    """The GPU that is here."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    return Machine(sys.executable, environment, environment)


def stand_in() -> Machine:
    """An H200 that does nothing, with the newest torch whose environment is ready. Raises ``SystemExit``."""
    sys.path.insert(0, str(ROOT / "tests"))
    from device.stand_in.build import build
    from device.stand_in.environments import FOLDER, VERSIONS
    from device.stand_in.machine import Pretended
    from device.stand_in.shapes import HOST_GB, SPARED

    versions = [version for version in VERSIONS if (FOLDER / version / "ready").exists()]
    if not versions:
        raise SystemExit(f"no CUDA build of torch in {FOLDER}: python -m tests.device.stand_in environments")
    build()
    version = max(versions)
    plain = Pretended("H200", watched_by=())
    spared = Pretended("H200", host_gb=HOST_GB, watched_by=("shapes",), more=SPARED)
    whole, bare = (on.environment(version) for on in (plain, spared))
    for environment in (whole, bare):
        environment["PYTHONPATH"] += os.pathsep + str(ROOT)
    return Machine(str(FOLDER / version / "bin" / "python"), whole, bare, pretends=True)


def key_of(described: Mapping[str, Any]) -> dict[str, Any]:
    """What a result is of."""
    versions = {name: described["packages"][name] for name in COUNTED if name in described["packages"]}
    return {"code": described["code"], "versions": versions, "gpus": [gpu["name"] for gpu in described["gpus"]]}


def state(result: Mapping[str, Any] | None, key: Mapping[str, Any] | None) -> str:
    """Of a piece; without a ``key`` whatever was measured counts as done."""
    if result is None:
        return "missing"
    if not result["whole"]:
        return "broke off"
    return "done" if key is None or result["of"] == key else "stale"


def carry_out(piece: Piece, machine: Machine, work: Path) -> dict[str, Any]:
    """Run a piece in processes of its own; what it wrote is told, whether it came to its end or not."""
    folder, output = work / piece.name.replace(" ", "-"), work / f"{piece.name}.json"
    folder.mkdir(parents=True, exist_ok=True)
    words = piece.words(folder, output)
    limit = STAND_IN_SECONDS if machine.pretends else PATIENCE * piece.seconds
    if machine.pretends:
        words += [*piece.part, *(("--limit", str(limit)) if piece.only else ())]
    shapes = machine.environment if piece.part else machine.spared
    environment = {**shapes, "TONNAGE_CACHE": str(work / "cache")}
    log = folder / "log"
    began = time.perf_counter()
    with log.open("w") as out:
        process = subprocess.Popen(
            [machine.python, "-m", *words],
            env=environment,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    seconds = round(time.perf_counter() - began, 1)
    result: dict[str, Any] = {"status": status, "seconds": seconds, "expected_seconds": piece.seconds}
    found = _read(piece, piece.written(folder, output))
    result["whole"] = status in (0, 1) and found is not None  # 1: it is whole, and not all is as it should be
    if status != 0:
        result["log"] = log.read_text(errors="replace")[-MOST_TOLD:].replace(str(work), ".")
    return result | {"result": without_speed(found) if machine.pretends else found}


def without_speed(value: Any) -> Any:
    """What a stand-in's result says, but for seconds and rates."""
    if isinstance(value, list):
        return [without_speed(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {name: without_speed(one) for name, one in value.items() if not SPEED.fullmatch(name)}


def _read(piece: Piece, path: Path) -> Any:
    try:
        found = json.loads(path.read_text().replace(str(path.parent), "."))
    except (OSError, ValueError):
        return None
    if not piece.only:
        return found
    pieces = [one for one in found["pieces"] if one["name"] in piece.only]
    return None if any(one["error"] for one in pieces) else pieces


def table(results: Mapping[str, Any], states: Mapping[str, str], chosen: Sequence[Piece]) -> str:
    """The pieces, a line each; those that are ``chosen`` have a star."""
    lines = [f"{'':2}{'piece':30} {'seconds':>7}  {'state':30} shows"]
    for piece in PIECES:
        date = results.get(piece.name, {}).get("date", "")
        word = {"stale": "of other code or versions"}.get(states[piece.name], states[piece.name])
        mark = "*" if piece in chosen else " "
        lines.append(
            f"{mark:2}{piece.name:30} {piece.seconds:7d}  {f'{word} {date[:10]}':30} {piece.number}: {piece.shows}"
        )
    lines.append(
        f"* {len(chosen)} pieces would run now, in about {sum(piece.seconds for piece in chosen)} s of an H200"
    )
    return "\n".join(lines)


def run(todo: list[Piece], machine: Machine, output: Path, record: dict[str, Any], end: float) -> bool:
    """Carry out what fits until ``end``, and write each result; whether all came to a good end."""
    good, described = True, record["machine"]
    with tempfile.TemporaryDirectory(prefix="tonnage-gpu-") as work:
        while chosen := fitting(todo, end - time.monotonic()):
            piece = chosen[0]
            todo.remove(piece)
            print(f"{piece.name} ({piece.number}: {piece.shows}): about {piece.seconds} s", flush=True)
            result = carry_out(piece, machine, Path(work))
            stamp = {"date": time.strftime("%Y-%m-%d %H:%M %z"), "of": key_of(described)}
            record["pieces"][piece.name] = stamp | result
            write(output, record)
            good = good and result["status"] == 0
            ended = "came to its end" if result["whole"] else "broke off"
            print(
                f"  {ended} after {result['seconds']} s{'' if result['status'] == 0 else ', not as it should'}",
                flush=True,
            )
    if todo:
        print(f"left: {', '.join(piece.name for piece in todo)}")
    return good


def main() -> int:
    """Returns 1 where a piece broke off or something in it is not as it should be."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [piece.name for piece in PIECES]
    parser.add_argument("--list", action="store_true", help="print the pieces, and run nothing")
    parser.add_argument("--minutes", type=float, help="take what fits in so many")
    parser.add_argument("--only", action="append", default=[], choices=names, metavar="PIECE", help="of these alone")
    parser.add_argument("--again", action="append", default=[], choices=names, metavar="PIECE", help="once more")
    parser.add_argument("--stand-in", action="store_true", help="without a GPU, under the stand-in")
    parser.add_argument("--output", type=Path, help="where results are, and go")
    arguments = parser.parse_args()
    output = arguments.output or RESULTS / ("gpu_stand_in.json" if arguments.stand_in else "gpu.json")
    record = json.loads(output.read_text()) if output.exists() else {"pieces": {}}
    key = None
    if not arguments.list or arguments.stand_in:
        machine = stand_in() if arguments.stand_in else this_machine()
        described = machine.described()
        if not described["gpus"]:
            raise SystemExit("no GPU is here: --list shows the pieces, --stand-in walks them without one")
        key = key_of(described)
        record |= {"what": PRETENDED if machine.pretends else WHAT, "machine": described}
    pieces = [piece for piece in PIECES if piece.name in arguments.only or not arguments.only]
    states = {piece.name: state(record["pieces"].get(piece.name), key) for piece in PIECES}
    todo = in_turn(pieces, states, arguments.again)
    seconds = 60 * arguments.minutes if arguments.minutes else float("inf")
    print(table(record["pieces"], states, fitting(todo, seconds)), flush=True)
    if arguments.list:
        return 0
    return 0 if run(todo, machine, output, record, time.monotonic() + seconds) else 1


if __name__ == "__main__":
    sys.exit(main())
