"""Chat templates in Go's words: the same bytes as ours, by Go itself, or a refusal that names what is in the way."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tonnage.data.text.choice import BUILT_IN
from tonnage.data.text.rendering import ChatTemplate
from tonnage.errors import UserError
from tonnage.files.reading import read_json
from tonnage.targets.ollama import go_template_of, modelfile
from tonnage.targets.turns import CONVERSATIONS, cases

FOLDER = Path(__file__).parent
FAMILIES = FOLDER / "families.json"
"""Chat templates written as those of the families are, for the same text."""
RENDERED = FOLDER / "rendered.json"
"""What Go makes of our Go templates: ``python -m tests.targets.by_go`` writes it, where there is a Go toolchain."""
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TEMPLATES = Path(__file__).parents[2] / "src/tonnage/data/text/templates"


def templates() -> dict[str, str]:
    found = {name: (TEMPLATES / f"{name}.jinja").read_text().rstrip("\n") for name in BUILT_IN}
    return found | {name: str(text) for name, text in read_json(FAMILIES).items()}


@pytest.mark.parametrize("name", templates())
def test_gos_template_writes_our_bytes_on_ten_conversations(name: str) -> None:
    template = ChatTemplate(templates()[name], SPECIAL)
    text, notes = go_template_of(template, name)
    rendered = read_json(RENDERED)[name]
    assert rendered["template"] == text, "python -m tests.targets.by_go writes the file again"
    told = list(cases(template))
    assert len(told) >= (10 if "system" not in str(notes) else 6)
    assert len(told) == len(rendered["texts"])
    for (_, ours), by_go in zip(told, rendered["texts"], strict=True):
        assert by_go == ours


@pytest.mark.skipif(shutil.which("go") is None, reason="no Go toolchain")
@pytest.mark.slow
def test_what_go_makes_of_them_is_what_is_kept() -> None:
    from targets.by_go import by_go, collated

    template = ChatTemplate(templates()["llama3"], SPECIAL)
    text, _ = go_template_of(template, "llama3")
    assert (
        by_go([(text, collated(messages)) for messages, _ in cases(template)]) == read_json(RENDERED)["llama3"]["texts"]
    )


REFUSED = {
    "{{ strftime_now('%d %B') }}{% for m in messages %}{{ m.role + ':' + m.content + '</s>' }}{% endfor %}": (
        "`strftime_now`, the date of today, in line 1"
    ),
    "{% for m in messages %}\n{{ m.role }}{{ m.content | upper }}</s>{% endfor %}": "the filter `upper` in line 2",
    "{% for m in messages %}{{ m.role }}{{ m.content.replace('a', 'b') }}</s>{% endfor %}": "`.replace()` of a text",
    "{% for m in messages %}{{ loop.index }}{{ m.role }}{{ m.content }}</s>{% endfor %}": "`loop.index` in line 1",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ m.content }}</s>"
    "{% endfor %}": "`namespace`",
    "{% for m in messages[-1:] %}{{ m.role }}{{ m.content }}</s>{% endfor %}": "a slice of the messages in line 1",
    "{% for m in messages %}{{ m.content }}{{ m.content }}</s>{% endfor %}": "written twice",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_a_table_cannot_say_is_refused_by_name(text: str) -> None:
    with pytest.raises(UserError) as refused:
        go_template_of(ChatTemplate(text, SPECIAL), "mine.jinja")
    (problem,) = refused.value.problems
    assert REFUSED[text] in problem.found
    assert problem.where == "mine.jinja"
    assert "--for vllm" in problem.change


def test_what_templates_treat_in_ways_of_their_own_is_said() -> None:
    late = ChatTemplate(
        "{% for m in messages %}{% if m.role != 'system' or loop.first %}{{ m.role }}:"
        "{{ m.content.split('</think>')[-1] }}</s>{% else %}!{{ m.content }}{{ loop.index }}{% endif %}{% endfor %}",
        SPECIAL,
    )
    _, notes = go_template_of(late, "late")
    assert any("a system message behind the first question" in note for note in notes)
    assert any("thoughts in an earlier answer" in note for note in notes)


def test_a_modelfile_says_where_the_weights_are_what_ends_an_answer_and_how_it_is_drawn() -> None:
    text, _ = go_template_of(ChatTemplate(templates()["chatml"], SPECIAL), "chatml")
    drawn = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [1, 2], "repetition_penalty": 1.1}
    made = modelfile("./m.gguf", text, stops=["<|im_end|>", 'a"b'], generation=drawn, context=2048, title="mine")
    lines = made.splitlines()
    assert lines[1] == "FROM ./m.gguf"
    assert made.count('"""') == 4  # around the template, and around a stop word with a quotation mark
    assert f'TEMPLATE """{text}"""' in made
    assert lines[-5:] == [
        'PARAMETER stop "<|im_end|>"',
        'PARAMETER stop """a"b"""',
        "PARAMETER temperature 0.6",
        "PARAMETER top_p 0.9",
        "PARAMETER num_ctx 2048",
    ]
    greedy = modelfile(".", text, stops=[], generation={"temperature": 0.6}, context=None, title="mine")
    assert greedy.splitlines()[-1] == "PARAMETER temperature 0"
    assert len(CONVERSATIONS) >= 10
