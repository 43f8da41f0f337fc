"""Images in rows: in the forms that people have, each with its place, or refused with a reason."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from tonnage.forms.conversation import Conversation, Image, RowError
from tonnage.forms.formats import Form, detect
from tonnage.forms.images import MARK
from tonnage.forms.reader import Reader

CONTENT = b"\x89PNG..."
URI = "data:image/png;base64," + base64.b64encode(CONTENT).decode()
ANSWER = {"role": "assistant", "content": "A cat."}
PATH, BYTES = Image("cat.png"), Image(content=CONTENT)


def read(row: dict[str, Any], *, takes: bool = True, **form: Any) -> Conversation:
    (format,) = detect([row])
    (conversation,) = Reader(Form(format, **form), images=takes, fills_nulls=True).read(row)
    return conversation


def asked(*parts: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}, ANSWER], **more}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


ONE: dict[str, tuple[dict[str, Any], Image]] = {
    "OpenAI's part, a path": (asked({"type": "image_url", "image_url": {"url": "cat.png", "detail": "low"}}), PATH),
    "OpenAI's part, a data URI": (asked({"type": "image_url", "image_url": {"url": URI}}), BYTES),
    "OpenAI's part, no object": (asked({"type": "image_url", "image_url": "cat.png"}), PATH),
    "OpenAI's later part": (asked({"type": "input_image", "image_url": URI}), BYTES),
    "transformers' part, image": (asked({"type": "image", "image": "cat.png"}), PATH),
    "transformers' part, path": (asked({"type": "image", "path": "cat.png"}), PATH),
    "transformers' part, url": (asked({"type": "image", "url": "file://cat.png"}), PATH),
    "transformers' part, base64": (asked({"type": "image", "base64": base64.b64encode(CONTENT).decode()}), BYTES),
    "a part in Parquet": (asked({"type": "image", "text": None, "image": {"bytes": CONTENT, "path": "x.png"}}), BYTES),
    "a part and a column": (asked({"type": "image"}, images=["cat.png"]), PATH),
    "a part and datasets.Image": (asked({"type": "image"}, image={"bytes": CONTENT, "path": None}), BYTES),
    "a part and bytes": (asked({"type": "image"}, image=CONTENT), BYTES),
    "LLaVA": (
        {
            "image": "cat.png",
            "conversations": [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "A cat."}],
        },
        PATH,
    ),
    "LLaMA-Factory's alpaca": ({"instruction": "<image>", "input": "", "output": "A cat.", "images": [URI]}, BYTES),
    "prompt and completion": ({"prompt": "<image>", "completion": "A cat.", "images": [{"path": "cat.png"}]}, PATH),
    "a column as JSON text": (asked({"type": "image"}, images='["cat.png"]'), PATH),
}


@pytest.mark.parametrize("form", ONE)
def test_an_image_stands_where_its_row_says(form: str) -> None:
    row, expected = ONE[form]
    conversation = read(row)
    assert conversation.images == [expected]
    assert [message["content"] for message in conversation.messages] == [MARK, "A cat."]
    assert all("images" not in message for message in conversation.messages)


def test_several_images_keep_their_order() -> None:
    row = {
        "images": ["0.png", "1.png"],
        "messages": [
            {"role": "system", "content": "Look."},
            {
                "role": "user",
                "content": [text("First "), {"type": "image"}, text(" and "), {"type": "image", "image": URI}],
            },
            ANSWER,
            {"role": "user", "content": "And\n<image>?"},
            ANSWER,
        ],
    }
    conversation = read(row)
    assert conversation.images == [Image("0.png"), BYTES, Image("1.png")]
    assert [message["content"] for message in conversation.messages if message["role"] == "user"] == [
        f"First {MARK} and {MARK}",
        f"And\n{MARK}?",
    ]


def test_instruction_and_input_have_marks_too() -> None:
    row = {"instruction": "What is <image>?", "input": "<image>", "output": "Cats.", "images": ["0.png", "1.png"]}
    (message, _) = read(row).messages
    assert message["instruction"] == f"What is {MARK}?"
    assert message["input"] == MARK
    assert message["content"] == f"What is {MARK}?\n\n{MARK}"


def test_columns_may_have_other_names() -> None:
    row = {"messages": [{"role": "user", "content": "<image> What?"}, ANSWER], "picture": "cat.png"}
    assert read(row, columns={"images": "picture"}).images == [PATH]


def test_rows_without_images_are_as_ever() -> None:
    row = {"messages": [{"role": "user", "content": "How <image> is written"}, ANSWER], "image": None, "images": []}
    conversation = read(row)
    assert not conversation.images
    assert conversation.messages[0]["content"] == "How <image> is written"


def test_a_dropped_system_message_takes_its_image_along() -> None:
    system = {"role": "system", "content": [{"type": "image", "image": "logo.png"}]}
    row = {"messages": [system, *asked({"type": "image", "image": "cat.png"})["messages"]]}
    assert read(row, drops_system=True).images == [PATH]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no placeholder": ({**asked(text("What?")), "image": "cat.png"}, "0 placeholders for images, and 1 of them"),
    "too few": (asked({"type": "image"}, images=["0.png", "1.png"]), "1 placeholder for images, and 2 of them"),
    "too many": (asked({"type": "image"}, {"type": "image"}, image="0.png"), "2 placeholders for images, and 1"),
    "no image": (asked({"type": "image"}), "1 placeholder for images, and 0 of them"),
    "a placeholder alone": ({"prompt": "<image>\nWhat?", "completion": "A cat."}, "begins or ends with <image>"),
    "the network": (asked({"type": "image_url", "image_url": {"url": "https://a.b/c.png"}}), "on a network"),
    "another URI": (asked({"type": "image", "url": "data:text/plain;base64,AAAA"}), "a data URI of text/plain"),
    "no base64": (asked({"type": "image", "url": "data:image/png,abc"}), "not in base64"),
    "broken base64": (asked({"type": "image", "url": "data:image/png;base64,%%%"}), "not valid base64"),
    "two places": (asked({"type": "image", "path": "a.png", "url": "b.png"}), "several of them"),
    "a number": (asked({"type": "image"}, images=[3]), "is a number, not an image"),
    "an empty object": (asked({"type": "image"}, images=[{"height": 3}]), "none of them (it has height)"),
    "two columns": (asked({"type": "image"}, images=["a.png"], image="b.png"), "images in two columns"),
    "in an answer": (
        {"messages": [{"role": "user", "content": "Draw."}, {"role": "assistant", "content": "<image>"}], "image": "a"},
        "an image in what the assistant says",
    ),
    "the mark itself": (asked(text(f"a {MARK}"), {"type": "image", "path": "a.png"}), r"the character U\+10FFFC"),
    "sound": (asked({"type": "audio", "audio": "a.wav"}), "only text and images are trained"),
    "video": ({**asked(text("What?")), "videos": ["a.mp4"]}, "a field 'videos'; only text and images are trained"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_add_up_is_refused(case: str) -> None:
    row, reason = REFUSED[case]
    with pytest.raises(RowError, match=reason.replace("(", r"\(").replace(")", r"\)")):
        read(row)


@pytest.mark.parametrize("form", ONE)
def test_a_model_of_text_takes_none(form: str) -> None:
    with pytest.raises(RowError, match=r"only text is trained|not text|begins or ends with"):
        read(ONE[form][0], takes=False)


def test_pairs_have_none() -> None:
    row = {"prompt": "<image>", "chosen": "A cat.", "rejected": "A dog.", "images": ["cat.png"]}
    with pytest.raises(RowError, match="a field 'images'; only text is trained"):
        Reader(Form("preference"), images=True).read(row)
