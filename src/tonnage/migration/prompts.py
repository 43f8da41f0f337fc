"""Axolotl's prompts that are a fixed text around two columns, and the Jinja template of the same text.

A row has an instruction, perhaps an input, and an output; what stands around them is the prompt. It is that of a
``type`` (``tables/prompts.yaml``), or the one that a configuration writes out. The output and the token that ends a
text are supervised, as in every template of ours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from tonnage.migration.yaml_files import as_expression, as_literal, read_data, read_template

_TEMPLATE = read_template("prompt")


@dataclass(frozen=True)
class PromptFormat:
    """A prompt: formats with ``{instruction}`` and ``{input}``, and what stands before them."""

    with_input: str
    without_input: str
    system: str = "{system}"
    """Around a system text."""
    usual: tuple[str, str] = ("", "")
    """The system text of rows that have none, with an input and without; empty: nothing stands there."""
    answer: str = ""
    """What an answer begins with that the rows do not have. It is supervised."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Ours -> those of the rows."""


def _read_prompts() -> dict[str, PromptFormat]:
    content = read_data("prompts")
    prompts = {}
    for name, entry in content["types"].items():
        entry = content["types"].get(entry.get("like"), {}) | entry
        usual = tuple(content["usual"][entry["usual"]]) if "usual" in entry else ("", "")
        prompts[name] = PromptFormat(
            **content["styles"][entry["style"]],
            usual=usual,
            answer=entry.get("answer", ""),
            columns=entry.get("columns", {}),
        )
    return prompts


NAMED: Mapping[str, PromptFormat] = _read_prompts()
"""By Axolotl's type of rows."""

_FIELD = re.compile(r"\{(\w*)\}")


def written_out(parts: Mapping[str, str]) -> PromptFormat:
    """A ``type`` that a configuration writes out itself, by the names that Axolotl has for its parts.

    Raises ``ValueError`` for a format with other places than it may have.
    """
    fields = {ours: parts.get(f"field_{ours}", ours) for ours in ("system", "instruction", "input", "output")}
    prompt = PromptFormat(
        parts.get("format", "{instruction} {input} "),
        parts.get("no_input_format", "{instruction} "),
        parts.get("system_format", "{system}"),
        (parts.get("system_prompt", ""),) * 2,
        columns={ours: theirs for ours, theirs in fields.items() if ours != theirs},
    )
    places = {"with_input": ("instruction", "input"), "without_input": ("instruction",), "system": ("system",)}
    for name, allowed in places.items():
        _parts(getattr(prompt, name), allowed)
    return prompt


def jinja(prompt: PromptFormat) -> str:
    """The template of a prompt. It is made for one instruction and its answer; several just follow each other.

    What both formats end with opens the answer, so that a model can be asked with the same template.
    """
    opener = _ending(prompt.with_input, prompt.without_input)
    with_input, without_input = prompt.with_input.removesuffix(opener), prompt.without_input.removesuffix(opener)
    literals = [as_literal(text) for text in (opener, prompt.answer) if text]
    user = {"instruction": "message['instruction']", "input": "message['input']"}
    usual = [as_expression(prompt.system, {"system": as_literal(words)}) if words else "" for words in prompt.usual]
    text = _TEMPLATE.render(
        usual=usual,
        system=as_expression(prompt.system, {"system": "message['content']"}),
        with_input=as_expression(with_input, user),
        without_input=as_expression(without_input, {"instruction": "message['content']"}),
        answer=" + ".join([*literals, "message['content'] + eos_token"]),
        opener=opener and as_literal(opener),
    )
    return text.rstrip()


def _ending(*formats: str) -> str:
    """The text behind their last places with which all formats end."""
    last = [_parts(text, ("instruction", "input"))[-1] for text in formats]
    if any(is_place for _, is_place in last):
        return ""
    first, *others = (text for text, _ in last)
    return next((first[at:] for at in range(len(first)) if all(other.endswith(first[at:]) for other in others)), "")


def _parts(text: str, places: tuple[str, ...]) -> list[tuple[str, bool]]:
    """The texts and places of a format of Python's. Raises ``ValueError`` for other places."""
    parts: list[tuple[str, bool]] = []
    at = 0
    for match in _FIELD.finditer(text):
        if match[1] not in places:
            raise ValueError(f"has a place {match[0]}, where {', '.join(places)} may stand")
        parts += [(text[at : match.start()], False), (match[1], True)]
        at = match.end()
    rest = [*parts, (text[at:], False)]
    if any("{" in part or "}" in part for part, is_place in rest if not is_place):
        raise ValueError("has braces that are no place of it")
    return [(part, is_place) for part, is_place in rest if part]
