"""Write the table of ``benchmarks/README.md`` from the results that are committed.

    python -m benchmarks.table [--check]

Everything between the two marks is written anew; ``--check`` only says whether it would change.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ON_DISK = {"all": "Everything", "optimizer": "The optimizer's state"}
BEGIN, END = "<!-- results: written by benchmarks/table.py -->", "<!-- end of results -->"


def results(pattern: str) -> Iterator[dict[str, Any]]:
    """Stored results, by name of their file."""
    for path in sorted((HERE / "results").glob(pattern)):
        yield json.loads(path.read_text())


def table(heading: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def facts(result: dict[str, Any]) -> str:
    """Date and machine of a result."""
    machine = result["machine"]
    rounds = {len(one["step_seconds"]) for one in result.get("contestants", {}).values()}
    return (
        f"{machine['date']}, {machine['processor']} ({', '.join(machine['instructions'])}), {machine['cores']} cores, "
        f"{machine['memory_bytes'] / 1e9:.0f} GB"
        + (f"; {max(rounds)} rounds" if rounds else "")
        + (
            f"; others had {result['share_of_cpu_that_others_had']:.0%} of the CPU time meanwhile"
            if "share_of_cpu_that_others_had" in result
            else ""
        )
    )


def processor(machine: dict[str, Any]) -> str:
    """In one or two words."""
    name = "Xeon" if "Xeon" in machine["processor"] else machine["processor"].removeprefix("AMD ")
    return f"{name} with AMX" if "amx_bf16" in machine["instructions"] else name


def gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f} GB"


def of_rounds(ratios: Sequence[float], form: str) -> str:
    """The median of the rounds' ratios, with the least and the most. (Some files store the larger of two rounds as
    their median, so it is taken here.)"""
    least, middle, most = (f"{ratio:{form}}" for ratio in (min(ratios), statistics.median(ratios), max(ratios)))
    return middle if least == most else f"{middle} ({least} to {most})"


def against(one: dict[str, Any]) -> list[str]:
    """How a peer compares."""
    if "times_faster" not in one:
        return ["", "", ""]
    difference = one["largest_relative_difference_of_losses"]
    agree = f"{difference:.2%}" if one.get("losses_agree", True) else f"**{difference:.2%}: does not count**"
    return [of_rounds(one["times_faster"], ".2f"), f"{one['share_of_their_memory']:.2f}", agree]


def training() -> Iterator[str]:
    """The runs beside trainers, of all weights, of adapters and of pairs of answers."""
    names = ("peers/training*.json", "peers/adapters*.json", "peers/preferences*.json")
    for result in (result for name in names for result in results(name)):
        rows = [
            [
                name,
                f"{one['tokens_per_second_median']:,.0f}",
                f"{one['tokens_per_second_min']:,.0f} to {one['tokens_per_second_max']:,.0f}",
                gigabytes(one["peak_bytes"]),
                *against(one),
            ]
            for name, one in result["contestants"].items()
        ]
        heading = ["", "tokens/s", "spread", "peak memory", "ours over theirs", "our share of memory", "losses differ"]
        units = result.get("units", "documents")
        steps = "".join(f" The {name}: {share:.2f}." for name, share in result.items() if name.startswith("step of"))
        what = f", low-rank additions of rank {result['rank']}" if "rank" in result else ""
        peers = "; ".join(name for name in result["contestants"] if not name.startswith("tonnage")) or "tonnage alone"
        head = f"### {result['shape']}{what}, {result['data']}, {processor(result['machine'])}: {peers}"
        yield f"{head}\n\n{facts(result)}; " + (
            f"{result['documents_per_step']} {units} and {result['tokens_per_step_mean']:,.0f} tokens a step."
            f"{steps}\n\n{table(heading, rows)}"
        )


def zero() -> Iterator[str]:
    """ZeRO beside DeepSpeed."""
    for result in results("peers/zero*.json"):
        heading = ["", "tokens/s", "peak memory", "ours over theirs", "our share of memory", "losses differ"]
        rows = [
            [name, f"{one['tokens_per_second_median']:,.0f}", gigabytes(one["peak_bytes"]), *against(one)]
            for name, one in result["contestants"].items()
        ]
        head = f"### ZeRO on {result['workers']} workers, {result['shape']}, {result['data']}"
        yield f"{head}\n\n{facts(result)}.\n\n{table(heading, rows)}"


def offload() -> Iterator[str]:
    """State on disk beside DeepSpeed."""
    for result in results("peers/offload*.json"):
        shares, differences = result["share_of_their_time"], result["largest_relative_difference_of_losses"]
        rows = [
            [
                name,
                f"{one['step_seconds_median']:.2f} s",
                gigabytes(one["peak_bytes"]),
                of_rounds(shares[name], ".0%") if name in shares else "",
                f"{differences[name]:.2%}" if name in differences else "",
            ]
            for name, one in result["contestants"].items()
        ]
        heading = ["", "a step", "peak memory", "our share of their time", "losses differ"]
        head = f"### {ON_DISK[result['on_disk']]} on disk, {result['shape']}, {result['tokens_per_step']} tokens a step"
        yield f"{head}\n\n{facts(result)}.\n\n{table(heading, rows)}"


def floor() -> Iterator[str]:
    """Our own step against its products."""
    for result in results("floor*.json"):
        shapes = result["shapes"]
        rows = [
            ["tokens/s", *(f"{one['tokens'] / one['step_seconds']:,.0f}" for one in shapes.values())],
            ["products alone", *(f"{one['floor_share_of_step']:.0%} of the step" for one in shapes.values())],
            *(
                [cause, *(f"{one['causes'][cause] / one['step_seconds']:.0%}" for one in shapes.values())]
                for cause in next(iter(shapes.values()))["causes"]
            ),
        ]
        head = f"### Where a step of 8,192 tokens goes, {result['data']}, {processor(result['machine'])}"
        yield (
            f"{head}\n\n{facts(result)}; one large product "
            f"runs at {next(iter(shapes.values()))['product_flops_per_second'] / 1e12:.2f} TFLOP/s.\n\n"
            f"{table(['', *shapes], rows)}"
        )


def scaling() -> Iterator[str]:
    """Own costs by size."""
    for result in results("scaling.json"):
        rows = [
            [name, *(f"{one:.3g} s" for one in found), f"{result['exponents'][name]:.2f}"]
            for name, found in result["seconds"].items()
        ]
        sizes = [f"{factor}x" for factor in result["factors"]]
        yield f"### Our own costs as sizes grow\n\n{result['date']}.\n\n{table(['', *sizes, 'exponent'], rows)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    readme = HERE / "README.md"
    text = readme.read_text()
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    parts = [*training(), *zero(), *offload(), *floor(), *scaling()]
    new = f"{before}{BEGIN}\n\n" + "\n\n".join(parts) + f"\n\n{END}{after}"
    if parser.parse_args().check:
        raise SystemExit(0 if new == text else f"{readme} is not what the results say: python -m benchmarks.table")
    readme.write_text(new)


if __name__ == "__main__":
    main()
