"""The display, fed by files that grow the way a run's do."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tonnage.display import progress
from tonnage.display.progress import RunDisplay, Tail, draw_sparkline, fill
from tonnage.rundir.directory import RunDirectory
from tonnage.rundir.positions import PositionFile


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


@pytest.fixture(autouse=True)
def always_refresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "REFRESH_SECONDS", 0.0)


def record(run: RunDirectory, step: int, loss: float | None = 2.0, **values: Any) -> None:
    memory = {"device_peak": 0, "host_peak": 3 * 2**30}
    usual: dict[str, Any] = {
        "step": step,
        "epoch": step / 10,
        "loss": loss,
        "grad_norm": 1.0,
        "lr": 1e-4,
        "tokens": 1000,
        "supervised_tokens": 500,
        "tokens_per_second": 500.0,
        "step_seconds": 2.0,
        "memory": memory,
        "skipped": False,
    }
    with run.metrics.open("a") as file:
        file.write(json.dumps({**usual, **values}) + "\n")


def record_evaluation(run: RunDirectory, step: int, loss: float | None) -> None:
    with run.metrics.open("a") as file:
        file.write(json.dumps({"step": step, "eval_loss": loss, "eval_seconds": 1.0}) + "\n")


def plain(run: RunDirectory, feed: Callable[[RunDisplay], None], num_steps: int = 10) -> list[str]:
    """Lines shown where there is no terminal."""
    file = io.StringIO()
    with RunDisplay(run, num_steps, console=Console(file=file, width=80)) as display:
        feed(display)
    assert "\x1b" not in file.getvalue()
    return file.getvalue().splitlines()


def region(run: RunDirectory, width: int = 100, num_steps: int = 10, **options: Any) -> list[str]:
    """Lines of the live region as it is now."""
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None, **options)
    display = RunDisplay(run, num_steps, num_workers=2, console=console)
    with console.capture() as capture:
        console.print(display._region())
    return capture.get().splitlines()


def test_tail_gives_whole_lines_once(tmp_path: Path) -> None:
    path = tmp_path / "file"
    tail = Tail(path)
    assert tail.lines() == []
    path.write_text("one\ntw")
    assert tail.lines() == ["one"]
    assert tail.lines() == []
    path.write_text("one\ntwo\nthree\nfo")
    assert tail.lines() == ["two", "three"]
    path.write_bytes(b"x\n")
    assert tail.lines() == ["x"]
    path.write_bytes(b"x\n\xff\n")
    assert tail.lines() == ["\ufffd"]


def test_plain_lines(run: RunDirectory) -> None:
    def feed(display: RunDisplay) -> None:
        record(run, 1, 3.5)
        display.poll()
        record_evaluation(run, 1, 3.25)
        run.log.write_text("2026-01-01 10:00:00 saved step-1\n")
        display.poll()
        record(run, 2, 3.0)
        display.poll()

    first, evaluation, log, last, summary = plain(run, feed)
    assert first == "step 1/10  loss 3.5000  lr 1.00e-04  500 tokens/s  3.0 GiB  eta 0:18"
    assert evaluation == "step 1: eval loss 3.2500"
    assert log == "saved step-1"
    assert last.startswith("step 2/10  loss 3.0000  eval 3.2500 @1")
    assert summary.startswith(
        "2 of 10 steps in 0:00, loss 3.5000 -> 3.0000, eval loss 3.2500, 2,000 tokens at 500 tokens/s"
    )


def test_plain_lines_are_rationed_but_end_with_the_last_step(run: RunDirectory) -> None:
    def feed(display: RunDisplay) -> None:
        for step in range(1, 1001):
            record(run, step, step_seconds=1.0)
            display.poll()

    lines = plain(run, feed, num_steps=1000)
    assert len(lines) < 20
    assert lines[-2].startswith("step 1000/1000")


def test_loading_is_shown_in_plain_lines_once(run: RunDirectory) -> None:
    def feed(display: RunDisplay) -> None:
        position = PositionFile(run.worker_position(0))
        position.update(phase="load")
        display.poll()
        display.poll()

    assert plain(run, feed) == ["loading the model", "no step of 10 was taken"]


def test_what_is_not_finite(run: RunDirectory) -> None:
    def feed(display: RunDisplay) -> None:
        record(run, 1, None, skipped=True)
        with run.metrics.open("a") as file:
            file.write(
                '{"step": 2, "loss": NaN, "lr": null, "tokens": null, "memory": null, "tokens_per_second": null}\n'
            )
        record_evaluation(run, 2, None)
        display.poll()

    lines = plain(run, feed)
    assert lines[0] == "step 1: skipped, its loss or gradient is not finite"
    assert "step 2: eval loss not finite" in lines
    assert lines[-1].endswith("1 not finite and skipped")
    assert any("loss not finite" in line for line in region(run))


@pytest.mark.parametrize("line", ["{", "[]", "3", "{}", '{"step": 3}', '{"loss": 1}', "\x00\x00"])
def test_a_damaged_line_is_passed_over(run: RunDirectory, line: str) -> None:
    def feed(display: RunDisplay) -> None:
        run.metrics.write_text(line + "\n")
        record(run, 4)
        display.poll()

    assert plain(run, feed)[-1].startswith("4 of 10 steps")


def test_what_was_there_before_is_not_shown_again(run: RunDirectory) -> None:
    record(run, 1, 9.0)
    record_evaluation(run, 1, 8.0)
    run.log.write_text("2026-01-01 10:00:00 old\n")

    def feed(display: RunDisplay) -> None:
        record(run, 2, 7.0)
        display.poll()

    lines = plain(run, feed)
    assert len(lines) == 2
    assert lines[0].startswith("step 2/10  loss 7.0000  eval 8.0000 @1")


def test_the_region_while_loading_shows_the_slowest_worker(run: RunDirectory) -> None:
    PositionFile(run.worker_position(0)).update(phase="step", step=1)
    PositionFile(run.worker_position(1)).update(phase="load")
    assert "loading the model" in region(run)[0]
    assert len(region(run)) == 1


@pytest.mark.parametrize("width", [40, 57, 80, 120, 200])
def test_the_region_fits(run: RunDirectory, width: int) -> None:
    for rank in range(2):
        PositionFile(run.worker_position(rank)).update(phase="step", step=8, micro_batch=2 + rank, num_micro_batches=6)
    for step in range(1, 8):
        record(run, step, 10.0 / step)
    record_evaluation(run, 7, 1.75)
    lines = region(run, width)
    assert all(len(line) <= width for line in lines)
    text = "\n".join(lines)
    for part in ("step 8, micro-batch 2/6", "7/10", "loss 1.4286 █", "eval 1.7500 @7", "lr 1.00e-04"):
        assert part in text
    for part in ("500 tokens/s", "3.0 GiB", "eta 0:0"):
        assert part in text


def test_a_stop_is_shown_as_understood(run: RunDirectory) -> None:
    PositionFile(run.worker_position(0)).update(phase="save")
    PositionFile(run.worker_position(1)).update(phase="save")
    run.stop_asked.touch()
    assert "stopping: saving" in region(run)[0]
    assert "Ctrl-C again" in region(run)[0]


def test_live_on_a_terminal(run: RunDirectory) -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=80, color_system=None)
    with RunDisplay(run, 3, console=console) as display:
        for step in range(1, 4):
            record(run, step)
            display.poll()
        record_evaluation(run, 3, 1.5)
        display.poll()
    text = file.getvalue()
    assert "\x1b[?25l" in text
    assert "\x1b[?25h" in text
    assert text.count("step 3: eval loss 1.5000") == 1
    assert "3 of 3 steps" in text


def test_after_an_error_the_region_goes_and_no_summary_comes(run: RunDirectory) -> None:
    file = io.StringIO()
    display = RunDisplay(run, 3, console=Console(file=file, force_terminal=True, width=80, color_system=None))

    def fail() -> None:
        with display:
            record(run, 1)
            display.poll()
            raise ValueError

    with pytest.raises(ValueError):
        fail()
    assert "of 3 steps" not in file.getvalue()
    assert file.getvalue().endswith("\x1b[2K")


def test_a_terminal_without_unicode(run: RunDirectory) -> None:
    for step in range(1, 9):
        record(run, step, float(step))
    raw = io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, "ascii"), force_terminal=True, width=80, color_system=None)
    with RunDisplay(run, 10, console=console) as display:
        display.poll()
    console.file.flush()
    assert b"loss 8.0000 _.-=+*%#" in raw.getvalue()


def test_sparkline() -> None:
    assert draw_sparkline([1, 2, 3, 4, 5, 6, 7, 8], 8) == "▁▂▃▄▅▆▇█"
    assert draw_sparkline([8, 8, 1, 1], 2) == "█▁"
    assert draw_sparkline([2, 2], 2) == "▄▄"
    assert draw_sparkline([None, math.nan], 2) == "  "
    assert draw_sparkline([1, None, 2], 3) == "▁ █"
    assert draw_sparkline([], 3) == "   "


@given(st.lists(st.none() | st.floats(), max_size=300), st.integers(1, 60))
def test_a_sparkline_is_as_wide_as_asked(values: list[float | None], width: int) -> None:
    assert len(draw_sparkline(values, width)) == width


def test_fill_breaks_between_pieces() -> None:
    assert fill(["aaa", "bbb", "cccc"], 8) == ["aaa  bbb", "cccc"]
    assert fill(["a" * 10], 4) == ["a" * 10]
    assert fill([], 4) == []
