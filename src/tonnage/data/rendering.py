"""Chat templates: which one is used, and what it makes of messages.

A template is Jinja text, rendered as transformers does it, so that what is trained here is what ``apply_chat_template``
gives anywhere else. The tokenizer's own template comes first; the built-ins are files in ``templates/``, of the same
kind, and the one chosen is set on the tokenizer, so that an export carries it.

    alpaca       instruction and answer under headings, for single-turn instructions; closes with the end-of-text token
    chatml       <|im_start|>role ... <|im_end|>
    dolly        ### Instruction: / ### Response: / ### End
    oasst        <|system|> ... <|prompter|> ... <|assistant|> ..., end-of-text between turns
    plain        the contents alone, one after another; end-of-text after every answer
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tonnage.data.conversation import Message, RowError
from tonnage.errors import Problem, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BUILT_IN: dict[str, tuple[str, ...]] = {
    "alpaca": (),
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "dolly": ("### Instruction:", "### Response:", "### End"),
    "oasst": ("<|system|>", "<|prompter|>", "<|assistant|>"),
    "plain": (),
}
"""Template -> special tokens that it needs in the vocabulary."""

_PLAIN_FIELDS = frozenset(("role", "content", "instruction", "input"))
"""Fields of a message that transformers hands to a template as they are, if they are strings."""

_PROBES: tuple[list[Message], ...] = (
    [{"role": "user", "content": " <a> "}, {"role": "assistant", "content": "b\n"}],
    [{"role": "user", "content": "a\n\nb", "instruction": "a", "input": "b"}, {"role": "assistant", "content": "é"}],
    [
        {"role": "system", "content": "a & b"},
        {"role": "user", "content": "{{ c }}"},
        {"role": "assistant", "content": "'d'"},
        {"role": "user", "content": ""},
    ],
)

Request = tuple[list[Message], list[dict[str, Any]] | None, bool]
"""Messages, tools, and whether the assistant's turn is opened at the end."""


@dataclass(frozen=True)
class ChatTemplate:
    """A template with the names of special tokens that it may use."""

    text: str
    special: dict[str, str]

    @cached_property
    def _render(self) -> Any:
        from transformers.utils.chat_template_utils import render_jinja_template

        return render_jinja_template

    @cached_property
    def _direct(self) -> Callable[[list[Message], bool], str] | None:
        """Renders plain messages with the template that transformers has compiled.

        transformers' own function copies every conversation, and Jinja every global, before it renders: that is two
        thirds of its time. ``None`` if transformers keeps compiled templates elsewhere, or if the texts of a few
        conversations are not the same both ways.
        """
        try:
            from transformers.utils import chat_template_utils

            template = chat_template_utils._compile_jinja_template(self.text)
            given = {**template.globals, **self.special, "tools": None, "documents": None}
        except Exception:
            return None
        concat, run = template.environment.concat, template.root_render_func

        def direct(messages: list[Message], opened: bool) -> str:
            values = {**given, "messages": messages, "add_generation_prompt": opened}
            text: str = concat(run(template.new_context(values, shared=True)))
            return text

        for messages in _PROBES:
            for opened in (False, True):
                try:
                    expected = self._call([messages], None, opened)[0]
                except Exception:
                    continue
                try:
                    if direct(messages, opened) != expected:
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

    def render_many(self, requests: Sequence[Request]) -> list[str | RowError]:
        """Texts of many conversations; a refusal takes the place of its text."""
        results: list[str | RowError] = []
        for messages, tools, opened in requests:
            if self._direct is not None and not tools and _are_plain(messages):
                try:
                    results.append(self._direct(messages, opened))
                    continue
                except Exception:
                    pass  # raised once more below, where it is put into words
            results.append(self._one((messages, tools, opened)))
        return results

    def _call(self, conversations: list[list[Message]], tools: list[dict[str, Any]] | None, opened: bool) -> list[str]:
        rendered: list[str] = self._render(
            conversations, tools=tools, chat_template=self.text, add_generation_prompt=opened, **self.special
        )[0]
        return rendered

    def _one(self, request: Request) -> str | RowError:
        try:
            return self._call([request[0]], request[1], request[2])[0]
        except RecursionError:
            return RowError("template", "the template raised: nested too deeply")
        except Exception as error:
            reason = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
            return RowError("template", f"the template raised: {reason}")


def _are_plain(messages: list[Message]) -> bool:
    return all(message.keys() <= _PLAIN_FIELDS and {*map(type, message.values())} == {str} for message in messages)


