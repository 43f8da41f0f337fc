"""The table of ``benchmarks/cpu.md``: shapes by processor and way to train.

    python -m benchmarks.cpu [--shapes NAME ...] [--methods NAME ...] [--steps 2] [--again]
    python -m benchmarks.cpu --table     # measure nothing, write the table from the results that are there
    python -m benchmarks.cpu --check     # say whether it would change

Every shape and method that ``results/cpu`` lacks for this processor is measured by ``tonnage bench``, in a process of
its own, and written at once; what was measured while others had more than 5% of the processors is not kept. Beside
these rows stand those of ``results/peers`` (ours, with what TRL and the Trainer took in the same run) and of
``results/floor*.json``, of whatever processor they are.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.table import HERE, results

from tonnage.cli.bench import DISTURBED
from tonnage.host.processor import processor
from tonnage.prove.bench import METHODS, SHAPES, markdown, processor_named, row_of

PAGE, FOLDER = HERE / "cpu.md", HERE / "results" / "cpu"
Row = dict[str, str]
OURS = {
    "tonnage": "full, bf16",
    "tonnage, full weights": "full, bf16",
    "tonnage, LoRA": "LoRA",
    "tonnage, LoRA on 4 bits": "LoRA over nf4",
}
"""Contestants in files of ``results/peers``, and their methods."""
DATA = {"made by the benchmark": "instructions made up"}


def measured() -> Iterator[Row]:
    """Rows that ``tonnage bench`` made."""
    for result in results("cpu/*.json"):
        yield row_of(result)


def beside_peers() -> Iterator[Row]:
    """Our rows of runs beside trainers: those of one shape, method, data and processor are one."""
    groups = defaultdict[tuple[Any, ...], list[tuple[dict[str, Any], str]]](list)
    for result in (result for name in ("training", "adapters") for result in results(f"peers/{name}*.json")):
        for name, method in OURS.items():
            if name in result["contestants"]:
                machine = result["machine"]
                key = (*of_machine(machine), result["shape"], method, result["data"], result["documents_per_step"])
                groups[key].append((result, name))
    for (processor_name, threads, shape, method, data, _), runs in groups.items():
        ours = [result["contestants"][name] for result, name in runs]
        speeds = [f"{end(one['tokens_per_second_median'] for one in ours):,.0f}" for end in (min, max)]
        tokens = statistics.mean(result["tokens_per_step_mean"] for result, _ in runs)
        yield {
            "processor": processor_name,
            "threads": threads,
            "shape": shape,
            "method": method,
            "documents": f"{DATA.get(data, data.removesuffix('.json'))}; {tokens:,.0f} a step",
            "tokens/s": " to ".join(dict.fromkeys(speeds)),
            "peak memory": f"{max(one['peak_bytes'] for one in ours) / 1e9:.2f} GB",
            "over TRL": fastest("TRL", runs),
            "over Trainer": fastest("Trainer", runs),
            "measured": max(result["machine"]["date"] for result, _ in runs),
        }


def fastest(peer: str, runs: list[tuple[dict[str, Any], str]]) -> str:
    """How a peer compares with ours in the way in which it was fastest; empty where it was not measured."""
    ratios = []
    for result, ours in runs:
        for name, one in result["contestants"].items():
            beside = one.get("compared_with", result.get("compared_with"))
            if "times_faster" in one and beside == ours and one["losses_agree"] and peer in name:
                ratios.append((statistics.median(one["times_faster"]), one["share_of_their_memory"], name))
    if not ratios:
        return ""
    ratio, memory, name = min(ratios)
    how = next((f", {how}" for how in ("experts in a loop", "fp32") if how in name), "")
    return f"{ratio:.2f} times, {memory:.2f} of its memory{how}"


def profiled() -> Iterator[Row]:
    """Rows of ``benchmarks.floor``."""
    for result in results("floor*.json"):
        processor_name, threads = of_machine(result["machine"])
        for shape, figures in result["shapes"].items():
            yield {
                "processor": processor_name,
                "threads": threads,
                "shape": shape,
                "method": OURS["tonnage"],
                "documents": f"{result['data'].removesuffix('.json')}, packed; {figures['tokens']:,.0f} a step",
                "tokens/s": f"{figures['tokens'] / figures['step_seconds']:,.0f}",
                "share of floor": f"{figures['floor_share_of_step']:.0%}",
                "measured": result["machine"]["date"],
            }


def of_machine(machine: dict[str, Any]) -> tuple[str, str]:
    """Processor and threads of a result that ``contest.machine`` described."""
    return processor_named(machine["processor"], machine["instructions"]), str(machine["cores"])


def page() -> str:
    """Its text as it is, and the table anew."""
    methods = [method.title for method in METHODS.values()]

    def place(row: Mapping[str, str]) -> tuple[Any, ...]:
        return [*SHAPES].index(row["shape"]), methods.index(row["method"]), row["processor"], row["documents"]

    text = PAGE.read_text().partition("\n| ")[0]
    return f"{text}\n{markdown(sorted([*measured(), *beside_peers(), *profiled()], key=place))}\n"


def measure(shape: str, method: str, steps: int, *, again: bool) -> None:
    """Measure one row, unless it is there."""
    name = processor_named(*processor()).lower().replace(",", "").replace(" ", "-")
    path = FOLDER / f"{name}-{shape}-{method}.json"
    if path.exists() and not again:
        print(f"{path.name} is there")
        return
    FOLDER.mkdir(exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    words = ["bench", "--shape", shape, "--method", method, "--steps", str(steps), "--output", str(fresh)]
    subprocess.run([sys.executable, "-m", "tonnage", *words], check=True)
    if json.loads(fresh.read_text())["share_of_cpu_that_others_had"] > DISTURBED:
        fresh.unlink()
        print(f"{path.name} is not kept")
    else:
        fresh.rename(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["pythia-70m", "pythia-160m", "llama-135m"])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS])
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--again", action="store_true", help="measure once more what is there")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    if arguments.check:
        raise SystemExit(0 if page() == PAGE.read_text() else f"{PAGE} is old: python -m benchmarks.cpu --table")
    if not arguments.table:
        for shape in arguments.shapes:
            for method in arguments.methods:
                measure(shape, method, arguments.steps, again=arguments.again)
                PAGE.write_text(page())
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
