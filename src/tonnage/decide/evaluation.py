"""How good a model, or that of a run, is on the rows of files: loss, token accuracy, scores of answers.

The model that computed the loss also writes the answers, on the engine of training (``training.answers``): many at a
time, with a cache of keys and values, the next prompt in the place of an answer that has ended. A family whose
documents need rows of their own answers through transformers' ``generate``, which has the cache that it needs.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import torch
from transformers import PreTrainedConfig

from tonnage.config import Config, Source, as_overrides, read_config
from tonnage.config.bounds import figure_of
from tonnage.data import Prepared, Progress, encode_prompt, prepare, silent
from tonnage.data.tokens.control import settings_of
from tonnage.decide.models import use_model
from tonnage.errors import user_error
from tonnage.host.quantized import Format
from tonnage.host.threads import usable_cores
from tonnage.inference.generate import BLOCK_BY_BLOCK, Decoding, check_room, form_of, generate, load, place_of
from tonnage.inference.questions import Question, read_questions
from tonnage.kernels.threads import use_threads
from tonnage.model.files import ModelFiles, check_fit, positions_of, read_model, read_tokenizer
from tonnage.model.matching import ANY, check_weights
from tonnage.parallel.parallelize import Precision
from tonnage.parallel.place import find_place
from tonnage.parallel.world import World, join_world
from tonnage.planning.layout import PLAIN
from tonnage.rundir.figures import Evaluated, Told, mean_of
from tonnage.rundir.samples import Prompt
from tonnage.training.answers import Asking, answer
from tonnage.training.assemble import names_of
from tonnage.training.batch import Deal, round_to
from tonnage.training.building import Blueprint, assemble_model, trains_of_files
from tonnage.training.evaluate import judge
from tonnage.training.isolation import Isolation, isolation_for
from tonnage.training.pipeline import Pipeline
from tonnage.training.scorers import Scorer, check_expected, scorer_of

MOST_TOGETHER = 64
"""Answers that are written at the same time."""
KEPT_BYTES = 2e9
"""Of cached keys and values, at most."""


@dataclass(frozen=True)
class Evaluation:
    """What was found."""

    loss: float
    """Mean negative log-likelihood of a supervised token, in nats."""
    supervised_tokens: int
    answers: int | None = None
    """Rows to which an answer was generated; None if none was asked for."""
    exact: int = 0
    """Answers that are the row's own."""
    evaluated: Evaluated = field(default_factory=Evaluated)
    """All figures with their intervals, by source as well."""
    base: str = "none"
    """How the weights under the adapter were quantised, as they were in training; ``none`` where they were not."""

    @property
    def perplexity(self) -> float:
        """The exponential of the loss."""
        return math.exp(min(self.loss, 700.0))

    def figures(self) -> dict[str, float | int]:
        """By name, as they are shown and written."""
        figures: dict[str, float | int] = {"loss": self.loss, "perplexity": self.perplexity}
        if self.evaluated.rows is not None:
            figures["token_accuracy"] = self.evaluated.rows.token_accuracy.value
        figures["supervised_tokens"] = self.supervised_tokens
        if self.answers is not None:
            figures |= {name: figure.value for name, figure in self.evaluated.scores.items()}
            figures |= {"exact_match": self.exact / self.answers if self.answers else math.nan, "answers": self.answers}
        return figures


@dataclass(frozen=True)
class Loading:
    """How a model is loaded and computed."""

    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """``auto`` is the type of the weights."""
    trust_remote_code: bool = False
    allow_unexpected: tuple[str, ...] = ()
    """Tensors that the model has no place for are refused but for these, and those that its run allowed."""


@dataclass(frozen=True)
class Answers:
    """To how many rows answers are generated at most, and how they are scored besides exact match."""

    limit: int = 0
    max_new_tokens: int = 128
    scorer: str = "exact_match"
    """Of ``training.scorers``."""
    pattern: str | None = None
    """What the scorer ``regex`` compares."""


@dataclass(frozen=True)
class Checked:
    """A model whose files and weights were checked, and how it is loaded: as the user asks, and as its run allows."""

    files: ModelFiles
    config: PreTrainedConfig
    loading: Loading
    form: Format | None
    """How the weights under the adapter of a run are quantised, as in training."""


AS_IT_IS, NONE = Loading(), Answers()


