"""The record as one page that asks nobody for anything, and as lines for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path

from tonnage.files.visible import visible
from tonnage.files.writing import write_whole
from tonnage.prove.checks import CHECKS, number
from tonnage.prove.record import CheckedFigure, PieceResult, ProofRecord


def write_page(record: ProofRecord, path: Path) -> None:
    """Write the page. Raises ``ImportError`` where jinja2 is not there."""
    write_whole(path, render(record))


def render(record: ProofRecord) -> str:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: visible(value) if type(value) is str else value,
    )
    template = files("tonnage.prove").joinpath("prove.html.jinja").read_text(encoding="utf-8")
    style = files("tonnage.report").joinpath("page.css").read_text(encoding="utf-8")
    return environment.from_string(template).render(
        record=record,
        style=style,
        title=f"Proof on {where(record)}",
        verdict=verdict(record),
        machine=machine_lines(record),
        checks=CHECKS,
        figure_of=figure_of,
    )


def where(record: ProofRecord) -> str:
    """On what it ran, in a few words."""
    gpus = record.machine["gpus"]
    if not gpus:
        return f"{record.machine['cpus']} CPUs, without a GPU"
    return f"{len(gpus)} x {gpus[0]['name']}" if len(gpus) > 1 else str(gpus[0]["name"])


def verdict(record: ProofRecord) -> str:
    counts = record.counts
    totals = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    broke = sum(bool(piece.error) for piece in record.pieces)
    skipped = sum(piece.status == "skipped" and not piece.findings for piece in record.pieces)
    more = [f"{broke} pieces broke off"] if broke else []
    more += [f"{skipped} pieces were skipped"] if skipped else []
    return "; ".join([f"checks: {totals or 'none'}", *more])


def machine_lines(record: ProofRecord) -> list[tuple[str, str]]:
    machine = record.machine
    cards = [
        f"{gpu['name']}, {gpu['memory_bytes'] / 1e9:.1f} GB, capability {gpu['capability']}" for gpu in machine["gpus"]
    ]
    lines = [
        ("date", record.date),
        ("tonnage", f"{machine['tonnage']} (code {machine['code']})"),
        ("processor", f"{machine['processor']}, {machine['cpus']} CPUs, {machine['memory_bytes'] / 1e9:.0f} GB"),
        ("GPUs", "; ".join(cards) or "none"),
        ("driver", f"{machine.get('driver', '')} {'NCCL ' + machine['nccl'] if machine.get('nccl') else ''}".strip()),
        ("Python, torch", f"{machine['python']}, {machine['torch']}"),
        ("packages", ", ".join(f"{name} {version}" for name, version in machine["packages"].items())),
        ("not installed", ", ".join(record.missing)),
    ]
    return [(name, words) for name, words in lines if words]


def figure_of(finding: CheckedFigure) -> str:
    """A figure with its unit, as the page and the terminal show it; empty without one."""
    return "" if finding.figure is None else f"{number(finding.figure)} {finding.unit}".strip()


def lines(record: ProofRecord) -> Iterable[tuple[str, str, str]]:
    """For a terminal: a piece, what became of it, and what to say of it: what failed, or the worst that held."""
    for piece in record.pieces:
        yield piece.name, piece.status, _told(piece)


def _told(piece: PieceResult) -> str:
    if piece.error:
        return piece.error.strip().splitlines()[-1]
    if not piece.findings:
        return piece.why
    failed = [finding for finding in piece.findings if finding.status == "failed"]
    if failed:
        finding = failed[0]
        figure = figure_of(finding) or "no figure"
        more = f"; and {len(failed) - 1} more" if len(failed) > 1 else ""
        return f"{finding.check}, {finding.case}: {figure}, {finding.tolerance} is needed{more}. {finding.why}".strip()
    counts = Counter(finding.status for finding in piece.findings)
    totals = ", ".join(f"{count} {status}" for status, count in counts.items())
    first = next((finding for finding in piece.findings if finding.status in ("passed", "told")), None)
    if first is None or first.figure is None:
        return f"{totals}: {piece.findings[0].why}"
    return f"{totals}; {first.check}, {first.case}: {figure_of(first)}"
