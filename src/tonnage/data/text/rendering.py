"""Chat templates at work: messages into text.

A template is Jinja text, rendered as transformers does it, so that what is trained here is what ``apply_chat_template``
gives anywhere else: in a sandbox, by the environment that transformers makes for it. Templates come from strangers, so
they are bounded as well: in seconds, in memory, and in what they write.
"""

from __future__ import annotations

import datetime
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from tonnage.errors import user_error
from tonnage.forms.conversation import Message, RowError, first_line
from tonnage.forms.images import MARK

REASONING = ("thinking", "reasoning")
"""Names under which templates look for what we call ``reasoning_content``."""
SECONDS = 5.0
"""Of processor time, at most, for one rendering; the longest real ones take 0.01."""
LEAST_SECONDS, MORE_SECONDS = 1.0, 0.1
"""For any conversation, and for each of its messages."""
LOOK_SECONDS = 0.05
MORE_BYTES = 512 << 20
"""By which the process may grow while it renders one conversation."""
MOST_PIECES = 1_000_000
MOST_CHARACTERS = 64 << 20
LONGEST_FORMAT = 200
"""Characters of the format of a date."""

_PROBES: tuple[list[Message], ...] = (
    [{"role": "user", "content": " <a> "}, {"role": "assistant", "content": "b\n"}],
    [{"role": "user", "content": "a\n\nb", "instruction": "a", "input": "b"}, {"role": "assistant", "content": "é"}],
    [
        {"role": "system", "content": "a & b"},
        {"role": "user", "content": "{{ c }}"},
        {"role": "assistant", "content": "'d'", "reasoning_content": "e"},
        {"role": "user", "content": ""},
    ],
    [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"type": "function", "id": "call00001", "function": {"name": "f", "arguments": {"x": [1.5, None, "é"]}}}
            ],
        },
        {"role": "tool", "content": "2", "name": "f", "tool_call_id": "call00001"},
        {"role": "assistant", "content": "b"},
    ],
)
_PROBE_TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "f", "description": "é & <", "parameters": {"type": "object"}}}
]

Request = tuple[list[Message], list[dict[str, Any]] | None, bool]
"""Messages, tools, and whether the assistant's turn is opened at the end."""


class TooMuch(Exception):
    """A template went on for too long, or took or wrote too much."""


@dataclass(frozen=True)
class ChatTemplate:
    """A template with its inputs besides messages and tools."""

    text: str
    special: Mapping[str, str]
    """The special tokens that it may use, by name."""
    arguments: Mapping[str, object] = field(default_factory=dict)
    date: str = ""
    """In ISO form, for a template that asks for it; empty is the time at which it is rendered."""
    parts: Literal["", "images", "all"] = ""
    """Which messages it is given as lists of parts, and not as strings: none, those with images, or all."""

    @cached_property
    def _direct(self) -> Callable[[list[Message], list[dict[str, Any]] | None, bool], str] | None:
        """Renders with the template that transformers has compiled.

        transformers' own function copies every conversation, and Jinja every global, before it renders: that is two
        thirds of its time. ``None`` if transformers keeps compiled templates elsewhere, or if the texts of a few
        conversations are not the same both ways.
        """
        try:
            from transformers.utils import chat_template_utils

            template = chat_template_utils._compile_jinja_template(self.text)
        except AttributeError:
            return None
        except Exception:
            return self._call  # which says what is wrong with it
        variables = {**template.globals, **self.special, **self.arguments, "documents": None}
        if dated := "strftime_now" in self.text:
            variables["strftime_now"] = partial(_strftime, self.date)
        concat, run = template.environment.concat, template.root_render_func

        def direct(messages: list[Message], tools: list[dict[str, Any]] | None, opened: bool) -> str:
            values = {**variables, "messages": messages, "tools": tools, "add_generation_prompt": opened}
            pieces = list(islice(run(template.new_context(values, shared=True)), MOST_PIECES))
            if len(pieces) == MOST_PIECES or sum(map(len, pieces)) > MOST_CHARACTERS:
                raise TooMuch("it writes more than any conversation holds")
            text: str = concat(pieces)
            return text

        if dated:
            return direct  # transformers' own function knows today's date alone, and formats of any length
        for messages in _PROBES:
            messages = _aliased(messages)
            for tools, opened in ((None, False), (None, True), (_PROBE_TOOLS, False)):
                try:
                    with bounded(alone=True) as again:
                        again(messages)
                        expected = self._call(messages, tools, opened)
                except (TooMuch, MemoryError):
                    return None
                except Exception:
                    continue
                try:
                    if direct(messages, tools, opened) != expected:
                        return None
                except Exception:
                    return None
        return direct

    def render(
        self, messages: list[Message], tools: list[dict[str, Any]] | None = None, *, opened: bool = False
    ) -> str:
        """The text of a conversation. Raises ``RowError`` when the template refuses it."""
        result = self.render_many([(messages, tools, opened)])[0]
        if isinstance(result, RowError):
            raise result
        return result

    def attempt(
        self, messages: list[Message], tools: list[dict[str, Any]] | None = None, *, opened: bool = False
    ) -> str | None:
        """As ``render``; none where the template refuses it."""
        result = self.render_many([(messages, tools, opened)])[0]
        return None if isinstance(result, RowError) else result

    def render_many(self, requests: Sequence[Request]) -> list[str | RowError]:
        """Texts of many conversations; a refusal takes the place of its text."""
        render = self._direct or self._call
        if self.date and self._direct is None:
            fault = "a template that asks for the date, and a transformers that keeps templates elsewhere"
            change = "install another version of transformers"
            raise user_error(fault, "a transformers in which the date can be set", change, "data.date")
        results: list[str | RowError] = []
        with bounded() as again:
            for messages, tools, opened in requests:
                again(messages)
                messages = _aliased(messages)
                if self.parts:
                    messages = [_in_parts(message, always=self.parts == "all") for message in messages]
                try:
                    results.append(render(messages, tools, opened))
                except (TooMuch, MemoryError) as error:
                    results.append(_in_words(error))
                except Exception as error:
                    again(messages)
                    results.append(_in_words(error))
                    if any("tool_calls" in message for message in messages):
                        with suppress(Exception):
                            results[-1] = render(with_ids(messages), tools, opened) or results[-1]
        return results

    def _call(self, messages: list[Message], tools: list[dict[str, Any]] | None, opened: bool) -> str:
        from transformers.utils import chat_template_utils

        render: Any = chat_template_utils.render_jinja_template
        inputs = {**self.special, **self.arguments}
        rendered: str = render(
            [messages], tools=tools, chat_template=self.text, add_generation_prompt=opened, **inputs
        )[0][0]
        return rendered


