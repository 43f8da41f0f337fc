"""A run as it happens, read from its directory: on a terminal one live region, elsewhere plain lines.

    ⠙ step 38, micro-batch 3/8                       or what else it does: loading, evaluating, saving
    ━━━━━━━━━━━━━━━━━━━━━╺━━━━━━━━━━━━━━━━━━━ 37/100
    loss 3.2102 █▇▆▅▄▄▃▃▂▂▁▁  eval 3.4012 @20  lr 9.10e-04  2,431 tokens/s  2.1 GiB  eta 4:12

Only files are read: the metrics and the log from where they ended at the last look (a last line still being
written waits for its end), and the workers' positions. So the display neither knows nor disturbs the workers,
and ``poll`` can be called as often as one likes.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from tonnage.display.terminal import terminal
from tonnage.errors import UserError
from tonnage.files.visible import visible
from tonnage.rundir.directory import RunDirectory
from tonnage.rundir.positions import Position
from tonnage.rundir.records import has_traffic, is_step, metrics_record, peak_memory
from tonnage.rundir.stalls import WITHIN_STEP, progress

PHASES = {
    "starting": "starting the workers",
    "import": "importing torch",
    "compile": "compiling loops, once on a machine",
    "join": "waiting for the other workers",
    "build": "building the model",
    "load": "loading the model",
    "optimizer": "making the optimizer's state",
    "reference": "computing the reference",
    "teacher": "asking the teacher",
    "features": "looking at the images",
    "evaluate": "evaluating",
    "answer": "answering",
    "save": "saving",
    "done": "done",
    "stopped": "stopped",
}
UNITS = {
    "reference": "packs",
    "teacher": "packs",
    "features": "rows with images",
    "evaluate": "packs",
    "answer": "prompts",
}
"""What is counted in a phase that is no step."""
BARS, PLAIN_BARS = "▁▂▃▄▅▆▇█", "_.-=+*%#"
LONGEST_SPARKLINE = 40
RECENT_STEPS = 50
"""Steps whose median time the remaining time is reckoned from."""
PLAIN_LINES = 200
"""About how many steps a long run shows where there is no terminal."""
REFRESH_SECONDS = 0.1


class Tail:
    """Whole lines appended to a file since the last look; the file need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def lines(self) -> list[str]:
        """New lines, without their ends. A line still without one is left for the next look."""
        try:
            if self._path.stat().st_size < self._offset:  # replaced by a shorter file
                self._offset = 0
            with self._path.open("rb") as file:
                file.seek(self._offset)
                whole, newline, _ = file.read().rpartition(b"\n")
        except OSError:
            return []
        self._offset += len(whole) + len(newline)
        return whole.decode(errors="replace").split("\n") if newline else []


@dataclass
class State:
    """What is known of a run from its metrics."""

    num_steps: int
    step: int = 0
    last: dict[str, Any] = field(default_factory=dict)
    """The latest step's record."""
    losses: list[float | None] = field(default_factory=list)
    """Of every step seen; None where it was not finite."""
    evaluations: list[tuple[int, float | None]] = field(default_factory=list)
    """Step and loss of every evaluation."""
    num_tokens: int = 0
    num_skipped: int = 0
    seconds: float = 0.0
    """Spent in steps."""
    recent_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    last_change: float = field(default_factory=time.monotonic)
    memory_bytes: int = 0
    num_saves: int = 0
    blocked_seconds: float = 0.0
    """Spent waiting for checkpoints."""

    @classmethod
    def of(cls, num_steps: int, records: Iterable[dict[str, Any]]) -> State:
        """What records tell of a run of so many steps."""
        state = cls(num_steps)
        for record in records:
            state.take(record)
        return state

    def take(self, record: dict[str, Any]) -> Literal["step", "evaluation", "neither"]:
        """Add one record of ``metrics.jsonl``; says what it was."""
        if "eval_loss" in record:
            self.evaluations.append((int(record["step"]), _finite(record["eval_loss"])))
            return "evaluation"
        if "blocked_seconds" in record:
            self.num_saves += 1
            self.blocked_seconds += _finite(record["blocked_seconds"]) or 0.0
        if not is_step(record):
            return "neither"
        self.step, self.last = int(record["step"]), record
        self.losses.append(_finite(record["loss"]))
        self.num_tokens += int(record.get("tokens") or 0)
        self.num_skipped += bool(record.get("skipped"))
        seconds = _finite(record.get("step_seconds"))
        if seconds is not None:
            self.seconds += seconds
            self.recent_seconds.append(seconds)
        self.memory_bytes = max(self.memory_bytes, int(peak_memory(record) or 0))
        self.last_change = time.monotonic()
        return "step"

    def remaining_seconds(self) -> float | None:
        """Time to the last step, from the median of recent ones; None before the first."""
        if not self.recent_seconds or self.step >= self.num_steps:
            return None
        step_seconds = statistics.median(self.recent_seconds)
        in_this_step = min(time.monotonic() - self.last_change, step_seconds)
        return (self.num_steps - self.step) * step_seconds - in_this_step


