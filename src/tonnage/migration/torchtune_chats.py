"""How torchtune's tokenizers write conversations, as Jinja: ``tables/torchtune_rows.yaml`` has what is around words.

A tokenizer has tokens of its own around a message; inside of them a prompt template may write more, and of Alpaca's
rows the message itself is a text around instruction and input. Words lose white space at their ends, piece by piece.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tonnage.migration.yaml_files import as_expression, as_literal, read_data, read_template

Around = tuple[str, str]
"""What stands before words, and behind them."""

_TABLE = read_data("torchtune_rows")
_TEMPLATE = read_template("torchtune")
_PROMPTS = read_data("prompts")
_STRIPS = {"": "{}", "all": "({} | trim)", "blanks": "{}.rstrip(' ')"}
CONTENT = "message['content']"
NOTHING: Around = ("", "")


@dataclass(frozen=True)
class PromptTemplate:
    """What is written around the words of a role, inside of what a tokenizer writes."""

    system: Around = NOTHING
    user: Around = NOTHING
    assistant: Around = NOTHING
    within: bool = False
    """Whether the system message stands in every question."""


@dataclass(frozen=True)
class ChatFormat:
    """What a tokenizer writes around messages."""

    begins: str = ""
    """``once`` or ``turns``: where it writes the token that begins a text."""
    system: Around = NOTHING
    user: Around = NOTHING
    assistant: Around = NOTHING
    between: str = ""
    """What follows an answer that is not the last one."""
    strips: str = ""
    """What words lose at their ends: white space (``all``), or ``blanks`` at the right."""
    joins: str = ""
    """What comes between pieces of a question that are encoded apart: the blank that SentencePiece puts before each."""
    prompt: str = ""
    """The prompt template that it has unless told otherwise."""
    ends_text: str = ""
    """The token that ends a plain text, where that may be another one than the model's own."""
    note: str = ""
    """The difference that there is all the same, by its name among the notes."""


def _around(fields: Mapping[str, object]) -> dict[str, object]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


CHAT_FORMATS = {name: ChatFormat(**_around(entry)) for name, entry in _TABLE["tokenizers"].items()}  # type: ignore[arg-type]
"""By what the name of a tokenizer's builder begins with."""
PROMPTS = {name: PromptTemplate(**_around(entry)) for name, entry in _TABLE["around"].items()}  # type: ignore[arg-type]
NAMED = {component: PROMPTS[name] for component, name in _TABLE["prompts"].items()}
"""By the name of their component."""
ALPACA = [
    f"{usual}\n\n{_PROMPTS['styles']['instruct'][name]}"
    for usual, name in zip(_PROMPTS["usual"]["alpaca"], ("with_input", "without_input"), strict=True)
]
"""The message that Alpaca's rows make, with an input and without."""


def jinja(chat: ChatFormat, prompt: PromptTemplate, *, is_alpaca: bool, system: str = "") -> str:
    """The template of a tokenizer, with ``system`` for conversations without a system message."""
    own = _system(chat, prompt)
    forms = ALPACA if is_alpaca else ["", "{instruction}"]
    with_input, user = (_question(chat, prompt, form) if form else "" for form in forms)
    answered = chat.assistant[0] + _stripped(chat, prompt.assistant[0])
    answer = f"{as_literal(answered)} + {_words(chat, CONTENT)} + " if answered else f"{_words(chat, CONTENT)} + "
    closer = "eos_token" if chat.assistant[1] == "{eos}" else as_literal(chat.assistant[1])
    ending = as_literal(_stripped(chat, prompt.assistant[1])) + " + " if prompt.assistant[1] else ""
    return _TEMPLATE.render(
        begins=chat.begins,
        within=prompt.within,
        usual=system and as_expression(own, {"system": as_literal(_stripped(chat, system))}),
        system=as_expression(own, {"system": _words(chat, CONTENT)}),
        with_input=with_input,
        user=user,
        assistant=answer + ending + closer,
        between=chat.between and as_literal(chat.between),
        opener=answered and as_literal(answered),
    ).rstrip()


def _system(chat: ChatFormat, prompt: PromptTemplate) -> str:
    pieces = [_stripped(chat, prompt.system[0]), "{system}", _stripped(chat, prompt.system[1])]
    inner = chat.joins.join(piece for piece in pieces if piece)
    return inner + chat.joins if prompt.within else f"{chat.system[0]}{inner}{chat.system[1]}"


def _question(chat: ChatFormat, prompt: PromptTemplate, form: str) -> str:
    """A question as an expression: its pieces, each of which loses what its tokenizer takes from it."""
    message = form.rstrip() if chat.strips == "all" else form
    before, behind = (_stripped(chat, piece) for piece in prompt.user)
    joins = chat.joins if before or behind else ""
    if form == "{instruction}":
        places = {"instruction": _words(chat, CONTENT)}
    else:
        instruction = "message['instruction']" if "{input}" in form else CONTENT
        places = {"instruction": instruction, "input": "message['input']"}
    start = f"{chat.user[0]}{before}{joins if before else ''}"
    inside = "{state}" if prompt.within else ""
    # A blank at the end of what stands behind is lost there, and comes back as the one before the answer.
    returned = " " if chat.joins and prompt.user[1].endswith(" ") else ""
    end = f"{joins}{behind}{returned}{chat.user[1]}" if behind else chat.user[1]
    return as_expression(start + inside + message + end, places | {"state": "state.system"})


def _stripped(chat: ChatFormat, piece: str) -> str:
    return piece.strip() if chat.strips == "all" else piece.rstrip(" ") if chat.strips == "blanks" else piece


def _words(chat: ChatFormat, expression: str) -> str:
    return _STRIPS[chat.strips].format(expression)
