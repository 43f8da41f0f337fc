"""What is trained on what: model, rows, lengths, packing, mask, template."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import PurePath
from typing import Any

from tonnage.errors import UserError
from tonnage.files.paths import is_jinja
from tonnage.migration.models import router_loss
from tonnage.migration.programs import TRL, TUTORIAL
from tonnage.migration.sheet import Need, Pick, Sheet, flag, number, text, texts, whole, words
from tonnage.migration.templates import JINJA

USUAL_TEXT_COLUMN = "text"


def model(sheet: Sheet) -> None:
    """The model, at which revision, and whether its own code may run."""
    found = sheet.first("model", text)
    if found is not None and (method := _quantised(sheet, found.value)):
        sheet.refuse(
            found,
            f"Weights of {method} are not trained on: name the model that they were made of, which adapter.quantize "
            "rests in 4 or 8 bits.",
        )
    elif found is not None:
        sheet.put("model", found.value, found)
    kind = sheet.first("model_class", text)
    if kind is not None and kind.value.endswith(("Classification", "Answering")):
        sheet.refuse(kind, "Next tokens are predicted, not labels.")
    elif kind is not None:
        sheet.drop(kind, "The class follows from the model's files.")
    sheet.refuse(sheet.first("media", text), "Rows with images or sounds are not trained on.")
    _start(sheet)
    tokenizer = sheet.first("tokenizer", text)
    if tokenizer is not None and found is not None and tokenizer.value == found.value:
        sheet.drop(tokenizer, "The model's own.")
    elif tokenizer is not None and any(given.name == "base_model_config" for given in tokenizer.givens):
        sheet.refuse(tokenizer, "The configuration is the one in the model's directory.")
    elif tokenizer is not None:
        sheet.put("tokenizer", tokenizer.value, tokenizer)
    revision = sheet.first("revision", text)
    if revision is not None and revision.value == "main":
        sheet.drop(revision, "The main branch is what is trained without it.")
    elif revision is not None:
        sheet.put("revision", revision.value, revision)
    sheet.copy("trust_remote_code", flag)


QUANTISED = (
    r"(?<![a-z0-9])(awq|gptq|aqlm|hqq|eetq|exl[23]|quip|quanto|spqr|vptq|autoround|torchao|bnb|mlx|w[48]a\d+|"
    r"(?:int|nf|fp|nvfp)4|int8|[2-8]-?bit)(?![a-z0-9])"
)
"""What names of models say that hold quantised weights, in small letters."""
READ_AS_BF16 = ("mxfp4", "fp8")
"""``quant_method`` of a model's config.json whose weights are widened as they are read."""


def _quantised(sheet: Sheet, model: str) -> str:
    """With what a model's weights are quantised, as its config.json says where it is here, else its name."""
    path = sheet.files.find(f"{model}/config.json")
    if path is None:
        named = re.search(QUANTISED, PurePath(model.lower()).name)
        return named[0].upper() if named else ""
    with suppress(UserError):
        method = (sheet.files.read(path).get("quantization_config") or {}).get("quant_method", "")
        return "" if str(method).lower() in READ_AS_BF16 else str(method)
    return ""


def _start(sheet: Sheet) -> None:
    """From the model's weights, or from random ones; and what routers are told."""
    anew, routers = sheet.first("init", flag), sheet.first("router_logits", flag)
    if anew is not None and anew.value:
        sheet.put("init", "random", anew)
    elif anew is not None:
        sheet.drop(anew, "The model's weights.")
    loss = router_loss(str(sheet.tree.get("model", "")))
    if routers is not None and routers.value and loss is not None:
        sheet.put("router_loss", loss, routers, note="As the model's config.json has it.")
    elif routers is not None and routers.value:
        need = Need("router_loss", "router_aux_loss_coef of the model's config.json, which counts here", "0.02")
        sheet.leave_open(need, routers)
    elif routers is not None:
        sheet.put("router_loss", 0.0, routers)


def rows(sheet: Sheet, *, evaluates: bool) -> None:
    """Sources to train on and to evaluate on."""
    column = sheet.first("text_column", text)
    columns: dict[str, Any] = {}
    if column is not None and column.value != USUAL_TEXT_COLUMN:
        columns = {"columns": {USUAL_TEXT_COLUMN: column.value}}
    both = sheet.first("splits", _splits)
    split = sheet.first("train_split", text) or (None if both is None else Pick(both.value[0], both.givens))
    hub, files = sheet.first("dataset", text), sheet.first("train_file", texts)
    subset = sheet.first("subset", text)
    named = {"name": subset.value} if subset is not None and hub is not None else {}
    mixture = _mixture(sheet)
    picks: Sequence[Pick[Any] | None] = ()
    if mixture:
        sources, picks = mixture
        sheet.drop(hub, "TRL ignores it where datasets are listed.")
    elif hub is not None:
        sources = [_source(hub.value, split) | named]
        picks = [hub, split, subset]
    elif files is not None:
        sources, picks = [{"path": path} for path in files.value], [files]
    else:
        sources = []
    if sources:
        if files is not None and files not in picks:
            sheet.drop(files, "A data set of the hub is named.")
        used = column if columns else None
        sheet.put("data.train", _short([source | columns for source in sources]), *picks, used)
    for part in (split, subset):
        sheet.drop(part, "No data set of the hub is named.")
    if not (columns and sources):
        sheet.drop(column, "The usual name." if not columns else "No rows are named.")
    _validation(sheet, hub, named, columns, _second(both), evaluates=evaluates)
    sheet.drop(both, "No data set of the hub is named, or others are evaluated.")


