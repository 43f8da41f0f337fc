"""The pictures of the page in docs/page.md: ``python scripts/screens.py docs/page`` (needs Chromium and Pillow).

Every view, in the light, in the dark and 390 pixels wide, as Chromium shows it. One run is that of ``tonnage demo``,
whose model is talked to and whose rows are shown; what the steps of the others measured is made up.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from tonnage.rundir.directory import RunDirectory
from tonnage.rundir.positions import PositionFile

TESTS = Path(__file__).resolve().parent.parent / "tests"
MODEL = "Qwen/Qwen2.5-0.5B"
PLANNED = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}
"""A model of a billion parameters, of which nothing but the shape is needed."""
WINDOWS = {"light": ("light", 1280), "dark": ("dark", 1280), "phone": ("light", 390)}
HIGHEST = 1500
"""Pixels of a picture; what lies below is cut."""
COLOURS = 256
SECONDS = 240.0
"""For a command, which loads torch."""
ASKED = 'Reverse the word "garden"'


def recorded(
    run: RunDirectory, base: RunDirectory, steps: int, of: int, losses: tuple[float, float], lr: float
) -> None:
    """A run of a larger model, of which ``steps`` were made, from that of the demo."""
    from report.recorded import record

    left_out = shutil.ignore_patterns("checkpoints", "export", "lock", "evaluation.json", "report.html")
    shutil.copytree(base.path, run.path, ignore=left_out)
    record(run, steps)
    chance, lines = random.Random(of + steps), []
    for line in run.metrics.read_text().splitlines():
        entry = json.loads(line)
        low, high = losses
        loss = low + (high - low) * math.exp(-5 * entry["step"] / of)
        if "loss" in entry:
            entry |= {"loss": loss * chance.gauss(1, 0.05), "lr": lr * (1 - entry["step"] / of), "tokens": 16384}
            entry |= {
                "tokens_per_second": 9200 * chance.uniform(0.97, 1.03),
                "step_seconds": chance.uniform(1.65, 1.75),
            }
            entry["memory"] = {"device_peak": 6.1e9 * chance.uniform(0.99, 1), "host_peak": 1e9}
        elif "eval_loss" in entry:
            entry["eval_loss"] = loss + 0.04
        lines.append(json.dumps(entry))
    run.metrics.write_text("\n".join(lines) + "\n")
    run.log.write_text(f"2026-01-01 10:00:00 training steps 1 to {of}\n")
    config = re.sub("^model: .*$", f"model: {MODEL}", run.config.read_text(), flags=re.MULTILINE)
    run.config.write_text(config.replace("lr: 0.003", f"lr: {lr}"))
    plan = json.loads(run.plan.read_text())
    plan |= {"num_steps": of, "model": plan["model"] | {"num_parameters": 494_000_000}}
    run.plan.write_text(json.dumps(plan | {"reasons": plan["reasons"] | {"trains": "LoRA, rank 16"}}))


def noted(run: RunDirectory, phase: str, step: int) -> None:
    """Where its worker is; what has not ended has no outcome."""
    PositionFile(run.worker_position(0)).update(phase=phase, step=step, micro_batch=3, num_micro_batches=8)
    if phase != "done":
        run.outcome.unlink()


def furnish(folder: Path) -> RunDirectory:
    """Runs in every state beside that of the demo; the one that is to be locked."""
    base = RunDirectory(folder / "runs" / "demo-1" / "run")
    runs = {
        "gsm8k/lora-r16": (2000, 2000, (0.61, 2.4), 1e-4, "done"),
        "gsm8k/lora-r64": (2000, 2000, (0.58, 2.4), 1e-4, "done"),
        "gsm8k/lr-1e-3": (740, 2000, (0.9, 2.4), 1e-3, "stopped"),
        "gsm8k/full": (1240, 2000, (0.55, 2.4), 2e-5, "forward"),
        "chat/dpo": (112, 800, (0.4, 0.69), 5e-6, "backward"),
        "chat/next": (10, 800, (0.4, 0.69), 5e-6, "starting"),
    }
    for name, (steps, of, losses, lr, phase) in runs.items():
        run = RunDirectory(folder / "runs" / name)
        recorded(run, base, steps, of, losses, lr)
        noted(run, phase, steps)
    first = RunDirectory(folder / "runs" / "gsm8k/lora-r16")
    first.tags.write_text(json.dumps({"tags": ["baseline"], "note": "the one to beat"}))
    RunDirectory(folder / "runs/chat/dpo").write_error(
        0, RuntimeError("CUDA out of memory. Tried to allocate 1.5 GiB"), 1
    )
    waiting = RunDirectory(folder / "runs/chat/next")
    for path in (waiting.metrics, waiting.samples, waiting.worker_position(0), waiting.log):
        path.unlink()
    (folder / "llama-1b").mkdir()
    (folder / "llama-1b" / "config.json").write_text(json.dumps(PLANNED))
    return RunDirectory(folder / "runs/gsm8k/full")


def fill(browser: Any, label: str, value: str) -> None:
    """Type into the field that a label names."""
    field = "[...document.querySelectorAll('.field')].find((field) => field.querySelector('.label').textContent === "
    browser.run(
        f"((field) => {{ field.value = {json.dumps(value)}; field.dispatchEvent(new Event('change')); }})"
        f"({field}{json.dumps(label)}).querySelector('input, select, textarea'))"
    )


def plan(browser: Any) -> None:
    """Have the billion planned for a GPU."""
    for label, value in {"Model": "llama-1b", "Hardware": "RTX4090", "Tokens in a pack": "4096"}.items():
        fill(browser, label, value)
    browser.run("document.querySelector('form.asked').requestSubmit()")
    browser.wait("document.querySelector('.planned .tiles')", SECONDS)


def data(browser: Any) -> None:
    """Have the demo's rows shown."""
    fill(browser, "Data of", "runs/demo-1/run")
    browser.run("document.querySelector('form.across').requestSubmit()")
    browser.wait("document.querySelector('main .row')", SECONDS)


