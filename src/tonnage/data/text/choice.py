"""Which chat template is used: the tokenizer's own, one of ours, or a file.

The tokenizer's own template comes first; the built-ins are files in ``templates/``, of the same kind, and the one
chosen is set on the tokenizer, so that an export carries it. A template's text may also stand in the config itself.
The built-ins begin with the token that begins a text where the tokenizer puts one there; so does a template that writes
``{{- text_start -}}`` at its head, whoever's it is.

    alpaca       instruction and answer under headings, for single-turn instructions; closes with the end-of-text token
    chatml       <|im_start|>role ... <|im_end|>
    dolly        ### Instruction: / ### Response: / ### End
    gemma        <start_of_turn>user ... <end_of_turn>, the assistant called model; gemma4 writes <|turn> ... <turn|>
    llama3       <|start_header_id|>role<|end_header_id|> ... <|eot_id|>
    oasst        <|system|> ... <|prompter|> ... <|assistant|> ..., end-of-text between turns
    plain        the contents alone, one after another; end-of-text after every answer

A tokenizer may have several templates by name: ``default``, and ``tool_use`` for conversations with tools.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tonnage.data.text.rendering import ChatTemplate, TooMuch, bounded
from tonnage.errors import user_error
from tonnage.files.paths import is_jinja
from tonnage.forms.formats import FORMATS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BUILT_IN: dict[str, tuple[str, ...]] = {
    "alpaca": (),
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "dolly": ("### Instruction:", "### Response:", "### End"),
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
    "gemma4": ("<|turn>", "<turn|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "oasst": ("<|system|>", "<|prompter|>", "<|assistant|>"),
    "plain": (),
}
"""Template -> special tokens that it needs in the vocabulary."""
CLOSED_BY_EOS = ("alpaca", "dolly", "oasst", "plain")
"""Built-in templates that need the tokenizer's own end-of-text token."""
TOOL_USE = "tool_use"
TEXT_START = "text_start"
"""What a template writes for the beginning-of-text token, where the tokenizer puts one before a text."""
WRITTEN_OUT = "written out"
"""The name of a template whose text is in the config."""
MOST_BYTES = 4 << 20
"""Of a template's file."""


@dataclass(frozen=True)
class TemplateChoice:
    """The template that was chosen, why, and what it added to the vocabulary."""

    name: str
    """A built-in's name, ``tokenizer``, the path of a file, or ``written out``."""
    reason: str
    added_tokens: tuple[str, ...] = ()


def extended(
    tokenizer: PreTrainedTokenizerBase, eos_token: str | None, added: Sequence[str]
) -> tuple[PreTrainedTokenizerBase, tuple[str, ...]]:
    """A copy of the tokenizer with this end-of-text token and these special tokens, and those of them that are new to
    its vocabulary; the tokenizer itself if it has them all."""
    vocabulary = tokenizer.get_vocab() if eos_token or added else {}
    tokens = dict.fromkeys([*added, *([eos_token] if eos_token else [])])
    missing = tuple(token for token in tokens if token not in vocabulary)
    plain = [
        token for token in tokens if token in vocabulary and vocabulary[token] not in tokenizer.added_tokens_decoder
    ]
    if not missing and not plain and eos_token in (None, tokenizer.eos_token):
        return tokenizer, ()
    own = copy.deepcopy(tokenizer)
    own.add_special_tokens({"extra_special_tokens": [*missing, *plain]}, replace_extra_special_tokens=False)
    if eos_token is not None:
        own.eos_token = eos_token
    return own, missing


