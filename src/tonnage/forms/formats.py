"""The forms of rows, one entry each: which fields they must and may have, how they are recognised and read.

``FORMATS`` is the only place that knows them. The config's schema takes the names from here, and ``document`` makes the
tables of ``docs/data.md``. Some data sets have fields of the same meaning under other names, which rows do not reveal.
For those there are presets, a form with its columns, chosen by name. ``detect`` looks at the rows and refuses to guess
between two forms that both fit.

The reader of a form checks every value it uses, raises ``RowError`` with the reason, and counts the fields that it does
not read; it never repairs a row in silence.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from tonnage.forms.beside import after_system, exchange, history_of, instruction_of, with_beside
from tonnage.forms.comparisons import read_arena, read_helpsteer, read_saferlhf, read_shp
from tonnage.forms.conversation import Conversation, Message, Pieces, RowError, Turn
from tonnage.forms.images import COLUMNS
from tonnage.forms.labelled import FIELDS as LABELLED_FIELDS
from tonnage.forms.labelled import has_label, read_labelled
from tonnage.forms.preferences import FIELDS, has_pair, read_preference
from tonnage.forms.turns import LISTS, TurnReader, media_error, read_tools
from tonnage.forms.values import (
    FLAGS,
    Row,
    answer_of,
    as_turns,
    is_empty,
    is_strings,
    is_turns,
    kind_of,
    names_of,
    number_weight,
    optional_string,
    quietly,
    string_of,
    weights_of,
)

MOST_IN_TREE = 2_000
RowPurpose = Literal["supervised", "pairs", "verdicts"]
"""What rows are for: answers to be learned as they are, pairs of answers of which one is preferred
(``Conversation.rejected``), or answers that are each desirable or not."""
PURPOSES: tuple[RowPurpose, ...] = ("supervised", "pairs", "verdicts")


@dataclass(frozen=True)
class Form:
    """How the rows of one source are to be understood."""

    format: str
    columns: Mapping[str, str] = field(default_factory=dict)
    """Our field -> the column that holds it."""
    roles: Mapping[str, str] = field(default_factory=dict)
    """Names of roles besides the usual ones -> ours."""
    optional: tuple[str, ...] = ()
    """Those of ``columns`` that a preset names: rows need not have them."""
    between: str = "\n\n"
    """What stands between ``instruction`` and ``input`` in the message of a user."""
    drops_system: bool = False
    """Whether a system message at the beginning of a conversation is left out."""
    images: str = ""
    """The folder from which paths of images start, and which they may not leave; empty is that of the rows' file."""

    def key(self) -> dict[str, Any]:
        """Plain values that differ where rows are read in another way."""
        values = asdict(self)
        if not self.images:
            del values["images"]
        return values


@dataclass(frozen=True)
class Format:
    must: tuple[str, ...]
    """Fields that a row must have."""
    read: Callable[[Row, Form, TurnReader], list[Conversation]]
    """The conversations of a row. Raises ``RowError``."""
    fits: Callable[[Row], bool] | None = None
    """Whether a row seems to have this form; where it is None, each does that has the fields that it must."""
    may: tuple[str, ...] = ()
    """Further fields that are read."""
    about: str = ""
    """What the documentation says of the fields that a row must have, behind their names."""
    is_chat: bool = True
    """Whether a chat template makes text of its rows."""
    is_listed: bool = False
    """Whether its messages may stand in any of ``LISTS``."""
    purpose: RowPurpose = "supervised"
    """What its rows are for."""

    def seems_of(self, row: Row) -> bool:
        """Whether a row seems to have this form."""
        return all(name in row for name in self.must) if self.fits is None else self.fits(row)


BESIDE = ("system", "tools", "functions")
PAIRS = (("input", "output"), ("human", "assistant"), ("user", "assistant"), ("question", "answer"))
"""Fields of a question and its answer in a list of both."""
MASKS = ("labels", "loss_mask", "assistant_masks", "completion_mask", "assistant_mask", "train_mask")


# Instructions


def _alpaca(row: Row, form: Form, reader: TurnReader) -> list[Conversation]:
    question = instruction_of(row, form.between)
    answer: Message = {"role": "assistant", "content": answer_of(string_of(row, "output"), "output")}
    return [with_beside(Conversation([*history_of(row), Turn(question), Turn(answer, 1.0)]), row, reader)]