def _splits(value: Any) -> list[str]:
    names = words(value)
    if not 1 <= len(names) <= 2:
        raise ValueError("is neither a split to train on nor two, the second to evaluate on")
    return names


def _second(both: Pick[list[str]] | None) -> Pick[str] | None:
    return Pick(both.value[1], both.givens) if both is not None and len(both.value) > 1 else None


def _source(path: str, split: Pick[str] | None) -> dict[str, Any]:
    return {"path": path} | ({"split": split.value} if split is not None and split.value != "train" else {})


def _short(sources: list[dict[str, Any]]) -> Any:
    """One source that is no more than its path, as the path."""
    return sources[0]["path"] if len(sources) == 1 and set(sources[0]) == {"path"} else sources


def _mixture(sheet: Sheet) -> tuple[list[dict[str, Any]], list[Pick[Any]]] | None:
    """TRL's list of data sets, and alignment-handbook's."""
    picks: list[Pick[Any]] = []
    sources: dict[str, dict[str, Any]] = {}
    for quantity, ours, parse in (
        ("mixture_path", "path", text),
        ("mixture_name", "name", text),
        ("mixture_split", "split", text),
        ("mixture_weight", "weight", number),
    ):
        for pick in sheet.every(quantity, parse):
            place = next((part for part in pick.givens[0].name.split(".") if part.isdecimal()), "0")
            sources.setdefault(place, {})[ours] = pick.value
            picks.append(pick)
    whole_ones = [source for source in sources.values() if "path" in source]
    _shares(sheet, len(whole_ones))
    if not whole_ones:
        for pick in picks:
            sheet.drop(pick, "No data set is named.")
        return None
    return whole_ones, picks


def _shares(sheet: Sheet, number_of: int) -> None:
    """TRL's ``fraction``, which is a share of the rows of the mixture and not of those of the data set."""
    for pick in sheet.every("mixture_fraction", number):
        if number_of < 2:
            sheet.drop(pick, "A share of one data set is all of it.")
        else:
            sheet.refuse(
                pick,
                "A share of the mixture's rows, so what it takes of a data set follows from how many rows each has: "
                "write weight for each source (0.5 is half of its rows).",
            )


def _validation(
    sheet: Sheet,
    hub: Pick[str] | None,
    named: Mapping[str, str],
    columns: Mapping[str, Any],
    second: Pick[str] | None,
    *,
    evaluates: bool,
) -> None:
    files = sheet.first("validation_file", texts)
    fraction, percentage = sheet.first("validation_fraction", number), sheet.first("validation_percentage", number)
    split = sheet.first("test_split", text) or second
    if files is not None:
        sheet.put("data.validation", _short([{"path": path, **columns} for path in files.value]), files)
    elif fraction is not None and fraction.value < 1:
        sheet.put("data.validation", fraction.value, fraction)
    elif percentage is not None:
        sheet.put("data.validation", percentage.value / 100, percentage)
    elif evaluates and hub is not None and split is not None:
        sheet.put("data.validation", [{"path": hub.value, "split": split.value, **named, **columns}], split)
    elif evaluates and hub is not None and sheet.program in (TRL, TUTORIAL):
        source = [{"path": hub.value, "split": "test", **named, **columns}]
        because = "dataset_test_split test by default" if sheet.program is TRL else "the script evaluates split test"
        sheet.imply("data.validation", source, because)
    if fraction is not None and fraction.value > 1 and fraction.value == int(fraction.value):
        sentence = f"{fraction.value:g} rows as a fraction of all: {fraction.value:g} / their number"
        sheet.leave_open(Need("data.validation", sentence, "0.01"), fraction)
    sheet.refuse(fraction, "A fraction of the rows, below 1.")
    for pick in (percentage, split):
        sheet.drop(pick, "Other rows are evaluated." if "data.validation" in sheet.tree else "Nothing is evaluated.")


def lengths(sheet: Sheet) -> None:
    """Longest conversation, what becomes of longer ones, packing."""
    longest = sheet.first("data.max_length", _length)
    if longest is not None and longest.value is None:
        sheet.leave_open(Need("data.max_length", "a longest length: there is none without", "2048"), longest)
    elif longest is not None:
        sheet.put("data.max_length", longest.value, longest)
    elif sheet.default("data.max_length"):
        sheet.imply_default("data.max_length", "data.max_length")
    elif sheet.has_arguments:
        sheet.notes.append("No argument says how long a sequence is: data.max_length is tonnage's default, 2048.")
    is_block = (longest is not None and longest.givens[0].name == "block_size") or any(
        given.name == "script" and str(given.value).endswith("run_clm.py") for given in sheet.files.givens
    )
    pack = sheet.copy("data.pack", flag)
    pack = _neat(sheet) or pack
    if pack is None and sheet.has_arguments and not is_block:
        sheet.imply_default("data.pack")
    elif pack is None and not sheet.has_arguments and "batch.sequences" in sheet.tree:
        sheet.notes.append(
            "batch.sequences counts packs of data.max_length tokens; where a sample of your script is one "
            "conversation, write data.pack: false for the same batch."
        )
    _over_length(sheet, is_packed=pack is not None and bool(pack.value))


