"""One piece in its process: ``python -m tonnage.prove.child NAME FOLDER MACHINE GPUS BRIEF``.

Whatever it breaks off with becomes its result, which is written after every finding: of a piece that is ended it stays.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

from tonnage.prove.pieces import named
from tonnage.prove.record import MOST_TEXT, PART, PieceResult, keep, status_of


def main(name: str, folder: str, machine: str, gpus: str, brief: str) -> None:
    from tonnage.files.writing import close_to_others

    close_to_others()
    began = time.perf_counter()
    (piece,) = named((name,))
    work = Path(folder, "work", name.replace(" ", "-"))
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    proof, device = None, "cpu"

    def tell(error: str = "", of: str = machine + PART) -> None:
        findings = tuple(proof.findings) if proof else ()
        more: dict[str, Any] = dict(proof.more) if proof else {}
        seconds = round(time.perf_counter() - began, 2)
        status = status_of(findings, error)
        keep(Path(folder), PieceResult(name, status, seconds, device, "", error, findings, more), of)

    error = ""
    try:
        import torch

        from tonnage.prove.machine import computes
        from tonnage.prove.proof import Proof

        at = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        device = at.type
        card = torch.cuda.get_device_name(0) if at.type == "cuda" else ""
        _know_the_machine(work)
        proof = Proof(at, card, computes(at), work, name, int(gpus), bool(int(brief)), tell=tell)
        import_module(f"tonnage.prove.{piece.module}").prove(proof)
    except Exception:
        error = traceback.format_exc()[-MOST_TEXT:]
    tell(error, machine)
    shutil.rmtree(work, ignore_errors=True)


def _know_the_machine(directory: Path) -> None:
    """Measure it roughly if the proof's own cache does not know it, or every plan of a busy machine would."""
    from tonnage.doctor.cache import recall
    from tonnage.doctor.hardware import look
    from tonnage.doctor.measure import examine

    compute = recall(look()).compute
    if compute is None or compute.glance:
        examine(directory, quick=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