def _instances(row: Row, form: Form, reader: TurnReader) -> list[Conversation]:
    instances = quietly(row.get("instances"))
    if not isinstance(instances, list) or not instances:
        raise RowError("wrong_type", f"'instances' is {kind_of(instances)}, not a list of inputs and outputs")
    conversations = []
    for number, instance in enumerate(instances):
        if not isinstance(instance, dict):
            raise RowError("wrong_type", f"instances[{number}] is {kind_of(instance)}, not an object")
        reader.count_others(instance, ("input", "output"), "instances[]")
        beside = {name: row[name] for name in ("instruction", "system") if name in row}
        own = {name: instance[name] for name in ("input", "output") if name in instance}
        conversations += _alpaca({**beside, **own}, form, reader)
    return conversations


# Lists of messages


def _messages(row: Row, form: Form, reader: TurnReader) -> list[Conversation]:
    name = turns_of(row, form.format)
    if name not in row:
        raise RowError("missing_field", f"no field {name!r} (it has {names_of(row)})")
    return [with_beside(Conversation(reader.read(row[name], name)), row, reader)]


def _pairs(row: Row, form: Form, reader: TurnReader) -> list[Conversation]:
    name = next((name for name in LISTS if pair_names(row.get(name)) is not None), "conversation")
    items, names = quietly(row.get(name)), pair_names(row.get(name))
    if names is None or not isinstance(items, list):
        raise RowError("wrong_type", f"{name!r} is not a list of questions and answers ({kind_of(items)})")
    turns: list[Turn] = []
    flags = (*FLAGS, "output_with_loss")
    for number, item in enumerate(items):
        where = f"{name}[{number}]"
        if not isinstance(item, dict):
            raise RowError("wrong_type", f"{where} is {kind_of(item)}, not a question and its answer")
        reader.count_others(item, (*names, "system", *flags), f"{name}[]")
        system, question = optional_string(item, "system"), optional_string(item, names[0])
        if system.strip():
            turns.append(Turn({"role": "system", "content": system}))
        answer = answer_of(string_of(item, names[1]), f"{where}.{names[1]}")
        turns += exchange(question, answer, next(iter(weights_of(item, flags, where)), 1.0))
    return [with_beside(Conversation(turns), row, reader)]


def _strings(row: Row, form: Form, reader: TurnReader) -> list[Conversation]:
    texts = quietly(row.get("data"))
    if not is_strings(texts) or not isinstance(texts, list):
        raise RowError("wrong_type", "'data' is not a list of strings, what the user and the assistant say in turn")
    messages = []
    for number, words in enumerate(texts):
        if number % 2:
            answer_of(words, f"data[{number}]")
        messages.append({"role": "assistant" if number % 2 else "user", "content": words})
    return [with_beside(Conversation.of(messages), row, reader)]


def _completion(row: Row, form: Form, reader: TurnReader) -> list[Conversation]:
    prompt, completion = as_turns(row.get("prompt")), as_turns(row.get("completion"))
    if isinstance(prompt, str) and isinstance(completion, str):
        answer_of(completion, "completion")
        if not prompt:
            raise RowError("empty_prompt", "'prompt' is empty")
        turns = list(exchange(prompt, completion))
    else:
        before = _side(prompt, "prompt", "user", reader)
        after = _side(completion, "completion", "assistant", reader)
        turns = [*(Turn(turn.message) for turn in before), *after]
    return [with_beside(Conversation(turns), row, reader)]


def _side(value: object, name: str, role: str, reader: TurnReader) -> list[Turn]:
    if isinstance(value, str):
        return [Turn({"role": role, "content": answer_of(value, name)}, float(role == "assistant"))]
    return reader.read(value, name, or_text=True)


def _gemini(row: Row, form: Form, reader: TurnReader) -> list[Conversation]:
    contents = quietly(row.get("contents"))
    if not isinstance(contents, list):
        raise RowError("wrong_type", f"'contents' is {kind_of(contents)}, not a list of messages")
    messages = [
        message
        for number, content in enumerate(contents)
        for message in _gemini_turn(content, f"contents[{number}]", reader)
    ]
    tools = read_tools(_gemini_tools(row.get("tools")))
    conversation = Conversation(reader.read(messages, "contents"), tools)
    system = row.get("systemInstruction", row.get("system_instruction"))
    if is_empty(system):
        return [conversation]
    if isinstance(system, dict):
        system = str(_gemini_turn({"role": "system", **system}, "systemInstruction", reader)[0]["content"])
    return [after_system(conversation, system if isinstance(system, str) else "")]


