"""Peak host memory of preparing millions of rows, over all processes, and what each worker then holds beyond the map.

    python benchmarks/prepare_large.py --tokenizer DIR [--rows 5000000] [--readers 4] [--output FILE]

Memory is the proportional set size of the process and all its children, sampled ten times a second: pages that
processes share are counted once. A reader opens the prepared packs as a worker does, reads all it would in an epoch
and reports what that added to its own written pages: those of the mapped cache are not written and can be dropped at
any time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WORDS = [first + second for first in ("the", "of", "an", "to", "in") for second in ("is", "that", "for", "", "it")]


def write_rows(path: Path, rows: int) -> None:
    """Instructions and answers of 15 to 40 words, no two rows alike."""
    draw = random.Random(0)
    with path.open("w") as out:
        for row in range(rows):
            asked = " ".join(draw.choices(WORDS, k=draw.randrange(5, 15)))
            answered = " ".join(draw.choices(WORDS, k=draw.randrange(10, 25)))
            out.write(f'{{"instruction": "{row} {asked}?", "output": "{answered}, {row % 1013}."}}\n')


def pages(pid: int, *fields: str) -> int:
    """Bytes of some fields of ``/proc/PID/smaps_rollup``; 0 for a process that has gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (OSError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.split(":")[0] in fields)


def tree(pid: int) -> list[int]:
    """A process and all that descend from it."""
    try:
        children = [
            int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()
        ]
    except (OSError, ProcessLookupError):
        children = []
    return [pid, *(descendant for child in children for descendant in tree(child))]


def prepare_rows(tokenizer: str, rows: str, cache: str, report: Any) -> None:
    from transformers import AutoTokenizer

    from tonnage.config import Data, Source
    from tonnage.data import prepare

    began = time.perf_counter()
    options = Data(train=(Source(path=rows),), max_length=1024)
    prepared = prepare(options, AutoTokenizer.from_pretrained(tokenizer), cache=Path(cache))
    total = prepared.account.total
    report.put((str(prepared.train.path), total.rows_packed, prepared.train.num_tokens, time.perf_counter() - began))


def read_packs(path: str, rank: int, readers: int, report: Any) -> None:
    """Read every ``readers``-th pack of an epoch; report private bytes before and after, and the tokens read."""
    from tonnage.data import PackedDataset, pack_at

    before = pages(os.getpid(), "Private_Dirty")
    packs = PackedDataset.open(path)
    tokens = 0
    for position in range(rank, packs.num_packs, readers):
        tokens += len(packs.pack(pack_at(position, packs.num_packs, 0)).input_ids)
    report.put((tokens, pages(os.getpid(), "Private_Dirty") - before))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--readers", type=int, default=4)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    report: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder, "rows.jsonl")
        write_rows(rows, arguments.rows)
        file_bytes = rows.stat().st_size
        prepare = context.Process(target=prepare_rows, args=(arguments.tokenizer, str(rows), folder + "/cache", report))
        prepare.start()
        peak = 0
        while prepare.is_alive():
            peak = max(peak, sum(pages(pid, "Pss") for pid in tree(prepare.pid or 0)))
            time.sleep(0.1)
        if prepare.exitcode:
            sys.exit(f"error: preparation ended with status {prepare.exitcode}")
        path, packed, tokens, seconds = report.get()
        workers = [
            context.Process(target=read_packs, args=(path, rank, arguments.readers, report))
            for rank in range(arguments.readers)
        ]
        for worker in workers:
            worker.start()
        read = [report.get() for _ in workers]
        assert packed == arguments.rows
        assert sum(count for count, _ in read) == tokens
    result = {
        "rows": arguments.rows,
        "file_bytes": file_bytes,
        "tokens": tokens,
        "prepare_seconds": round(seconds, 1),
        "prepare_peak_bytes": peak,
        "reader_private_bytes": [private for _, private in read],
    }
    print(json.dumps(result, indent=2))
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