def summarise(state: State, seconds: float | None = None) -> str:
    """One line on a run, and ``seconds`` that it took, if that is known."""
    if not state.losses:
        return f"no step of {state.num_steps} was taken"
    parts = [f"{state.step} of {state.num_steps} steps" + ("" if seconds is None else f" in {_clock(seconds)}")]
    first, last = state.losses[0], state.losses[-1]
    parts.append(f"loss {_number(first)} -> {_number(last)}")
    if state.evaluations:
        parts.append(f"eval loss {_number(state.evaluations[-1][1])}")
    if state.seconds:
        parts.append(f"{state.num_tokens:,} tokens at {state.num_tokens / state.seconds:,.0f} tokens/s")
    if state.memory_bytes:
        parts.append(f"peak memory {_memory(state.memory_bytes)}")
    if state.num_saves:
        saves = f"{state.num_saves} checkpoint{'s' if state.num_saves > 1 else ''}"
        parts.append(f"{saves} for which training waited {state.blocked_seconds:.2g} s")
    if state.num_skipped:
        parts.append(f"{state.num_skipped} not finite and skipped")
    return ", ".join(parts)


class RunDisplay:
    """Shows a run from its directory. A context: leaving it ends the live region, and prints a summary if all is well.

    Args:
        run: the run, which need not have written anything yet; what it has written before is not shown again.
        num_steps: steps of the whole run.
        num_workers: how many positions there are to read; None for those that are there, where workers come and go.
        console: where to show it, by default standard output.
    """

    def __init__(
        self, run: RunDirectory, num_steps: int, *, num_workers: int | None = 1, console: Console | None = None
    ) -> None:
        self._run = run
        self._num_workers = num_workers
        self._console = console or terminal()
        self._metrics, self._log = Tail(run.metrics), Tail(run.log)
        self._state = State.of(num_steps, _records(self._metrics.lines()))
        self._log.lines()
        self._began = time.monotonic()
        self._last_shown = -math.inf
        self._last_refresh = -math.inf
        self._last_step_line: str | None = None
        self._phase = ""
        self._notice = ""
        self._spinner = Spinner("dots" if not self._console.options.ascii_only else "line")
        self._live: Live | None = None
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, get_renderable=self._region)

    def __enter__(self) -> RunDisplay:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._look()
        if self._live is not None:
            self._live.transient = kind is not None
            self._live.stop()
        if kind is None:
            if self._last_step_line is not None:
                self._print(self._last_step_line)
            self._print(self.summary(), style="bold")

    def poll(self) -> None:
        """Read what is new and show it; cheap when nothing is."""
        now = time.monotonic()
        if now - self._last_refresh < REFRESH_SECONDS / 2:
            return
        self._last_refresh = now
        self._look()
        if self._live is not None:
            self._live.refresh()
            return
        phase = self._slowest().phase
        if phase != self._phase and phase in ("import", "compile", "join", "load"):
            self._print(PHASES[phase])
        self._phase = phase

    def tell(self, notice: str) -> None:
        """Show this in place of what the workers do, until it is empty."""
        if notice and notice != self._notice and self._live is None:
            self._print(notice)
        self._notice = notice

    def summary(self) -> str:
        return summarise(self._state, time.monotonic() - self._began)

    def _look(self) -> None:
        """Take in what is new and print the lines that stay."""
        for record in _records(self._metrics.lines()):
            kind = self._state.take(record)
            if kind == "evaluation":
                step, loss = self._state.evaluations[-1]
                self._print(f"step {step}: eval loss {_number(loss)}", style="bold")
            elif kind == "step" and record.get("skipped"):
                self._print(f"step {record.get('step')}: skipped, its loss or gradient is not finite", style="red")
            elif kind == "step" and self._live is None:
                self._step_line(record)
        for line in self._log.lines():
            self._print(line.partition(" ")[2].partition(" ")[2] or line, style="dim")

    def _step_line(self, record: dict[str, Any]) -> None:
        """Print a step's line, unless the last one was printed a moment ago: more rarely the longer a run takes."""
        line = f"step {self._state.step}/{self._state.num_steps}  " + "  ".join(self._figures(sparkline=False))
        now = time.monotonic()
        expected = (self._state.remaining_seconds() or 0) + now - self._began
        if now - self._last_shown >= expected / PLAIN_LINES or self._state.step == 1:
            self._last_shown = now
            self._last_step_line = None
            self._print(line)
        else:
            self._last_step_line = line

    def _figures(self, *, sparkline: bool) -> Iterator[str]:
        """What is known of the latest step, piece by piece."""
        state, last = self._state, self._state.last
        loss = f"loss {_number(state.losses[-1])}"
        if sparkline and len(state.losses) > 1:
            width = min(LONGEST_SPARKLINE, len(state.losses), max(8, self._console.width // 4))
            bars = PLAIN_BARS if self._console.options.ascii_only else BARS
            loss += f" {draw_sparkline(state.losses, width, bars)}"
        yield loss
        if (preferred := _finite(last.get("reward_accuracy"))) is not None:
            yield f"preferred {preferred:.0%}"
        if state.evaluations:
            step, value = state.evaluations[-1]
            yield f"eval {_number(value)} @{step}"
        if (rate := _finite(last.get("lr"))) is not None:
            yield f"lr {rate:.2e}"
        if (speed := _finite(last.get("tokens_per_second"))) is not None:
            yield f"{speed:,.0f} tokens/s"
        if state.memory_bytes:
            yield _memory(state.memory_bytes)
        if (disk := last.get("disk")) is not None:
            moved = ""
            if has_traffic(disk):
                moved = f"{_memory(disk['read_bytes'])} read, {_memory(disk['written_bytes'])} written, "
            yield f"disk {moved}waited {disk['waited_seconds']:.2g} s"
        if (host := last.get("host")) is not None:
            yield f"host {_memory(host['copied_bytes'])} copied, waited {host['waited_seconds']:.2g} s"
        if (seconds := state.remaining_seconds()) is not None:
            yield f"eta {_clock(seconds)}"

    def _region(self) -> Group:
        """The live region: what is going on, how far, and the figures, in as many lines as the width asks for, which is
        40 columns or more."""
        state, width = self._state, self._console.width
        activity = Table.grid(padding=(0, 1))
        activity.add_row(self._spinner, Text(self._activity(), overflow="ellipsis", no_wrap=True))
        if not state.losses:
            return Group(activity)
        count = f" {state.step}/{state.num_steps}"
        bar = ProgressBar(total=state.num_steps, completed=state.step, width=min(60, width - len(count)))
        counted = Table.grid()
        counted.add_row(bar, Text(count, style="bold"))
        lines = fill(list(self._figures(sparkline=True)), width)
        return Group(activity, counted, *(Text(line, no_wrap=True, overflow="crop") for line in lines))

    def _activity(self) -> str:
        """What the slowest worker is doing, or why there is none."""
        if self._notice:
            return self._notice
        position = self._slowest()
        stopping = "stopping: " if self._run.stop_asked.exists() and position.phase != "stopped" else ""
        again = " (Ctrl-C again ends it at once)" if stopping else ""
        doing = PHASES.get(position.phase, position.phase)
        in_step = position.phase in WITHIN_STEP
        if in_step:
            doing = f"step {position.step}"
        if position.num_micro_batches > 1 and in_step:
            doing += f", micro-batch {max(position.micro_batch, 1)}/{position.num_micro_batches}"
        elif position.num_micro_batches > 1 and position.phase in UNITS:
            unit = UNITS[position.phase]
            doing += f", {position.micro_batch} of {position.num_micro_batches} {unit}"
        since = f" {_clock(time.time() - position.seconds)}" if position.seconds and not in_step else ""
        return f"{stopping}{doing}{since}{again}"

    def _slowest(self) -> Position:
        num_workers = self._num_workers or max(1, len(list(self._run.workers.glob("rank-*.position"))))
        positions = [self._run.read_position(rank) for rank in range(num_workers)]
        return min(positions, key=progress)

    def _print(self, line: str, style: str = "") -> None:
        if self._console.is_terminal:
            self._console.print(Text(visible(line), style=style))
        else:
            self._console.file.write(visible(line) + "\n")
            self._console.file.flush()


def show_memory(run: RunDirectory, console: Console) -> None:
    """A table of the most memory that each phase of a run took, as its workers wrote it down at their end."""
    try:
        lines = run.metrics.read_bytes().split(b"\n")
    except OSError:
        return
    tables = [record["memory_phases"] for record in _records(lines) if "memory_phases" in record]
    if not tables:
        return
    on_device = any(any(phase["device"]) for phase in tables[-1])
    table = Table("peak memory", "host", *(["device"] if on_device else []), box=None, padding=(0, 2, 0, 0))
    for phase in tables[-1]:
        kinds = ("host", "device") if on_device else ("host",)
        table.add_row(f"  {phase['phase']}", *(_range(phase[kind]) for kind in kinds))
    console.print(table)


def _range(numbers: Sequence[int]) -> str:
    """Bytes of all workers: of one, or the least and the most."""
    least, most = _memory(min(numbers)), _memory(max(numbers))
    return most if least == most else f"{least} to {most}"


def fill(pieces: Sequence[str], width: int, gap: str = "  ") -> list[str]:
    """Pieces put into lines of at most ``width`` columns; a piece is never broken."""
    lines: list[str] = []
    for piece in pieces:
        if lines and len(lines[-1]) + len(gap) + len(piece) <= width:
            lines[-1] += gap + piece
        else:
            lines.append(piece)
    return lines


def draw_sparkline(values: Sequence[float | None], width: int, bars: str = BARS) -> str:
    """Values as a row of ``width`` bars, each the mean of its share of them; a blank where none is finite."""
    means = []
    for column in range(width):
        share = values[column * len(values) // width : max((column + 1) * len(values) // width, 1)]
        finite = [value for value in share if value is not None and math.isfinite(value)]
        means.append(sum(value / len(finite) / 2 for value in finite) if finite else None)
    present = [mean for mean in means if mean is not None]
    if not present:
        return " " * width
    low, span = min(present), max(present) - min(present)  # finite, as the means are halves
    top = len(bars) - 1
    return "".join(
        " " if mean is None else bars[round((mean - low) / span * top) if span > 0 else top // 2] for mean in means
    )


def _records(lines: Sequence[str] | Sequence[bytes]) -> Iterator[dict[str, Any]]:
    """Metrics of whole lines; a line that a crash cut short, or that no run wrote, is passed over."""
    for line in lines:
        try:
            record = metrics_record(line, "")
        except UserError:  # a run is not to end because of what it is shown by
            continue
        if record is not None:
            yield record


def _finite(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and math.isfinite(value)
    return float(value) if is_number else None


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}" if abs(value) < 1e-3 else f"{value:.4f}"


def _memory(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"


def _clock(seconds: float) -> str:
    """``1:02:03`` or ``2:03``."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