_GEMINI_PART = (
    *("text", "thought", "functionCall", "function_call", "functionResponse", "function_response"),
    *("thoughtSignature", "thought_signature"),
)


def _gemini_turn(content: object, where: str, reader: TurnReader) -> list[dict[str, Any]]:
    parts = content.get("parts") if isinstance(content, dict) else None
    if not isinstance(content, dict) or not isinstance(parts, list):
        raise RowError("wrong_type", f"{where} is {kind_of(content)}, not a message with parts")
    own_fields = ("parts", "content", "reasoning_content", "tool_calls")
    list_name = where.split("[")[0]
    reader.count_others(content, [field for field in content if field not in own_fields[1:]], f"{list_name}[]")
    beside = {name: value for name, value in content.items() if name not in own_fields and value is not None}
    turn: dict[str, Any] = {"role": "user", **beside, "content": ""}
    results = []
    for number, part in enumerate(parts):
        match part:
            case {"text": str(text), "thought": True}:
                turn["reasoning_content"] = turn.get("reasoning_content", "") + text
            case {"text": str(text)}:
                turn["content"] += text
            case {"functionCall": {"name": str(name), **call}} | {"function_call": {"name": str(name), **call}}:
                turn.setdefault("tool_calls", []).append({"name": name, "arguments": call.get("args") or {}})
            case {"functionResponse": {"name": str(name), **result}} | {
                "function_response": {"name": str(name), **result}
            }:
                results.append({"role": "tool", "name": name, "content": result.get("response")})
            case {"inlineData": _} | {"inline_data": _} | {"fileData": _} | {"file_data": _}:
                raise media_error(f"{where}.parts[{number}] is a file")
            case _:
                raise RowError("wrong_type", f"{where}.parts[{number}] holds neither text nor a call of a function")
        reader.count_others(part, _GEMINI_PART, f"{list_name}[].parts[]")
    return [*results, turn] if turn["content"] or "tool_calls" in turn or not results else results


def _gemini_tools(value: object) -> object:
    """Tools of Gemini's form, which wraps a list of declarations once more."""
    tools = quietly(value)
    if not isinstance(tools, list):
        return tools
    declared = [
        tool.get("functionDeclarations", tool.get("function_declarations")) if isinstance(tool, dict) else None
        for tool in tools
    ]
    return [
        declaration for declarations in declared if isinstance(declarations, list) for declaration in declarations
    ] or tools


# Trees


def _tree(row: Row, form: Form, reader: TurnReader) -> list[Conversation]:
    root = row.get("prompt")
    if not isinstance(root, dict):
        raise RowError("wrong_type", f"'prompt' is {kind_of(root)}, not a message with replies")
    conversations: list[Conversation] = []
    counted: set[int] = set()
    taken: set[tuple[str, ...]] = set()
    for path in _paths(root):
        messages: list[Message] = []
        for number, node in enumerate(path):
            words = node.get("text")
            if not isinstance(words, str):
                raise RowError("wrong_type", f"a message of the tree has no text (it has {names_of(node)})")
            if id(node) not in counted:
                reader.count_others(node, ("role", "text", "replies"), "replies[]")
            counted.add(id(node))
            messages.append({"role": reader.role(node.get("role"), f"reply {number}"), "content": words})
        while messages and messages[-1]["role"] != "assistant":
            messages.pop()
        key = tuple(words for message in messages for words in message.values())
        if messages and key not in taken:
            taken.add(key)
            conversations.append(Conversation.of(messages))
    if not conversations:
        raise RowError("no_answer", "no reply of the assistant in the tree")
    return conversations


def _paths(root: Mapping[str, Any]) -> Iterator[list[Mapping[str, Any]]]:
    """The paths from the root of a tree to its leaves. Raises ``RowError``."""
    waiting: list[list[Mapping[str, Any]]] = [[root]]
    count = 0
    while waiting:
        path = waiting.pop()
        replies = path[-1].get("replies") or []
        if not isinstance(replies, list) or not all(isinstance(reply, dict) for reply in replies):
            raise RowError("wrong_type", f"'replies' is {kind_of(replies)}, not a list of messages")
        if len(path) > MOST_IN_TREE or (count := count + 1) > MOST_IN_TREE:
            raise RowError("too_large", f"a tree of more than {MOST_IN_TREE:,} messages")
        if not replies:
            yield path
        waiting += [[*path, reply] for reply in reversed(replies)]


