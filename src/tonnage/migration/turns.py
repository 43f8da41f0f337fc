"""A chat template as what stands around the words of each role, and as Jinja.

Calls of tools are not written: rows that have some are refused by name when they are read.
"""

from __future__ import annotations

from dataclasses import dataclass

from tonnage.migration.yaml_files import as_expression, as_literal, read_template

CONTENT = "{content}"
_TEMPLATE = read_template("turns")


@dataclass(frozen=True)
class TurnFormats:
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
    always: bool = False
    """Whether what stands around a system message is written where there is none, too."""
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


def jinja(turns: TurnFormats) -> str:
    words = "message['content']" + (" | trim" if turns.trims else "")
    return _TEMPLATE.render(
        begins=turns.begins,
        within=turns.within,
        thinks=turns.thinks,
        usual=(turns.usual or turns.always) and _written(turns.system, as_literal(turns.usual)),
        system=_written(turns.system, "message['content']"),
        user=_written(turns.user, f"(state.system + {words})" if turns.within else f"({words})"),
        opener=as_literal(turns.opener),
        assistant=_written(turns.assistant, f"({words})"),
        thought=as_literal("<think>\n\n</think>\n\n"),
    )


def _written(form: str, words: str) -> str:
    """A format as an expression of Jinja."""
    return as_expression(form, {"content": words, "bos": "bos_token", "eos": "eos_token"})
