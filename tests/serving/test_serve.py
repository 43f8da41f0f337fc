"""The endpoint over real sockets: answers are those of ``generate``, whoever else asks, leaves, or sends nonsense."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch

import tiny
from served import CHAT, Served, events, question, said, serving
from stripped import write_stripping_model
from tonnage.data import encode_prompt
from tonnage.errors import UserError
from tonnage.inference.generate import Decoding, EncodedPrompt, Loaded, load
from tonnage.inference.pieces import Token
from tonnage.serving.engine import Ended, Engine
from tonnage.serving.listen import in_address, listen
from tonnage.serving.requests import MOST_BYTES, MOST_MESSAGES, ChatRequest, read_request

TEXT = "/v1/completions"
WAITING = 28


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    config = tiny.llama_config(num_hidden_layers=1, initializer_range=0.2)
    loaded = load(tiny.write_model(tmp_path_factory.mktemp("models") / "tiny", config), template="alpaca")
    with serving(Engine(loaded, max_tokens=40, most_waiting=WAITING)) as made:
        yield made


def test_a_host_that_can_be_no_name_is_refused() -> None:
    for host in ("127.0.0..1", "a" * 70, "no.such.address"):
        with pytest.raises(UserError, match="an address of this machine"), listen(host, 0):
            pass


def test_addresses_have_numbers_with_colons_in_brackets() -> None:
    assert [in_address(host) for host in ("0.0.0.0", "::", "fe80::1")] == ["0.0.0.0", "[::]", "[fe80::1]"]


def test_an_answer_is_that_of_generate_whole_and_in_pieces(served: Served) -> None:
    for text in ("Say a", "A longer question about nothing at all"):
        whole = served.chat(text)
        assert said(whole) == served.expected(text)
        prompt = encode_prompt([{"role": "user", "content": text}], served.loaded.tokenizer)
        assert whole["usage"]["prompt_tokens"] == len(prompt)
        _, content = served.ask(CHAT, question(text, stream=True, stream_options={"include_usage": True}))
        pieces = events(content)
        assert "".join(one["choices"][0]["delta"].get("content", "") for one in pieces[:-1]) == said(whole)
        assert pieces[-2]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"] == "length"
        assert pieces[-1]["usage"] == whole["usage"]
        assert len(pieces) > 5


def test_parts_of_a_message_are_one_text(served: Served) -> None:
    parts = [{"type": "text", "text": "Say "}, {"type": "text", "text": "a"}]
    status, answer = served.ask(CHAT, question("", messages=[{"role": "user", "content": parts}]))
    assert (status, said(answer)) == (200, served.expected("Say a"))


def test_an_answer_ends_before_a_stop_word(served: Served) -> None:
    whole = served.expected("Say abc, please")
    at = next(
        at
        for at in range(3, len(whole) - 2)
        if "\ufffd" not in whole[at : at + 2] and whole.find(whole[at : at + 2]) == at
    )
    stop = whole[at : at + 2]
    for stops in (stop, ["never that", stop]):
        answer = served.chat("Say abc, please", stop=stops)
        assert (said(answer), answer["choices"][0]["finish_reason"]) == (whole[:at], "stop")
        _, content = served.ask(CHAT, question("Say abc, please", stop=stops, stream=True))
        assert "".join(one["choices"][0]["delta"].get("content", "") for one in events(content)) == whole[:at]


def test_probabilities_are_those_of_the_model(served: Served) -> None:
    answer = served.chat("b", logprobs=True, top_logprobs=3, max_tokens=6)
    told = answer["choices"][0]["logprobs"]["content"]
    ids = encode_prompt([{"role": "user", "content": "b"}], served.loaded.tokenizer)
    assert len(told) == 6
    for one in told:
        with torch.no_grad():
            logprobs = served.loaded.model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        best = logprobs.topk(3)
        assert [other["logprob"] for other in one["top_logprobs"]] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert one["logprob"] == pytest.approx(float(best.values[0]), abs=1e-4)
        ids.append(int(best.indices[0]))
        assert one["token"] == served.loaded.tokenizer.decode(ids[-1:])


def test_a_text_is_gone_on_with(served: Served) -> None:
    ids = served.loaded.tokenizer("Once upon")["input_ids"]
    asked = {"model": "tiny", "temperature": 0, "max_tokens": 8, "logprobs": 2}
    answers = [served.ask(TEXT, {**asked, "prompt": prompt})[1]["choices"][0] for prompt in ("Once upon", ids)]
    assert answers[0] == answers[1]
    with torch.no_grad():
        written = served.loaded.model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)[0, len(ids) :]
    assert answers[0]["text"] == served.loaded.tokenizer.decode(written, skip_special_tokens=True)
    told = answers[0]["logprobs"]
    assert len(told["tokens"]) == len(told["token_logprobs"]) == len(told["top_logprobs"]) == 8


def test_draws_repeat_with_their_seed(served: Served) -> None:
    drawn = [said(served.chat("Say a", temperature=1.5, top_p=0.9, seed=seed)) for seed in (1, 2, 1)]
    assert drawn[0] == drawn[2] != drawn[1]
    assert len({said(served.chat("Say a", temperature=1.5)) for _ in range(3)}) > 1


@pytest.fixture(scope="module")
def stripping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Whose decoder strips the space at the beginning of a text."""
    loaded = load(write_stripping_model(tmp_path_factory.mktemp("models") / "tiny"), template="plain")
    with serving(Engine(loaded, max_tokens=40, most_waiting=WAITING)) as made:
        yield made