@dataclass(frozen=True)
class Choice:
    """The template that was chosen, why, and what it added to the vocabulary."""

    name: str
    """A built-in's name, ``tokenizer``, or the path of a file."""
    reason: str
    added_tokens: tuple[str, ...] = ()


def choose(
    name: str, tokenizer: PreTrainedTokenizerBase, formats: Sequence[str], single_turn: bool
) -> tuple[PreTrainedTokenizerBase, Choice]:
    """A copy of the tokenizer that carries the chosen template and its special tokens.

    ``formats`` are those of all sources, ``single_turn`` whether no row of them goes beyond one question and one
    answer. Raises ``UserError`` for an unknown name, an unreadable file, or a tokenizer without an end-of-text token
    where one is needed.
    """
    own = isinstance(tokenizer.chat_template, str | dict)
    chats = [format for format in formats if format != "text"]
    if name in ("auto", "tokenizer") and own:
        text = tokenizer.get_chat_template()
        reason = "the tokenizer's own" + (" (its rows are plain text: not used)" if not chats else "")
        return _with(tokenizer, text, (), Choice("tokenizer", reason))
    if name == "tokenizer":
        raise UserError(
            Problem(found="the tokenizer has no chat template", needed=", ".join(BUILT_IN), where="data.template")
        )
    if name == "auto":
        if not chats or all(format == "completion" for format in chats):
            name, why = "plain", "plain text and completions need no turns"
        elif all(format in ("alpaca", "completion") for format in chats) and single_turn:
            name, why = "alpaca", "rows are single instructions"
        else:
            name, why = "chatml", "rows are conversations"
        reason = f"the tokenizer has none; {why}"
    else:
        reason = "asked for"
    if name in BUILT_IN:
        file = Path(__file__).parent / "templates" / f"{name}.jinja"
        text = file.read_text(encoding="utf-8").rstrip("\n")
        if _opens_with_bos(tokenizer):
            text = "{{ bos_token }}" + text
        if tokenizer.eos_token is None and name != "chatml":
            raise UserError(
                Problem(
                    found=f"the tokenizer has no end-of-text token, and template {name!r} closes turns with it",
                    needed="a tokenizer with eos_token",
                    change="set eos_token in tokenizer_config.json, or use template: chatml",
                    where="data.template",
                )
            )
        return _with(tokenizer, text, BUILT_IN[name], Choice(name, reason))
    path = Path(name).expanduser()
    if not path.is_file():
        raise UserError(
            Problem(
                found=f"no built-in template and no file {name!r}",
                needed=f"auto, tokenizer, {', '.join(BUILT_IN)}, or the path of a Jinja file",
                where="data.template",
            )
        )
    return _with(tokenizer, path.read_text(encoding="utf-8"), (), Choice(name, reason))


def _opens_with_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer itself puts the beginning-of-text token before a text."""
    if tokenizer.bos_token_id is None:
        return False
    ids = tokenizer("a")["input_ids"]
    return len(ids) > 1 and ids[0] == tokenizer.bos_token_id


def _with(
    tokenizer: PreTrainedTokenizerBase, text: str, special: tuple[str, ...], choice: Choice
) -> tuple[PreTrainedTokenizerBase, Choice]:
    vocabulary = tokenizer.get_vocab() if special else {}
    known = tokenizer.added_tokens_decoder
    missing = [token for token in special if token not in vocabulary]
    plain = [token for token in special if token in vocabulary and vocabulary[token] not in known]
    # The vocabulary is shared with the tokenizer given, unless it must grow.
    own = copy.deepcopy(tokenizer) if missing or plain else copy.copy(tokenizer)
    own.chat_template = text
    if missing or plain:
        own.add_special_tokens({"extra_special_tokens": missing + plain}, replace_extra_special_tokens=False)
    return own, Choice(choice.name, choice.reason, tuple(missing))


def of_tokenizer(tokenizer: PreTrainedTokenizerBase) -> ChatTemplate:
    """The template that a tokenizer carries. Raises ``UserError`` when there is none."""
    if not isinstance(tokenizer.chat_template, str | dict):
        raise UserError(
            Problem(
                found="the tokenizer has no chat template",
                needed="one, to open the assistant's turn",
                change=f"name one: {', '.join(BUILT_IN)}",
                where="template",
            )
        )
    return ChatTemplate(tokenizer.get_chat_template(), dict(tokenizer.special_tokens_map))
