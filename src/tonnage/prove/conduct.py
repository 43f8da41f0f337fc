"""Piece after piece, each in a process of its own: one that crashes, hangs or fills the device ends alone, with what it
had found.

What an earlier call found on this machine with this code stays, so a call that was broken off is gone on with by
another one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import groupby
from pathlib import Path

from tonnage.errors import user_error
from tonnage.host.allocators import HUGE_PAGES, huge_pages
from tonnage.prove.machine import USEFUL, described, missing, of_which
from tonnage.prove.pieces import CORES, CPU_SECONDS, LIMIT_SECONDS, TOGETHER, ProofPiece, named
from tonnage.prove.record import MOST_TEXT, PART, PieceResult, ProofRecord, keep, kept, result_file, write

Tell = Callable[[str, int, int], None]
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "0",
}
"""Nothing is fetched."""
ALLOCATORS = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", HUGE_PAGES: huge_pages()}
"""As a worker chooses them."""


def lacking() -> None:
    """Refuse a machine on which something is not installed. Raises ``UserError``, which names all of it."""
    if absent := missing():
        kit = "where no registry is reached, bring the kit that tonnage doctor --prove-kit DIR makes elsewhere"
        change = f"pip install them; {kit}"
        raise user_error(f"not installed: {', '.join(absent)}", "what the proof imports", change, "--prove")


def conduct(
    folder: Path,
    *,
    gpus: int = 1,
    only: Sequence[str] = (),
    again: bool = False,
    brief: bool = False,
    limit_seconds: float | None = None,
    tell: Tell = lambda piece_name, done, total: None,
) -> ProofRecord:
    """Carry out what is missing of the proof, and write ``prove.json`` and ``prove.html`` into ``folder`` as it goes.

    Args:
        folder: for results, and for what is made meanwhile.
        gpus: devices, or on a CPU workers, for the pieces that take several; 1 leaves these out.
        only: names of pieces; these are carried out anew, and no others. None: all.
        again: carry out anew what is there already.
        brief: only a slice of every piece, for a test.
        limit_seconds: after which a piece is ended; by default ``pieces.LIMIT_SECONDS``, and more on a CPU.

    Raises:
        KeyError: a name is no piece's.
    """
    from tonnage.prove.page import write_page

    machine = described()
    of = of_which({**machine, "brief": brief, "gpus asked": gpus}) + ("-brief" if brief else "")
    pieces, chosen = named(()), {piece.name for piece in named(tuple(only))}
    anew = chosen if again or only else set[str]()
    earlier = [kept(folder, piece.name, of) for piece in pieces if piece.name not in anew]
    results = {result.name: result for result in earlier if result is not None}
    on_gpu, at_work = bool(machine["gpus"]), set[subprocess.Popen[bytes]]()
    todo = [piece for piece in pieces if piece.name in chosen and piece.name not in results]
    limit = limit_seconds or (LIMIT_SECONDS if on_gpu else CPU_SECONDS)

    def result_of(piece: ProofPiece) -> PieceResult:
        tell(f"{piece.name}: {piece.shows}", pieces.index(piece), len(pieces))
        return _carried_out(piece, folder, of, gpus, at_work, on_gpu=on_gpu, brief=brief, limit=limit)

    def recorded() -> ProofRecord:
        date = time.strftime("%Y-%m-%d %H:%M %z")
        finished = tuple(results[piece.name] for piece in pieces if piece.name in results)
        record = ProofRecord(date, machine, finished, tuple(missing(USEFUL)))
        write(folder / "prove.json", record.to_json())
        return record

    for alone, group in groupby(todo, key=lambda piece: piece.alone):
        at_a_time = 1 if alone or not on_gpu else max(1, min(TOGETHER, machine["cpus"] // CORES))
        with ThreadPoolExecutor(at_a_time) as pool:
            try:
                for result in pool.map(result_of, group):
                    results[result.name] = result
                    recorded()
            except BaseException:  # whoever interrupts this does not wait for what goes on
                pool.shutdown(wait=False, cancel_futures=True)
                for process in list(at_work):
                    _end(process)
                raise
    record = recorded()
    with suppress(ImportError):  # a machine without jinja2 has the JSON
        write_page(record, folder / "prove.html")
    tell("", len(pieces), len(pieces))
    return record


def _carried_out(
    piece: ProofPiece,
    folder: Path,
    of: str,
    gpus: int,
    at_work: set[subprocess.Popen[bytes]],
    *,
    on_gpu: bool,
    brief: bool,
    limit: float,
) -> PieceResult:
    """One piece in its process, which is ``at_work`` for so long, or why not."""
    device = "cuda" if on_gpu else "cpu"
    if piece.gpu and not on_gpu:
        return PieceResult(piece.name, "skipped", 0.0, device, why="needs a GPU")
    if piece.several and gpus < 2:
        return PieceResult(piece.name, "skipped", 0.0, device, why="for several devices: --gpus N")
    command = [sys.executable, "-m", "tonnage.prove.child", piece.name, str(folder), of, str(gpus), str(int(brief))]
    cache = {"TONNAGE_CACHE": str((folder / "cache").resolve())}
    environment = {**ALLOCATORS, **os.environ, **OFFLINE, **cache}
    result_file(folder, piece.name).unlink(missing_ok=True)
    log, began = folder / "pieces" / f"{piece.name}.log", time.perf_counter()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env=environment, stdout=out, stderr=out, stdin=subprocess.DEVNULL, start_new_session=True
        )
        at_work.add(process)
        try:
            status: int | None = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            at_work.discard(process)
            _end(process)
            process.wait()
    result_kept = kept(folder, piece.name, of)
    seconds = round(time.perf_counter() - began, 2)
    if status == 0 and result_kept is not None:
        return result_kept
    part = result_kept or kept(folder, piece.name, of + PART)
    findings, more = (part.findings, part.more) if part is not None else ((), {})
    why = f"took longer than {limit:g} s" if status is None else f"the process ended with status {status}"
    tail = log.read_text(encoding="utf-8", errors="replace")[-MOST_TEXT:]
    result = PieceResult(piece.name, "failed", seconds, device, error=f"{tail}\n{why}", findings=findings, more=more)
    keep(folder, result, of)
    return result


def _end(process: subprocess.Popen[bytes]) -> None:
    """A piece, with all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
