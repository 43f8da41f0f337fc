"""Try chat templates of other people: ``python -m tests.data.templates DIRECTORY [--tokenizer DIR] [--output FILE]``.

Every template in a directory (``.jinja`` files, and those in ``tokenizer_config.json``) gets thirteen rows with what
chats have: system messages, thoughts, calls of tools and their results, white space. A row is right where ``prepare``
trains the tokens that ``data.reference`` works out, or is refused. The table counts, for each template,

* right: as the reference has it;
* unsure: trained, and the reference cannot say (the template opens no turn, opens it with white space that the turn
  does not have, rewrites turns before, or closes none);
* refused: with the reason, and whether the template itself refuses the row;
* differs: trained otherwise than the reference has it, to be looked at: the reference knows less of templates;
* traceback: anything that is no refusal.

The exit status is 1 if any is a traceback. Nothing of a directory is kept here.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tonnage.config import Data, Source
from tonnage.data import cache, prepare
from tonnage.errors import UserError

from .reference import common, trained

Message = dict[str, Any]


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def said(content: str, **more: Any) -> Message:
    return {"role": "assistant", "content": content, **more}


def call(first: int, second: int, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "add_up", "arguments": {"first": first, "second": second}}, **more}


def result(content: str, **more: Any) -> Message:
    return {"role": "tool", "content": content, "name": "add_up", **more}


SYSTEM: Message = {"role": "system", "content": "Be very brief."}
NUMBER = {"type": "integer", "description": "a number"}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "add_up",
            "description": "Adds two whole numbers.",
            "parameters": {
                "type": "object",
                "properties": {"first": NUMBER, "second": NUMBER},
                "required": ["first", "second"],
            },
        },
    }
]
ID = "call00001"
TWO, THREE = user("What is two?"), user("And three?")
ADD = user("Add 1 and 2.")
CALLED, RESULT = said("", tool_calls=[call(1, 2, id=ID)]), result("3", tool_call_id=ID)

ROWS: dict[str, tuple[list[Message], list[dict[str, Any]] | None]] = {
    "single": ([TWO, said("It is 2.")], None),
    "system": ([SYSTEM, TWO, said("It is 2.")], None),
    "multi": ([TWO, said("It is 2."), THREE, said("That is 3."), user("And four?"), said("Then 4.")], None),
    "system-multi": ([SYSTEM, TWO, said("It is 2."), THREE, said("That is 3.")], None),
    "thought": ([TWO, said("It is 2.", reasoning_content="One and one.")], None),
    "thought-multi": (
        [
            TWO,
            said("It is 2.", reasoning_content="One and one."),
            THREE,
            said("That is 3.", reasoning_content="Two and one."),
        ],
        None,
    ),
    "inline-multi": (
        [
            TWO,
            said("<think>\nOne and one.\n</think>\n\nIt is 2."),
            THREE,
            said("<think>\nTwo and one.\n</think>\n\nThat is 3."),
        ],
        None,
    ),
    "call": ([ADD, CALLED, RESULT, said("It is 3.")], TOOLS),
    "call-words": (
        [SYSTEM, ADD, {**CALLED, "content": "I will add."}, RESULT, said("It is 3."), user("Thanks"), said("Fine.")],
        TOOLS,
    ),
    "calls-no-ids": (
        [
            user("Add 1 and 2, 3 and 4."),
            said("", tool_calls=[call(1, 2), call(3, 4)]),
            result("3"),
            result("7"),
            said("3 and 7."),
        ],
        TOOLS,
    ),
    "space": ([user("Say two."), said("\n two lines\n\nhere "), user("More"), said(" three")], None),
    "last-call": ([ADD, CALLED], TOOLS),
    "tools-unused": ([user("Hello"), said("Hi."), user("Bye"), said("So long.")], TOOLS),
}

SPECIAL = re.compile(
    r"<\|[^|<>\s]{1,40}\|>|<｜[^｜<>]{1,40}｜>|\[/?[A-Z_]{3,20}\]|</?s>|<(?:start|end)_of_(?:turn|image)>"
    r"|<(?:bos|eos|pad)>|<extra_id_\d>|<turn\|>|<\|turn>|<\|?channel\|?>|<\|?tool(?:_call|_response)?\|?>"
    r"|]<]\w+\[>\[|\[e~\[|]~b]|<SPECIAL_\d+>|<seed:[a-z_:]+>|<[\[\]|a-z_]*eom[^>]*>|<AI>"
)
"""What looks like a special token."""
PLAIN = re.compile(
    r"</?(?:think|thinking|thought|tool_call|tool_response|tools|TOOLCALL|arg_key|arg_value|function_calls|invoke)>"
)
"""Tokens that are whole and not special in many vocabularies."""
CLOSING = (
    *("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|END_OF_TURN_TOKEN|>", "<｜end▁of▁sentence｜>"),
    *("<turn|>", "<|return|>", "<|call|>", "<|endoftext|>", "<|end_of_text|>", "<|eot|>", "<|eom_id|>", "</s>"),
    *("<|END_RESPONSE|>", "<|message_end|>", "<|im_sep_end|>", "<|end_of_role_turn|>"),
)
"""Tokens that close turns of the assistant, in one template or another."""
FIRST = ("<s>", "<｜begin▁of▁sentence｜>", "<|begin_of_text|>", "<bos>", "<|startoftext|>")
LAST = ("</s>", "<｜end▁of▁sentence｜>", "<|endoftext|>", "<|end_of_text|>", "<eos>")
WORDS = r"'\w+|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def tokenizer_for(template: str) -> Any:
    """A byte-level tokenizer that has the special tokens of a template whole."""
    found = list(dict.fromkeys(SPECIAL.findall(template)))
    last = next((token for token in LAST if token in found), "<eos>")
    first = next((token for token in FIRST if token in found), "<bos>")
    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("Ċ", "Ċ"), ("Ġ", "t"), ("i", "s"), ("Ġ", "Ċ")]  # so that borders of words matter
    for pair in merges:
        vocabulary["".join(pair)] = len(vocabulary)
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(WORDS), "isolated"), level])
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(list(dict.fromkeys([last, first, "<pad>", *found])))
    raw.add_tokens(list(dict.fromkeys(PLAIN.findall(template))))
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token=last,
        bos_token=first,
        pad_token="<pad>",
        extra_special_tokens=[token for token in found if token not in (last, first)],
    )


def templates_in(directory: Path) -> Iterator[tuple[str, str]]:
    """Names and texts of the templates in a directory and below."""
    for file in sorted(directory.rglob("*.jinja")):
        yield str(file.relative_to(directory).with_suffix("")), file.read_text("utf-8")
    for file in sorted(directory.rglob("tokenizer_config.json")):
        name = str(file.parent.relative_to(directory))
        held = json.loads(file.read_text("utf-8")).get("chat_template")
        if isinstance(held, str):
            yield name, held
        for one in held if isinstance(held, list) else []:
            yield f"{name}:{one['name']}", one["template"]


def expected(
    tokenizer: Any, messages: Sequence[Message], tools: list[dict[str, Any]] | None
) -> tuple[list[int], list[float]] | None:
    """Tokens and weights as the reference has them; None where it cannot say."""

    def text(upto: int, opened: bool) -> str:
        prompt = list(messages[:upto])
        return str(tokenizer.apply_chat_template(prompt, tools=tools, tokenize=False, add_generation_prompt=opened))

    closing = [token for token in CLOSING if token in tokenizer.get_vocab()]
    weights = [float(message["role"] == "assistant") for message in messages]
    try:
        whole = text(len(messages), False)
        for turn, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, opened = text(turn, False), text(turn, True)
            if before == opened or not whole.startswith(before.rstrip()):
                return None
            rest = opened[common(opened, whole) :]
            if rest and not rest.strip():
                return None
        return trained(tokenizer, messages, weights, closing, tools)
    except Exception:
        return None


def tried(tokenizer: Any, name: str, folder: Path) -> tuple[str, str]:
    """What becomes of a row: a column of the table, and the reason or the difference."""
    messages, tools = ROWS[name]
    file = folder / f"{name}.jsonl"
    file.write_text(json.dumps({"messages": messages, **({"tools": tools} if tools else {})}) + "\n", "utf-8")
    options = Data(train=(Source(path=str(file)),), pack=False, max_length=1 << 16)
    try:
        prepared = prepare(options, tokenizer, cache=folder / "cache")
    except UserError as error:
        try:
            tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
        except Exception as own:
            return "refused", f"by the template: {own}"
        return "refused", error.problems[0].found
    except Exception as error:
        return "traceback", f"{type(error).__name__}: {error}"
    pack = prepared.train.pack(0)
    found = pack.input_ids.tolist(), pack.weights.tolist()
    if (reference := expected(tokenizer, messages, tools)) is None:
        return "unsure", ""
    if reference == found:
        return "right", ""
    return "differs", f"{shown(tokenizer, *found)!r} instead of {shown(tokenizer, *reference)!r}"


def shown(tokenizer: Any, ids: Sequence[int], weights: Sequence[float]) -> str:
    """A document as text, with what is trained between ⟦ and ⟧."""
    trained_before = [False, *(weight > 0 for weight in weights)]
    text = ""
    for token, was, now in zip([*ids, None], trained_before, [*trained_before[1:], False], strict=True):
        text += ("⟦" if now else "⟧") if now != was else ""
        text += tokenizer.decode([token]) if token is not None else ""
    return text


COLUMNS = ("right", "unsure", "refused", "differs", "traceback")
LONGEST_REASON = 100


def try_all(directory: Path, tokenizer_directory: Path | None) -> Iterator[tuple[str, dict[str, tuple[str, str]]]]:
    """Templates, and for each row what becomes of it."""
    for name, text in templates_in(directory):
        tokenizer = (
            tokenizer_for(text) if tokenizer_directory is None else AutoTokenizer.from_pretrained(tokenizer_directory)
        )
        tokenizer.chat_template = text
        with tempfile.TemporaryDirectory() as folder:
            yield name, {row: tried(tokenizer, row, Path(folder)) for row in ROWS}


def lines(name: str, found: dict[str, tuple[str, str]]) -> Iterator[str]:
    """A template's line of the table, and one for each reason below it."""
    counts = Counter(kind for kind, _ in found.values())
    yield f"{name[-48:]:48}" + "".join(f"{counts[kind]:>10}" for kind in COLUMNS)
    reasons: dict[tuple[str, str], list[str]] = {}
    for row, (kind, reason) in found.items():
        if kind in ("refused", "differs", "traceback"):
            limit = LONGEST_REASON if kind == "refused" else 2_000
            reasons.setdefault((kind, " ".join(reason.split())[:limit]), []).append(row)
    for (kind, reason), rows in reasons.items():
        yield f"    {kind} {', '.join(rows)}: {reason}"


def main(words: Sequence[str] | None = None) -> int:
    """Print the table; 1 if anything is a traceback."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tokenizer", type=Path, help="directory of a tokenizer; by default one is made per template")
    parser.add_argument("--output", type=Path, help="file that takes the table as well")
    given = parser.parse_args(words)
    transformers.logging.set_verbosity_error()
    cache.synchronise = lambda directory: None  # thousands of small caches need no disk
    table = [f"{'template':48}" + "".join(f"{kind:>10}" for kind in COLUMNS)]
    total: Counter[str] = Counter()
    print(table[0])
    tried_all = 0
    for name, found in try_all(given.directory, given.tokenizer):
        tried_all += 1
        total.update(kind for kind, _ in found.values())
        table += (new := list(lines(name, found)))
        print("\n".join(new), flush=True)
    table.append(f"{f'{tried_all} templates':48}" + "".join(f"{total[kind]:>10}" for kind in COLUMNS))
    print(table[-1])
    if given.output is not None:
        given.output.write_text("\n".join(table) + "\n", "utf-8")
    return int(tried_all == 0 or total["traceback"] > 0)


if __name__ == "__main__":
    sys.exit(main())
