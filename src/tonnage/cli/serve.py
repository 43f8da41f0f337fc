"""``tonnage serve``: an endpoint for trying a run or a model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tonnage.cli.parameters import AllowUnexpected, Host, Port, RunOrModel, Template, TrustRemoteCode, check_server
from tonnage.display.terminal import say, terminal
from tonnage.errors import UserError, user_error
from tonnage.files.paths import path_word

if TYPE_CHECKING:
    from rich.console import Console

    from tonnage.inference.sight import Sight


def serve(
    model: RunOrModel,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            help="Longest answer where a request does not say; by default 512, if the model has room for it.", min=1
        ),
    ] = None,
    waiting: Annotated[int, typer.Option(help="Requests that may wait; more are refused.", min=1)] = 64,
    images: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of images that requests may name; without it they hold theirs, as data URIs.",
            parser=path_word,
        ),
    ] = None,
    template: Template = "auto",
    trust_remote_code: TrustRemoteCode = False,
    allow_unexpected: AllowUnexpected = None,
) -> None:
    """Serve a run or a model as OpenAI's API does, for trying it."""
    from tonnage.decide.models import use_model
    from tonnage.inference.generate import TALK
    from tonnage.inference.sight import check_images

    check_server("serve")
    from tonnage.host.nodes import LOCAL
    from tonnage.serving.app import create_app
    from tonnage.serving.engine import Engine
    from tonnage.serving.listen import in_address, listen, run
    from tonnage.targets.commands import Servable, commands

    if images is not None and not images.is_dir():
        raise user_error(f"no directory {images}", "the folder of images that requests may name", where="--images")
    console = terminal(stderr=True)
    in_use = use_model(model, trust_remote_code=trust_remote_code, allow_unexpected=allow_unexpected or ())
    if images is not None:
        check_images(in_use.directory, trusts=in_use.trust_remote_code)
    with listen(host, port) as socket:
        with console.status("loading the model"):
            loaded = in_use.load(template=template, **TALK, max_new_tokens=max_new_tokens, tell=partial(say, console))
            if loaded.sight is not None:
                _see(loaded.sight, console)
        name = Path(model).resolve().name if Path(model).is_dir() else model
        engine = Engine(loaded, max_tokens=max_new_tokens or 512, most_waiting=waiting, images=images)
        app = create_app(engine, name, only_local=host in LOCAL)
        address = f"http://{'localhost' if host in LOCAL else in_address(host)}:{socket.getsockname()[1]}/v1"
        say(console, "Serving ", (name, "bold"), " at ", (address, "bold"), ", one answer at a time: for trying it.")
        if host not in LOCAL:
            say(console, "Whoever reaches this machine may ask: there are no keys, and no encryption.")
        if (in_use.directory / "config.json").is_file():
            (line,) = commands("vllm", Servable(str(in_use.directory), ""))
            say(console, "For load: ", (line, "bold"))
        run(app, socket)


def _see(sight: Sight, console: Console) -> None:
    """Load what looks at images, so that nobody waits for that; where it cannot be, say why they will be refused."""
    try:
        _ = sight.tower
    except UserError as error:
        say(console, (f"Images will be refused: {error.problems[0].found}", "yellow"))
