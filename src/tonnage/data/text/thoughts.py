"""Thoughts written into an answer's words, between tags, and those that were cut off.

An answer that opens a thought and never closes it holds no answer: generation ended, or a file was cut, while it was
still thinking. Trained, it would teach to stop there; and templates that look for the closing tag write an empty
thought in front of it. A tag in the middle of a sentence is a word like any other: only one that a text begins with
opens a thought.
"""

from __future__ import annotations

from tonnage.forms.conversation import CLOSES_THOUGHT, OPENS_THOUGHT, Message, RowError

TAGS = (
    (OPENS_THOUGHT, CLOSES_THOUGHT),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought", "<channel|>"),
    ("<|channel|>analysis", "<|end|>"),
)
"""What opens a thought and what closes it, in the families that are known."""
CLOSES_TURNS = ("<|end|>",)
"""Of what closes thoughts, what also closes answers: alone, it says nothing of a thought."""
CHANGE = "write the whole thought with its closing tag and the answer after it, or take the row out"


def check_rendered(message: Message, number: int, turn: str) -> None:
    """Refuse a message whose thought the template took for words, behind a thought of its own. Raises ``RowError``."""
    for _, closing in TAGS:
        written = message["content"].count(closing)
        more = turn.count(closing) - written - ("reasoning_content" in message)
        if written and more > 0 and closing not in CLOSES_TURNS:
            raise RowError(
                "wrong_thought",
                f"message {number}: the template does not see the thought that {closing} ends in its words, and writes "
                "another one in front of it",
                "write the thought with both of its tags, or into reasoning_content",
            )


def check_thoughts(message: Message, number: int) -> None:
    """Refuse a message of the assistant that is nothing but a thought, whole or cut, or whose reasoning holds the tags
    that the template writes around it. Raises ``RowError``."""
    where = f"message {number}"
    content, reasoning = message["content"], message.get("reasoning_content", "").strip()
    for opening, closing in TAGS:
        thought, closed, behind = content.rpartition(closing)
        behind = behind.strip()
        if behind.startswith(opening):
            raise RowError("cut_thought", f"{where} opens a thought with {opening} and never closes it", CHANGE)
        begun = opening not in thought and thought.endswith("\n") and not reasoning and closing not in CLOSES_TURNS
        if closed and not behind and "tool_calls" not in message and (begun or thought.lstrip().startswith(opening)):
            raise RowError("empty_answer", f"{where}: nothing but a thought, which {closing} ends", CHANGE)
        ends = reasoning.endswith(closing) and closing not in CLOSES_TURNS
        if tag := opening if reasoning.startswith(opening) else closing if ends else "":
            raise RowError(
                "wrong_type" if closing in reasoning else "cut_thought",
                f"{where}: its reasoning holds the tag {tag}, which the template writes around it",
                "take the tags out of the reasoning, or write the thought into the content with both of them",
            )
