"""Images of a row: where rows say that they are, and where they stand in what is said.

    {"type": "image_url", "image_url": {"url": "cat.png"}}                    a part, OpenAI's
    {"type": "image", "image" | "path" | "url" | "base64": ...}               a part, transformers'
    {"type": "image"}, or <image> in a text, and a column image or images     TRL, LLaVA, LLaMA-Factory
    {"bytes": ..., "path": ...}                                               a value of a column of datasets.Image

An image is the path of a file or its bytes, also as a data URI. Nothing is fetched from a network. In the words of a
message every image is one character, ``MARK``, that no row may hold itself.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from tonnage.forms.conversation import Conversation, Image, RowError, Turn
from tonnage.forms.values import as_list, is_empty, kind_of, names_of

MARK = "\U0010fffc"
"""What stands in a message for an image: of a plane of Unicode that is for private use."""
PLACEHOLDER = "<image>"
"""What LLaVA's rows write where an image of a column belongs."""
COLUMNS = ("image", "images")
PART_TYPES = ("image", "images", "image_url", "input_image")
MESSAGE_KEY = "images"
"""Under which a message has its images until its row is read."""
_SOURCES = ("image_url", "image", "path", "url", "base64", "bytes", "images")
_URI = re.compile(r"data:(?P<kind>[\w.+/-]*)(?:;[\w=.+-]+)*?(?P<coded>;base64)?,", re.IGNORECASE)
_NETWORK = re.compile(r"[a-z][a-z0-9+.-]+://", re.IGNORECASE)
_SLOTS = re.compile(f"{MARK}|{PLACEHOLDER}")


def image_of(value: object, where: str) -> Image:
    """The image that a value of a row stands for. Raises ``RowError``."""
    if isinstance(value, bytes | bytearray):
        return Image(content=bytes(value))
    if isinstance(value, str) and value.strip():
        return _of_text(value, where)
    if isinstance(value, Mapping):
        content, named = value.get("bytes"), [name for name in _SOURCES if not is_empty(value.get(name))]
        if isinstance(content, bytes | bytearray) and content:
            return Image(content=bytes(content))
        if len(named) == 1:
            key = named[0]
            return _of_base64(value[key], where) if key == "base64" else image_of(value[key], f"{where}.{key}")
        shown = f"several of them ({', '.join(named)})" if named else f"none of them (it has {names_of(value)})"
        raise RowError("image", f"{where} says where an image is in {shown}; one of {', '.join(_SOURCES)} is read")
    raise RowError("image", f"{where} is {kind_of(value)}, not an image: a path, a data URI, or its bytes")


def images_of(value: object, where: str) -> list[Image]:
    """The images of a column: one, or a list of them. Raises ``RowError``."""
    value = as_list(value)
    if is_empty(value):
        return []
    if not isinstance(value, list | tuple):
        return [image_of(value, where)]
    return [image_of(item, f"{where}[{number}]") for number, item in enumerate(value)]


def image_of_part(part: Mapping[str, Any], where: str) -> Image | None:
    """The image of a part; None where it only says that an image belongs there, which a column holds."""
    holds = {name: value for name, value in part.items() if name in _SOURCES and not is_empty(value)}
    return image_of(holds, where) if holds else None


def take_columns(row: Mapping[str, Any]) -> list[Image]:
    """The images that stand in columns of a row. Raises ``RowError``."""
    named = [name for name in COLUMNS if not is_empty(row.get(name))]
    if len(named) > 1:
        raise RowError("image", f"images in two columns, {' and '.join(named)}; which of them are meant is not said")
    return images_of(row[named[0]], named[0]) if named else []


def place_images(conversation: Conversation, beside: Sequence[Image]) -> None:
    """Give a conversation its images, in the order of their marks; those ``beside`` it belong where only a placeholder
    is. Raises ``RowError`` where there are more or fewer, or one stands where none may."""
    waiting, number = iter(beside), 0
    for at, turn in enumerate(conversation.turns):
        own = turn.message.pop(MESSAGE_KEY, [])
        if len(own) != turn.message["content"].count(MARK):
            raise RowError("image", f"message {at} holds the character U+{ord(MARK):X}, which stands for images here")
        slots = _slots(turn, own, takes_text=bool(beside))
        number += sum(image is None for image in slots)
        if slots and turn.role == "assistant":
            raise RowError("image", f"message {at}: an image in what the assistant says, which only writes text")
        conversation.images += [image or next(waiting, Image()) for image in slots]
    if number != len(beside):
        places = "1 placeholder" if number == 1 else f"{number} placeholders"
        raise RowError(
            "image",
            f"{places} for images, and {len(beside)} of them in the row",
            f"write {PLACEHOLDER} (or a part of type image) once for every image, where it belongs",
        )


def _slots(turn: Turn, own: Sequence[Image | None], *, takes_text: bool) -> list[Image | None]:
    """The images of a message in the order of its words, None for those that a column holds; ``takes_text``: whether
    placeholders in the text stand for such, which become marks."""
    if not takes_text or PLACEHOLDER not in turn.message["content"]:
        return list(own)
    parts = iter(own)
    slots = [next(parts) if slot == MARK else None for slot in _SLOTS.findall(turn.message["content"])]
    if turn.pieces is not None:
        raise RowError("image", f"{PLACEHOLDER} in a message whose parts have weights of their own")
    for key in ("content", "instruction", "input"):
        if key in turn.message:
            turn.message[key] = turn.message[key].replace(PLACEHOLDER, MARK)
    return slots


def _of_text(text: str, where: str) -> Image:
    """The image that a text names, or is."""
    text = text.strip()
    if (head := _URI.match(text)) is not None:
        if not head["kind"].lower().startswith("image/"):
            raise RowError("image", f"{where} is a data URI of {head['kind'] or 'no kind'}, not of an image")
        if head["coded"] is None:
            raise RowError("image", f"{where} is a data URI that is not in base64")
        return _of_base64(text[head.end() :], where)
    if text.lower().startswith("file://"):
        return Image(path=unquote(text[len("file://") :]))
    if _NETWORK.match(text):
        raise RowError(
            "image",
            f"{where} is {text[:100]}, an image on a network",
            "download the images, and write their paths into the rows: nothing is fetched",
        )
    return Image(path=text)


def _of_base64(text: object, where: str) -> Image:
    if not isinstance(text, str):
        raise RowError("image", f"{where} is {kind_of(text)}, not a text in base64")
    try:
        return Image(content=base64.b64decode("".join(text.split()), validate=True))
    except (binascii.Error, ValueError) as error:
        raise RowError("image", f"{where} is not valid base64 ({error})") from None