def with_ids(messages: Sequence[Message]) -> list[Message]:
    """Messages whose calls are numbered, ``call00001`` and on, and whose results say which call they answer: some
    templates cannot do without."""
    numbered: list[Message] = []
    renamed: dict[str, str] = {}
    waiting: list[str] = []
    number = 0
    for message in messages:
        if "tool_calls" in message:
            calls, waiting = [], []
            for call in message["tool_calls"]:
                number += 1
                name = f"call{number:05d}"
                if "id" in call:
                    renamed[call["id"]] = name
                waiting.append(name)
                calls.append({**call, "id": name})
            message = {**message, "tool_calls": calls}
        elif message["role"] == "tool":
            name = renamed.get(message.get("tool_call_id", ""), waiting[0] if waiting else "")
            if name in waiting:
                waiting.remove(name)
            if name:
                message = {**message, "tool_call_id": name}
        numbered.append(message)
    return numbered


def _aliased(messages: list[Message]) -> list[Message]:
    """Messages whose reasoning stands under every name by which a template may look for it."""
    if not any("reasoning_content" in message for message in messages):
        return messages
    return [
        {**dict.fromkeys(REASONING, message["reasoning_content"]), **message}
        if "reasoning_content" in message
        else message
        for message in messages
    ]


def _in_parts(message: Message, *, always: bool) -> Message:
    """A message whose content is a list of texts and images, where it has any of these or is ``always`` one."""
    content = message["content"]
    if MARK not in content and not always:
        return message
    texts = [[{"type": "text", "text": text}] if text else [] for text in content.split(MARK)]
    parts = [*texts[0], *(part for text in texts[1:] for part in ({"type": "image"}, *text))]
    return {**message, "content": parts or [{"type": "text", "text": ""}]}


def _strftime(date: str, format: str) -> str:
    day = datetime.datetime.fromisoformat(date) if date else datetime.datetime.now()
    if len(format) > LONGEST_FORMAT:  # the system's function takes seconds over megabytes, and no signal ends it
        raise ValueError(f"a format of {len(format):,} characters for a date")
    return day.strftime(format)


def _in_words(error: Exception) -> RowError:
    if isinstance(error, TooMuch | MemoryError):
        return RowError("template", f"the template was ended: {str(error) or 'it takes too much memory'}")
    if isinstance(error, RecursionError):
        return RowError("template", "the template raised: nested too deeply")
    return RowError("template", f"the template raised: {first_line(error)[:300]}")


@contextmanager
def bounded(*, alone: bool = False) -> Iterator[Callable[[Sequence[Message]], None]]:
    """End what computes for more than ``SECONDS``, or grows this process by more than ``MORE_BYTES``, with ``TooMuch``.

    Gives a function that starts the clock anew for a conversation; a short one gets less time. Signals reach the main
    thread alone; in another one nothing is bounded. With ``alone``, where no other thread of this process is at work,
    no single request for memory is larger either.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda messages: None
        return
    began, last_began, held, most = time.thread_time(), -1.0, 0, SECONDS
    ended = False  # raising a second time would interrupt what handles the first

    def again(messages: Sequence[Message]) -> None:
        nonlocal began, ended, most
        began, ended = time.thread_time(), False
        most = min(SECONDS, LEAST_SECONDS + MORE_SECONDS * len(messages))

    def look(number: int, frame: FrameType | None) -> None:
        nonlocal last_began, held, ended
        if ended:
            return
        if time.thread_time() - began > most:
            ended = True
            raise TooMuch(f"it went on for more than {most:g} s")
        if last_began != began:  # the first look at this conversation
            last_began, held = began, _memory_bytes(1)
        elif _memory_bytes(1) - held > MORE_BYTES:
            ended = True
            raise TooMuch(f"it took more than {MORE_BYTES >> 20} MiB of memory")

    before = signal.signal(signal.SIGALRM, look)
    timer = signal.setitimer(signal.ITIMER_REAL, LOOK_SECONDS, LOOK_SECONDS)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    try:
        if alone and (size := _memory_bytes(0)):
            resource.setrlimit(resource.RLIMIT_AS, (size + MORE_BYTES, limits[1]))
        try:
            yield again
        finally:
            ended = True
    finally:
        if resource.getrlimit(resource.RLIMIT_AS) != limits:  # macOS may refuse what it says itself
            resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, before)


def _memory_bytes(field: int) -> int:
    """Bytes of this process: its address space (0), or what of it is in memory (1); 0 where nobody tells."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[field]) * resource.getpagesize()
    except (OSError, ValueError):
        return 0