# Texts and tokens


def _segments(row: Row, form: Form, reader: TurnReader) -> list[Conversation]:
    segments = quietly(row.get("segments"))
    if not isinstance(segments, list) or not segments:
        raise RowError("wrong_type", f"'segments' is {kind_of(segments)}, not a list of texts with labels")
    pieces: Pieces = []
    text = ""
    flags = ("label", *FLAGS)
    for number, segment in enumerate(segments):
        where = f"segments[{number}]"
        if not isinstance(segment, dict) or not isinstance(segment.get("text"), str):
            raise RowError("wrong_type", f"{where} is {kind_of(segment)} without a text")
        weights = weights_of(segment, flags, where)
        if not weights:
            raise RowError("missing_field", f"{where} has no label (it has {names_of(segment)})")
        reader.count_others(segment, ("text", *flags), "segments[]")
        pieces.append((len(segment["text"]), weights[0]))
        text += segment["text"]
    if not any(weight for _, weight in pieces):
        raise RowError("nothing_supervised", "no segment has the label true")
    return [Conversation(text=answer_of(text, "segments"), pieces=pieces)]


def _tokens(row: Row, form: Form, reader: TurnReader) -> list[Conversation]:
    ids = row.get("input_ids")
    if not isinstance(ids, list) or not ids or not all(type(token) is int and 0 <= token < 2**31 for token in ids):
        raise RowError("wrong_type", "'input_ids' is not a list of token ids")
    names = [name for name in MASKS if not is_empty(row.get(name))]
    if not names:
        raise RowError(
            "missing_field",
            f"token ids without a mask (it has {names_of(row)})",
            f"say which are trained: one of {', '.join(MASKS)} beside input_ids",
        )
    masks = []
    for name in (*names, *(("attention_mask",) if not is_empty(row.get("attention_mask")) else ())):
        mask = row[name]
        if not isinstance(mask, list) or len(mask) != len(ids):
            size = f"{len(mask)} long" if isinstance(mask, list) else kind_of(mask)
            raise RowError("wrong_type", f"{name!r} is {size}, and 'input_ids' has {len(ids)} tokens")
        if name == "labels":
            if any(label not in (-100, token) for label, token in zip(mask, ids, strict=True)):
                raise RowError("wrong_type", "'labels' holds other tokens than 'input_ids' and -100")
            mask = [float(label != -100) for label in mask]
        masks.append([number_weight(flag, f"{name}[{at}]") or 0.0 for at, flag in enumerate(mask)])
    if any(mask != masks[0] for mask in masks[1 : len(names)]):
        raise RowError("wrong_type", f"{' and '.join(names)} do not agree")
    weights = masks[0]
    if len(masks) > len(names):  # padding is no token
        real = [at for at, flag in enumerate(masks[-1]) if flag]
        if not real or real != list(range(real[0], real[-1] + 1)):
            raise RowError("wrong_type", "'attention_mask' leaves tokens out between others")
        ids, weights = ids[real[0] : real[-1] + 1], weights[real[0] : real[-1] + 1]
    if not any(weights[1:]):
        raise RowError("nothing_supervised", "no token of the row is trained on")
    return [Conversation(ids=ids, ids_weights=weights)]


# How forms are recognised


def turns_of(row: Row, format: str) -> str:
    """The field that holds a row's messages: the format's usual one if it does, else the first that does."""
    usual = FORMATS[format].must[0]
    names = (usual, *LISTS)
    return next(
        (name for name in names if is_turns(row.get(name), "role", "from")),
        next((name for name in names if name in row), usual),
    )


def pair_names(value: object) -> tuple[str, str] | None:
    """The names of the fields of question and answer in a list of such pairs; ``None`` if it is none."""
    value = quietly(value)
    if not (isinstance(value, list) and value and isinstance(value[0], dict)):
        return None
    return next(
        (names for names in PAIRS if names[1] in value[0] and (names[0] in value[0] or "system" in value[0])), None
    )


