"""Texts against ``apply_chat_template``, whichever way they were rendered."""

from __future__ import annotations

import datetime
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import chat_template_utils

from data.conftest import alpaca_rows, make_tokenizer, write_rows
from data.test_chat_templates import CASES, GEMMA, Shape, tokenizer_of
from tonnage.config import Data, Source
from tonnage.data import prepare
from tonnage.data.text import rendering
from tonnage.data.text.choice import choose, of_tokenizer
from tonnage.data.text.rendering import ChatTemplate, TooMuch, bounded
from tonnage.data.text.shape import TurnShape
from tonnage.errors import UserError
from tonnage.forms.conversation import RowError
from tonnage.forms.formats import Form
from tonnage.forms.reader import Reader

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def conversations(count: int) -> list[list[dict[str, Any]]]:
    """Messages with everything a row can give them."""
    chance = random.Random(0)

    def words() -> str:
        return "".join(
            chance.choice(["a", " b", "\n", "{{ c }}", "<d>", "é", "'", "  ", ""]) for _ in range(chance.randint(0, 8))
        )

    found = []
    for _ in range(count):
        messages: list[dict[str, Any]] = []
        if chance.random() < 0.3:
            messages.append({"role": "system", "content": words()})
        for _ in range(chance.randint(1, 3)):
            user = {"role": "user", "content": words()}
            if chance.random() < 0.3:
                user |= {"instruction": words(), "input": words()}
            answer: dict[str, Any] = {"role": "assistant", "content": words()}
            if chance.random() < 0.1:
                answer["reasoning_content"] = words()
            if chance.random() < 0.1:
                answer["tool_calls"] = [CALL]
            if chance.random() < 0.1:
                answer["name"] = "someone"
            messages += [user, answer]
        found.append(messages)
    return found


def expected(tokenizer: Any, messages: list[dict[str, Any]], opened: bool) -> str | None:
    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=opened)
    except Exception:
        return None
    return text


def with_template(name: str, shape: Shape, built_in: bool) -> Any:
    tokenizer = tokenizer_of(shape, built_in)
    return choose(name, tokenizer, ["messages"], False)[0] if built_in else tokenizer


