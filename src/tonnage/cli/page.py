"""``tonnage page``: a page over all runs below a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tonnage.cli.parameters import Host, Port, check_server
from tonnage.display.terminal import say, terminal
from tonnage.errors import user_error
from tonnage.files.paths import word


def page(
    folder: Annotated[str, typer.Argument(metavar="[DIR]", help="Folder below which the runs are.", parser=word)] = ".",
    host: Host = "127.0.0.1",
    port: Port = 8100,
) -> None:
    """Show all runs below a folder on a page in the browser: watch, compare, plan, start, stop, talk to them."""
    check_server("page")
    from tonnage.host.nodes import LOCAL
    from tonnage.page.app import create_app
    from tonnage.page.guard import new_token
    from tonnage.serving.listen import in_address, listen, run

    path = Path(folder)
    if not path.is_dir():
        raise user_error(f"no directory {folder}", "a folder whose runs are shown", "tonnage page FOLDER")
    console, token, is_local = terminal(stderr=True), new_token(), host in LOCAL
    with listen(host, port) as socket:
        app = create_app(path, token, only_local=is_local)
        shown = "127.0.0.1" if host == "localhost" else in_address(host)
        address = f"http://{shown}:{socket.getsockname()[1]}/#token={token}"
        say(console, "The page over ", (str(path.resolve()), "bold"), " is at ", (address, "bold"))
        say(console, "Whoever has this address may read these runs, and start and stop them. Ctrl-C ends it.")
        if not is_local:
            say(console, "Other machines may ask, and there is no encryption: what they send can be read on the way.")
        run(app, socket)