FORMATS: dict[str, Format] = {
    "alpaca": Format(
        must=("instruction", "output"),
        may=("input", "system", "history", "tools", "functions"),
        read=_alpaca,
    ),
    "messages": Format(
        must=("messages",),
        may=BESIDE,
        fits=lambda row: any(is_turns(row.get(name), "role") for name in LISTS),
        read=_messages,
        about=f" (or {', '.join(f'`{name}`' for name in LISTS[1:])}): a list of `{{role, content}}`",
        is_listed=True,
    ),
    "sharegpt": Format(
        must=("conversations",),
        may=BESIDE,
        fits=lambda row: any(is_turns(row.get(name), "from") for name in LISTS),
        read=_messages,
        about=" (or as above): a list of `{from, value}`",
        is_listed=True,
    ),
    "completion": Format(
        must=("prompt", "completion"),
        may=BESIDE,
        read=_completion,
        about=": strings, or messages",
    ),
    "text": Format(
        must=("text",),
        fits=lambda row: isinstance(row.get("text"), str) and "message_id" not in row,
        read=lambda row, form, reader: [Conversation(text=answer_of(string_of(row, "text"), "text"))],
        is_chat=False,
    ),
    "pairs": Format(
        must=("conversation",),
        may=BESIDE,
        fits=lambda row: any(pair_names(row.get(name)) is not None for name in LISTS),
        read=_pairs,
        about=f": a list of {' or '.join(f'`{{{question}, {answer}}}`' for question, answer in PAIRS)}, each with a "
        "`system` of its own if it has one (xtuner, Firefly)",
        is_listed=True,
    ),
    "strings": Format(
        must=("data",),
        may=BESIDE,
        fits=lambda row: is_strings(row.get("data")),
        read=_strings,
        about=": what user and assistant say in turn (UltraChat)",
    ),
    "gemini": Format(
        must=("contents",),
        may=("systemInstruction", "system_instruction", "tools"),
        fits=lambda row: is_turns(row.get("contents"), "parts"),
        read=_gemini,
        about=": a list of `{role, parts}`",
    ),
    "instances": Format(
        must=("instruction", "instances"),
        may=("system",),
        fits=lambda row: "instruction" in row and is_turns(row.get("instances"), "output"),
        read=_instances,
        about=": a list of `{input, output}`, a conversation each (seed tasks)",
    ),
    "tree": Format(
        must=("prompt",),
        fits=lambda row: isinstance(row.get("prompt"), dict) and "replies" in row["prompt"],
        read=_tree,
        about=": `{role, text, replies}`, a tree, of which every path to a leaf is a conversation (OpenAssistant)",
    ),
    "segments": Format(
        must=("segments",),
        fits=lambda row: is_turns(row.get("segments"), "text"),
        read=_segments,
        about=": a list of `{text, label}`, of which those with `label: true` are trained; no template",
        is_chat=False,
    ),
    "tokens": Format(
        must=("input_ids",),
        may=(*MASKS, "attention_mask"),
        fits=lambda row: isinstance(row.get("input_ids"), list),
        read=_tokens,
        about=" with one mask or several that agree (-100 in `labels` is not trained)",
        is_chat=False,
    ),
    "preference": Format(
        must=("chosen", "rejected"),
        may=FIELDS,
        fits=has_pair,
        read=lambda row, form, reader: [read_preference(row, reader, form.between, form.columns.keys())],
        about=": answers, texts or messages, or whole conversations, also as text (hh); or `chosen_response` and "
        "`rejected_response`; or `instruction` and an `output` of both, the chosen one first",
        purpose="pairs",
    ),
    "saferlhf": Format(
        must=("prompt", "response_0", "response_1", "better_response_id"),
        read=lambda row, form, reader: [read_saferlhf(row, reader)],
        about=": the number of the better one (PKU-SafeRLHF)",
        purpose="pairs",
    ),
    "shp": Format(
        must=("history", "human_ref_A", "human_ref_B", "labels"),
        may=("score_A", "score_B"),
        read=lambda row, form, reader: [read_shp(row, reader)],
        about=": 1 where A is preferred (Stanford Human Preferences)",
        purpose="pairs",
    ),
    "arena": Format(
        must=("conversation_a", "conversation_b", "winner"),
        read=lambda row, form, reader: [read_arena(row, reader)],
        about=": `model_a` or `model_b`; rows with a tie are bad (Chatbot Arena)",
        purpose="pairs",
    ),
    "helpsteer": Format(
        must=("context", "response1", "response2", "overall_preference"),
        read=lambda row, form, reader: [read_helpsteer(row, reader)],
        about=": below 0 where the first is preferred; rows with 0 are bad (HelpSteer3)",
        purpose="pairs",
    ),
    "labelled": Format(
        must=("completion", "label"),
        may=LABELLED_FIELDS,
        fits=has_label,
        read=lambda row, form, reader: [read_labelled(row, reader, form.between, form.columns.keys())],
        about=": whether the answer is desirable; or `output` and `kto_tag`; or whole conversations as messages beside "
        "either label",
        purpose="verdicts",
    ),
}
"""The forms by name. Every row may also have ``loss_weight``."""

