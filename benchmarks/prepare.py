"""Tokens per second of preparation against bare ``tokenizers`` on the same texts, and seconds of a second run.

    python benchmarks/prepare.py --tokenizer DIR_OR_FILE --rows FILE [FILE ...] [--repeats 5]

Preparation reads the files, renders, tokenises, proves every border, packs and writes the cache to disk; ``tokenizers``
only gets the finished texts in one ``encode_batch``. Both start from a tokenizer already loaded. Runs alternate, so
that what else the machine does falls on both; the figure is the ratio of the medians.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from tonnage.data import DataOptions, Prepared, Source, prepare


def load_tokenizer(path: Path) -> Any:
    """A tokenizer from a directory, or from a bare ``tokenizer.json`` with ``<|endoftext|>``."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if path.is_dir():
        return AutoTokenizer.from_pretrained(path)
    return PreTrainedTokenizerFast(tokenizer_file=str(path), eos_token="<|endoftext|>", bos_token="<|endoftext|>")


def seconds_of_preparation(options: DataOptions, tokenizer: Any, cache: Path) -> tuple[float, Prepared]:
    """Wall-clock seconds of one preparation."""
    began = time.perf_counter()
    prepared = prepare(options, tokenizer, cache=cache)
    return time.perf_counter() - began, prepared


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
        first, prepared = seconds_of_preparation(options, tokenizer, Path(directory) / "first")
        again, _ = seconds_of_preparation(options, tokenizer, Path(directory) / "first")
        documents = prepared.train.source
        texts = [prepared.tokenizer.decode(documents.tokens(at)) for at in range(len(documents))]
        backend = prepared.tokenizer.backend_tokenizer
        num_tokens = sum(len(found) for found in backend.encode_batch(texts, add_special_tokens=False))
        ours, bare = [], []
        for repeat in range(arguments.repeats):
            seconds, _ = seconds_of_preparation(options, tokenizer, Path(directory) / str(repeat))
            ours.append(seconds)
            began = time.perf_counter()
            backend.encode_batch(texts, add_special_tokens=False)
            bare.append(time.perf_counter() - began)

    read = prepared.account.total.tokens.read
    print(f"rows {prepared.account.total.rows_read:,}  tokens {read:,} (bare: {num_tokens:,})")
    for name, seconds_of, tokens in (("prepare", ours, read), ("encode_batch", bare, num_tokens)):
        median = statistics.median(seconds_of)
        spread = f"{min(seconds_of):.2f} to {max(seconds_of):.2f} s"
        print(f"{name:<13} {tokens / median:>12,.0f} tokens/s  median {median:.2f} s ({spread})")
    ratio = statistics.median(bare) / statistics.median(ours) * read / num_tokens
    print(f"ratio         {ratio:.2f}   first run {first:.2f} s, second run from the cache {again:.2f} s")


if __name__ == "__main__":
    main()
