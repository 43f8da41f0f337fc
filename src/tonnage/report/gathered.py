"""The files of a run, as what the page says of it. Files that are not there leave out what they would tell."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from tonnage.config import Config, read_config
from tonnage.data.account import Account, SourceAccount
from tonnage.data.pictures import Pictures
from tonnage.data.telling import file_name, remarks, table_lines
from tonnage.files.reading import RECORD_BYTES, WRITTEN, read_bytes, read_record
from tonnage.planning.drawn import facts, frontier_as_html, instants_as_html, measured_phases
from tonnage.planning.plan import Plan
from tonnage.planning.words import run_time, size, step_time
from tonnage.report.comparison import Comparison, compare
from tonnage.report.curves import curves
from tonnage.report.settings import ConfigKey, settings
from tonnage.rundir.directory import RunDirectory
from tonnage.rundir.records import Outcome, is_step, peak_memory
from tonnage.rundir.samples import Sample, read_samples

BEGUN = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) training steps (\d+) to \d+$", re.MULTILINE)
"""What a worker logs when it begins to train."""
MOST_SKIPPED = 50
"""Of the steps that were skipped, those that are told in words."""
MOST_ANSWERS = 10
"""To each prompt."""
MOST_SOURCES = 12
"""That have a column of their own."""


@dataclass(frozen=True)
class Environment:
    python: str = ""
    system: str = ""
    logical_cpus: int | None = None
    packages: dict[str, str] = field(default_factory=dict)
    model_commit: str = ""
    devices: list[str] = field(default_factory=list)
    """Accelerators, each with its driver."""
    cuda: str = ""
    """Version that torch was built for."""


@dataclass(frozen=True)
class TableRow:
    name: str
    cells: list[str]
    stands_out: bool = False


@dataclass(frozen=True)
class Beginning:
    when: str
    step: int
    """The first that they took."""


@dataclass(frozen=True)
class AnsweredPrompt:
    prompt: str
    expected: str | None
    answers: list[tuple[int, str]]
    """Step and answer, in order."""


@dataclass(frozen=True)
class Gathered:
    name: str
    directory: str
    config: Config
    plan: Plan
    summary: list[tuple[str, str]]
    """Names and words, of which reports of several runs make a table."""
    tells: str
    """What was trained on what, in a sentence."""
    curves: dict[str, Any]
    settings: list[ConfigKey]
    plan_lines: list[tuple[str, str]]
    outcome_lines: list[TableRow]
    memory: str
    """HTML: bytes by category and instant."""
    frontier: str
    """HTML: other ways to run the step."""
    sources: list[str]
    """Headings of the account's columns."""
    account_lines: list[TableRow]
    remarks: list[str]
    pictures: Pictures
    asked: list[AnsweredPrompt]
    """Prompts and what was answered, evaluation by evaluation."""
    comparison: Comparison
    """Rows it was evaluated on, before and after."""
    num_evaluations: int
    """At which prompts were answered: some of them are left out where there are many."""
    beginnings: list[Beginning]
    """All of them; those after the first are restarts."""
    lost_records: int
    skipped: list[tuple[int, str]]
    """Step and why, of the first of them."""
    num_skipped: int
    environment: list[tuple[str, str]]


def gather(path: Path, num_runs: int = 1) -> Gathered:
    """Everything about a run; ``num_runs`` are on the page.

    Raises:
        UserError: there is no run, or a file of it is damaged.
    """
    run = RunDirectory(path)
    run.check_decided()
    config, plan = read_config(run.config, check_files=False), Plan.read(run.plan)
    records = run.read_metrics()
    steps = [record for record in records if is_step(record)]
    account = read_record(run.data, Account) if run.data.exists() else None
    outcome = read_record(run.outcome, Outcome) if run.outcome.exists() else None
    skipped = [record for record in steps if record.get("skipped")]
    sources, lines = account_table(account)
    questions, num_evaluations = answered_prompts(read_samples(run))
    log, cut = (
        read_bytes(path, RECORD_BYTES, WRITTEN) if path.is_file() else b"" for path in (run.log, run.cut_metrics)
    )
    return Gathered(
        name=run.path.resolve().name,
        directory=str(run.path),
        config=config,
        plan=plan,
        summary=_summary(plan, config, records, steps),
        tells=_sentence(config, plan, account),
        curves=curves(records, num_runs),
        settings=settings(config),
        plan_lines=[*facts(plan), *(("warning", warning) for warning in plan.warnings)],
        outcome_lines=_outcome_lines(outcome, steps),
        memory=instants_as_html(plan.choice, measured_phases(plan, records)),
        frontier=frontier_as_html(plan),
        sources=sources,
        account_lines=lines,
        remarks=[one if isinstance(one, str) else one[0] for one in remarks(account)] if account else [],
        pictures=read_record(run.rows, Pictures) if run.rows.exists() else Pictures([]),
        asked=questions,
        comparison=compare(run, every=records),
        num_evaluations=num_evaluations,
        beginnings=[Beginning(when, int(step)) for when, step in BEGUN.findall(log.decode(errors="replace"))],
        lost_records=cut.count(b"\n"),
        skipped=[(record["step"], str(record.get("not_finite", ""))) for record in skipped[:MOST_SKIPPED]],
        num_skipped=len(skipped),
        environment=_environment(run, plan),
    )


