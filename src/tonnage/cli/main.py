"""The ``tonnage`` command: a table of commands, one file each.

Nothing heavy is imported here or by the command files at module level, so that ``tonnage --help`` answers at
once. ``main`` turns what went wrong into an exit status: 2 for the user's mistakes (a message, no traceback),
1 for ours, 130 for Ctrl-C.
"""

from __future__ import annotations

import atexit
import gc
import sys
from importlib import import_module
from keyword import iskeyword
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from tonnage import __version__
from tonnage.errors import Problem, TonnageError, UserError

if TYPE_CHECKING:
    from rich.console import Console

COMMANDS = {
    "Start here": ("demo", "doctor"),
    "Train": ("train", "follow", "plan", "inspect", "profile", "launch", "import"),
    "Use a trained model": ("eval", "chat", "generate", "export", "verify"),
}
"""Help panel -> its commands. A command is the function of its name in the module of its name; an underscore follows a
name that Python has taken."""

TAKE_CONFIG = ("train", "plan", "inspect", "profile")
"""Commands whose first argument is a config."""

INTERRUPTED = 130
ALLOCATIONS = 100_000
"""Between two collections of garbage. Imports make a million objects that stay: at Python's 700, looking through them
again and again, and once more at the end, takes a third of the time of a short command."""

app = typer.Typer(
    name="tonnage",
    help="Fine-tune language models at full weight on the hardware people have.",
    epilog="The keys of a config are described in docs/config.md. TONNAGE COMMAND --help says more.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
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
        """Print the usual help, then every key with its sentence."""
        super().format_help(ctx, formatter)
        from shutil import get_terminal_size

        from tonnage.config.document import render_help

        print(f" Keys of a config (KEY=VALUE):\n\n{render_help(min(get_terminal_size().columns, 140))}\n")


for _panel, _names in COMMANDS.items():
    for _name in _names:
        _module = import_module(f"tonnage.cli.{_name}{'_' * iskeyword(_name)}")
        _function = getattr(_module, _name if hasattr(_module, _name) else f"{_name}_")
        _class = _TakesConfig if _name in TAKE_CONFIG else TyperCommand
        app.command(_name, cls=_class, rich_help_panel=_panel)(_function)


def main() -> None:
    """Entry point of the console script."""
    gc.set_threshold(ALLOCATIONS)
    atexit.register(gc.freeze)
    try:
        app()
    except TonnageError as error:
        show_error(error)
        sys.exit(error.exit_status)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def show_error(error: TonnageError, console: Console | None = None) -> None:
    """Print an error to standard error: in a frame on a terminal, as plain text elsewhere."""
    if console is None:
        from rich.console import Console

        console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        print(f"error: {error}", file=console.file)
        return
    from rich.panel import Panel
    from rich.text import Text

    text, title = Text(str(error)), "error"
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
    return pieces


if __name__ == "__main__":
    main()
