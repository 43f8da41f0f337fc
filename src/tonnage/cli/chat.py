"""``tonnage chat``: talk to a run or a model."""

from __future__ import annotations

import sys
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tonnage.cli.parameters import AllowUnexpected, RunOrModel, Temperature, Template, TopP, TrustRemoteCode
from tonnage.display.terminal import put, say, terminal
from tonnage.errors import UserError, user_error
from tonnage.files.visible import visible

if TYPE_CHECKING:
    from tonnage.inference.generate import Decoding, Loaded

HELP = (
    "/image FILE shows an image with the next line, /reset starts over, /quit or Ctrl-D leaves, Ctrl-C stops an answer."
)


def chat(
    model: RunOrModel,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Longest answer, in tokens; by default 512, if the model has room for it.", min=1)
    ] = None,
    temperature: Temperature = 0.0,
    top_p: TopP = 1,
    template: Template = "auto",
    trust_remote_code: TrustRemoteCode = False,
    allow_unexpected: AllowUnexpected = None,
) -> None:
    """Talk to a run or a model; reads lines from a pipe just as well."""
    from tonnage.decide.models import use_model
    from tonnage.inference.generate import TALK, Decoding

    console = terminal(stderr=True)
    in_use = use_model(model, trust_remote_code=trust_remote_code, allow_unexpected=allow_unexpected or ())
    with console.status("loading the model"):
        loaded = in_use.load(template=template, **TALK, max_new_tokens=max_new_tokens, tell=partial(say, console))
    if sys.stdin.isatty():
        import readline  # noqa: F401  (gives input() its line editing and history)

        say(console, f"{in_use.directory}  ", (HELP, "dim"))
    converse(loaded, Decoding(max_new_tokens or 512, temperature, top_p), system)


def converse(loaded: Loaded, decoding: Decoding, system: str | None) -> None:
    opening = [] if system is None else [{"role": "system", "content": system}]
    messages: list[dict[str, Any]] = list(opening)
    images: list[dict[str, Any]] = []
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            if prompt:
                print()
            return
        except KeyboardInterrupt:  # at the prompt: drop the line
            print()
            continue
        if not line:
            continue
        if line == "/quit":
            return
        if line == "/reset":
            messages, images = list(opening), []
            continue
        if line.split(maxsplit=1)[0] == "/image":
            if (image := shown_image(line.removeprefix("/image").strip(), loaded)) is not None:
                images.append(image)
            continue
        if line.startswith("/"):
            print(HELP)
            continue
        content = [*images, {"type": "text", "text": line}] if images else line
        messages.append({"role": "user", "content": content})
        images = []
        answer = answer_aloud(loaded, decoding, messages)
        if answer is None:
            messages.pop()
        else:
            messages.append({"role": "assistant", "content": answer})


def shown_image(name: str, loaded: Loaded) -> dict[str, Any] | None:
    """An image for the next message, as a part of it. None, with the reason printed, if it cannot be one."""
    from tonnage.data.images.opening import decode, load_file
    from tonnage.files.paths import path_word
    from tonnage.forms.conversation import RowError

    try:
        if loaded.sight is None:
            raise user_error("/image, and a model that takes none", "words")
        path = path_word(name).absolute()
        pixels = decode(load_file(path))
    except (RowError, UserError) as error:
        reason = error.reason if isinstance(error, RowError) else str(error)
        print(f"error: {visible(reason)}", file=sys.stderr)
        return None
    print(f"{path.name}, {pixels.width} x {pixels.height}", file=sys.stderr)
    return {"type": "image", "path": str(path)}


def answer_aloud(loaded: Loaded, decoding: Decoding, messages: list[dict[str, Any]]) -> str | None:
    """Print the answer as it is written. None if it cannot be given, or was interrupted before its first word."""
    from tonnage.inference.generate import stream

    pieces: list[str] = []
    try:
        with closing(stream(loaded, messages, decoding)) as written:
            for piece in written:
                pieces.append(piece)
                put(piece, end="", flush=True)
    except KeyboardInterrupt:
        if not pieces:
            print()
            return None
    except UserError as error:  # a conversation that has grown too long, for instance; /reset mends it
        print(f"error: {visible(str(error))}", file=sys.stderr)
        return None
    print()
    return "".join(pieces)