def answered_prompts(samples: Sequence[Sample]) -> tuple[list[AnsweredPrompt], int]:
    """Prompts with the answers of the first, the last and some evaluations between; and how many there were."""
    steps = sorted({sample.step for sample in samples})
    last = len(steps) - 1
    shown = {steps[round(last * at / (MOST_ANSWERS - 1))] for at in range(MOST_ANSWERS)} if steps else set()
    found: dict[int, AnsweredPrompt] = {}
    for sample in samples:
        asked = found.setdefault(sample.number, AnsweredPrompt(sample.prompt, sample.expected, []))
        if sample.step in shown:
            asked.answers.append((sample.step, sample.answer))
    return [found[number] for number in sorted(found)], len(steps)


def _sentence(config: Config, plan: Plan, account: Account | None) -> str:
    """What was trained on what."""
    what = plan.reasons.get("trains", "") or ("all weights" if config.adapter == "none" else "an adapter")
    begun = " from random weights" if config.init == "random" else ""
    sentence = f"{file_name(config.model)}{begun}: {what}"
    if account is not None:
        names = [file_name(source.name) for source in account.sources if source.role == "train"]
        more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
        rows = sum(source.rows_train for source in account.sources)
        sentence += f", on {rows:,} rows of {', '.join(names[:3])}{more}"
    return sentence


def _summary(
    plan: Plan, config: Config, records: Sequence[dict[str, Any]], steps: Sequence[dict[str, Any]]
) -> list[tuple[str, str]]:
    evaluations = [record["eval_loss"] for record in records if record.get("eval_loss") is not None]
    seconds = sum(record.get("step_seconds") or 0 for record in steps)
    tokens = sum(record.get("tokens") or 0 for record in steps)
    losses = [record["loss"] for record in steps if record.get("loss") is not None]
    memory = max((peak_memory(record) or 0 for record in steps), default=0)
    shown = {
        "steps": f"{steps[-1]['step'] if steps else 0:,} of {plan.num_steps:,}",
        "loss": f"{losses[0]:.4g} → {losses[-1]:.4g}" if losses else "",
        "evaluation": f"{evaluations[-1]:.4g}, best {min(evaluations):.4g}" if evaluations else "",
        "tokens": f"{tokens:,}" if tokens else "",
        "tokens/s": f"{tokens / seconds:,.0f}" if seconds else "",
        "time in steps": run_time(seconds) if seconds else "",
        "peak memory": size(memory) if memory else "",
        "skipped steps": f"{sum(bool(record.get('skipped')) for record in steps):,}",
        "parameters": f"{plan.model.trained_parameters:,} of {plan.model.num_parameters:,} trained",
        "learning rate": f"{config.optimizer.lr:g}",
        "workers": f"{plan.workers}",
    }
    return list(shown.items())


def _outcome_lines(outcome: Outcome | None, steps: Sequence[dict[str, Any]]) -> list[TableRow]:
    """What was planned beside what was measured."""
    if outcome is None:
        return []
    lines = []
    for key, name, words in (("memory_bytes", "memory of a worker", size), ("step_seconds", "a step", step_time)):
        if key in outcome.planned and key in outcome.measured:
            planned, measured = outcome.planned[key], outcome.measured[key]
            change = f"{measured / planned - 1:+.0%}" if planned else ""
            lines.append(TableRow(name, [words(planned), words(measured), change]))
    waits = [record["disk"]["waited_seconds"] for record in steps if record.get("disk")]
    if waits:
        lines.append(TableRow("waited for disks, a step", ["", step_time(median(waits)), ""]))
    return lines


def account_table(account: Account | None) -> tuple[list[str], list[TableRow]]:
    """Headings and lines of what became of the rows and tokens of every source."""
    if account is None:
        return [], []
    shown: list[SourceAccount] = [*account.sources]
    if len(shown) > MOST_SOURCES:
        shown = shown[:MOST_SOURCES]
    headings = [file_name(one.name) + (" (validation)" if one.role == "validation" else "") for one in shown]
    if len(account.sources) > 1:
        shown, headings = [*shown, account.total], [*headings, f"all {len(account.sources):,}"]
    return headings, [TableRow(*line) for line in table_lines(shown)]


def _environment(run: RunDirectory, plan: Plan) -> list[tuple[str, str]]:
    if not run.environment.exists():
        return [("planned for", plan.machine)]
    found = read_record(run.environment, Environment)
    lines = [("planned for", plan.machine), ("system", found.system), ("python", found.python)]
    lines += [("logical CPUs", f"{found.logical_cpus}")] if found.logical_cpus else []
    lines += [("devices, drivers", f"{device} ({count})") for device, count in Counter(found.devices).items()]
    lines += [("CUDA", found.cuda)] if found.cuda else []
    lines += [("model's commit", found.model_commit)] if found.model_commit else []
    return [*lines, *found.packages.items()]