def choose(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    formats: Sequence[str],
    single_turn: bool,
    arguments: Mapping[str, object] | None = None,
) -> tuple[PreTrainedTokenizerBase, TemplateChoice]:
    """A copy of the tokenizer that carries the chosen template and its special tokens.

    ``formats`` are those of all sources, ``single_turn`` whether no row of them goes beyond one question and one
    answer. The template's ``arguments`` are written at its head as defaults, so that whoever uses the tokenizer later
    opens turns as they were opened in training. Raises ``UserError`` for an unknown name, an unreadable
    file, or a tokenizer without an end-of-text token where one is needed.
    """
    chats = [format for format in formats if format not in FORMATS or FORMATS[format].is_chat]
    text, choice = _own(name, tokenizer, chats) or _other(name, tokenizer, chats, single_turn)
    if arguments:
        head = "".join(_default(argument) for argument in arguments.items() if argument[0].isidentifier()) + "\n"
        text = {key: head + body for key, body in text.items()} if isinstance(text, dict) else head + text
    own, missing = extended(tokenizer, None, BUILT_IN.get(choice.name, ()))
    if own is tokenizer:  # they share the vocabulary, which need not grow
        own = copy.copy(tokenizer)
    own.chat_template = text
    return own, replace(choice, added_tokens=missing)


def _default(argument: tuple[str, object]) -> str:
    """Template text that gives a variable its value unless whoever renders the template does."""
    name, value = argument
    literal = "none" if value is None else json.dumps(value).replace("%", "\\u0025")
    return f"{{%- if {name} is not defined %}}{{%- set {name} = {literal} %}}{{%- endif %}}"


_DEFAULTS = re.compile(r"\A(?:\{%- if \w+ is not defined %\}\{%- set \w+ = [^%]* %\}\{%- endif %\})+\n")


def _own(
    name: str, tokenizer: PreTrainedTokenizerBase, chats: Sequence[str]
) -> tuple[str | dict[str, str], TemplateChoice] | None:
    """The tokenizer's own template, or one of those that it has by name; ``None`` where another is meant."""
    own = tokenizer.chat_template
    unused = " (its rows are plain text: not used)" if not chats else ""
    is_default = name in ("auto", "tokenizer")
    if not isinstance(own, dict):
        return (str(own), TemplateChoice("tokenizer", f"the tokenizer's own{unused}")) if own and is_default else None
    default = "default" if is_default else name
    if default in own:
        named = "" if len(own) == 1 else f": {default!r} of {', '.join(map(repr, own))}"
        extra = f", {TOOL_USE!r} where a row has tools" if default == "default" and TOOL_USE in own else ""
        templates = own if default == "default" else {**own, "default": own[default]}
        if default != "default":
            templates.pop(TOOL_USE, None)
        return templates, TemplateChoice("tokenizer", f"the tokenizer's own{named}{extra}{unused}")
    if is_default:
        raise user_error(
            found=f"a tokenizer with the chat templates {', '.join(map(repr, own))} and no default",
            needed="the name of one",
            change=f"data.template: {next(iter(own), 'chatml')}",
            where="data.template",
        )
    return None


def _other(
    name: str, tokenizer: PreTrainedTokenizerBase, chats: Sequence[str], single_turn: bool
) -> tuple[str, TemplateChoice]:
    """A template that is not the tokenizer's: a built-in, one whose text is in the config, or a file."""
    if name == "tokenizer":
        raise user_error(found="the tokenizer has no chat template", needed=", ".join(BUILT_IN), where="data.template")
    reason = "asked for"
    if name == "auto":
        if all(format == "completion" for format in chats):
            name, why = "plain", "plain text and completions need no turns"
        elif all(format in ("alpaca", "completion", "instances") for format in chats) and single_turn:
            name, why = "alpaca", "rows are single instructions"
        else:
            name, why = "chatml", "rows are conversations"
        reason = f"the tokenizer has none; {why}"
    if name in BUILT_IN:
        file = Path(__file__).parent / "templates" / f"{name}.jinja"
        text = file.read_text(encoding="utf-8").rstrip("\n")
        if _opens_with_bos(tokenizer):
            text = "{{ bos_token }}" + text
        if tokenizer.eos_token is None and name in CLOSED_BY_EOS:
            raise user_error(
                found=f"the tokenizer has no end-of-text token, and template {name!r} closes turns with it",
                needed="a tokenizer with eos_token",
                change="set eos_token in tokenizer_config.json, or set data.template: chatml",
                where="data.template",
            )
        return text, TemplateChoice(name, reason)
    if is_jinja(name):
        return _begun(name, tokenizer), TemplateChoice(WRITTEN_OUT, "its text is in the config")
    return _begun(_read(name, tokenizer.chat_template), tokenizer), TemplateChoice(name, reason)


