"""Arguments and options that several commands have, and what those need that serve."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated

import typer

from tonnage.errors import user_error
from tonnage.files.paths import word

ConfigFile = Annotated[str, typer.Argument(metavar="CONFIG", help="A YAML config.", parser=word)]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Change keys of the config.")]
RunPath = Annotated[str, typer.Argument(metavar="RUN", help="A run directory.", parser=word)]
RunOrModel = Annotated[
    str,
    typer.Argument(metavar="RUN|MODEL", help="A run directory, a model directory or a hub id.", parser=word),
]
Host = Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 lets other machines ask, too.")]
Port = Annotated[int, typer.Option(help="0 takes a free one.", min=0, max=65535)]
Template = Annotated[
    str, typer.Option(metavar="NAME|FILE", help="Chat template; auto is the tokenizer's own.", parser=word)
]
Temperature = Annotated[float, typer.Option(help="0 takes the likeliest token every time.", min=0)]
TopP = Annotated[float, typer.Option(help="Draw from the likeliest tokens of this probability.", min=0, max=1)]
TrustRemoteCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Let the model's own Python code run; a run's config says it too."),
]
AllowUnexpected = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-unexpected",
        metavar="PATTERN",
        help="Tensors that may be left out though config.json has no place for them; a run's config says it too.",
    ),
]


def check_server(extra: str) -> None:
    """Refuse an environment without what serves, of a command and ``extra`` of one name. Raises ``UserError``."""
    if find_spec("starlette") is None or find_spec("uvicorn") is None:
        needed, change = f"the server of tonnage[{extra}]", f"pip install 'tonnage[{extra}]'"
        raise user_error("no starlette and uvicorn", needed, change, extra)
