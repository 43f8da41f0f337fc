"""ms-swift's commands: what its names of data sets and engines come to, and defaults that depend on other arguments.

Its arguments are those of transformers' Trainer and of TRL's trainers besides, which the shared rules take.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tonnage.files.paths import is_there
from tonnage.migration import lengths, model, rendering
from tonnage.migration.draft import Draft, Pick
from tonnage.migration.evaluation import validation_fraction
from tonnage.migration.templates import AXOLOTL_TEMPLATES
from tonnage.migration.turns import jinja
from tonnage.migration.values import flag, listed, number, text
from tonnage.migration.yaml_files import read_data

_TABLE = read_data("swift_rows")
PRESETS: Mapping[str, Mapping[str, Any]] = _TABLE["engines"]
RATES = {"lora": 1e-4, "full": 1e-5}
"""``learning_rate`` where it is not given, of an adapter and of all weights."""
BETAS = (0.9, 0.95)
BETA_OF_SIMPO = 2.0
PRETRAINING = "pt"
PLAIN_CHATML = re.compile(
    r"qwen-?2(\.5)?-(?!.*(vl|omni|audio|math|coder))|qwen-?3-(?!.*(vl|omni)).*instruct-2507", re.IGNORECASE
)
"""Models whose conversations swift writes as ChatML, with a system message before all."""
DATA_SET = re.compile(r"(?:(?:HF|MS|hf|ms)::)?(?P<name>[^#]+?)(?::(?P<subsets>[\w./-]+))?(?:#(?P<first>\d+))?")
"""``HF::owner/name:subset#500``."""
OWN_ROWS = "ROWS"
"""Stands for a file that has to be written."""
FILES = (".json", ".jsonl", ".csv", ".parquet", ".txt")


def components(draft: Draft) -> None:
    """What the shared rules do not know, before them."""
    if not draft.has("processes_per_node") and draft.files.workers is None:
        draft.imply("launch.workers", 1, "one process without NPROC_PER_NODE")
    _engine(draft)
    betas = [draft.first(f"beta{place}", number) for place in (1, 2)]
    both = [usual if beta is None else beta.value for beta, usual in zip(betas, BETAS, strict=True)]
    if any(betas):
        draft.put("optimizer.betas", both, *betas)
    draft.imply("optimizer.betas", both, "adam_beta2 0.95 by default")
    if not draft.has("optimizer.lr"):
        tuners = [str(setting.value).lower() for setting in draft.settings("lora")]
        rate = RATES["full" if "full" in tuners else "lora"]
        draft.imply("optimizer.lr", rate, f"learning_rate {rate:g} by default")
    if _words(draft, "swift") == ["simpo"] and not draft.has("objective.beta"):
        draft.imply("objective.beta", BETA_OF_SIMPO, f"beta {BETA_OF_SIMPO:g} by default of simpo")
    if not draft.has("swift"):
        draft.refuse(draft.first("loss", lambda value: value), "Cross-entropy, where rlhf_type is not given.")
    draft.drop(draft.first("swift_command", text), "What is trained, its rows and rlhf_type say.")


def _words(draft: Draft, quantity: str) -> list[str]:
    return [str(setting.value).lower() for setting in draft.settings(quantity)]


def _engine(draft: Draft) -> None:
    """DeepSpeed's and FSDP's settings that swift has by name."""
    for quantity in ("deepspeed_file", "sharding"):
        for pick in draft.every(quantity, text):
            preset = PRESETS.get(pick.value, {})
            for key, value in preset.items():
                draft.put(key, value, pick)
            if "memory.recompute" in preset:
                draft.drop_every(f"{pick.shown} says it.", "memory.recompute")


def rows(draft: Draft) -> None:
    """Sources, how long their rows may be, how they are shown, and what of them is trained."""
    for quantity, key in (("swift_rows", "data.train"), ("swift_tests", "data.validation")):
        _sources(draft, quantity, key)
    draft.drop_every("Belongs to self-cognition, in whose rows they are filled in.", "swift_names")
    validation_fraction(draft)
    _evaluations(draft)
    shuffled = draft.every("swift_shuffle", flag)
    if len(shuffled) > 1 and not any(pick.value for pick in shuffled):
        draft.put("data.order", "given", *shuffled)
    draft.drop(shuffled, "Packs are shuffled, by the seed.")
    model.tokens(draft)
    lengths.lengths(draft)
    truncation = draft.follow("swift_truncation") if not draft.is_preference else None
    draft.drop_every("An answer that is judged is never cut.", "swift_truncation")
    if truncation is None and not draft.is_preference:
        draft.imply_default("data.over_length")
    _template(draft)
    _mask(draft)


