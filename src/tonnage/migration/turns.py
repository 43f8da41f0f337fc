"""A chat template as what stands around the words of each role, and as Jinja.

Calls of tools are not written: rows that have some are refused by name when they are read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

CONTENT = "{content}"
_THOUGHT = "<think>\n\n</think>\n\n"


@dataclass(frozen=True)
class Turns:
    """What stands around the words of each role: formats with ``{content}``, ``{bos}`` and ``{eos}``."""

    user: str
    opener: str
    """What opens the assistant's turn, behind the user's."""
    assistant: str = "{content}{eos}"
    system: str = CONTENT
    usual: str = ""
    """The system message of conversations that have none."""
    begins: str = ""
    """``bos_token`` or ``eos_token``, if a conversation begins with it."""
    within: bool = False
    """Whether the system message stands inside of the first user's."""
    trims: bool = False
    """Whether words lose white space around them."""
    thinks: bool = False
    """Whether an answer without a thought gets an empty one: part of the answer, or of what opens it if the template is
    told ``enable_thinking: false``."""
    tokens: tuple[str, ...] = ()
    """Special tokens that the tokenizer must have."""

    @property
    def joins(self) -> bool:
        """Whether an answer begins right behind other words, and not after a line break or a token in brackets."""
        return (self.opener or self.user)[-1] not in "\n>"


def jinja(turns: Turns) -> str:
    """The template of a conversation."""
    lines = [f"{{{{- {turns.begins} -}}}}"] if turns.begins else []
    words = "message['content']" + (" | trim" if turns.trims else "")
    if turns.within:
        lines += ["{%- set state = namespace(system='') -%}"]
        if turns.usual:
            lines += [f"{{%- set state.system = {_written(turns.system, _text(turns.usual))} -%}}"]
    elif turns.usual:
        lines += [
            "{%- if messages[0]['role'] != 'system' -%}",
            f"{{{{- {_written(turns.system, _text(turns.usual))} -}}}}",
            "{%- endif -%}",
        ]
    system = _written(turns.system, "message['content']")
    user = _written(turns.user, f"(state.system + {words})" if turns.within else f"({words})")
    lines += [
        "{%- for message in messages -%}",
        "{%- if message['role'] == 'system' and loop.first -%}",
        f"{{%- set state.system = {system} -%}}" if turns.within else f"{{{{- {system} -}}}}",
        "{%- elif message['role'] == 'user' -%}",
        f"{{{{- {user} -}}}}",
        *(["{%- set state.system = '' -%}"] if turns.within else []),
        "{%- elif message['role'] == 'assistant' -%}",
        f"{{{{- {_text(turns.opener)} -}}}}",
        *(_thought() if turns.thinks else []),
        f"{{{{- {_written(turns.assistant, f'({words})')} -}}}}",
        "{%- else -%}",
        "{{- raise_exception('this template has no place for role ' + message['role'] + ' here') -}}",
        "{%- endif -%}",
        "{%- endfor -%}",
        "{%- if add_generation_prompt -%}",
        f"{{{{- {_text(turns.opener)} -}}}}",
        *(
            [
                "{%- if enable_thinking is defined and not enable_thinking -%}",
                f"{{{{- {_text(_THOUGHT)} -}}}}",
                "{%- endif -%}",
            ]
            if turns.thinks
            else []
        ),
        "{%- endif -%}",
    ]
    return "\n".join(lines)


def _thought() -> list[str]:
    return [
        "{%- if '<think>' not in message['content'] and '</think>' not in message['content'] -%}",
        f"{{{{- {_text(_THOUGHT)} -}}}}",
        "{%- elif enable_thinking is defined and not enable_thinking -%}",
        "{{- raise_exception('a thought, and enable_thinking is false') -}}",
        "{%- endif -%}",
    ]


def _written(format: str, words: str) -> str:
    """A format as an expression of Jinja."""
    before, _, behind = format.partition(CONTENT)
    parts = [_with_tokens(before), words, _with_tokens(behind)]
    return " + ".join(part for part in parts if part)


def _with_tokens(text: str) -> str:
    parts = re.split(r"\{(bos|eos)\}", text)  # texts and names in turn
    expressions = [f"{part}_token" if at % 2 else _text(part) for at, part in enumerate(parts) if part]
    return " + ".join(expressions)


def _text(text: str) -> str:
    """A text as Jinja writes one."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n") + "'"
