"""``tonnage eval``: what a run made of its validation rows; or how good a run or a model is on the rows of files."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tonnage.cli.parameters import AllowUnexpected, RunOrModel, Template, TrustRemoteCode
from tonnage.display.bar import progress_bar
from tonnage.display.terminal import number, put, table, terminal, to_json
from tonnage.errors import user_error
from tonnage.files.paths import word

if TYPE_CHECKING:
    from rich.console import Console

    from tonnage.decide.evaluation import Evaluation


def eval_(
    model: RunOrModel,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            metavar="FILE",
            help="Rows to evaluate on; may be given more than once. Without it, a run tells of its validation rows.",
            parser=word,
        ),
    ] = None,
    format: Annotated[str, typer.Option(help="Format of the rows; auto finds out.")] = "auto",
    template: Template = "auto",
    max_length: Annotated[int, typer.Option(help="Tokens in a pack.", min=2)] = 2048,
    exact_match: Annotated[
        int, typer.Option(help="Generate answers to this many rows and score them; 0 is none.", min=0)
    ] = 100,
    scorer: Annotated[
        str,
        typer.Option(
            metavar="NAME|MODULE:FUNCTION",
            help="How answers are scored besides: number, choice, contains, json, regex, or a function.",
        ),
    ] = "exact_match",
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...", help="Tasks of lm-evaluation-harness instead of rows: pip install 'tonnage\\[eval]'."
        ),
    ] = None,
    tasks_from: Annotated[
        str | None, typer.Option(metavar="DIR", help="With --tasks: a folder with YAML of tasks.", parser=word)
    ] = None,
    few_shot: Annotated[int | None, typer.Option(help="With --tasks: examples before each question.", min=0)] = None,
    limit: Annotated[int | None, typer.Option(help="With --tasks: rows of each task, at most.", min=1)] = None,
    chat: Annotated[bool, typer.Option("--chat", help="With --tasks: ask with the chat template.")] = False,
    pattern: Annotated[str | None, typer.Option(metavar="REGEX", help="What --scorer regex compares.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer.", min=1)] = 128,
    precision: Annotated[
        Literal["auto", "bf16", "fp32"], typer.Option(help="auto is the type of the weights.")
    ] = "auto",
    trust_remote_code: TrustRemoteCode = False,
    allow_unexpected: AllowUnexpected = None,
    json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON and nothing else.")] = False,
) -> None:
    """Loss, token accuracy and scores of answers, with 95% intervals, on the rows of files.

    Of a run without --data: what it was evaluated as before its first step and at its end; status 4 if it fails its
    gate. Under torchrun, mpirun or srun the weights are sharded over the workers, and each evaluates its share.
    """
    from tonnage.config.bounds import SCORERS
    from tonnage.decide.evaluation import Answers, Loading, evaluate_model, speaks
    from tonnage.decide.harness import as_table, evaluate_tasks

    console = terminal(stderr=json)
    console.quiet = not speaks()
    loading = Loading(precision, trust_remote_code, tuple(allow_unexpected or ()))
    of_tasks = {"--tasks-from": tasks_from, "--few-shot": few_shot, "--limit": limit, "--chat": chat or None}
    if tasks is None:
        for option in (option for option, value in of_tasks.items() if value is not None):
            needed = "--tasks, to which the option belongs"
            raise user_error(f"{option} without --tasks", needed, f"add --tasks NAME, or leave out {option}")
    elif data:
        change = "run tonnage eval twice, once with --tasks and once with --data"
        raise user_error("--tasks beside --data", "one of the two", change)
    if tasks is not None:
        names = [name.strip() for name in tasks.split(",") if name.strip()]
        with progress_bar(console) as progress:
            results = evaluate_tasks(
                model,
                names,
                progress,
                task_folder=tasks_from,
                few_shot=few_shot,
                limit=limit,
                chat=chat,
                loading=loading,
            )
        if speaks():
            put(to_json(results["results"]) if json else as_table(results))
        return
    if not data:
        _of_run(model, console, json)
        return
    if ":" not in scorer and scorer not in SCORERS[1:]:
        raise user_error(scorer, f"{', '.join(SCORERS[1:])}, or module:function", where="--scorer")
    with progress_bar(console) as progress:
        evaluation = evaluate_model(
            model,
            [{"path": path, "format": format} for path in data],
            progress,
            template=template,
            max_length=max_length,
            answers=Answers(exact_match, max_new_tokens, scorer, pattern),
            loading=loading,
            tell=console.print,
        )
    if json and speaks():
        put(to_json(evaluation.figures() | {"evaluation": evaluation.evaluated.to_json(), "base": evaluation.base}))
    elif not json:
        _show(evaluation, console)


def _of_run(model: str, console: Console, json: bool) -> None:
    """What a run was evaluated as, from its records: nothing is computed."""
    from tonnage.cli.comparison import FAILED_GATE, show
    from tonnage.report.comparison import compare
    from tonnage.rundir.directory import RunDirectory

    run = RunDirectory(model)
    if not run.config.is_file():
        change = f"tonnage eval {run.word} --data FILE"
        raise user_error("a model, and no rows", "rows to evaluate it on", change, "--data")
    comparison = compare(run)
    if comparison.after is None and comparison.passed:
        raise user_error(
            "a run without validation rows: nothing was evaluated",
            "rows to evaluate it on, which it was not trained on",
            f"tonnage eval {run.word} --data FILE; data.validation=0.02 sets rows of the next run aside",
            "--data",
        )
    if json:
        put(to_json(comparison.to_json()))
    else:
        show(comparison, console)
    if not comparison.passed:
        sys.exit(FAILED_GATE)


def _show(evaluation: Evaluation, console: Console) -> None:
    """A table: of all rows, of every source if there are several, and of the answers."""
    from tonnage.report.comparison import Comparison
    from tonnage.rundir.figures import METHODS

    figures = table("rows", "figure", number(), number("95% interval"))
    for line in Comparison(0, None, evaluation.evaluated).lines():
        rows, figure, _, value, interval = line.cells
        figures.add_row("all" if rows == "validation" else rows, figure, value, interval)
    figures.add_row("all", "supervised tokens", f"{evaluation.supervised_tokens:,}", "")
    console.print(figures)
    console.print(METHODS, style="dim", soft_wrap=True)
