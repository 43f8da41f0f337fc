"""A page of one run, or of several side by side."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tonnage import __version__
from tonnage.errors import TonnageError, refusals, user_error
from tonnage.files.places import begins_with, check_file
from tonnage.files.visible import visible
from tonnage.files.writing import write_whole
from tonnage.report.gathered import Gathered, gather
from tonnage.report.settings import differences
from tonnage.rundir.directory import RunDirectory
from tonnage.rundir.figures import METHODS

if TYPE_CHECKING:
    from jinja2 import Environment

GENERATOR = '<meta name="generator" content="tonnage'
"""By which a page of ours is known."""
MOST_RUNS = 12
"""In one report: as many as the page has colours for."""


def write_report(runs: Sequence[str | os.PathLike[str]], output: str | os.PathLike[str] | None = None) -> Path:
    """Write the report of one run, or of several that are compared; returns where it is.

    Args:
        runs: their directories.
        output: the file; an earlier report is replaced, nothing else is. By default ``report.html`` in the directory of
            the one run.

    Raises:
        UserError: there is no run, a file of one is damaged, or the report cannot be written.
    """
    if output is None and len(runs) != 1:
        raise user_error(f"{len(runs)} runs and no --output", "a file to write", "--output comparison.html")
    if len(runs) > MOST_RUNS:
        raise user_error(f"{len(runs)} runs", f"at most {MOST_RUNS} in one report", "leave some out")
    path = RunDirectory(runs[0]).report if output is None else Path(output)
    page = render([gather(Path(run), len(runs)) for run in runs])
    with refusals("the report could not be written", path):
        check_file(path, is_own=begins_with(GENERATOR))
        write_whole(path, page)
    return path


def leave_report(run: RunDirectory) -> str:
    """Write the report of a run that has ended; why there is none, in words, where that fails: no run does for it."""
    try:
        write_report([run.path])
    except (TonnageError, OSError) as error:
        return f"no report was written: {str(error).splitlines()[0]}"
    return ""


@contextmanager
def reported_if_it_fails(run: RunDirectory) -> Iterator[None]:
    """Within it, a run that fails for a reason that we raise leaves a report as well."""
    try:
        yield
    except TonnageError:
        leave_report(run)
        raise


def render(runs: Sequence[Gathered]) -> str:
    script, style = _part("curves.js") + _part("page.js"), _part("page.css")
    names = _distinct(runs)
    drawn = [
        {"name": name, **run.curves, "restarts": [one.step for one in run.beginnings[1:]]}
        for name, run in zip(names, runs, strict=True)
    ]
    policy = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        _environment()
        .get_template("page.html.jinja")
        .render(
            runs=list(zip(names, runs, strict=True)),
            title=names[0] if len(runs) == 1 else f"{len(runs)} runs",
            differences=differences([run.settings for run in runs]),
            data=_inside_of_script({"runs": drawn}),
            script=script,
            style=style,
            policy=policy,
            version=__version__,
            methods=METHODS,
        )
    )


def render_sections(run: Gathered) -> str:
    """What the page says of a run below its curves, as HTML."""
    return str(_environment().get_template("sections.html.jinja").module.sections(run, METHODS, True))  # type: ignore[attr-defined]


def _distinct(runs: Sequence[Gathered]) -> list[str]:
    """Names by which readers tell the runs apart."""
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [run.directory for run in runs]


def _inside_of_script(data: Any) -> str:
    """JSON that no text inside of it can end the element with."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def _part(name: str) -> str:
    return files("tonnage.report").joinpath(name).read_text(encoding="utf-8")


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    return Environment(
        loader=FunctionLoader(_part),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: visible(value) if type(value) is str else value,
    )
