"""A conversation with a run's model, from Python."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tonnage.inference.generate import Decoding, Loaded


class Chat:
    """A conversation with a model that stays loaded as long as this object is there, from ``run.chat()``.

    Example:
        >>> chat = tonnage.open_run("runs/first").chat(max_new_tokens=8)
        >>> answer = chat.say("Say one.")
        >>> [message["role"] for message in chat.messages], chat.messages[-1]["content"] == answer
        (['user', 'assistant'], True)
    """

    def __init__(self, loaded: Loaded, decoding: Decoding, system: str | None, seed: int) -> None:
        self._loaded, self._decoding = loaded, decoding
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self._seed, self._said = seed, 0
        self.messages: list[dict[str, Any]] = list(self._opening)
        """All that was said, in order: ``role`` and ``content``. It may be changed before the next answer."""

    def say(self, text: str, images: Sequence[str | os.PathLike[str] | bytes] = ()) -> str:
        """Say something, and show ``images`` before it, files or their bytes, if the model takes any; returns the
        model's answer, and keeps both.

        Raises ``UserError``, and keeps neither: the conversation leaves no room for an answer.
        """
        from tonnage.inference.generate import generate

        self._said += 1
        shown = [
            {"type": "image", "image": image if isinstance(image, bytes) else os.fspath(image)} for image in images
        ]
        content = [*shown, {"type": "text", "text": text}] if shown else text
        messages = [*self.messages, {"role": "user", "content": content}]
        (answer,) = generate(self._loaded, [messages], self._decoding, seed=self._seed + self._said)
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        return answer

    def reset(self) -> None:
        """Begin again, with the system message alone if there is one."""
        self.messages = list(self._opening)

    def __repr__(self) -> str:
        return f"Chat({len(self.messages)} messages)"

    def _repr_markdown_(self) -> str:
        return (
            "\n\n".join(f"**{one['role']}** {_words(one['content'])}" for one in self.messages)
            or "*nothing was said yet*"
        )


def _words(content: str | list[dict[str, Any]]) -> str:
    """A content as text, images as such."""
    if isinstance(content, str):
        return content
    return " ".join(str(part.get("text", "*(an image)*")) for part in content)
