"""Disks that are full, places that are read-only, streams that are closed; runs and checkpoints that were damaged."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from hostile import mutations
from hostile.case import Case
from hostile.forking import Ended
from hostile.stock import Stock

STRANGER = 65534
"""A user who owns nothing: nobody."""


def make(chance: random.Random, folder: Path, stock: Stock) -> Case:
    """A run that is damaged, or a command whose surroundings refuse something."""
    return _damaged(chance, folder, stock) if chance.randrange(5) < 3 else _refused(chance, folder, stock)


def _damaged(chance: random.Random, folder: Path, stock: Stock) -> Case:
    run = folder / "work" / "run"
    shutil.copytree(stock.run, run)
    files = sorted(path for path in run.rglob("*") if path.is_file())
    path = chance.choice(files)
    before, broken = path.read_bytes(), ""
    way = chance.randrange(6)
    if (way < 2 and path.suffix == ".json") or path.name == "COMPLETE":
        path.write_text(
            json.dumps(mutations.changed(chance, json.loads(before), chance.choice((1, 1, 3)))), errors="surrogatepass"
        )
    elif way < 4:
        path.write_bytes(mutations.content(chance, before))
    elif way == 4:
        path.unlink()
    else:
        path.unlink()
        if chance.randrange(2):
            path.mkdir()
        else:
            path.symlink_to(chance.choice(("/dev/zero", path.name, str(folder / "outside" / "secret.txt"), "nothing")))
    same = path.is_file() and not path.is_symlink() and path.read_bytes() == before
    kept = {"checkpoints": "a checkpoint is damaged", "export": "the export is damaged"}.get(
        path.relative_to(run).parts[0], ""
    )
    words = chance.choice(
        (
            ["verify", "run"],
            ["verify", "run"],
            ["export", "run", "out"],
            ["export", "run", "out", "--from", "1"],
            ["train", "--resume", "run", "--dry-run"],
            ["train", "--resume", "run", "steps=3", "--dry-run"],
            ["follow", "run"],
            ["generate", "run", "--prompt", "a", "--max-new-tokens", "2"],
            ["chat", "run", "--max-new-tokens", "2"],
            ["eval", "run", "--data", str(stock.rows), "--exact-match", "0"],
        )
    )
    if words[0] == "verify" and not same and kept and path.name != "README.md":
        broken = kept
        if path.name == "COMPLETE" and not path.is_file():
            broken = ""  # a save that was interrupted
        if path.name in ("COMPLETE", "checksums.json") and path.is_file():  # not what has no end
            broken = "" if _says_the_same(path, before) else broken
    return Case([words], broken=broken, named=("interrupted", "nothing reads it"), statuses=(0, 2))


def _says_the_same(path: Path, before: bytes) -> bool:
    """Whether a list of files lists what it listed, whatever else stands there."""
    try:
        now, then = (json.loads(content)["files"] for content in (path.read_bytes(), before))
        return now.keys() == then.keys() and all(then[name].items() <= now[name].items() for name in then)
    except (OSError, ValueError, AttributeError, KeyError, TypeError, RecursionError):
        return False


def _refused(chance: random.Random, folder: Path, stock: Stock) -> Case:
    work = folder / "work"
    (work / "config.yaml").write_text(json.dumps(stock.config(output="run", data={"train": "rows.jsonl"})))
    rows = [json.loads(line) for line in stock.rows.read_text().splitlines()]
    rows[0]["output"] = f"only here {chance.random()}"
    (work / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shutil.copytree(stock.run, work / "old")
    (work / "ds.json").write_text('{"train_batch_size": 8}')
    model = str(stock.model("llama"))
    commands: Sequence[list[str]] = (
        ["inspect", "config.yaml"],
        ["plan", "config.yaml", "--json"],
        ["train", "config.yaml", "--dry-run"],
        ["train", "config.yaml", "--prepare"],
        ["export", "old", "out"],
        ["verify", "old"],
        ["import", "ds.json", "-o", "out.yaml"],
        ["launch", "kube", "config.yaml", "--image=a", "--claim=b", "--to", "manifests"],
        [
            "generate",
            model,
            "--file",
            "rows.jsonl",
            "--output",
            "answers.jsonl",
            "--template",
            "plain",
            "--max-new-tokens",
            "1",
        ],
        ["generate", model, "--prompt", "a", "--template", "plain", "--max-new-tokens", "2"],
        ["chat", model, "--template", "plain", "--max-new-tokens", "2"],
        ["train", "--resume", "old", "steps=3", "--dry-run"],
        ["--help"],
    )
    words = chance.choice(commands)
    before, broken = _surroundings(chance, folder)

    def whole(ended: Sequence[Ended]) -> str:
        """What was written is whole, or is not there."""
        if ended[-1].status == 0:
            return ""
        if (work / "out" / "checksums.json").exists() or (work / "out.yaml").exists():  # done, and only not told
            return ""
        made = [name for name in ("out", "out.yaml", "answers.jsonl", "run") if (work / name).exists()]
        half = [path.name for path in work.iterdir() if path.name.startswith(".") or path.name.endswith(".tmp")]
        if words[0] == "train" and made == ["run"] and any((work / "run").iterdir()):
            return f"left of a run that was not begun: {[path.name for path in (work / 'run').iterdir()][:5]}"
        if half or (made and words[0] != "train"):
            return f"left half written: {made + half}"
        return ""

    if words[0] in ("chat", "import") or "--output" in words:  # which need not print to standard output
        broken = ""
    return Case([words], before=before, broken=broken, check=whole, statuses=(0, 1, 2, 141), may_leave=True)


def _surroundings(chance: random.Random, folder: Path) -> tuple[Callable[[], None], str]:
    """What is refused, and what must fail for it."""
    way = chance.randrange(7)
    if way == 0:
        return lambda: _to("/dev/full"), "standard output is full"
    if way == 1:
        return lambda: os.close(1), ""
    if way == 2:

        def no_reader() -> None:
            reads, writes = os.pipe()
            os.close(reads)
            os.dup2(writes, 1)
            os.close(writes)

        return no_reader, ""
    if way == 3:
        most = chance.choice((0, 1, 100, 4096, 20_000))

        def small_files() -> None:
            _through_a_pipe((1, 2))  # what is printed is not what is too large
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

        return small_files, ""
    if way == 4:
        most_files = chance.choice((8, 16, 24))
        return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files)), ""
    if way == 5:

        def be_stranger() -> None:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(STRANGER)
                os.setuid(STRANGER)

        return be_stranger, ""

    place = chance.choice(("/proc/nothing", "/dev/null", "config.yaml", "\x1b[31m", "/sys/x", "x" * 300))

    def read_only_cache() -> None:
        os.environ["TONNAGE_CACHE"] = place

    return read_only_cache, ""


def _to(path: str) -> None:
    file = os.open(path, os.O_WRONLY)
    os.dup2(file, 1)
    os.close(file)


def _through_a_pipe(numbers: Sequence[int]) -> None:
    """Let another process write what is printed into its files."""
    for number in numbers:
        reads, writes = os.pipe()
        if not os.fork():
            os.close(writes)
            while content := os.read(reads, 1 << 16):
                os.write(number, content)
            os._exit(0)
        os.close(reads)
        os.dup2(writes, number)
        os.close(writes)