@pytest.mark.parametrize("seam", ["there", "gone"])
@pytest.mark.parametrize(("name", "shape", "built_in"), CASES, ids=[case[0] for case in CASES])
def test_texts_are_those_of_apply_chat_template(
    name: str, shape: Shape, built_in: bool, seam: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = with_template(name, shape, built_in)
    template = of_tokenizer(tokenizer)
    if seam == "gone":
        monkeypatch.delattr(chat_template_utils, "_compile_jinja_template")
    assert (template._direct is None) == (seam == "gone"), "transformers compiles templates elsewhere now"
    monkeypatch.undo()
    asked: list[Any] = [(messages, None, opened) for messages in conversations(40) for opened in (False, True)]
    for (messages, _, opened), found in zip(asked, template.render_many(asked), strict=True):
        text = expected(tokenizer, messages, opened)
        if text is None:
            assert isinstance(found, RowError)
            assert found.reason.startswith("the template raised: ")
        else:
            assert found == text


def test_a_refusal_is_told_the_same_way_however_it_was_met(monkeypatch: pytest.MonkeyPatch) -> None:
    template = of_tokenizer(tokenizer_of(GEMMA, False))
    plain: list[dict[str, Any]] = [{"role": "assistant", "content": "a"}]
    named = [{**plain[0], "name": "b"}]
    first, second = template.render_many([(plain, None, False), (named, None, False)])
    assert isinstance(first, RowError)
    assert isinstance(second, RowError)
    assert first.reason == second.reason == "the template raised: roles must alternate"


def test_a_template_that_transformers_prepares_otherwise_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a version did something to messages before the template sees them."""
    original = chat_template_utils.render_jinja_template

    def shouting(conversations: Any, **given: Any) -> Any:
        louder = [[{**m, "content": m["content"].upper()} for m in messages] for messages in conversations]
        return original(louder, **given)

    monkeypatch.setattr(chat_template_utils, "render_jinja_template", shouting)
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})
    assert template.render([{"role": "user", "content": "abc"}]) == "ABC"


def test_what_is_wrong_with_a_template_that_asks_for_the_date_is_said() -> None:
    template = ChatTemplate("{{ strftime_now('%Y') }}{% for m in messages %}{{ m.content }}", {}, date="2020-01-01")
    with pytest.raises(RowError, match="the template raised: Unexpected end of template"):
        template.render([{"role": "user", "content": "a"}])


def test_rows_in_the_alpaca_form_take_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    template = of_tokenizer(choose("alpaca", make_tokenizer(), ["alpaca"], True)[0])
    assert template._direct is not None
    monkeypatch.setattr(ChatTemplate, "_call", lambda *given: pytest.fail("the long way"))
    reader = Reader(Form("alpaca"))
    template.render_many([(reader.read(row)[0].messages, None, False) for row in alpaca_rows(9)])


OWN = """{# lines and indents of a file are not part of the text #}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- 'Q: ' + message.content + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- 'A:' + message.content + eos_token + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'A:' }}{% endif %}
"""


def test_a_template_of_the_users_own(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"prompt": f"Name fox {n}", "completion": f" Fox {n}."} for n in range(5)]
    file = write_rows(tmp_path / "rows.jsonl", rows)
    own = tmp_path / "mine.jinja"
    own.write_text(OWN)
    options = Data(train=(Source(path=str(file)),), max_length=128, template=str(own), pack=False)
    prepared = prepare(options, tokenizer, cache=tmp_path / "cache")
    assert prepared.account.template == str(own)
    assert prepared.account.end_of_turn == ("<|endoftext|>",)
    assert prepared.stop_tokens == (tokenizer.eos_token_id,)
    assert prepared.tokenizer.chat_template == OWN, "it goes with the export"
    found = []
    for index in range(prepared.train.num_packs):
        pack = prepared.train.pack(index)
        said = pack.weights > 0
        found.append((tokenizer.decode(pack.input_ids[~said]), tokenizer.decode(pack.input_ids[said])))
    assert sorted(found) == [(f"Q: Name fox {n}\nA:\n", f" Fox {n}.<|endoftext|>") for n in range(5)]
    own.write_text(OWN.replace("Q:", "Question:"))
    changed = prepare(options, tokenizer, cache=tmp_path / "cache")
    assert tokenizer.decode(changed.train.pack(0).input_ids).startswith("Question: "), "a change of the file is seen"


def test_what_handles_the_end_of_a_template_is_not_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it takes: many looks later, nothing else was raised, and nobody looks any more."""
    monkeypatch.setattr(rendering, "SECONDS", 0.05)
    before = signal.getsignal(signal.SIGALRM)

    def wait(seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            pass

    handled = []

    def template() -> None:
        try:
            wait(10)
        finally:
            wait(5 * rendering.LOOK_SECONDS)
            handled.append(True)

    with pytest.raises(TooMuch), rendering.bounded():
        template()
    wait(2 * rendering.LOOK_SECONDS)
    assert handled
    assert signal.getsignal(signal.SIGALRM) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def endless() -> None:
    while True:
        pass


def test_a_template_that_fills_the_memory_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    renderings = list[object]()

    def full(self: ChatTemplate, *request: object) -> str:
        renderings.append(request)
        raise MemoryError

    monkeypatch.setattr(ChatTemplate, "_call", full)
    assert ChatTemplate("{{ messages }}", {})._direct is None
    assert len(renderings) == 1


def test_a_busy_machine_ends_no_template_and_a_short_conversation_has_less_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tonnage.data.text.rendering.LEAST_SECONDS", 0.1)
    with bounded() as again:
        again([])
        time.sleep(0.3)  # while others have the processor
        again([{}] * 9)
        began = time.thread_time()
        with pytest.raises(TooMuch, match=r"more than 1 s"):
            endless()
        assert 0.9 < time.thread_time() - began < 2
        again([])
        with pytest.raises(TooMuch, match=r"more than 0.1 s"):
            endless()


def test_a_template_that_is_ended_between_two_texts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(*_: object) -> TurnShape:
        raise TooMuch("it went on")

    monkeypatch.setattr("tonnage.data.text.shape._learned", ended)
    with pytest.raises(UserError, match="the template was ended: it went on"):
        TurnShape.of(ChatTemplate("", {}), ["<end>"])


def test_today_has_a_short_format_too() -> None:
    day = ChatTemplate("{{- strftime_now('%Y') -}}", {}).render([{"role": "user", "content": "a"}], None)
    assert day == str(datetime.date.today().year)
    with pytest.raises(RowError, match="a format of 2,000,000 characters for a date"):
        ChatTemplate("{{- strftime_now('%Y' * 10**6) -}}", {}).render([{"role": "user", "content": "a"}], None)
