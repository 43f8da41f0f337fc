"""``tonnage doctor``: what this machine can do."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Column, Table

from tonnage.display.bar import progress_bar
from tonnage.display.terminal import put, put_json, say, table, terminal
from tonnage.errors import user_error
from tonnage.files.paths import word
from tonnage.files.visible import as_json_text

if TYPE_CHECKING:
    from rich.console import Console

    from tonnage.data import Progress
    from tonnage.doctor.advice import Advice
    from tonnage.doctor.measure import Examination
    from tonnage.prove.record import ProofRecord

SAMPLED = ("bf16", "fp32")
"""Precisions in which passes of small models are timed."""


def doctor(
    directory: Annotated[
        str,
        typer.Option(
            "--directory", metavar="DIR", help="Measure the disk under DIR, where runs will be written.", parser=word
        ),
    ] = ".",
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON and nothing else.")] = False,
    again: Annotated[bool, typer.Option("--again", help="Measure, or prove, once more what was before.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Measure roughly, in a few seconds, what was not measured before.")
    ] = False,
    prove: Annotated[
        bool, typer.Option("--prove", help="Prove that training here is right, and how fast it is: DIR/tonnage-prove/.")
    ] = False,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="NAME", help="Prove this piece alone, once more; repeat it.")
    ] = None,
    gpus: Annotated[
        int, typer.Option("--gpus", metavar="N", min=1, help="Prove on several GPUs too; without any, on processes.")
    ] = 1,
    prove_kit: Annotated[
        str | None,
        typer.Option(
            "--prove-kit", metavar="DIR", help="Collect what a machine without registries lacks.", parser=word
        ),
    ] = None,
) -> None:
    """Measure this machine, once, and say what could be better: products, memory, disk, optimizer, links.

    It takes about a minute and 1.5 GB of disk meanwhile. What is found is kept for the planner.
    """
    if not prove and (only or gpus > 1):
        alone = f"{'--only' if only else '--gpus'} without --prove"
        raise user_error(alone, "--prove, of which it says more", "tonnage doctor --prove ...")
    if prove_kit is not None:
        _make_kit(prove_kit)
        return
    if prove:
        _prove(directory, only or [], gpus, again=again, brief=quick, json=json)
        return
    from tonnage.doctor.advice import advise
    from tonnage.doctor.cache import machine_of, to_json
    from tonnage.doctor.hardware import available_memory, device_files
    from tonnage.doctor.measure import examine

    console = terminal(stderr=json)
    with progress_bar(console) as progress:
        examination = examine(Path(directory), quick=quick, again=again, progress=progress)
        if not (quick or examination.disturbed or examination.hardware.devices):
            _sample_training(examination, again, progress)
    advice = advise(
        examination.hardware,
        examination.disk,
        examination.record.compute,
        examination.record.disks.get(examination.disk.key),
        environment=os.environ,
        available_bytes=available_memory(),
        device_files=device_files(),
    )
    if json:
        machine = machine_of(examination.record, examination.disk)
        measured = {
            "compute": examination.record.compute and asdict(examination.record.compute),
            "disks": {key: asdict(rates) for key, rates in examination.record.disks.items()},
        }
        more = {"hardware": asdict(examination.hardware), "disk": asdict(examination.disk), "measured": measured}
        put(as_json_text(to_json(machine, **more, advice=[asdict(one) for one in advice])))
    else:
        _show(examination, console)
        _show_advice(advice, console)


def _prove(directory: str, only: list[str], gpus: int, *, again: bool, brief: bool, json: bool) -> None:
    """Carry out the proof, and end with 1 where a check failed."""
    from tonnage.prove.conduct import conduct, lacking
    from tonnage.prove.pieces import PIECES

    lacking()
    if unknown := [name for name in only if name not in {piece.name for piece in PIECES}]:
        names = ", ".join(piece.name for piece in PIECES)
        raise user_error(f"no piece is called {unknown[0]}", names, where="--only")
    console, folder = terminal(stderr=json), Path(directory) / "tonnage-prove"
    with progress_bar(console) as progress:
        record = conduct(folder, gpus=gpus, only=only, again=again, brief=brief, tell=progress)
    if json:
        put_json(record.to_json())
    else:
        _show_proof(record, folder, console)
    if record.failed:
        raise typer.Exit(1)


def _show_proof(record: ProofRecord, folder: Path, console: Console) -> None:
    from tonnage.prove.page import lines, verdict, where

    styles = {"passed": "green", "failed": "red", "skipped": "dim", "told": ""}
    columns = (Column(no_wrap=True), Column(no_wrap=True), "")
    shown = Table(*columns, title=f"Proof on {where(record)}", title_justify="left", show_header=False, box=None)
    for name, status, words in lines(record):
        shown.add_row(name, status, words, style=styles[status])
    console.print(shown)
    console.print(verdict(record))
    console.print(f"{folder / 'prove.json'} and {folder / 'prove.html'}", soft_wrap=True)


def _make_kit(folder: str) -> None:
    from tonnage.prove.kit import write_kit

    kit, console = write_kit(Path(folder)), terminal()
    console.print(
        f"{len(kit.wheels)} wheels, {kit.num_bytes / 1e6:.1f} MB, in {kit.folder}; HOW.txt says how to use them"
    )
    if kit.left_out:
        console.print(f"left out, as there is no room: {', '.join(kit.left_out)}")


def _sample_training(examination: Examination, again: bool, progress: Progress) -> None:
    """Time passes of small models by the code that trains, if that was not done yet, and keep them for the planner."""
    import json
    import subprocess

    from tonnage.doctor.advice import BUSY
    from tonnage.doctor.cache import calibration_file
    from tonnage.doctor.hardware import Neighbours
    from tonnage.planning import calibration

    path = calibration_file(examination.hardware)
    if not again and not examination.new and any(sample.origin == "doctor" for sample in calibration.read(path)):
        return
    progress("training", 0, 1)
    command = [sys.executable, "-m", "tonnage.training.sample", str(examination.hardware.cores), *SAMPLED]
    threads = {"OMP_NUM_THREADS": str(examination.hardware.cores)}
    neighbours = Neighbours()
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | threads)
    if done.returncode or neighbours.share() > BUSY:  # the machine is described without
        return
    samples = [calibration.TimedStep(**fields) for fields in json.loads(done.stdout)]
    calibration.add(path, samples, "doctor")


def _attention() -> str:
    """Which FlashAttention training uses on the first device."""
    import torch

    from tonnage.model.flash import installed_for

    newer = installed_for(torch.cuda.get_device_capability(0))
    return f"{newer[0]}, installed, in training" if newer else "torch's own FlashAttention"


def _show(examination: Examination, console: Console) -> None:
    from tonnage.host.lockable import limit_in_words

    hardware, disk, record = examination.hardware, examination.disk, examination.record
    compute, storage = record.compute, record.disks[disk.key]
    assert compute is not None
    shown = table(title="Machine", show_header=False)
    cores = f"{hardware.cores} core{'s' if hardware.cores > 1 else ''}"
    features = f" ({', '.join(hardware.features)})" if hardware.features else ""
    shown.add_row("processor", f"{hardware.processor}, {cores}{features}")
    shown.add_row("memory", f"{hardware.memory_bytes / 1e9:.1f} GB")
    if hardware.devices:
        many = f"{len(hardware.devices)} x " if len(hardware.devices) > 1 else ""
        shown.add_row("device", f"{many}{hardware.devices[0]}, {hardware.device_bytes / 1e9:.1f} GB")
        shown.add_row("attention", _attention())
    shown.add_row("torch", hardware.torch)
    shown.add_row("disk", f"{disk.directory} on {disk.key.replace(':', ' ', 1)}, {disk.free_bytes / 1e9:.1f} GB free")
    shown.add_section()
    of_what = " (a device)" if hardware.devices else f" (all {cores})" if hardware.cores > 1 else ""
    for dtype, flops in compute.flops.items():
        shown.add_row(f"products {dtype}", f"{_rate(flops, 'FLOP/s')}{of_what}")
    shown.add_row("memory", f"{_rate(compute.memory_bytes_per_second, 'B/s')} read plus written")
    shown.add_row("fresh memory", f"{_rate(compute.fresh_bytes_per_second, 'B/s')} a core")
    if compute.made_bytes_per_second is not None:
        shown.add_row("results in new memory", f"{_rate(compute.made_bytes_per_second, 'B/s')} a core")
    if hardware.devices:
        shown.add_row("host copies", _rate(compute.host_device_bytes_per_second, "B/s"))
        obeyed = "not tried whether the GPU's driver keeps to it"
        if compute.counts_locked is not None:
            obeyed = f"to which the GPU's driver {'keeps' if compute.counts_locked else 'does not keep'}"
        shown.add_row("locked memory", f"{limit_in_words()} (ulimit -l), {obeyed}")
    for codec, parameters in compute.optimizer_parameters_per_second.items():
        shown.add_row(f"update, {codec} moments", f"{parameters / 1e6:,.0f} million parameters/s")
    for codec, parameters in compute.host_parameters_per_second.items():
        shown.add_row(f"the same by the CPU, {codec}", f"{parameters / 1e6:,.0f} million parameters/s")
    if compute.link_bytes_per_second is not None:
        shown.add_row("between workers", f"{_rate(compute.link_bytes_per_second, 'B/s')} each way")
    past = ", past the page cache" if storage.direct else ", through the page cache"
    shown.add_row("disk read", f"{_rate(storage.read, 'B/s')}{past}")
    shown.add_row("disk write", _rate(storage.write, "B/s"))
    shown.add_row("disk both", f"{_rate(storage.mixed, 'B/s')} read plus written")
    console.print(shown)
    if examination.disturbed:
        console.print(
            "Other processes disturbed this, so nothing of it is kept: plans go on as before.", style="yellow"
        )
    elif not examination.new:
        dates = " and ".join(dict.fromkeys((compute.date, storage.date)))
        console.print(f"Measured on {dates}; --again measures once more.", style="dim")


def _show_advice(advice: list[Advice], console: Console) -> None:
    if not advice:
        console.print("Nothing to complain of.")
    for one in advice:
        say(console, ("note", "yellow"), f" {one.found}")
        console.print(f"  change: {one.change}", style="dim", soft_wrap=True)


def _rate(value: float, unit: str) -> str:
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"
