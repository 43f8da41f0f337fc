"""Two answers, and a field that says which of them is the better one: an index, a winner, a strength.

Data sets differ in what the field means, which no column's name reveals, so there is a reader for each. What neither
answer wins is refused: a pair without a preference teaches nothing.
"""

from __future__ import annotations

from tonnage.forms.conversation import Conversation, RowError, Turn
from tonnage.forms.preferences import SKIPPING, check_order, number_of, pair
from tonnage.forms.turns import TurnReader
from tonnage.forms.values import Row, answer_of, as_turns, is_empty, names_of, string_of

_WINNERS = {"model_a": True, "model_b": False}


def read_saferlhf(row: Row, reader: TurnReader) -> Conversation:
    """PKU-SafeRLHF: ``better_response_id`` is the number of the better of ``response_0`` and ``response_1``."""
    better = _zero_or_one(row, "better_response_id")
    return _pair_of(row, reader, "prompt", ("response_1", "response_0") if better else ("response_0", "response_1"))


def read_shp(row: Row, reader: TurnReader) -> Conversation:
    """SHP: ``labels`` is 1 where ``human_ref_A`` is preferred to ``human_ref_B``, else 0."""
    letters = "AB" if _zero_or_one(row, "labels") else "BA"
    scores = (f"score_{letters[0]}", f"score_{letters[1]}")
    if not any(is_empty(row.get(name)) for name in scores):
        check_order(scores, (number_of(row, scores[0]), number_of(row, scores[1])))
    return _pair_of(row, reader, "history", (f"human_ref_{letters[0]}", f"human_ref_{letters[1]}"))


def read_helpsteer(row: Row, reader: TurnReader) -> Conversation:
    """HelpSteer3: ``overall_preference`` is below 0 where ``response1`` is better, above 0 where ``response2`` is."""
    strength = number_of(row, "overall_preference")
    if strength == 0:
        raise _tie("'overall_preference' is 0")
    return _pair_of(row, reader, "context", ("response1", "response2") if strength < 0 else ("response2", "response1"))


def read_arena(row: Row, reader: TurnReader) -> Conversation:
    """Chatbot Arena: ``winner`` says which model's conversation is preferred."""
    winner = string_of(row, "winner").strip().lower()
    if "tie" in winner or "both" in winner:
        raise _tie(f"'winner' is {winner[:40]!r}")
    if winner not in _WINNERS:
        raise RowError("wrong_type", f"'winner' is {winner[:40]!r}, not model_a, model_b or a tie")
    first, second = ("conversation_a", "conversation_b") if _WINNERS[winner] else ("conversation_b", "conversation_a")
    for name in (first, second):
        if is_empty(row.get(name)):
            raise RowError("missing_field", f"{name!r} holds nothing (the row has {names_of(row)})")
    return pair(reader.read(row[first], first), reader.read(row[second], second), (first, second))


def _pair_of(row: Row, reader: TurnReader, prompt: str, names: tuple[str, str]) -> Conversation:
    """A prompt, a text or messages, with the two answers to it, the preferred one first."""
    question = as_turns(row.get(prompt))
    if isinstance(question, str):
        if not question:
            raise RowError("empty_prompt", f"{prompt!r} is empty")
        context = [Turn({"role": "user", "content": question})]
    else:
        context = [Turn(turn.message) for turn in reader.read(question, prompt, or_text=True)]
    if context[-1].role == "assistant":
        raise RowError("answered_prompt", f"the prompt {prompt!r} ends with an answer of the assistant")
    chosen, rejected = (
        [*context, Turn({"role": "assistant", "content": answer_of(string_of(row, name), name)}, 1.0)] for name in names
    )
    return pair(chosen, rejected, names)


def _zero_or_one(row: Row, name: str) -> int:
    """What says which of two answers is meant. Raises ``RowError``."""
    if is_empty(row.get(name)):
        raise RowError("missing_field", f"{name!r} says nothing (the row has {names_of(row)})")
    number = number_of(row, name)
    if number not in (0, 1):
        raise RowError("wrong_type", f"{name!r} is {number:g}, not 0 or 1")
    return int(number)


def _tie(fault: str) -> RowError:
    return RowError("tie", f"{fault}: neither answer is preferred", SKIPPING)