def _begun(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """A template in which ``text_start`` means something, wherever it is rendered later."""
    if TEXT_START not in text:
        return text
    return f"{{%- set {TEXT_START} = {'bos_token' if _opens_with_bos(tokenizer) else repr('')} -%}}\n{text}"


def _read(name: str, own: object) -> str:
    names = [*BUILT_IN, *(own if isinstance(own, dict) else ())]
    try:
        path = Path(name).expanduser()
        if not path.is_file():
            raise FileNotFoundError
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"it has {path.stat().st_size:,} bytes; a template has {MOST_BYTES:,} at most")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        message = f"no built-in template and no file {name[:200]!r}"
    except (OSError, ValueError, RuntimeError) as error:
        message = f"the template {name[:200]!r} cannot be read ({error})"
    raise user_error(
        found=message,
        needed=f"auto, tokenizer, {', '.join(names)}, the path of a Jinja file, or its text",
        where="data.template",
    )


def _opens_with_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer itself puts the beginning-of-text token before a text."""
    if tokenizer.bos_token_id is None:
        return False
    ids = tokenizer("a")["input_ids"]
    return len(ids) > 1 and ids[0] == tokenizer.bos_token_id


def of_tokenizer(
    tokenizer: PreTrainedTokenizerBase,
    tools: object = None,
    arguments: Mapping[str, object] | None = None,
    date: str = "",
) -> ChatTemplate:
    """The template that a tokenizer carries, for conversations with or without ``tools``.

    Raises ``UserError`` when there is none, or when it knows nothing of an argument.
    """
    own: Any = tokenizer.chat_template
    if isinstance(own, dict):
        own = own.get(TOOL_USE if tools and TOOL_USE in own else "default")
    if not isinstance(own, str):
        raise user_error(
            found="the tokenizer has no chat template",
            needed="one, to open the assistant's turn",
            change=f"name one: {', '.join(BUILT_IN)}",
            where="template",
        )
    template_arguments = dict(arguments or {})
    if template_arguments:
        _check_arguments(own, template_arguments)
    special = dict(tokenizer.special_tokens_map)
    in_lists = _takes_lists_alone(
        own, *(json.dumps(one, sort_keys=True, default=str) for one in (special, template_arguments))
    )
    return ChatTemplate(
        own, special, template_arguments, date if "strftime_now" in own else "", "all" if in_lists else ""
    )


@lru_cache(maxsize=64)
def _takes_lists_alone(text: str, special: str, arguments: str) -> bool:
    """Whether a template writes what is said where a content is a list of parts, and not where it is a string: those of
    some models that take images do so. The tokens and arguments are JSON."""
    question, answer = "Which one?", "Both of them."
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    if "type" not in text:  # which parts have, and strings do not
        return False
    template = ChatTemplate(text, json.loads(special), json.loads(arguments))
    with suppress(TooMuch), bounded(alone=True):
        for parts, writes in ((template, True), (replace(template, parts="all"), False)):
            written = parts.attempt(messages) or ""
            if (question in written and answer in written) == writes:
                return False
        return True
    return False


_OURS = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "unk_token", "pad_token")
)


def _check_arguments(text: str, arguments: Mapping[str, object]) -> None:
    """Refuse arguments that a template never looks at."""
    from jinja2 import Environment, meta
    from jinja2.exceptions import TemplateError

    try:
        parsed = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION.sub("", _DEFAULTS.sub("", text)))
        variables = sorted(meta.find_undeclared_variables(parsed) - _OURS - _GLOBALS)
    except (TemplateError, RecursionError):
        return  # rendering it will say so
    unknown = [name for name in arguments if name not in variables]
    if unknown:
        raise user_error(
            found=f"template arguments that the template never looks at: {', '.join(unknown)}",
            needed=f"arguments that it knows: {', '.join(variables) or 'it knows none'}",
            change="correct or remove them",
            where="data.template_arguments",
        )


_GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
_GLOBALS = frozenset(("raise_exception", "strftime_now", "namespace", "range", "dict", "lipsum", "cycler", "joiner"))