def evaluate_model(
    model: str,
    sources: Sequence[Mapping[str, str]],
    progress: Progress = silent,
    *,
    template: str = "auto",
    max_length: int = 2048,
    answers: Answers = NONE,
    loading: Loading = AS_IT_IS,
    tell: Callable[[str], None] = lambda message: None,
) -> Evaluation:
    """Evaluate a run, a model directory or a hub id on files of rows, in this process; a run with the kernels that it
    was trained with. ``sources`` are as ``data.train`` lists them; ``tell`` hears what is remarkable about the weights.

    Raises:
        UserError: no such model, rows that cannot be read, or the two do not belong together.
    """
    scorers = scorers_of(answers.scorer, answers.pattern)
    checked = checked_model(model, loading, tell)
    tokenizer = read_tokenizer(checked.files, trust_remote_code=checked.loading.trust_remote_code)
    max_length = min(max_length, positions_of(checked.config) or max_length)
    check_fit(checked.config, tokenizer, max_length)
    data = {"train": list(map(dict, sources)), "max_length": max_length, "template": template, **settings_of(tokenizer)}
    config = read_config(None, as_overrides({"model": str(model), "data": data}), check_files=False)
    prepared = prepare(config.data, tokenizer, progress=progress)
    questions = _questions(config.data.train, answers)
    if checked.form is not None:
        tell(f"The weights under the adapter are in {checked.form}, as they were in training.")
    figures, by_source, texts = _judged(checked, config, prepared, questions, answers.max_new_tokens, progress, tell)
    if texts is None:
        texts = _from_transformers(checked, template, questions, answers.max_new_tokens, progress, tell)
    pairs = [(text, question.answer or "") for text, question in zip(texts, questions, strict=True)]
    scores = {name: [score(text, expected) for text, expected in pairs] for name, score in scorers.items()}
    means = {name: mean_of(values) for name, values in scores.items()} if answers.limit else {}
    return Evaluation(
        figures.loss.value,
        prepared.train.supervised_tokens,
        len(questions) if answers.limit else None,
        int(sum(scores["exact_match"])),
        Evaluated(figures, by_source, scores=means, answers=len(questions)),
        checked.form or "none",
    )


def _from_transformers(
    checked: Checked,
    template: str,
    questions: Sequence[Question],
    max_new_tokens: int,
    progress: Progress,
    tell: Callable[[str], None],
) -> list[str]:
    """Answers of transformers' ``generate``, by a model that is loaded again: that which computed the loss is gone."""
    gc.collect()
    if checked.form is not None:
        tell(f"Answers are given with the adapter merged into the original weights, not into {checked.form}.")
    loaded = load(
        place_of(checked.files),
        template=template,
        **form_of(questions),
        trust_remote_code=checked.loading.trust_remote_code,
        allow_unexpected=checked.loading.allow_unexpected,
        tell=tell,
    )
    conversations = [question.conversation for question in questions]
    return generate(loaded, conversations, Decoding(max_new_tokens), progress=partial(progress, "generate"))


def checked_model(model: str, loading: Loading, tell: Callable[[str], None] = lambda message: None) -> Checked:
    """A run, a model directory or a hub id after the checks that training makes; this process computes with the run's
    kernels from here on.

    Raises:
        UserError: no such model, or its weights are not those that config.json describes, what is allowed aside.
    """
    trusted, patterns = loading.trust_remote_code, loading.allow_unexpected
    in_use = use_model(model, trust_remote_code=trusted, allow_unexpected=patterns)
    trusted, patterns = in_use.trust_remote_code, in_use.allow_unexpected
    files, config = read_model(str(in_use.directory), trust_remote_code=trusted)
    weights = check_weights(files, config, allow_unexpected=patterns)
    if weights.left_out:
        tell(f"{len(weights.left_out):,} tensors that the model has no place for are left out.")
    loading = Loading(loading.precision, trusted, patterns)
    return Checked(files, config, loading, in_use.quantize)


def scorers_of(scorer: str, pattern: str | None = None) -> dict[str, Scorer]:
    """Exact match and another scorer, by the names of their figures. Raises ``UserError``."""
    if (scorer == "regex") != (pattern is not None):
        found = f"scorer {scorer} {'without' if pattern is None else 'with'} a pattern"
        raise user_error(found, "a pattern for regex, and for nothing else", where="scorer")
    names = {"exact_match": "exact_match", figure_of(scorer) or "exact_match": scorer}
    return {name: scorer_of(one, pattern) for name, one in names.items()}


def _questions(sources: Sequence[Source], answers: Answers) -> list[Question]:
    """The rows that have an answer to compare with, of the first ``answers.limit``."""
    if not answers.limit:
        return []
    questions = [question for question in read_questions(sources, answers.limit) if question.answer is not None]
    rows = [(f"row {number}", question.answer or "") for number, question in enumerate(questions, start=1)]
    check_expected(answers.scorer, answers.pattern, rows)
    return questions