def says(served: Served, monkeypatch: pytest.MonkeyPatch, *names: str) -> list[int]:
    """Have the model say these tokens; returns their ids."""
    vocabulary = served.loaded.tokenizer.get_vocab()
    ids = [vocabulary[name] for name in names]

    def write(loaded: Loaded, prompt: EncodedPrompt, decoding: Decoding, on_token: Any, **_: Any) -> None:
        for token in ids:
            if on_token(Token(token, -1.0, ((token, -1.0),))):
                return

    monkeypatch.setattr("tonnage.serving.engine.write_tokens", write)
    return ids


def test_a_text_and_its_tokens_keep_their_spaces(stripping: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    says(stripping, monkeypatch, "▁world", "▁is", "▁big")
    wish = {"model": "tiny", "prompt": "hello", "logprobs": 1}
    choice = stripping.ask(TEXT, wish)[1]["choices"][0]
    assert choice["text"] == " world is big"
    assert choice["logprobs"]["tokens"] == [" world", " is", " big"]
    assert choice["logprobs"]["text_offset"] == [0, 6, 9]
    assert choice["logprobs"]["top_logprobs"] == [{" world": -1}, {" is": -1}, {" big": -1}]
    _, content = stripping.ask(TEXT, {**wish, "stream": True})
    assert [one["choices"][0]["text"] for one in events(content)] == [" world", " is", " big", ""]
    answer = stripping.chat("hello", logprobs=True)
    assert said(answer) == "world is big"  # as that of generate: it is a text of its own
    assert [one["token"] for one in answer["choices"][0]["logprobs"]["content"]] == [" world", " is", " big"]


def test_an_answer_in_bytes_is_whole(stripping: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = says(stripping, monkeypatch, "A", "<0x0A>", "<0xF0>", "<0x9F>", "▁world")
    whole = stripping.loaded.tokenizer.decode(ids)
    answer = stripping.chat("hello", logprobs=True)
    assert said(answer) == whole == "A\ufffd\ufffd\ufffd world"
    assert len(answer["choices"][0]["logprobs"]["content"]) == len(ids)
    _, content = stripping.ask(CHAT, question("hello", stream=True))
    assert "".join(one["choices"][0]["delta"].get("content", "") for one in events(content)) == whole


def test_messages_without_tokens_are_refused(stripping: Served) -> None:
    status, answer = stripping.ask(CHAT, question(""))
    assert (status, answer["error"]["param"]) == (400, "messages")
    assert "no tokens" in answer["error"]["message"]


def leave(port: int, text: str, after: int) -> None:
    """Ask for a long answer, and go when so many bytes of it have come."""
    body = json.dumps(question(text, stream=True, max_tokens=250)).encode()
    lines = [f"POST {CHAT} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    head = "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""])
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(head.encode() + body)
        while after > 0:
            received = len(connection.recv(after))
            assert received, "the answer ended"
            after -= received


@pytest.mark.slow
def test_twenty_at_once_and_those_who_leave_change_no_answer(served: Served) -> None:
    texts = [f"Question {number}: say {'abc' * (number % 5)}" for number in range(20)]
    expected = [served.expected(text, 8) for text in texts]
    seeded = said(served.chat("Say a", temperature=1.0, seed=7))
    with ThreadPoolExecutor(27) as pool:
        leaving = [
            pool.submit(leave, served.port, text, after)
            for text, after in zip(texts, (0, 0, 300, 900, 1500), strict=False)
        ]
        answers = [pool.submit(served.chat, text, max_tokens=8) for text in texts]
        again = pool.submit(served.chat, "Say a", temperature=1.0, seed=7)
        assert [said(answer.result()) for answer in answers] == expected
        assert said(again.result()) == seeded
        for one in leaving:
            one.result()


def test_who_leaves_stops_the_model(served: Served) -> None:
    forwards = 0

    def count(*_: Any) -> None:
        nonlocal forwards
        forwards += 1
        time.sleep(0.005)

    hook = served.loaded.model.register_forward_hook(count)
    try:
        leave(served.port, "Say a", 300)
        served.chat("Say a", max_tokens=1)
    finally:
        hook.remove()
    assert forwards < 200


def test_who_leaves_a_fast_model_stops_it(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tonnage.serving.engine.LOOK_SECONDS", 0.02)
    engine = Engine(replace(served.loaded, stop_tokens=()), max_tokens=300, most_waiting=1)

    async def left() -> bool:
        return True

    async def answered() -> list[Any]:
        wish = read_request(ChatRequest, json.dumps(question("a", max_tokens=300)).encode())
        return [event async for event in engine.answer(wish, left)]

    parts = asyncio.run(answered())
    engine.close()
    assert not any(isinstance(part, Ended) for part in parts)


def test_more_than_may_wait_are_told_so(served: Served) -> None:
    hook = served.loaded.model.register_forward_hook(lambda *_: time.sleep(0.005))
    try:
        with ThreadPoolExecutor(WAITING + 4) as pool:
            asked = [pool.submit(served.ask, CHAT, question("a", max_tokens=2)) for _ in range(WAITING + 4)]
            statuses = [one.result()[0] for one in asked]
    finally:
        hook.remove()
    assert set(statuses) == {200, 429}


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in question("a").items() if key != name}


def message(**fields: Any) -> dict[str, Any]:
    return question("a", messages=[{"role": "user", "content": "a", **fields}])


HOSTILE: dict[str, tuple[int, Any]] = {
    "nothing": (400, b""),
    "no JSON": (400, b"{'a': 1}"),
    "half of it": (400, json.dumps(question("a")).encode()[:-3]),
    "no text": (400, b"\xff\xfe{}"),
    "half a character": (400, json.dumps(question("a")).replace('"a"', '"\\ud800"').encode()),
    "a list": (400, []),
    "a number": (400, b"1e400"),
    "deep": (400, b"[" * 100_000),
    "deep and whole": (400, b'{"model":' + b"[" * 5000 + b"]" * 5000 + b"}"),
    "deep in a message": (400, message(content=[{"type": "text", "text": [[[["a"]]]]}])),
    "too large": (413, b" " * (MOST_BYTES + 1)),
    "no model": (400, without("model")),
    "another model": (404, question("a", model="gpt-4o")),
    "a model that is a list": (400, question("a", model=["tiny"])),
    "no messages": (400, without("messages")),
    "empty messages": (400, question("a", messages=[])),
    "too many messages": (400, question("a", messages=[{"role": "user", "content": "a"}] * (MOST_MESSAGES + 1))),
    "messages that are text": (400, question("a", messages="hello")),
    "a message that is text": (400, question("a", messages=["hello"])),
    "a message without content": (400, question("a", messages=[{"role": "user"}])),
    "content that is null": (400, message(content=None)),
    "content that is a number": (400, message(content=5)),
    "no parts": (400, message(content=[])),
    "a picture": (400, message(content=[{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}])),
    "an unknown role": (400, message(role="root")),
    "calls of tools": (400, message(tool_calls=[])),
    "the last word": (400, question("a", messages=[{"role": "assistant", "content": "a"}])),
    "a prompt as long as can be": (400, question("x " * 2000)),
    "a longer answer than fits": (400, question("a", max_tokens=10**6)),
    "max_tokens of 0": (400, question("a", max_tokens=0)),
    "max_tokens below 0": (400, question("a", max_tokens=-5)),
    "max_tokens as text": (400, question("a", max_tokens="5")),
    "max_tokens as a fraction": (400, question("a", max_tokens=1.5)),
    "max_tokens that is true": (400, question("a", max_tokens=True)),
    "max_tokens that is huge": (400, json.dumps(question("a")).replace("24", "9" * 5000).encode()),
    "max_tokens that is large": (400, question("a", max_tokens=2**31 - 1)),
    "two limits": (400, question("a", max_completion_tokens=3)),
    "a temperature below 0": (400, question("a", temperature=-1)),
    "a temperature that is next to none": (400, question("a", temperature=1e-40)),
    "a temperature of 3": (400, question("a", temperature=3)),
    "a temperature that is none": (400, json.dumps(question("a", temperature=float("nan"))).encode()),
    "an infinite temperature": (400, json.dumps(question("a", temperature=float("inf"))).encode()),
    "top_p of 0": (400, question("a", top_p=0)),
    "top_p of 2": (400, question("a", top_p=2)),
    "a seed of 70 bits": (400, question("a", seed=2**70)),
    "five stop words": (400, question("a", stop=list("abcde"))),
    "an empty stop word": (400, question("a", stop="")),
    "a long stop word": (400, question("a", stop="a" * 300)),
    "stop words that are numbers": (400, question("a", stop=[1])),
    "two answers": (400, question("a", n=2)),
    "a penalty": (400, question("a", presence_penalty=1.0)),
    "a bias": (400, question("a", logit_bias={"50256": -100})),
    "tools": (400, question("a", tools=[{"type": "function", "function": {"name": "f"}}])),
    "a schema": (400, question("a", response_format={"type": "json_schema", "json_schema": {}})),
    "likely tokens without probabilities": (400, question("a", top_logprobs=2)),
    "too many likely tokens": (400, question("a", logprobs=True, top_logprobs=21)),
    "options of a stream that is none": (400, question("a", stream_options={"include_usage": True})),
    "stream that is text": (400, question("a", stream="yes")),
    "an unknown field": (400, question("a", top_k=5)),
    "a field of odd letters": (400, question("a", **{"\x1b[31m\n": 1})),
}


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_no_request_is_refused_in_openais_words(served: Served, stream: bool) -> None:
    for name, (status, body) in HOSTILE.items():
        sent = {**body, "stream": True} if stream and isinstance(body, dict) and "stream" not in body else body
        if stream and "stream_options" in str(body):
            continue
        found, answer = served.ask(CHAT, sent)
        assert found == status, (name, answer)
        assert set(answer) == {"error"}, name
        assert set(answer["error"]) == {"message", "type", "param", "code"}, name
        assert answer["error"]["type"] == "invalid_request_error", name
        assert 5 < len(answer["error"]["message"]) < 1000, name
    assert said(served.chat("Say a")) == served.expected("Say a")


def test_a_refusal_names_the_field(served: Served) -> None:
    _, answer = served.ask(CHAT, question("a", top_k=5))
    assert answer["error"]["param"] == "top_k"
    assert "max_completion_tokens" in answer["error"]["message"]  # one of those that are taken
    _, answer = served.ask(CHAT, message(content=5))
    assert answer["error"]["param"].startswith("messages.0.content")
    for prompt in ([], "", [10**6], ["a", "b"], [-1], 5, None):
        status, answer = served.ask(TEXT, {"model": "tiny", "prompt": prompt})
        assert (status, answer["error"]["param"].split(".")[0]) == (400, "prompt"), prompt


def test_of_several_types_the_one_that_fits_is_told(served: Served) -> None:
    cases = {
        "stop": (question("a", stop=list("abcde")), "at most 4 items"),
        "stop.1": (question("a", stop=["a", 3]), "valid string"),
        "messages.0.content": (message(content=[]), "at least 1 item"),
        "messages.0.content.0": (message(content=[{"type": "image", "text": "a"}]), "'text'"),
    }
    for place, (asked, needed) in cases.items():
        error = served.ask(CHAT, asked)[1]["error"]
        assert (error["param"], needed in error["message"]) == (place, True), error


@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings"])
@pytest.mark.parametrize("chunked", [True, False])
def test_what_is_sent_without_end_is_not_read_to_its_end(served: Served, chunked: bool, path: str) -> None:
    size, sent = 200 << 20, 0
    how = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {size}"
    piece = b" " * (1 << 20)
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{how}\r\n\r\n"
        connection.sendall(head.encode())
        with suppress(ConnectionError):
            while sent < size:
                connection.sendall(b"100000\r\n%s\r\n" % piece if chunked else piece)
                sent += len(piece)
        with suppress(ConnectionError):
            assert connection.recv(1000).startswith(b"HTTP/1.1 413 " if path == CHAT else b"HTTP/1.1 404 ")
    assert sent < size / 4
    assert said(served.chat("Say a")) == served.expected("Say a")


def test_other_routes_and_pages_of_a_browser_are_refused(served: Served) -> None:
    assert served.ask("/v1/embeddings", {})[0] == 404
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    for path, status in ((CHAT, 405), ("/v1/models", 200), ("/v1/models/tiny", 200), ("/v1/models/x/y", 404)):
        connection.request("GET", path)
        response = connection.getresponse()
        assert response.status == status
        content = json.loads(response.read())
        assert (status == 200) != ("error" in content)
    connection.close()
    assert served.ask(CHAT, question("a"), **{"Content-Type": "text/plain"})[0] == 415
    assert served.ask(CHAT, question("a"), Host="evil.example")[0] == 403
    assert served.ask(CHAT, question("a"), Host="[evil")[0] == 403
    assert served.ask(CHAT, question("a"), Host="localhost:8000")[0] == 200


def test_an_answer_that_fails_is_told_without_its_inside(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr("tonnage.serving.engine.write_tokens", fail)
    for stream in (False, True):
        _, answer = served.ask(CHAT, question("a", stream=stream))
        assert "RuntimeError" in str(answer)
        assert "secret" not in str(answer)
    monkeypatch.undo()
    assert said(served.chat("Say a")) == served.expected("Say a")


def test_the_client_of_openai_talks_to_it(served: Served) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key="none", max_retries=0)
    asked = question("Say a")
    assert client.chat.completions.create(**asked).choices[0].message.content == served.expected("Say a")
    pieces = [one.choices[0].delta.content or "" for one in client.chat.completions.create(**asked, stream=True)]
    assert "".join(pieces) == served.expected("Say a")
    stop = served.expected("Say a")[4:6]
    assert stop not in client.chat.completions.create(**asked, stop=[stop]).choices[0].message.content
    likely = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert all(len(one.top_logprobs) == 2 for one in likely)
    answer = client.chat.completions.create(**asked).choices[0].message
    client.chat.completions.create(**{**asked, "messages": [*asked["messages"], answer, asked["messages"][0]]})
    assert [one.id for one in client.models.list()] == ["tiny"]
    with pytest.raises(openai.BadRequestError, match="frequency_penalty"):
        client.chat.completions.create(**asked, frequency_penalty=1)
    with ThreadPoolExecutor(20) as pool:
        texts = [f"Say {number}" for number in range(20)]
        answers = list(pool.map(lambda text: client.chat.completions.create(**question(text)), texts))
    assert [one.choices[0].message.content for one in answers] == [served.expected(text) for text in texts]
    client.close()
