"""The model card of an export: what the model was made from and how, told by the run itself.

Everything in it comes from the checkpoint's state and the files of the run directory. Local paths are cut down to
their last name, and nothing of the machine but versions is told.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from tonnage.checkpoint.save import STATE, RunForm, read_state
from tonnage.config import Config
from tonnage.data import Account
from tonnage.files.reading import read_object, read_record
from tonnage.files.visible import visible
from tonnage.model.adapter_files import POSITIONS
from tonnage.rundir.directory import RunDirectory

BEGAN = {"pissa": ", which began as a part of the weights (PiSSA),", "loftq": ", which began as LoftQ's,"}
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w-]*(\.[\w-]*\d[\w-]*)*")
"""``owner/name``; a name that ends like a file's (``rows.jsonl``) is none, one with a version in it may be."""

USE_ADAPTER = """\
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

path = "..."  # this directory, or its name on the hub
model = AutoPeftModelForCausalLM.from_pretrained(path)
tokenizer = AutoTokenizer.from_pretrained(path)
question = [{"role": "user", "content": "..."}]
prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=200)[0]))
"""
USE_SCORES = """\
from {package} import {auto}
from transformers import AutoTokenizer

path = "..."  # this directory, or its name on the hub
model = {auto}.from_pretrained(path, dtype="auto", num_labels=1)
tokenizer = AutoTokenizer.from_pretrained(path)
conversation = [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]
print(model(**tokenizer.apply_chat_template(conversation, return_tensors="pt", return_dict=True)).logits)
"""
"""Of a reward model."""
USE = """\
from transformers import {auto}, AutoTokenizer

path = "..."  # this directory, or its name on the hub
model = {auto}.from_pretrained(path, dtype="auto")
tokenizer = AutoTokenizer.from_pretrained(path)
question = [{"role": "user", "content": "..."}]
prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=200)[0]))
"""


@dataclass(frozen=True)
class PackagesForm:
    """Versions, this one at least."""

    tonnage: str


@dataclass(frozen=True)
class EnvironmentForm:
    """What ``environment.json`` holds at least."""

    packages: PackagesForm


@dataclass(frozen=True)
class LayoutForm:
    """What a checkpoint says of the workers."""

    workers: int
    zero: int


@dataclass(frozen=True)
class CardForm:
    """What a checkpoint's state holds at least for a card."""

    config: Config
    layout: LayoutForm


def model_card(
    run: RunDirectory,
    checkpoint: Path,
    *,
    dtype: str,
    is_part: bool = False,
    is_adapter: bool = False,
    notes: Sequence[str] = (),
) -> str:
    """Markdown, with the front matter that the hub reads, for the export of ``checkpoint`` in ``dtype``; ``is_part``:
    the model is one of more than text, whose text model was trained; ``is_adapter``: the export is an adapter alone.
    ``notes`` are sentences on how it was merged.

    Raises:
        UserError: a file of the run or the checkpoint does not hold what a run writes.
    """
    state, account = read_state(checkpoint, RunForm), read_record(run.data, Account)
    held = read_record(checkpoint / STATE, CardForm)
    config = held.config
    steps, evaluations = _records(run, state["step"])
    base, is_hub = _named(config.model)
    origin = "Trained from random weights in the shape of" if config.init == "random" else "Fine-tuned from"
    linked = f"[{base}](https://huggingface.co/{base})" if is_hub else f"`{base}`"
    packages = read_object(run.environment, EnvironmentForm)["packages"]
    task = "text-classification" if config.objective.scores else "image-text-to-text" if is_part else "text-generation"
    scaled = is_adapter and (config.rope is not None or (Path(config.model) / POSITIONS).is_file())
    sections = [
        _front_matter(config, account, task, is_adapter=is_adapter),
        f"# {run.path.resolve().name}",
        f"{origin} {linked} with tonnage {packages['tonnage']}: {_trained(config, is_part, is_adapter)}, with an exact "
        f"fp32 master. The weights here are {dtype}.",
        *notes,
        f"## Use\n\n```python\n{_use(task, is_adapter=is_adapter, scaled=scaled)}```",
        "## Data\n\n" + _data(account),
        "## Training\n\n" + _table(("setting", "value"), _settings(held, state)),
        "## Results\n\n" + _table(("figure", "value"), _results(steps, evaluations)),
        "## Versions\n\n" + _table(("package", "version"), ((name, str(notes)) for name, notes in packages.items())),
    ]
    return "\n\n".join(sections) + "\n"


def _use(task: str, *, is_adapter: bool, scaled: bool) -> str:
    """How to use the export, in Python; ``scaled``: an adapter has a file of positions, which its model must have."""
    if scaled:
        plain = _use(task, is_adapter=is_adapter, scaled=False)
        positions = f'**json.loads(Path(path, "{POSITIONS}").read_text())'
        loads = re.sub(r"(model = \w+\.from_pretrained\(path)", rf"\1, {positions}", plain)
        return f"import json\nfrom pathlib import Path\n\n{loads}"
    if task == "text-classification":
        package, prefix = ("peft", "AutoPeft") if is_adapter else ("transformers", "Auto")
        return USE_SCORES.replace("{package}", package).replace("{auto}", f"{prefix}ModelForSequenceClassification")
    if is_adapter:
        return USE_ADAPTER
    is_part = task == "image-text-to-text"
    return USE.replace("{auto}", "AutoModelForImageTextToText" if is_part else "AutoModelForCausalLM")