@contextmanager
def ranks() -> Iterator[World]:
    """The ranks that torchrun, mpirun or srun has started, each of which evaluates its share; this process alone
    without them. Within it torch uses all cores of the machine, and afterwards as many as before.

    Raises:
        UserError: the launcher does not say who this rank is, or where the ranks of several machines meet.
    """
    place, threads = find_place(), torch.get_num_threads()
    if place.size > 1:
        if not place.address and (place.local_size or 1) < place.size:
            machines = f"{place.size} ranks of several machines, and no MASTER_ADDR"
            raise user_error(machines, "where the first of them is", "export MASTER_ADDR=HOST", "environment")
        place.announce()
    use_threads(max(1, usable_cores() // (place.local_size or 1)))
    try:
        with join_world() as world:
            yield world
    finally:
        use_threads(threads)


def speaks() -> bool:
    """Whether this process, of those that a launcher has started, tells the user what was found."""
    return find_place().rank == 0


def _judged(
    checked: Checked,
    config: Config,
    prepared: Prepared,
    questions: Sequence[Question],
    max_new_tokens: int,
    progress: Progress,
    tell: Callable[[str], None],
) -> tuple[Told, dict[str, Told], list[str] | None]:
    """Figures of all rows and by source, and the answers to the questions; None where transformers must write them."""
    max_length = config.data.max_length
    with ranks() as world:
        pipeline, dtypes, isolation = assembled(checked, world, max_length, tell)
        deal = deal_of(isolation, max_length, world, dtypes)
        shown = partial(progress, "evaluate")
        figures, by_source = judge(pipeline, prepared.train, deal, world, names_of(config), progress=shown)
        if not questions:
            return figures, by_source, []
        if isolation.arrangement == "padded":
            return figures, by_source, None
        asking = asking_of(checked.config, prepared, questions, max_new_tokens, dtypes.compute)
        tokens = answer(pipeline, asking, deal, world, progress=partial(progress, "generate"))
        return figures, by_source, list(map(asking.decode, tokens))


def assembled(
    checked: Checked, world: World, max_length: int, tell: Callable[[str], None] = lambda message: None
) -> tuple[Pipeline, Precision, Isolation]:
    """The model that is evaluated, the types of its numbers, and how documents of up to ``max_length`` tokens are laid
    out. ``tell`` hears where it has no room on a GPU. The weights under an adapter are those that it was trained over.
    """
    files, config, compute = checked.files, checked.config, checked.loading.precision
    isolation = isolation_for(config, world.device, max_length)
    if compute == "auto":
        compute = "fp32" if config.dtype == torch.float32 else "bf16"
    dtypes = Precision.of(compute, world.data_size)
    layout = replace(PLAIN, arrangement=isolation.arrangement, attention=isolation.attention)
    trains = replace(trains_of_files(files, config), quantize=checked.form if files.adapter is not None else None)
    blueprint = Blueprint(files, config, world, dtypes, layout, trains, evaluates=True, allow_unexpected=ANY)
    assembled = assemble_model(blueprint)
    if assembled.placed.on_host is not None:
        tell(BLOCK_BY_BLOCK)
    return Pipeline({0: assembled.loss_model}, world, dtypes.compute), dtypes, isolation


def deal_of(isolation: Isolation, max_length: int, world: World, dtypes: Precision) -> Deal:
    """One pack a row, and as many at a time as there are ranks."""
    return Deal(
        world.data_size,
        1,
        rank=world.data_rank,
        world_size=world.data_size,
        round_to=round_to(max_length, world.device, dtypes.compute),
        padded_tokens=max_length if isolation.arrangement == "padded" else 0,
    )


def asking_of(
    config: PreTrainedConfig,
    prepared: Prepared,
    questions: Sequence[Question],
    max_new_tokens: int,
    dtype: torch.dtype,
) -> Asking:
    """Questions in the form that the engine takes. Raises ``UserError`` where one leaves no room for an answer."""
    positions, tokenizer = positions_of(config), prepared.tokenizer
    encoded = [encode_prompt(question.conversation, tokenizer) for question in questions]
    check_room(encoded, positions)
    prompts = []
    for ids, question in zip(encoded, questions, strict=True):
        room = max_new_tokens if positions is None else min(max_new_tokens, positions - len(ids))
        prompts.append(Prompt("", ids, room, question.answer))
    return Asking(
        tuple(prompts),
        frozenset(prepared.stop_tokens),
        row_tokens=kept_tokens(config, dtype, [len(one.ids) + one.room for one in prompts]),
        decode=lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=True)),
        most_together=MOST_TOGETHER,
    )


def kept_tokens(config: PreTrainedConfig, dtype: torch.dtype, lengths: Sequence[int]) -> int:
    """How many tokens the cache has room for: those of the longest document at least, whatever ``KEPT_BYTES`` is."""
    text = config.get_text_config(decoder=True)
    layers, hidden = getattr(text, "num_hidden_layers", 1) or 1, getattr(text, "hidden_size", 1) or 1
    heads = getattr(text, "num_attention_heads", None) or 1
    of_token = 2 * layers * hidden * (getattr(text, "num_key_value_heads", None) or heads) / heads * dtype.itemsize
    return max(*lengths, 1, min(MOST_TOGETHER * max(lengths, default=1), int(KEPT_BYTES / of_token)))
