"""``tonnage generate``: answer one prompt, or every row of a file."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tonnage.cli.parameters import AllowUnexpected, RunOrModel, Temperature, Template, TopP, TrustRemoteCode
from tonnage.display.bar import progress_bar
from tonnage.display.terminal import put, say, terminal, to_json
from tonnage.errors import Problem, UserError, refusals, user_error
from tonnage.files.paths import path_word, word

if TYPE_CHECKING:
    from tonnage.forms.conversation import Conversation

LONGEST_ROW = 64 << 20


def generate(
    model: RunOrModel,
    prompt: Annotated[str | None, typer.Option(help="What to ask.")] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="An image that the prompt is about; again for more. It comes first, or where the prompt says <image>.",
            parser=path_word,
        ),
    ] = None,
    file: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Rows to answer, in any form that can be trained on.", parser=word),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="JSONL of the rows of FILE, each with its answer as `generated`.", parser=path_word
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message before every conversation without one.")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Longest answer, in tokens; by default 256, if the model has room for it.", min=1)
    ] = None,
    temperature: Temperature = 0.0,
    top_p: TopP = 1,
    template: Template = "auto",
    batch_size: Annotated[int, typer.Option(help="Rows answered at once.", min=1)] = 32,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    trust_remote_code: TrustRemoteCode = False,
    allow_unexpected: AllowUnexpected = None,
) -> None:
    """Answer one prompt, or every row of a file."""
    from tonnage.config import Source
    from tonnage.decide.models import use_model
    from tonnage.files.writing import write_whole
    from tonnage.inference.generate import Decoding, form_of
    from tonnage.inference.generate import generate as answer
    from tonnage.inference.questions import read_questions
    from tonnage.inference.sight import check_images

    _check(prompt, image, file, output, template)
    conversations = [] if prompt is None else [_asked(prompt, image or [], system)]
    console = terminal(stderr=True)
    in_use = use_model(model, trust_remote_code=trust_remote_code, allow_unexpected=allow_unexpected or ())
    questions = [] if file is None else read_questions([Source(path=file)], images=True)
    conversations += [_with_system(question.conversation, system) for question in questions]
    if any(conversation.images for conversation in conversations):
        check_images(in_use.directory, trusts=in_use.trust_remote_code)
    with progress_bar(console) as progress:
        form = form_of(questions)
        loaded = in_use.load(template=template, **form, max_new_tokens=max_new_tokens, tell=partial(say, console))
        answers = answer(
            loaded,
            conversations,
            Decoding(max_new_tokens or 256, temperature, top_p),
            batch_size=batch_size,
            seed=seed,
            progress=partial(progress, "generate"),
        )
    if prompt is not None:
        put(answers[0])
        return
    rows = [{**question.row, "generated": text} for question, text in zip(questions, answers, strict=True)]
    lines = "".join(to_json(_without_bytes(row)) + "\n" for row in rows)
    if output is None:
        put(lines, end="")
        return
    with refusals("the answers could not be written", output):
        write_whole(output, lines)
    say(console, f"{len(rows):,} answers: ", (str(output), "bold"))


def _check(
    prompt: str | None, image: Sequence[Path] | None, file: str | None, output: Path | None, template: str
) -> None:
    from tonnage.files.places import check_file, check_writable

    problems = []
    if (prompt is None) == (file is None):
        observed = "neither --prompt nor --file" if prompt is None else "both --prompt and --file"
        problems.append(Problem(observed, "one of them"))
    if image and prompt is None:
        problems.append(Problem("--image without --prompt", "a prompt about it; rows of a file hold their images"))
    if output is not None and file is None:
        problems.append(Problem("--output without --file", "rows to write: --output belongs to --file"))
    if output is not None and not output.absolute().parent.is_dir():
        problems.append(Problem(f"no directory {output.parent}", "a directory to write to", where="--output"))
    if problems:
        raise UserError(*problems)
    if output is not None:  # the answers may take hours
        with refusals("the answers could not be written", output):
            inputs = [path for path in (file, template) if path is not None]
            check_file(output, is_own=_is_answered, inputs=inputs, where="--output")
            check_writable(output.parent)


def _asked(prompt: str, images: Sequence[Path], system: str | None) -> Conversation:
    """A prompt as a conversation. Raises ``UserError`` where an image cannot be used, or its place is not known."""
    from tonnage.data.images.opening import decode, load_file
    from tonnage.forms.conversation import Conversation, Image, RowError
    from tonnage.forms.images import PLACEHOLDER, place_images

    content = prompt if PLACEHOLDER in prompt or not images else PLACEHOLDER * len(images) + prompt
    conversation = Conversation.of([{"role": "user", "content": content}])
    try:
        for path in images:
            decode(load_file(path))
        if images:
            place_images(conversation, [Image(str(path.absolute())) for path in images])
    except RowError as error:
        raise user_error(error.reason, "images that can be used", error.change, "--image") from error
    return _with_system(conversation, system)


def _without_bytes(value: Any) -> Any:
    """A value of a row in which images of bytes are data URIs, which rows of JSON may hold."""
    if isinstance(value, bytes):
        return "data:image/x;base64," + base64.b64encode(value).decode()
    if isinstance(value, Mapping):
        return {key: _without_bytes(held) for key, held in value.items()}
    return [_without_bytes(held) for held in value] if isinstance(value, list) else value


def _is_answered(path: Path) -> bool:
    """Whether a file holds answers: whether its first row has one."""
    with path.open("rb") as file:
        try:
            row = json.loads(file.readline(LONGEST_ROW))
        except (ValueError, RecursionError):
            return False
    return isinstance(row, dict) and "generated" in row


def _with_system(conversation: Conversation, system: str | None) -> Conversation:
    from tonnage.forms.conversation import Turn

    turns = conversation.turns
    if system is None or turns[0].role == "system":
        return conversation
    return replace(conversation, turns=[Turn({"role": "system", "content": system}), *turns])
