"""Tokens per second of preparation against bare ``tokenizers`` on the same texts, and seconds of a second run.

    python benchmarks/prepare.py --tokenizer DIR_OR_FILE --rows FILE [FILE ...] [--repeats 5]

Preparation reads the files, renders, tokenises, proves every border, packs and writes the cache to disk; ``tokenizers``
only gets the finished texts in one ``encode_batch``. Both start from a tokenizer already loaded. Runs alternate, so
that what else the machine does falls on both; the figure is the ratio of the medians. On a machine that is not quiet
the seconds of CPU (all threads) say more.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tonnage.data import DataOptions, Source, prepare

T = TypeVar("T")


def load_tokenizer(path: Path) -> Any:
    """A tokenizer from a directory, or from a bare ``tokenizer.json`` with ``<|endoftext|>``."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if path.is_dir():
        return AutoTokenizer.from_pretrained(path)
    return PreTrainedTokenizerFast(tokenizer_file=str(path), eos_token="<|endoftext|>", bos_token="<|endoftext|>")


def measured(work: Callable[[], T]) -> tuple[tuple[float, float], T]:
    """Wall-clock seconds and seconds of CPU that something takes, and its result."""
    began, began_cpu = time.perf_counter(), time.process_time()
    result = work()
    return (time.perf_counter() - began, time.process_time() - began_cpu), result


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--rows", nargs="+", required=True)
    parser.add_argument("--max-length", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()

    tokenizer = load_tokenizer(arguments.tokenizer)
    options = DataOptions(train=tuple(Source(path) for path in arguments.rows), max_length=arguments.max_length)
    with tempfile.TemporaryDirectory() as directory:
        (first, _), prepared = measured(partial(prepare, options, tokenizer, cache=Path(directory) / "first"))
        (again, _), _ = measured(partial(prepare, options, tokenizer, cache=Path(directory) / "first"))
        documents = prepared.train.source
        texts = [prepared.tokenizer.decode(documents.tokens(at)) for at in range(len(documents))]
        backend = prepared.tokenizer.backend_tokenizer
        num_tokens = sum(len(found) for found in backend.encode_batch(texts, add_special_tokens=False))
        ours, bare = [], []
        for repeat in range(arguments.repeats):
            ours.append(measured(partial(prepare, options, tokenizer, cache=Path(directory) / str(repeat)))[0])
            bare.append(measured(partial(backend.encode_batch, texts, add_special_tokens=False))[0])

    read = prepared.account.total.tokens.read
    print(f"rows {prepared.account.total.rows_read:,}  tokens {read:,} (bare: {num_tokens:,})")
    rates = []
    for name, runs, tokens in (("prepare", ours, read), ("encode_batch", bare, num_tokens)):
        wall, cpu = (sorted(seconds) for seconds in zip(*runs, strict=True))
        rates.append(tokens / statistics.median(wall))
        print(
            f"{name:<13} {rates[-1]:>12,.0f} tokens/s  median {statistics.median(wall):.2f} s "
            f"({wall[0]:.2f} to {wall[-1]:.2f} s)  CPU {statistics.median(cpu):.2f} s"
        )
    print(f"ratio         {rates[0] / rates[1]:.2f}   first run {first:.2f} s, second run from the cache {again:.2f} s")


if __name__ == "__main__":
    main()
