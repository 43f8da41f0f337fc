"""Places to write to that are somebody else's: directories with files in them, files, devices, pipes, links."""

from __future__ import annotations

import json
import os
import random
import stat
from collections.abc import Sequence
from pathlib import Path

from hostile.case import Case
from hostile.forking import Ended
from hostile.stock import Stock

NAMES = (
    *("config.yaml", "data.json", "plan.json", "report.html", "log.txt", "environment.json", "metrics.jsonl", "lock"),
    *("rows.json", "profile.json", "profile.svg", "answers.jsonl", "run-run-job.yaml", "notes.txt", "outcome.json"),
    *("export/model.safetensors", "checkpoints/step-00000005/COMPLETE", "tokenizer/a", "workers/rank-0.log", "plans/b"),
    *(".report.html.7", ".theirs.partial/a", ".export/c", "resume.json", "tensorboard/d", "config.json"),
)
CONTENTS = (b"theirs", b"", b"{}", b'{"pid": 1', b'{"host": "x"}', b"model: x\n", b"<html>", b'{"a": 1}\n')
DEVICES = ("/dev/null", "/dev/full", "/dev/stdout", "/dev/fd/2", "/proc/x", "/sys/x", "/")
Kept = dict[str, tuple[int, int, bytes]]


def make(chance: random.Random, folder: Path, stock: Stock) -> Case:
    """A command that writes, and where."""
    work = folder / "work"
    theirs = work / "theirs"
    for name in chance.sample(NAMES, chance.randint(1, 8)):
        path = theirs / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(chance.choice(CONTENTS))
    os.mkfifo(work / "pipe")
    for name, target in (("link", "theirs"), ("linked", str(next(theirs.rglob("*")))), ("loop", "loop"), ("gone", "x")):
        (work / name).symlink_to(target)
    (work / "rows.jsonl").write_bytes(stock.rows.read_bytes())
    config = stock.config(output="run", data={"train": "rows.jsonl"})
    (work / "config.yaml").write_text(json.dumps(config))
    # Empty files are nobody's: commands may write them.
    files = [str(path) for path in theirs.rglob("*") if path.is_file() and path.stat().st_size]
    place = chance.choice(["theirs", "theirs/", "./theirs", "link", "linked", "loop", "pipe", ".", *files, *DEVICES])
    model, run = str(stock.model("llama")), str(stock.run)
    asked = ["--template", "plain", "--max-new-tokens", "1"]
    words = chance.choice(
        (
            ["train", "config.yaml", f"output={place}", "--prepare"],
            ["train", "config.yaml", f"output={place}", f"data.cache={place}", "--prepare"],
            ["train", "--resume", place, "--dry-run"],
            ["train", "--resume", place, "--prepare"],
            ["profile", "config.yaml", "--steps", "1", "--output", place],
            ["demo", "--output", place],
            ["init", model, "rows.jsonl", "--for", "task", "--output", place],
            ["import", "trl sft --learning_rate 1e-5", "--partial", "--output", place],
            ["generate", model, "--file", "rows.jsonl", *asked, "--output", chance.choice((place, "rows.jsonl"))],
            ["report", run, "--output", place],
            ["report", place],
            ["export", run, place],
            ["verify", place],
            ["stop", place],
            ["follow", place],
            ["launch", "kube", "config.yaml", "--image=a", "--claim=b", "--to", place],
        )
    )
    before = _kept(work)

    def untouched(ended: Sequence[Ended]) -> str:
        """All is there, as it was."""
        after = _kept(work)
        changed = sorted(name for name, found in before.items() if after.get(name) != found)
        if changed:
            return f"changed: {changed[:5]}"
        if not all(Path(device).is_char_device() for device in ("/dev/null", "/dev/full")):
            return "a device was replaced"
        harmful = ("rm -", "chmod -R", "chown")
        said = ended[-1].err
        return next((f"it advises {one}" for one in harmful if one in said), "")

    return Case([words], check=untouched, statuses=(0, 1, 2))


def _kept(folder: Path) -> Kept:
    """What is in a directory: kind, inode and content of all but empty files, and of directories the kind."""
    found: Kept = {}
    for path in folder.rglob("*"):
        told = path.lstat()
        kind = stat.S_IFMT(told.st_mode)
        if kind == stat.S_IFREG and told.st_size:
            found[str(path)] = (kind, told.st_ino, path.read_bytes())
        elif kind != stat.S_IFREG:
            found[str(path)] = (kind, 0, b"")
    return found
