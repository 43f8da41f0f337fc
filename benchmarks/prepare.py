"""Seconds of preparation beside bare ``tokenizers`` on the same texts, and beside another version of tonnage.

    python benchmarks/prepare.py --tokenizer DIR_OR_FILE --rows FILE [FILE ...] [--repeats 5]
    python benchmarks/prepare.py --tokenizer DIR_OR_FILE --chinese SEED,ROWS,CHARACTERS --against CHECKOUT/src

Preparation reads the files, renders, tokenises, proves every border, packs and writes the cache to disk; ``tokenizers``
only gets the finished texts in one ``encode_batch``. Both start from a tokenizer already loaded. Runs alternate, so
that what else the machine does falls on all; the figures are ratios of medians. On a machine that is not quiet the
seconds of CPU (all threads) say more.

``--chinese`` makes conversations in a script without spaces, of so many characters a row, instead of reading files.
``--tokenizer qwen-like`` is a byte-level tokenizer with Qwen 2's split pattern and normaliser, trained on such rows.
``--against`` (the ``src`` of another checkout) prepares the same rows with that version, each time in a process of its
own, and stops when its tokens or its spans are not the same.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

QWEN_2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHARACTERS = 3000
"""Different ones in the made rows, the frequent ones as frequent as in a normal distribution."""


def chinese_rows(seed: int, rows: int, characters: int) -> list[dict[str, Any]]:
    """Conversations of about ``characters`` characters each: questions of 40 to 120, answers of 200 to 900, in clauses
    of 4 to 18 characters that a punctuation mark or a line break ends."""
    chance = random.Random(seed)
    common = [chr(0x4E00 + int(abs(chance.gauss(0, 1)) * 2500) % 20000) for _ in range(CHARACTERS)]

    def text(size: int) -> str:
        written = ""
        while len(written) < size:
            written += "".join(chance.choices(common, k=chance.randint(4, 18))) + chance.choice("，，，。；：？！\n")
        return written[:size]

    found = []
    for _ in range(rows):
        messages: list[dict[str, str]] = []
        left = characters
        while left > 0:
            for role, size in (("user", chance.randint(40, 120)), ("assistant", chance.randint(200, 900))):
                messages.append({"role": role, "content": text(max(1, min(left, size)))})
                left -= size
        found.append({"messages": messages})
    return found


def qwen_like() -> Any:
    """A byte-level tokenizer of 8,000 tokens, made as Qwen 2's is."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_2), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=8000,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (message["content"] for row in chinese_rows(0, 50, 4000) for message in row["messages"])
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load_tokenizer(path: Path) -> Any:
    """A tokenizer from a directory, or from a bare ``tokenizer.json`` with ``<|endoftext|>``."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if path.is_dir():
        return AutoTokenizer.from_pretrained(path)
    return PreTrainedTokenizerFast(tokenizer_file=str(path), eos_token="<|endoftext|>", bos_token="<|endoftext|>")


def prepare_once(arguments: argparse.Namespace, bare: bool) -> dict[str, Any]:
    """Prepare in this process: seconds of wall clock and of CPU, what came out, and the same of a second run; with
    ``bare``, also what ``tokenizers`` takes for the texts."""
    from tonnage.config import Data, Source
    from tonnage.data import prepare

    tokenizer = load_tokenizer(Path(arguments.tokenizer))
    options = Data(train=tuple(Source(path=path) for path in arguments.rows), max_length=arguments.max_length)
    with tempfile.TemporaryDirectory() as directory:
        began, began_cpu = time.perf_counter(), time.process_time()
        prepared = prepare(options, tokenizer, cache=Path(directory))
        seconds, cpu = time.perf_counter() - began, time.process_time() - began_cpu
        began = time.perf_counter()
        prepare(options, tokenizer, cache=Path(directory))
        again = time.perf_counter() - began
        documents = prepared.train.source
        told = hashlib.sha256()
        for at in range(len(documents)):
            told.update(documents.tokens(at).tobytes())
            told.update(repr(documents.spans(at)).encode())
        found = {
            "seconds": seconds,
            "cpu": cpu,
            "again": again,
            "rows": prepared.account.total.rows_read,
            "tokens": prepared.account.total.tokens.read,
            "digest": told.hexdigest(),
        }
        if bare:
            texts = [prepared.tokenizer.decode(documents.tokens(at)) for at in range(len(documents))]
            backend = prepared.tokenizer.backend_tokenizer
            began, began_cpu = time.perf_counter(), time.process_time()
            backend.encode_batch(texts, add_special_tokens=False)
            found |= {"bare": time.perf_counter() - began, "bare_cpu": time.process_time() - began_cpu}
        return found


def measured(arguments: argparse.Namespace, source: str | None) -> dict[str, Any]:
    """``prepare_once`` in a process of its own, with the package of ``source`` if one is given."""
    environment = dict(os.environ)
    if source:
        environment["PYTHONPATH"] = str(Path(source).resolve())
    command = [sys.executable, __file__, "--tokenizer", str(arguments.tokenizer), "--rows", *arguments.rows, "--once"]
    command += ["--max-length", str(arguments.max_length)] + ([] if source else ["--bare"])
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def processor() -> str:
    """The processor's name and the instructions that matter here."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--rows", nargs="+", default=[])
    parser.add_argument("--chinese", help="seed,rows,characters")
    parser.add_argument("--against", help="src of another checkout")
    parser.add_argument("--max-length", type=int, help="2,048, or 131,072 with --chinese")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.once:
        print(json.dumps(prepare_once(arguments, arguments.bare)))
        return
    if bool(arguments.rows) == bool(arguments.chinese):
        parser.error("give either --rows or --chinese")
    arguments.max_length = arguments.max_length or (1 << 17 if arguments.chinese else 2048)

    name = arguments.tokenizer
    with tempfile.TemporaryDirectory() as directory:
        if name == "qwen-like":
            arguments.tokenizer = str(Path(directory) / "tokenizer.json")
            qwen_like().save(arguments.tokenizer)
        if arguments.chinese:
            seed, rows, characters = map(int, arguments.chinese.split(","))
            arguments.rows = [str(Path(directory) / "rows.jsonl")]
            with Path(arguments.rows[0]).open("w", encoding="utf-8") as out:
                out.writelines(
                    json.dumps(row, ensure_ascii=False) + "\n" for row in chinese_rows(seed, rows, characters)
                )
        versions = [None] + ([arguments.against] if arguments.against else [])
        runs: dict[str | None, list[dict[str, Any]]] = {version: [] for version in versions}
        for _ in range(arguments.repeats):
            for version in versions:
                runs[version].append(measured(arguments, version))

    ours = runs[None]
    if len({run["digest"] for found in runs.values() for run in found}) > 1:
        raise SystemExit("the versions do not give the same tokens and spans")
    kinds = {"prepare": (ours, "seconds", "cpu"), "encode_batch": (ours, "bare", "bare_cpu")}
    if arguments.against:
        kinds["prepare, other version"] = (runs[arguments.against], "seconds", "cpu")
    print(f"{processor()}, {os.cpu_count()} cores; {name}")
    print(f"rows {ours[0]['rows']:,}  tokens {ours[0]['tokens']:,}  (the same in all runs)")
    results: dict[str, dict[str, float]] = {}
    for kind, (found, wall, cpu) in kinds.items():
        seconds = sorted(run[wall] for run in found)
        results[kind] = {"seconds": statistics.median(seconds), "cpu": statistics.median(run[cpu] for run in found)}
        print(
            f"{kind:<24} {ours[0]['tokens'] / results[kind]['seconds']:>12,.0f} tokens/s  median "
            f"{results[kind]['seconds']:.2f} s ({seconds[0]:.2f} to {seconds[-1]:.2f} s)  "
            f"CPU {results[kind]['cpu']:.2f} s"
        )
    again = statistics.median(run["again"] for run in ours)
    print(f"of encode_batch's rate: {results['encode_batch']['seconds'] / results['prepare']['seconds']:.2f}")
    print(f"a second run, from the cache: {again:.2f} s")
    if arguments.against:
        faster = results["prepare, other version"]["seconds"] / results["prepare"]["seconds"]
        print(f"as fast as the other version: {faster:.1f} times")
    if arguments.output:
        told = {
            "benchmark": "prepare",
            "date": datetime.date.today().isoformat(),
            "processor": processor(),
            "cores": os.cpu_count(),
            "tokenizer": Path(name).name,
            "rows": ours[0]["rows"],
            "tokens": ours[0]["tokens"],
            "chinese": arguments.chinese,
            "repeats": arguments.repeats,
            "medians": results,
            "second_run_seconds": again,
        }
        kept = json.loads(arguments.output.read_text()) if arguments.output.exists() else []
        kept = [one for one in kept if (one["tokenizer"], one["chinese"]) != (told["tokenizer"], told["chinese"])]
        arguments.output.write_text(json.dumps([*kept, told], indent=1) + "\n")


if __name__ == "__main__":
    main()