PRESETS: dict[str, tuple[str, dict[str, str]]] = {
    "codefeedback": ("alpaca", {"instruction": "query", "output": "answer"}),
    "dolly": ("alpaca", {"input": "context", "output": "response"}),
    "firefly": ("alpaca", {"instruction": "input", "output": "target"}),
    "gpteacher": ("alpaca", {"output": "response"}),
    "gsm8k": ("alpaca", {"instruction": "question", "output": "answer"}),
    "metamath": ("alpaca", {"instruction": "query", "output": "response"}),
    "numina": ("alpaca", {"instruction": "problem", "output": "solution"}),
    "openorca": ("alpaca", {"system": "system_prompt", "instruction": "question", "output": "response"}),
    "ultrachat": ("strings", {}),
    "oasst": ("tree", {}),
    "seed_tasks": ("instances", {}),
    "xtuner": ("pairs", {}),
    "step_dpo": ("preference", {"chosen": "full_chosen", "rejected": "full_rejected"}),
    "saferlhf_safety": ("saferlhf", {"better_response_id": "safer_response_id"}),
    "helpsteer2": (
        "helpsteer",
        {
            "context": "prompt",
            "response1": "response_1",
            "response2": "response_2",
            "overall_preference": "preference_strength",
        },
    ),
}
"""Data sets by name: the form of their rows, and the columns that hold its fields."""

FORMAT_NAMES: tuple[str, ...] = ("auto", *FORMATS, *PRESETS)
"""What a source's ``format`` may be."""


def form_of(format: str, columns: Mapping[str, str], roles: Mapping[str, str]) -> Form:
    """The form that a source asks for by name: a format, or a preset with ``columns`` on top."""
    if format not in PRESETS:
        return Form(format, dict(columns), dict(roles))
    name, preset = PRESETS[format]
    return Form(name, {**preset, **columns}, dict(roles), tuple(set(preset) - set(columns)))


def known_forms(*, only_chat: bool = False, purpose: RowPurpose = "supervised") -> str:
    """The forms of rows for a ``purpose`` with the fields that rows must have, for a refusal."""
    formats = (
        (name, format)
        for name, format in FORMATS.items()
        if (format.is_chat or not only_chat) and format.purpose == purpose
    )
    return "; ".join(f"{name} ({', '.join(format.must)})" for name, format in formats)


def rename(row: Row, columns: Mapping[str, str]) -> dict[str, Any]:
    """The row under our names: ``columns`` maps our field to the file's column."""
    renamed = {name: value for name, value in row.items() if name not in columns.values()}
    for ours, theirs in columns.items():
        if theirs in row:
            renamed[ours] = row[theirs]
    return renamed


def candidates(row: Row, purpose: RowPurpose = "supervised") -> tuple[str, ...]:
    """Formats for a ``purpose`` whose fields the row has."""
    return tuple(name for name, format in FORMATS.items() if format.purpose == purpose and format.seems_of(row))


def detect(rows: Sequence[Row], purpose: RowPurpose = "supervised") -> tuple[str, ...]:
    """Formats that fit the rows: one when all is well, several when it is ambiguous, none when nothing fits.

    ``purpose`` is as of ``candidates``. A row that fits nothing is left to ``Reader``, which names it; rows that
    disagree make it ambiguous.
    """
    fitting = [formats for row in rows if (formats := candidates(row, purpose))]
    if not fitting:
        return ()
    shared = set(fitting[0]).intersection(*fitting)
    every = sorted(set().union(*fitting), key=list(FORMATS).index)
    if len(every) == 1 or not shared:
        return tuple(every)
    return tuple(name for name in every if name in shared)


def fields_of(format: str) -> tuple[str, ...]:
    """Every field that is read of rows in a format, those with images too, which only some models take."""
    known = FORMATS[format]
    images = COLUMNS if known.is_chat and known.purpose == "supervised" else ()
    return (*known.must, *known.may, "loss_weight", *images)


def nearest_field(name: str, format: str) -> str | None:
    """The field of a format that was probably meant."""
    known = (*FORMATS[format].must, *FORMATS[format].may, "loss_weight")
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return near[0] if near else None