def _sources(draft: Draft, quantity: str, key: str) -> None:
    """Data sets by name, and files."""
    pick = draft.first(quantity, lambda value: [text(part) for part in listed(value)])
    if pick is None:
        return
    sources: list[dict[str, Any]] = []
    missing: list[str] = []
    for word in pick.value:
        parts = DATA_SET.fullmatch(word)
        if parts is None or parts["first"] == "0":
            draft.refuse(pick, f"{word[:60]} is no name of a data set.")
        elif parts["name"] in _TABLE["named"]:
            missing.append(f"those of {parts['name']} with the name and the author filled in")
            sources.append({"path": OWN_ROWS})
        elif parts["name"] in _TABLE["made"]:
            missing.append(f"those that swift makes of {parts['name']}")
            sources.append({"path": OWN_ROWS})
        else:
            sources += _described(draft, parts)
    if pick.settings[0].number in draft.entries:
        return
    if missing:
        names = draft.every("swift_names", lambda value: value)
        sentence = f"rows as a file: {', '.join(dict.fromkeys(missing))}"
        draft.leave_open(key, sentence, pick, *names, example=json.dumps(sources, ensure_ascii=False))
    elif sources:
        draft.put(key, sources, pick)


def _described(draft: Draft, parts: re.Match[str]) -> list[dict[str, Any]]:
    """Sources for a name, one for each subset."""
    name = parts["name"]
    source: dict[str, Any] = {"path": _TABLE["hub"].get(name, name), "between": "\n"}
    if "/" in name and not name.endswith(FILES) and not is_there(Path(name)):
        entry = _TABLE["rows"].get(source["path"])
        draft.note("names of ModelScope" if entry is None else "known names of ModelScope")
        source |= entry or {}
    if source["path"] in _TABLE["changed"]:
        draft.note("rows that are changed", source=source["path"])
    if source.get("format", "alpaca") != "alpaca":
        del source["between"]
    if parts["first"]:
        source["first"] = int(parts["first"])
        draft.note("rows by chance")
    subsets = (parts["subsets"] or "").split("/")
    return [source | ({"name": subset} if subset not in ("", "default") else {}) for subset in subsets]


def _evaluations(draft: Draft) -> None:
    """Evaluations, which come when checkpoints do unless told otherwise, where there are rows for them."""
    if "data.validation" not in draft.tree:
        draft.drop_every("There are no validation rows.", "evaluate.every", "eval_strategy")
    elif not draft.has("evaluate.every") and not set(_words(draft, "eval_strategy")) - {"steps"}:
        saved = [setting.value for setting in draft.settings("checkpoint.every")] or [draft.default("checkpoint.every")]
        if "epoch" not in _words(draft, "save_strategy"):
            draft.imply("evaluate.every", int(number(saved[0])), "eval_steps of save_steps by default")
            draft.drop_every("As often as it is saved.", "eval_strategy")


def _template(draft: Draft) -> None:
    """The model's own template, with a system message of the run's where that is known, or none."""
    system, chat = draft.first("swift_system", text), draft.first("swift_chat", flag)
    is_pretraining = PRETRAINING in _words(draft, "swift_command")
    if chat is not None and not chat.value:
        draft.put("data.template", "plain", chat)
    elif chat is None and is_pretraining:
        draft.imply("data.template", "plain", "use_chat_template false by default of pt")
    else:
        _conversations(draft, system)
    draft.drop(chat, "The model's own.")
    draft.drop(system, "Without a template there is no place for it.")
    rendering.template_arguments(draft)


def _conversations(draft: Draft, system: Pick[str] | None) -> None:
    turns = AXOLOTL_TEMPLATES["qwen_25"].turns
    if system is not None and PLAIN_CHATML.search(draft.model) and not system.value.endswith(".txt") and turns:
        written = jinja(replace(turns, usual=system.value))
        draft.put("data.template", written, system, note="Written out, for the model's own has another one.")
    else:
        draft.imply("data.template", "auto", "the model's own, of which swift has a copy")
        draft.refuse(system, "Write it into the template (data.template), or into the rows.")
        draft.note("copies of templates", program=draft.program.name)


def _mask(draft: Draft) -> None:
    """Which tokens are trained."""
    if draft.is_preference:
        draft.drop_every("Answers are judged whole, and nothing before them.", "swift_loss")
        return
    draft.follow("swift_loss")
    if PRETRAINING in _words(draft, "swift_command"):
        draft.imply("data.train_on", "all", "loss_scale all by default of pt")
    draft.imply("data.train_on", "assistant", "loss_scale default: what the assistant says")
    if draft.tree.get("data.train_on") != "all":
        draft.note("ends of swift's answers")
