"""The ``tonnage`` command: a table of commands, one file each.

Nothing heavy is imported here or by the command files at module level, so that ``tonnage --help`` answers at
once. ``main`` turns what went wrong into an exit status: 2 for the user's mistakes (a message, no traceback),
1 for ours.
"""

from __future__ import annotations

import sys

import typer

from tonnage.errors import TonnageError

app = typer.Typer(
    name="tonnage",
    help="Fine-tune language models at full weight on the hardware people have.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Entry point of the console script."""
    try:
        app()
    except TonnageError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_status)


if __name__ == "__main__":
    main()
