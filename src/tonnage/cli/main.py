"""The ``tonnage`` command: a table of commands, one file each.

Nothing heavy is imported here or by the command files at module level, so that ``tonnage --help`` answers at
once. ``main`` turns what went wrong into an exit status: 2 for the user's mistakes and what the system refuses (a
message, no traceback), 1 for ours, 130 for Ctrl-C, 141 where nobody reads what is printed any more.
"""

from __future__ import annotations

import atexit
import gc
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from keyword import iskeyword
from shutil import get_terminal_size
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from tonnage import __version__
from tonnage.display.terminal import lost_output, streams, terminal
from tonnage.errors import OutputLost, Problem, TonnageError, UserError, refused
from tonnage.files.visible import visible
from tonnage.files.writing import close_to_others
from tonnage.host.allocators import choose_allocators

COMMANDS = {
    "Start here": ("demo", "init", "doctor", "bench", "page"),
    "Train": ("train", "follow", "stop", "plan", "inspect", "profile", "launch", "import"),
    "Use a trained model": ("report", "eval", "chat", "generate", "serve", "export", "verify"),
}
"""Help panel -> its commands. A command is the function of its name in the module of its name; an underscore follows a
name that Python has taken."""

TAKE_CONFIG = ("train", "plan", "inspect", "profile")
"""Commands whose first argument is a config."""
TAKE_MODEL = ("eval", "chat", "generate", "serve")
"""Commands whose first argument is a run or a model, and which load it."""

INTERRUPTED = 130
USUAL_THRESHOLDS = gc.get_threshold()
IMPORTED, ALLOCATIONS = 2_000_000, 100_000
"""Objects that are made before the first collection of garbage, and then between two. Imports make a million that stay:
at Python's 700, looking through them again and again, and once more at the end, takes a third of the time of a short
command."""


class _Commands(TyperGroup):
    """The commands; a word that is none of theirs may be a file's name, and is shown as such."""

    def make_context(self, *args: Any, **more: Any) -> Any:
        with _visible_mistakes():
            return super().make_context(*args, **more)

    def invoke(self, ctx: Any) -> Any:
        with _visible_mistakes():
            return super().invoke(ctx)


@contextmanager
def _visible_mistakes() -> Iterator[None]:
    """Typer's message about a wrong word repeats that word: make it safe to print."""
    try:
        yield
    except Exception as error:
        if isinstance(message := getattr(error, "message", None), str):
            error.message = visible(message)  # type: ignore[attr-defined]
        raise


app = typer.Typer(
    name="tonnage",
    cls=_Commands,
    help="Fine-tune language models, whole or by adapters, on the hardware people have.",
    epilog="The keys of a config are described in docs/config.md. TONNAGE COMMAND --help says more.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(asked: bool) -> None:
    if asked:
        print(f"tonnage {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    pass


class _TakesConfig(TyperCommand):
    """A command whose help goes on with the keys of a config."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        from tonnage.config.document import render_help

        print(f" Keys of a config (KEY=VALUE):\n\n{render_help(min(get_terminal_size().columns, 140))}\n")


class _TakesModel(TyperCommand):
    """A command without a config: what it advises are options of its own."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as error:
            from tonnage.cli.option_advice import with_options

            raise with_options(error, {option for one in self.params for option in one.opts}) from error


for _panel, _names in COMMANDS.items():
    for _name in _names:
        _module = import_module(f"tonnage.cli.{_name}{'_' * iskeyword(_name)}")
        _function = getattr(_module, _name if hasattr(_module, _name) else f"{_name}_")
        _class = _TakesConfig if _name in TAKE_CONFIG else _TakesModel if _name in TAKE_MODEL else TyperCommand
        app.command(_name, cls=_class, rich_help_panel=_panel)(_function)


def main() -> None:
    gc.set_threshold(IMPORTED)
    gc.callbacks.append(_collect_more_often)
    choose_allocators()
    atexit.register(gc.freeze)
    close_to_others()
    status: str | int | None = INTERRUPTED
    with suppress(KeyboardInterrupt):  # another one, while the first is seen to
        try:
            with streams():
                status = _carry_out()
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Python and libraries would print tracebacks at their end
    sys.exit(status)


def _collect_more_often(phase: str, _: dict[str, int]) -> None:
    """Called by the garbage collector: at the end of its first collection, have it collect more often."""
    if phase == "stop":
        gc.callbacks.remove(_collect_more_often)
        if gc.get_threshold()[0] == IMPORTED:  # a worker that was forked from here has Python's own
            gc.set_threshold(ALLOCATIONS)


def _carry_out() -> str | int | None:
    """Carry out what the command line says; returns the exit status."""
    status: str | int | None = 0
    try:
        try:
            app()
        except SystemExit as asked:
            status = asked.code
        if (lost := lost_output()) is not None:
            raise lost
    except TonnageError as error:
        show_error(error)
        return error.exit_status
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        if (explained := refused(error)) is None:
            return _show_defect()
        show_error(explained)
        return explained.exit_status
    except Exception:
        return _show_defect()
    return status


def _show_defect() -> int:
    """Print the traceback of a defect of ours, which may hold anybody's text."""
    print(visible(traceback.format_exc()), end="", file=sys.stderr)
    return TonnageError.exit_status


def show_error(error: TonnageError, console: Console | None = None) -> None:
    """Print an error to standard error: in a frame on a terminal, as plain text elsewhere.

    That the reader of a pipe has gone is no news to anybody.
    """
    if isinstance(error, OutputLost) and error.reader_left:
        return
    if console is None:
        console = terminal(stderr=True)
    if not console.is_terminal:
        print(f"error: {visible(str(error))}", file=console.file)
        return
    from rich.panel import Panel

    text, title = Text(visible(str(error))), "error"
    if isinstance(error, UserError):
        title = "1 problem" if len(error.problems) == 1 else f"{len(error.problems)} problems"
        text = Text("\n\n").join(Text.assemble(*parts) for parts in map(_styled, error.problems))
    console.print(Panel(text, title=title, title_align="left", border_style="red"))


def _styled(problem: Problem) -> list[tuple[str, str]]:
    """A problem as pieces of text, each with its style."""
    pieces = [(f"{problem.where}: ", "cyan")] if problem.where else []
    pieces += [(problem.found, "bold"), ("\n  needed: ", "dim"), (problem.needed, "")]
    if problem.change:
        pieces += [("\n  change: ", "dim"), (problem.change, "green")]
    return [(visible(piece), style) for piece, style in pieces]


if __name__ == "__main__":
    main()
