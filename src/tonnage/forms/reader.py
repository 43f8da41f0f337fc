"""From rows of a form to conversations.

``Reader`` checks every value it uses, raises ``RowError`` with the reason, and counts the fields that nobody reads; it
never repairs a row in silence. Rows that were made for another purpose than their form's (preferences as answers to
learn, pictures) are refused, since their texts alone mean something else. Here a message only gets its weight: which
tokens are trained is settled elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from tonnage.forms.conversation import Conversation, RowError
from tonnage.forms.formats import FORMATS, Form, fields_of, rename, turns_of
from tonnage.forms.images import COLUMNS, MARK, place_images, take_columns
from tonnage.forms.preferences import is_tie, other_preference
from tonnage.forms.turns import LISTS, MEDIA, ROLE_NAMES, TurnReader, media_error, placeholder_in
from tonnage.forms.values import (
    Row,
    as_float,
    as_turns,
    count_unread,
    is_empty,
    kind_of,
    names_of,
    number_weight,
    written,
)
from tonnage.forms.verdicts import Values

LARGEST_CARRIED = 3.4e38
SOURCE, PATH = "{source}", "{path}"
"""In a ``RowError``'s advice: the key of the row's source in the config, and its path."""


class Reader:
    def __init__(
        self, form: Form, *, fills_nulls: bool = False, carry: Sequence[str] = (), images: bool = False
    ) -> None:
        """``fills_nulls``: whether the file's kind gives objects the fields of all others, null. ``carry``: columns of
        numbers that go with each conversation of a row; of pairs, 0 where a row has none. ``images``: whether the model
        takes any."""
        self.unread: Counter[str] = Counter()
        """Fields that hold something and are not read -> rows (or messages) that have them."""
        self.columns: Counter[str] = Counter()
        """Columns that the form names -> rows that have them."""
        self.values = Values()
        """Of the fields that are not read; none of rows that say themselves which answer is a good one."""
        self.ties = 0
        """Pairs whose answers have the same score."""
        self._form, self._format = form, FORMATS[form.format]
        values = self.values if self._format.purpose == "supervised" else Values()
        self._images = images and self._format.is_chat and self._format.purpose == "supervised"
        self._turns = TurnReader(form.roles, self.unread, values, fills_nulls=fills_nulls, images=self._images)
        self._carry = tuple(carry)
        self._known = frozenset((*fields_of(form.format), *carry)) - frozenset(COLUMNS)
        self._asked_for = frozenset(form.columns.values())

    def read(self, row: Row) -> list[Conversation]:
        """The conversations of a row: one, or one for every path of a tree and every instance. Raises ``RowError``."""
        missing = 0.0 if self._format.purpose == "pairs" else None
        carried = tuple(_carried(row, name, missing) for name in self._carry)
        if self._form.columns:
            self.columns.update(self._asked_for.intersection(row))
            for ours, theirs in self._form.columns.items():
                if ours in row and theirs in row and ours not in self._asked_for and not is_empty(row[ours]):
                    count_unread(self.unread, ours)  # another column stands in its place
            row = rename(row, self._form.columns)
        beside = [name for name in row if name not in self._known]
        for name in beside:
            self._unknown(name, row)
        images = take_columns(row) if self._images else []
        conversations = self._format.read(row, self._form, self._turns)
        if len(conversations) > 1 and images:
            raise RowError("image", f"images beside {len(conversations)} conversations of one row")
        if self._images:
            for conversation in conversations:
                place_images(conversation, images)
        if beside and self._format.purpose == "supervised":
            self._note_values(row, beside, conversations[-1])
        weight = number_weight(row.get("loss_weight"), "loss_weight")
        for at, conversation in enumerate(conversations):
            conversation.carried = carried or conversation.carried
            if weight is not None:
                conversations[at] = conversation = conversation.scaled(weight)
            for side in (conversation, conversation.rejected):
                if side is not None:
                    self._finish(side)
        self.ties += self._format.purpose == "pairs" and is_tie(row)
        return conversations

    def _finish(self, conversation: Conversation) -> None:
        """Leave out its system message where the form says so. Raises ``RowError`` if it cannot be trained on."""
        if self._form.drops_system and conversation.turns and conversation.turns[0].role == "system":
            conversation.images = conversation.images[conversation.turns[0].message["content"].count(MARK) :]
            conversation.turns = conversation.turns[1:]
        if mark := placeholder_in(conversation.turns):
            raise media_error(f"a message that begins or ends with {mark}", images=self._images)
        if conversation.is_chat:
            _check_turns(conversation)

    def _unknown(self, name: str, row: Row) -> None:
        """Count a field that is not read, or refuse the row for it."""
        value = row[name]
        if is_empty(value) or (self._format.is_listed and name in LISTS and name == turns_of(row, self._form.format)):
            return
        if self._images and name in COLUMNS:
            return
        if name in MEDIA:
            raise media_error(f"a field {name!r}", images=self._images)
        is_verdict = name == "kto_tag" or (name == "label" and isinstance(value, bool))
        if is_verdict and self._format.purpose == "pairs":
            raise other_preference(row) or RowError(
                "two_verdicts",
                f"a field {name!r} that says whether an answer is a good one, beside a chosen and a rejected one",
                f"take {name} out of the rows if it agrees with them; swap the answers where it says the opposite",
            )
        if is_verdict:
            raise RowError(
                "preference",
                f"a field {name!r} that says whether the answer is a good one",
                f"learn from good and bad answers: objective: kto; or write the rows whose {name} is true to a file of "
                "their own, without that field",
            )
        if name in ("chosen", "rejected") and row.get("chosen") is not None:
            raise RowError(
                "preference",
                "an answer that was chosen, or one that was rejected, beside it: a preference, which needs another "
                "objective",
                for_chosen(row, self._form.columns),
            )
        if name == "train_detail":
            raise RowError(
                "unsupported", "train_detail is not read", "mark messages, or parts of them, with train: false"
            )
        count_unread(self.unread, str(name))

    def _note_values(self, row: Row, beside: Sequence[str], conversation: Conversation) -> None:
        """Note the values of the fields ``beside`` those that are read."""
        answer = conversation.turns[-1].message["content"] if conversation.turns else ""
        for name in beside:
            if not (self._format.is_listed and name in LISTS):
                self.values.note(name, row[name], answer)


def _check_turns(conversation: Conversation) -> None:
    """Refuse a conversation of which nothing would be trained."""
    roles = [turn.role for turn in conversation.turns]
    if "assistant" not in roles:
        raise RowError("no_answer", f"no assistant message (roles: {', '.join(roles) or 'none'})")
    if not any(turn.weight and turn.has_weight for turn in conversation.turns):
        raise RowError(
            "nothing_supervised", "every assistant message is marked as not to be trained (train: false or weight 0)"
        )


def _carried(row: Row, name: str, missing: float | None) -> float:
    """The number of a row that goes with its documents, or what stands for one that is not there. Raises
    ``RowError``."""
    value = row.get(name)
    if is_empty(value) and missing is not None:
        return missing
    if is_empty(value):
        raise RowError("missing_field", f"no {name!r}, which data.carry names (it has {names_of(row)})")
    taker = "data.carry" if missing is None else "objective: reward"
    if not isinstance(value, int | float):
        raise RowError("wrong_type", f"{name!r} is {kind_of(value)}, and {taker} takes numbers")
    number = as_float(value)
    if not abs(number) <= LARGEST_CARRIED:  # in fp32, as a loss is given it
        raise RowError("wrong_type", f"{name!r} is {str(value)[:20]}, and {taker} takes numbers that fp32 holds")
    return number


def for_chosen(row: Row, columns: Mapping[str, str]) -> str:
    """How to train on preferences, on the pairs or on the chosen answers alone; ``SOURCE`` and ``PATH`` stand for what
    only the caller knows. ``columns`` are those by which the row is renamed."""
    pairs = "learn from both answers: objective: dpo"
    form = _form_of_chosen(row, columns)
    if not form:
        return f"{pairs}; or write the chosen answers to a file of their own, as prompt and completion"
    return f"{pairs}; or train on the chosen answers alone: {SOURCE}: {{path: {PATH}, format: {form}}}"


def _form_of_chosen(row: Row, columns: Mapping[str, str]) -> str:
    """The format and the columns with which the chosen answers alone are read; empty where there are none."""
    chosen, column = as_turns(row.get("chosen")), columns.get("chosen", "chosen")
    names = ("prompt", "question", "instruction", "query", "input", *LISTS)
    prompt_field = next((name for name in names if not is_empty(row.get(name))), None)
    if isinstance(chosen, list) and len(chosen) > 1 and not _is_answer(chosen[0]):
        return f"messages, columns: {written({'messages': column})}"
    if prompt_field is None or is_empty(chosen):
        return ""
    beside = {name: theirs for name, theirs in columns.items() if name in ("system", "tools")}
    if prompt_field == "instruction" and isinstance(chosen, str):
        question = {name: theirs for name, theirs in columns.items() if name in ("instruction", "input")}
        return f"alpaca, columns: {written(question | beside | {'output': column})}"
    prompt = columns.get(prompt_field, prompt_field)
    question = {"prompt": prompt} if prompt != "prompt" else {}
    return f"completion, columns: {written(question | beside | {'completion': column})}"


def _is_answer(message: object) -> bool:
    """Whether a message is the assistant's, by the usual names of roles."""
    role = message.get("role", message.get("from")) if isinstance(message, dict) else None
    return isinstance(role, str) and ROLE_NAMES.get(role.lower()) == "assistant"


def conversation_of(messages: Sequence[Mapping[str, Any]]) -> Conversation:
    """Messages that a program holds, in any of their forms, with the images among their parts. Raises ``RowError``."""
    unread = Counter[str]()
    turns = TurnReader({}, unread, Values(), images=True).read([dict(message) for message in messages], "messages")
    if unread:
        raise RowError("unknown_form", f"{', '.join(unread)}: fields that nothing reads")
    conversation = Conversation(turns)
    place_images(conversation, [])
    return conversation