def _trained(config: Config, is_part: bool, is_adapter: bool) -> str:
    """What was trained, in words that go on."""
    adapter, some = config.adapter, config.train
    if isinstance(adapter, str):
        every = f"the parameters {', '.join(some)} were trained" if some else "every parameter was trained"
        return "every parameter of its text model was trained" if is_part and not some else every
    targets = adapter.targets if isinstance(adapter.targets, str) else ", ".join(adapter.targets)
    also = f", and {', '.join(adapter.also)} whole" if adapter.also else ""
    base = "" if adapter.quantize in ("none", "widened") else f" over weights in {adapter.quantize}"
    merged = "" if is_adapter else ", and merged in fp32 into the model's own weights"
    lengths = " with lengths of rows (DoRA)" if adapter.kind == "dora" else ""
    ranks = "".join(f", {own.match} {own.rank}" for own in adapter.patterns if own.rank)
    began = BEGAN.get(adapter.init, "")
    twice = " (they are written as additions of twice the rank, to the weights as they were)" if began else ""
    additions = f"low-rank additions{lengths} of rank {adapter.rank}{ranks} to {targets}{also}"
    if adapter.kind == "oft":
        additions = f"rotations of {adapter.oft_block_size} inputs each (OFT) of {targets}{also}"
    return f"{additions}{began} were trained{base}{merged}{twice if is_adapter else ''}"


def _named(path: str) -> tuple[str, bool]:
    """A model or data set as the card may call it, and whether that is a hub id."""
    is_hub = HUB_ID.fullmatch(path) is not None and not Path(path).exists()
    return (path if is_hub else PurePath(path.rstrip("/")).name), is_hub


def _front_matter(config: Config, account: Account, task: str, *, is_adapter: bool) -> str:
    library = "peft" if is_adapter else "transformers"
    lines = ["---", f"library_name: {library}", f"pipeline_tag: {task}", "tags: [tonnage]"]
    base, is_hub = _named(config.model)
    if is_hub and config.init != "random":
        lines += [f"base_model: {base}", f"base_model_relation: {'adapter' if is_adapter else 'finetune'}"]
    data_sets = [name for name, is_hub in (_named(source.name) for source in account.sources) if is_hub]
    if data_sets:
        lines.append(f"datasets: [{', '.join(dict.fromkeys(data_sets))}]")
    return "\n".join([*lines, "---"])


def _data(account: Account) -> str:
    header = ("source", "used for", "form", "rows read", "rows trained on", "tokens", "supervised tokens")
    rows = [
        (
            _named(source.name)[0],
            source.role,
            source.format,
            f"{source.rows_read:,}",
            f"{source.rows_train:,}",
            f"{source.tokens.train:,}",
            f"{source.supervised.train:,}",
        )
        for source in account.sources
    ]
    return (
        _table(header, rows)
        + f"\n\nOne epoch is {account.train.packs:,} packs of at most {account.train.max_length:,} tokens. "
        f"Conversations are written with the template `{PurePath(account.template).name}`."
    )


def _settings(held: CardForm, state: Mapping[str, Any]) -> list[tuple[str, str]]:
    config, optimizer, data = held.config, held.config.optimizer, held.config.data
    return [
        ("steps", f"{state['step']:,} of {state['num_steps']:,}"),
        ("epochs", f"{state['position'] / state['data']['num_packs']:.4g}"),
        ("packs in a step", f"{state['packs_per_step']:,}"),
        ("longest sequence", f"{data.max_length:,} tokens"),
        ("supervised", {"assistant": "assistant turns", "last": "the last turn", "all": "all"}[data.train_on]),
        (
            "optimizer",
            f"{'Muon and ' if optimizer.kind == 'muon' else ''}AdamW, betas {optimizer.betas}, eps {optimizer.eps:g}",
        ),
        ("learning rate", f"{optimizer.lr:g}, {optimizer.schedule}, warm-up {optimizer.warmup:g}"),
        ("weight decay", f"{optimizer.weight_decay:g}"),
        ("clipping", f"{optimizer.clip:g}" if optimizer.clip else "none"),
        ("precision", config.precision),
        ("workers", f"{held.layout.workers}, ZeRO {held.layout.zero}"),
        ("seed", str(config.seed)),
        *([("revision of the model", config.revision)] if config.revision is not None else []),
    ]


def _results(steps: list[Mapping[str, Any]], evaluations: list[Mapping[str, Any]]) -> Iterable[tuple[str, str]]:
    for position, records in (("first", steps[:1]), ("last", steps[-1:])):
        for record in records:
            yield f"training loss, {position} step", _number(record["loss"])
    for record in evaluations[-1:]:
        yield f"evaluation loss after step {record['step']:,}", _number(record["eval_loss"])
    yield "tokens trained on", f"{sum(record.get('tokens') or 0 for record in steps):,}"
    if skipped := sum(bool(record.get("skipped")) for record in steps):
        yield "steps skipped as not finite", f"{skipped:,}"


def _records(run: RunDirectory, last: int) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Steps and evaluations up to a step."""
    records = [record for record in run.read_metrics() if record["step"] <= last]
    return [r for r in records if "loss" in r], [r for r in records if "eval_loss" in r]


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(text: str) -> str:
    return visible(text).replace("|", "\\|").replace("\n", " ")
