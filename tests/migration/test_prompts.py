"""Prompts around columns: the template of each writes what Python's own ``str.format`` does."""

from __future__ import annotations

import pytest

from tonnage.data.text.rendering import ChatTemplate
from tonnage.migration.prompts import NAMED, PromptFormat, jinja, written_out

QUOTED = written_out(
    {
        "system_prompt": 'Don\'t\\n "guess" \u00e9.',
        "system_format": "<|system|> {system}\n",
        "format": "<|user|>\\{instruction}\t'{input}' <|end|>",
        "no_input_format": "<|user|> {instruction} <|end|>",
    }
)
EMPTY = written_out({})


@pytest.mark.parametrize("prompt", [*NAMED.values(), QUOTED, EMPTY], ids=[*NAMED, "quoted", "empty"])
@pytest.mark.parametrize("given", ["", "of {{ it }}"])
@pytest.mark.parametrize("system", ["", "Be kind."])
def test_a_template_writes_what_the_format_says(prompt: PromptFormat, given: str, system: str) -> None:
    asked, said = 'What\'s "{this}"?', "It's that."
    usual = prompt.usual[0 if given else 1]
    expected = prompt.system.format(system=system or usual) if system or usual else ""
    if given:
        user = {"role": "user", "content": f"{asked}\n\n{given}", "instruction": asked, "input": given}
        expected += prompt.with_input.format(instruction=asked, input=given)
    else:
        user = {"role": "user", "content": asked}
        expected += prompt.without_input.format(instruction=asked)
    template = ChatTemplate(jinja(prompt), {"eos_token": "</s>"}, {"text_start": ""})
    before = [{"role": "system", "content": system}, user] if system else [user]
    answer = {"role": "assistant", "content": said}
    assert template.render(before, opened=True) == expected
    assert template.render([*before, answer]) == f"{expected}{prompt.answer}{said}</s>"


@pytest.mark.parametrize("format", ["{instruction} {output}", "{{instruction}}", "{instruction", "{}"])
def test_formats_with_other_places_are_refused(format: str) -> None:
    with pytest.raises(ValueError, match="has"):
        written_out({"format": format})