def chat(browser: Any) -> None:
    """Ask the demo's model before and after training, and show the tokens of what they answer."""
    fill(browser, "Tokens at most", "32")
    are_ready = "[...document.querySelectorAll('.who .remark')].every((side) => side.textContent === 'ready')"
    browser.wait(are_ready, SECONDS)
    browser.run(f"document.querySelector('form.ask textarea').value = {json.dumps(ASKED)}")
    browser.run("document.querySelector('form.ask').requestSubmit()")
    browser.wait("document.querySelectorAll('.turn').length === 4")
    browser.wait("!document.querySelector('form.ask button.main').disabled", SECONDS)
    browser.run("document.querySelector('.check input').click()")


COMPARED = "&".join(f"run=runs/gsm8k/{name}" for name in ("lora-r16", "lora-r64", "full", "lr-1e-3"))
VIEWS = {
    "runs": ("runs", "document.querySelector('table.runs')", None),
    "run": ("run?run=runs/gsm8k/full", "document.querySelectorAll('.report section').length > 3", None),
    "compare": (f"compare?{COMPARED}", "document.querySelectorAll('path.curve').length > 4", None),
    "plan": ("plan", "document.querySelector('form.asked')", plan),
    "data": ("data", "document.querySelector('form.across')", data),
    "chat": ("chat?run=runs/demo-1/run&run=runs/demo-1/untrained", "document.querySelector('form.ask')", chat),
}


def pictures(browser: Any, output: Path, names: Sequence[str]) -> None:
    """One of every view in every window."""
    for name in names:
        place, until, act = VIEWS[name]
        browser.resize(1280, 900)
        browser.run(f"location.hash = {json.dumps('#/' + place)}")
        browser.wait(until)
        if act is not None:
            act(browser)
        for window, (scheme, width) in WINDOWS.items():
            browser.prefer(scheme)
            browser.resize(width, 844)
            time.sleep(1)  # curves are drawn anew
            browser.run("document.activeElement.blur()")
            browser.resize(width, min(HIGHEST, browser.run("document.documentElement.scrollHeight")))
            time.sleep(0.5)
            if (wide := browser.run("document.documentElement.scrollWidth")) > width:
                print(f"{name}-{window}: {wide} pixels wide")
            path = output / f"{name}-{window}.png"
            browser.picture(path)
            Image.open(path).convert("RGB").quantize(COLOURS, kmeans=2, dither=Image.Dither.NONE).save(
                path, optimize=True
            )
            print(f"{path}: {path.stat().st_size:,} bytes", flush=True)


def main() -> None:
    """Make the runs and the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--demo", type=Path, help="A folder in which `tonnage demo` was carried out; else it is here.")
    parser.add_argument("--view", choices=VIEWS, nargs="*", default=list(VIEWS))
    asked = parser.parse_args()
    sys.path[0] = str(TESTS)
    from report.browser import Browser

    tonnage = [sys.executable, "-m", "tonnage"]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "work"
        folder.mkdir()
        if asked.demo is None:
            subprocess.run([*tonnage, "demo"], cwd=folder, check=True)
        else:
            shutil.copytree(asked.demo / "runs" / "demo-1", folder / "runs" / "demo-1")
        live = furnish(folder)
        server = subprocess.Popen([*tonnage, "page", "--port", "0"], cwd=folder, stderr=subprocess.PIPE, text=True)
        assert server.stderr is not None
        with live.lock.open("w") as lock, Browser() as browser:
            fcntl.flock(lock, fcntl.LOCK_EX)
            text = ""
            while "token=" not in text or not text.endswith("\n"):
                text += server.stderr.readline()
                assert server.poll() is None, text
            browser.resize(1280, 900)
            browser.open(text[text.index("http://") :].split()[0])
            browser.wait("document.querySelector('table.runs')")
            try:
                pictures(browser, asked.output, asked.view)
            finally:
                server.terminate()
                server.wait()


if __name__ == "__main__":
    main()