def _neat(sheet: Sheet) -> Pick[bool] | None:
    """LLaMA-Factory's other switch for packing, and version 1's strategy."""
    neat, batching = sheet.first("neat", flag), sheet.first("batching", text)
    if batching is not None and batching.value in ("normal", "padding_free"):
        sheet.drop(batching, "A row for each conversation, without padding.")
    elif batching is not None and batching.value == "dynamic_padding_free":
        sheet.put("data.pack", True, batching, note="A row is filled up to cutoff_len.")
        return Pick(True, batching.givens)
    elif batching is not None:
        sheet.refuse(batching, "How many conversations a batch has does not follow from padding: dynamic_padding_free.")
    if neat is not None and neat.value:
        sheet.put("data.pack", True, neat)
        return neat
    sheet.drop(neat, "Off.")
    return None


def _length(value: Any) -> int | None:
    return None if value is None or str(value).lower() in ("none", "null") else whole(value)


def _over_length(sheet: Sheet, *, is_packed: bool) -> None:
    strategy = sheet.first("packing_strategy", text)
    if strategy is not None and not is_packed:
        sheet.drop(strategy, "Nothing is packed.")
    elif strategy is not None:
        becomes = {"bfd": "truncate", "bfd_split": "split", "bfd-requeue": "split", "ffd": "truncate"}
        ours = becomes.get(strategy.value.lower())
        if ours is None:
            sheet.refuse(strategy, "Documents are packed whole, best fit first.")
        else:
            sheet.put("data.over_length", ours, strategy, note="More than data.max_loss lost stops the run.")
    lengths = {given.name for given in sheet.files.givens if given.key and given.key.quantity == "data.max_length"}
    if sheet.program is TRL and is_packed and strategy is None and lengths & {"max_seq_length", "max_seq_len"}:
        sheet.imply("data.over_length", "split", "with that name for the length, packing cuts documents in pieces")
    elif sheet.program is TUTORIAL:
        sheet.imply_default("data.over_length")
    elif sheet.program is TRL:
        because = "TRL cuts what is longer; here more than data.max_loss lost stops the run"
        sheet.imply("data.over_length", "truncate", because)


def mask(sheet: Sheet) -> None:
    """Which tokens are trained, and the template that says where they are."""
    assistant, completion = sheet.first("assistant_only", flag), sheet.first("completion_only", _maybe)
    inputs = sheet.first("train_on_inputs", flag)
    asked = [pick for pick in (assistant, completion) if pick is not None and pick.value]
    denied = [pick for pick in (assistant, completion) if pick is not None and pick.value is False]
    if inputs is not None:
        sheet.put("data.train_on", "all" if inputs.value else "assistant", inputs)
    elif asked:
        sheet.put("data.train_on", "assistant", *asked)
    elif denied:
        note = "" if completion in denied else "Of rows with prompt and completion, TRL trained the completion alone."
        sheet.put("data.train_on", "all", *denied, note=note)
    elif sheet.program is TUTORIAL:
        sheet.imply("data.train_on", "all", "the script trains every token")
    elif sheet.program is TRL:
        sheet.imply("data.train_on", "all", "TRL trains every token of conversations and of text by default")
        sheet.notes.append(
            "Of rows with prompt and completion TRL trains the completion alone: write data.train_on: assistant for "
            "those."
        )
    for pick in (assistant, completion):
        if pick is not None:
            sheet.drop(pick, "The default." if pick.value is None else "Other keys decide data.train_on.")
    template = sheet.first("data.template", text)
    if template is not None and (template.value.endswith(JINJA) or is_jinja(template.value)):
        sheet.put("data.template", template.value, template)
    elif template is not None:
        sheet.refuse(template, "A Jinja file, not another tokenizer: save its chat template as one.")


def special_tokens(sheet: Sheet) -> None:
    """Whether tokens are added to what a template writes. They never are here, and a text always gets its tokenizer's,
    so only where a template is named are all rows known to be conversations."""
    added = sheet.first("special_tokens", flag)
    if added is None:
        return
    if added.value == ("data.template" not in sheet.tree):
        sheet.drop(added, "So it is here.")
    elif added.value:
        sheet.refuse(added, "Nothing is added to what a template writes: write the tokens into it.")
    else:
        sheet.refuse(added, "A text gets what its tokenizer adds; false is for conversations, with chat_template.")


def _maybe(value: Any) -> bool | None:
    return None if value is None or str(value).lower() in ("none", "null") else flag(value)
