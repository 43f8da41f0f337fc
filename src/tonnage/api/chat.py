"""A conversation with a run's model, from Python."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
        self.messages: list[dict[str, str]] = list(self._opening)
        """All that was said, in order: ``role`` and ``content``. It may be changed before the next answer."""

    def say(self, text: str) -> str:
        """Say something; returns the model's answer, and keeps both.

        Raises ``UserError``, and keeps neither: the conversation leaves no room for an answer.
        """
        from tonnage.inference.generate import generate

        self._said += 1
        messages = [*self.messages, {"role": "user", "content": text}]
        (answer,) = generate(self._loaded, [messages], self._decoding, seed=self._seed + self._said)
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        return answer

    def reset(self) -> None:
        """Begin again, with the system message alone if there is one."""
        self.messages = list(self._opening)

    def __repr__(self) -> str:
        return f"Chat({len(self.messages)} messages)"

    def _repr_markdown_(self) -> str:
        return "\n\n".join(f"**{one['role']}** {one['content']}" for one in self.messages) or "*nothing was said yet*"
