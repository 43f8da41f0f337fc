"""Requests with images: answered as by ``generate``; what is no image, or is somewhere else, is refused in words."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from served import CHAT, Served, events, question, said, serving
from tonnage.inference.generate import TALK, Decoding, generate, load
from tonnage.serving.engine import Engine
from tonnage.serving.requests import MOST_BYTES_WITH_IMAGES, MOST_IMAGES

pytest.importorskip("PIL")
from visions import LISTS_ONLY, draw_image, write_vision


def uri(content: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(content).decode()


def message(*urls: str, text: str = "What is it?") -> list[dict[str, Any]]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def request(*urls: str, **more: Any) -> dict[str, Any]:
    return question("", messages=message(*urls), **more)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("models")
    loaded = load(write_vision(folder / "llava", "llava", template=LISTS_ONLY), **TALK)
    with serving(Engine(loaded, max_tokens=40, most_waiting=28)) as made:
        yield made


@pytest.fixture(scope="module")
def with_folder(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The same model, where a folder of images was named."""
    folder = tmp_path_factory.mktemp("served")
    (folder / "images").mkdir()
    (folder / "images" / "cat.png").write_bytes(draw_image(1))
    (folder / "secret.png").write_bytes(draw_image(2))
    (folder / "images" / "link.png").symlink_to(folder / "secret.png")
    engine = Engine(served.loaded, max_tokens=40, most_waiting=28, images=folder / "images")
    with serving(engine) as made:
        yield made


def expected(served: Served, *urls: str, num_tokens: int = 24) -> str:
    return generate(served.loaded, [message(*urls)], Decoding(num_tokens))[0]


def test_every_image_has_its_own_answer_whoever_asks_beside(served: Served) -> None:
    urls = [uri(draw_image(number)) for number in range(8)]
    answers = [expected(served, url) for url in urls]
    assert len(set(answers)) > 4
    with ThreadPoolExecutor(8) as pool:
        asked = list(pool.map(lambda url: served.ask(CHAT, request(url)), [*urls, *urls]))
    assert [(status, said(answer)) for status, answer in asked] == [(200, answer) for answer in answers * 2]
    _, content = served.ask(CHAT, request(urls[0], stream=True))
    assert "".join(one["choices"][0]["delta"].get("content", "") for one in events(content)) == answers[0]
    assert said(served.chat("No image")) == served.expected("No image")


def test_a_conversation_goes_on_about_its_image(served: Served) -> None:
    first = message(uri(draw_image(1)))
    more = [*first, {"role": "assistant", "content": "A cat."}, {"role": "user", "content": "Why?"}]
    status, answer = served.ask(CHAT, question("", messages=more))
    assert (status, said(answer)) == (200, generate(served.loaded, [more], Decoding(24))[0])


HOSTILE = {
    "http://169.254.169.254/cat.png": "an image on a network",
    "https://example.org/cat.png": "an image on a network",
    "file:///etc/passwd": "no image in the request itself",
    "/etc/passwd": "no image in the request itself",
    "cat.png": "no image in the request itself",
    "~/cat.png": "no image in the request itself",
    "data:text/html;base64,AAAA": "not of an image",
    "data:image/png,AAAA": "not in base64",
    "data:image/png;base64,@@@": "not valid base64",
    "data:image/png;base64,": "",
    uri(b"%!PS-Adobe-3.0"): "no image of a kind that is read",
    uri(b"GIF89a" + b"\0" * 50): "",
    uri(draw_image(1, (300, 300))[:-900]): "is damaged",
    "": "at least 1 character",
}


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_no_image_is_refused_in_words(served: Served, stream: bool) -> None:
    for url, reason in HOSTILE.items():
        status, answer = served.ask(CHAT, request(url, stream=stream))
        assert status == 400, (url[:60], answer)
        assert reason in answer["error"]["message"], url[:60]
        assert "Traceback" not in answer["error"]["message"]
        assert answer["error"]["param"].startswith("messages")
    assert said(served.chat("Say a")) == served.expected("Say a")


def test_other_parts_and_too_many_images_are_refused(served: Served) -> None:
    url = uri(draw_image(1))
    part = {"type": "image_url", "image_url": {"url": url}}
    cases: list[tuple[Any, str]] = [
        ([{**part, "image_url": {"url": url, "detail": "high"}}], "detail"),
        ([{**part, "image_url": url}], "image_url"),
        ([{"type": "input_image", "image_url": url}], "image_url"),
        ([{"type": "image"}], "image_url"),
        ([part] * (MOST_IMAGES + 1), f"at most {MOST_IMAGES}"),
    ]
    for parts, reason in cases:
        status, answer = served.ask(CHAT, question("", messages=[{"role": "user", "content": parts}]))
        assert (status, reason in answer["error"]["message"]) == (400, True), answer
    said_by_us = [{"role": "assistant", "content": [part]}, {"role": "user", "content": "a"}]
    status, answer = served.ask(CHAT, question("", messages=[*message(url), *said_by_us]))
    assert (status, "in what the assistant says" in answer["error"]["message"]) == (400, True), answer
    status, answer = served.ask(CHAT, b" " * (MOST_BYTES_WITH_IMAGES + 1))
    assert status == 413


def test_files_are_of_the_folder_that_was_named_alone(with_folder: Served) -> None:
    status, answer = with_folder.ask(CHAT, request("cat.png"))
    assert (status, said(answer)) == (200, expected(with_folder, uri(draw_image(1))))
    for url in ("../secret.png", "link.png", "/etc/passwd", "file:///etc/passwd", "nowhere.png", "\0"):
        status, answer = with_folder.ask(CHAT, request(url))
        assert (status, answer["error"]["param"]) == (400, "messages"), url
