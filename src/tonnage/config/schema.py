"""What a config may say: one frozen, typed tree with a sentence under every field.

The sentence is the field's documentation, its line in ``docs/config.md`` and its help text. Constraints on
one value stand beside the field; constraints between fields are in ``check.py``; where a value was written
is known only to ``read.py``. Shorthand is spelled out while reading (``train: rows.json`` becomes a list of
one source), so that those who use a config meet one shape of everything. Nothing here touches a file or a
device.
"""

from __future__ import annotations

import datetime
import keyword
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, cast, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    TypeAdapter,
    ValidationInfo,
    field_serializer,
    field_validator,
    model_validator,
)

from tonnage.config.bounds import SCORERS, Best, Bound, Gated
from tonnage.files.paths import expanded, is_jinja
from tonnage.forms.formats import FORMAT_NAMES, RowPurpose

DEFAULT_EPOCHS = 3.0
DEFAULT_LR, ADAPTER_LR = 2e-5, 2e-4
"""Learning rates where none is given: of a model's own weights, and of low-rank additions to them, which begin at zero
and are usually trained with ten times as much."""
PREFERENCE_LR, PREFERENCE_ADAPTER_LR = 1e-6, 1e-5
"""The same for pairs of answers: a twentieth, since what is compared are sums over whole answers."""


def adapter_lr(*, compares: bool) -> float:
    """The learning rate of additions where none is given."""
    return PREFERENCE_ADAPTER_LR if compares else ADAPTER_LR


MOST = 10**12
"""Of anything that is counted: no run gets so far, and floating point still knows such numbers exactly."""
MOST_WORKERS = 2**20
"""Workers, nodes, and what one of them has."""
MOST_BYTES = 2**60
MOST_SECONDS = 1e9
"""Thirty years. Timers count nanoseconds in 64 bits, which end after three hundred."""
LONGEST_TEXT = 4096
"""Characters of what is no path."""
FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
"""A function that can be imported, as ``module:function``."""
LONGEST_TEMPLATE = 1 << 18
"""Characters of a template that stands in the config."""
LONGEST_SIZE = 40
"""Characters of a size such as 6GB."""


class Section(BaseModel):
    """A part of the config: strict (no guessing of types), frozen, and closed to unknown keys."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )

    def with_keys(self, section: str, values: Mapping[str, Any]) -> Self:
        """A copy with other ``values`` of keys of a section, whose name may be dotted."""
        name, _, inner = section.partition(".")
        before: Section = getattr(self, name)
        after = before.with_keys(inner, values) if inner else before.model_copy(update=values)
        return self.model_copy(update={name: after})


@dataclass(frozen=True)
class Words:
    """How documentation and errors call what a field takes, where its type does not say it."""

    text: str


def _expand(value: Any) -> Any:
    return expanded(value) if isinstance(value, str) else value


def _expand_unless_jinja(value: Any) -> Any:
    return value if isinstance(value, str) and is_jinja(value) else _expand(value)


PathText = Annotated[str, Field(min_length=1), BeforeValidator(_expand), Words("a path")]
"""A path, with ``~`` written out: who uses a config never meets one."""
PathOrId = Annotated[str, Field(min_length=1), BeforeValidator(_expand), Words("a path or hub id")]
Text = Annotated[str, Field(min_length=1, max_length=LONGEST_TEXT)]
Count = Annotated[int, Field(ge=1, le=MOST)]
CountOrNone = Annotated[int, Field(ge=0, le=MOST)]
Workers = Annotated[int, Field(ge=1, le=MOST_WORKERS)]
Seconds = Annotated[float, Field(gt=0, le=MOST_SECONDS)]


def _spell_out_sources(value: Any) -> Any:
    """``rows.json`` or ``{path: rows.json}`` or a list of either, as a list of mappings."""
    items = value if isinstance(value, list | tuple) else [value]
    return tuple({"path": item} if isinstance(item, str) else item for item in items)


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _one_or_many(value: Any) -> Any:
    return (value,) if isinstance(value, str) else _as_tuple(value)


def _targets(value: Any) -> Any:
    return (value,) if isinstance(value, str) and value != "all-linear" else _as_tuple(value)


def _as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _is_date(value: str) -> str:
    if value != "auto":
        datetime.date.fromisoformat(value)
    return value


def _off_is_zero(value: Any) -> Any:
    return 0.0 if value is None or value in ("none", "off") else value


def _size_in_bytes(value: Any) -> Any:
    """``6GiB`` in bytes; numbers and ``auto`` as they are. What is no size is left for the field to refuse."""
    if not isinstance(value, str) or value == "auto" or len(value) > LONGEST_SIZE:
        return value
    return int(TypeAdapter(ByteSize).validate_python(value))


Bytes = Annotated[Annotated[int, Field(ge=1, le=MOST_BYTES)] | Literal["auto"], BeforeValidator(_size_in_bytes)]
BytesOrNone = Annotated[Annotated[int, Field(ge=0, le=MOST_BYTES)] | Literal["auto"], BeforeValidator(_size_in_bytes)]
Name = Text | None
_REPOSITORY = r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$"
Repository = Annotated[str, Field(max_length=96, pattern=_REPOSITORY), Words("a repository as owner/name")] | None


if TYPE_CHECKING:
    FormatName = str
else:
    FormatName = Literal[FORMAT_NAMES]


class Source(Section):
    """One source of rows."""

    path: PathOrId
    """File, glob, directory or hub id of the rows."""
    format: FormatName = "auto"
    """How a row holds its conversation, or a data set with such columns; `auto` finds out and shows what it found."""
    name: Name = None
    """Subset (configuration) of a hub data set that has several."""
    revision: Name = None
    """Branch, tag or commit of a hub data set; none is its newest state, whose commit goes into `data.json`."""
    files: Annotated[tuple[Text, ...], BeforeValidator(_one_or_many)] = ()
    """Which files of a hub data set or a directory are read, as names or patterns (`data/*.jsonl`); none: all."""
    split: Text = "train"
    """Which split of a hub data set, or of a directory that is a copy of one, to read."""
    weight: Annotated[float, Field(gt=0, le=1e15)] = 1.0
    """How often each of its rows is seen in an epoch: 2 is twice, 0.5 is half of them."""
    first: Count | Annotated[float, Field(gt=0, lt=1)] | None = None
    """Only its first rows: so many, or below 1 such a fraction of them; none is all."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Names of the columns where they are not the usual ones, as `{usual: yours}`."""
    between: Annotated[str, Field(max_length=LONGEST_TEXT)] = "\n\n"
    """What stands between `instruction` and `input` where a template has one place for both."""
    roles: dict[str, Literal["system", "user", "assistant", "tool"]] = Field(default_factory=dict)
    """Whose messages are whose where roles have other names than the usual ones, as `{yours: assistant}`."""
    system: Literal["keep", "drop"] = "keep"
    """Whether a system message that a conversation begins with is kept, or dropped as if the row had none."""
    images: PathText | None = None
    """Directory where the paths of its images start, and which they may not leave; none is that of the rows' file."""
    documents: Literal["file", "paragraph", "line"] = "file"
    """What one document is in a file of plain text or Markdown (`.txt`, `.md`)."""


OF_A_LOSS = ("logprobs", "weights")
"""What a loss of one's own is given besides columns."""


def _arguments(value: tuple[str, ...]) -> tuple[str, ...]:
    fit = (name.isidentifier() and not keyword.iskeyword(name) and name not in OF_A_LOSS for name in value)
    if len(set(value)) < len(value) or not all(fit):
        raise ValueError
    return value


Lines = Annotated[tuple[Text, ...], BeforeValidator(_one_or_many)]
Sources = Annotated[tuple[Source, ...], Field(min_length=1), BeforeValidator(_spell_out_sources)]


def _fraction_or_sources(value: Any) -> str:
    return "fraction" if isinstance(value, int | float) or value is None else "sources"


Pixels = Annotated[int, Field(ge=1, le=100_000_000)]


class Data(Section):
    """What to train on, and how rows become packs."""

    train: Sources
    """Rows to train on: a file, directory or hub id, or a list of sources."""
    validation: Annotated[
        Annotated[float, Field(ge=0, lt=1), Tag("fraction")] | Annotated[Sources, Tag("sources")],
        Discriminator(_fraction_or_sources),
    ] = 0.0
    """Rows to evaluate on: a fraction of `train` (then not trained on), or sources of their own."""
    max_length: Annotated[int, Field(ge=2, le=MOST)] = 2048
    """Tokens in a pack, and so the longest conversation that fits."""
    min_length: Annotated[int, Field(ge=1, le=MOST)] = 1
    """Tokens that a conversation has at least; a shorter one is left out."""
    over_length: Literal["error", "drop", "truncate", "split"] = "error"
    """What becomes of a conversation longer than `max_length`; the tokens lost are counted in every case."""
    split_at: Literal["tokens", "sentences", "turns"] = "tokens"
    """Of `split`: where pieces end: full, or after the last paragraph or sentence that fits, or the last turn."""
    overlap: CountOrNone = 0
    """Of `split`: tokens of a piece that the next one begins with, as context that is not supervised again."""
    max_loss: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Fraction of the supervised tokens that `over_length` may lose, and of a file damage, before a run is refused."""
    template: Annotated[
        str,
        Field(min_length=1, max_length=LONGEST_TEMPLATE),
        BeforeValidator(_expand_unless_jinja),
        Words("a template's name, file or text"),
    ] = "auto"
    """Chat template: `auto` is the tokenizer's own, else the name of a built-in, a Jinja file, or its text."""
    template_arguments: dict[str, bool | int | float | str | None] = Field(default_factory=dict)
    """What the template is told besides the messages, such as `{enable_thinking: false}`."""
    eos_token: Name = None
    """Token that ends a text, such as `</s>`, in the place of the tokenizer's own; a new one gets a row."""
    added_tokens: Lines = ()
    """Special tokens that the vocabulary gets where it lacks them, such as `<tool>`; the embedding gets rows."""
    date: Annotated[str, AfterValidator(_is_date)] = "auto"
    """The date that templates write which ask for it, as `2026-01-31`; `auto` is the day of preparation."""
    fold_system: bool = False
    """Put a system message at the beginning of the first user's message where the template takes no system message."""
    control_tokens: Literal["text", "keep", "error"] = "text"
    """What characters such as `<|im_end|>` in a row's own words become: words, the token, or a bad row."""
    image_min_pixels: Pixels | None = None
    """Pixels that an image has at least: a smaller one is enlarged, in its shape, before the processor sees it."""
    image_max_pixels: Pixels | None = None
    """Pixels that an image has at most: a larger one is made smaller, in its shape, before the processor sees it."""
    train_on: Literal["assistant", "last", "all"] = "assistant"
    """Which tokens are supervised: every assistant turn, only the last one, or everything but images."""
    pack: bool = True
    """Put several whole conversations into one pack; they never attend to each other."""
    order: Literal["shuffled", "given"] = "shuffled"
    """Order of training: packs drawn anew for each epoch, or rows as sources and files give them, in every epoch."""
    share_prefixes: bool = True
    """Compute what conversations of a micro-batch begin with alike once, where that is possible; it changes no loss."""
    on_bad_row: Literal["error", "skip"] = "error"
    """Whether a row that cannot be read stops the run or is skipped, counted and listed."""
    duplicates: Literal["keep", "drop"] = "keep"
    """Whether equal rows are all trained on or only the first of them; they are counted in both cases."""
    mixture: Literal["rows", "tokens"] = "rows"
    """What a source's weight means: how often each of its rows is seen in an epoch, or its share of the tokens."""
    carry: Annotated[
        tuple[Text, ...],
        BeforeValidator(_one_or_many),
        AfterValidator(_arguments),
        Words(f"a list of columns, each once, named as arguments of a function are ({', '.join(OF_A_LOSS)} are taken)"),
    ] = ()
    """Columns of the rows, numbers, that a loss of one's own is given with each target (from Python, `loss=`)."""
    image_features: Literal["auto", "cached", "computed"] = "auto"
    """What a vision tower makes of images: `cached` before training, `computed` in every step; `auto`: the faster."""
    cache: PathText | None = None
    """Directory for prepared data; none is the user's cache directory."""

    @property
    def pixels(self) -> tuple[int | None, int | None]:
        """The fewest and the most of an image."""
        return self.image_min_pixels, self.image_max_pixels


class Rope(Section):
    """How rotary position embeddings are changed for more positions than the model was trained with."""

    type: Literal["yarn", "linear", "llama3", "default"] = "yarn"
    """As transformers' `rope_type`; `default`: no frequency is scaled, `theta` alone is another."""
    factor: Annotated[float, Field(ge=1, le=1e6)] = 1.0
    """How many times as many positions as before there are, which `data.max_length` may use."""
    original_max_position_embeddings: Annotated[int, Field(ge=2, le=MOST)] | None = None
    """Of `yarn` and `llama3`: positions before; none: the model's own, of one that is scaled already its original."""
    theta: Annotated[float, Field(gt=1, le=1e15)] | None = None
    """Base of the frequencies (`rope_theta`); none: the model's own."""
    attention_factor: Annotated[float, Field(gt=0, le=1e3)] | None = None
    """Of `yarn`: by which sines and cosines are multiplied; none: 0.1 ln(`factor`) + 1."""
    beta_fast: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Of `yarn`: turns within the original positions above which a frequency stays as it is; none: 32."""
    beta_slow: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Of `yarn`: turns below which a frequency is divided by `factor`; none: 1."""
    low_freq_factor: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Of `llama3`: turns below which a frequency is divided by `factor`; none: 1."""
    high_freq_factor: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Of `llama3`: turns above which a frequency stays as it is; none: 4."""

    @property
    def parameters(self) -> dict[str, Any]:
        """What it says, by the names of its keys; nothing of what it leaves to the model or to transformers."""
        return self.model_dump(exclude_none=True)


class Batch(Section):
    """What one step sees, over all workers: `tokens` or `sequences`."""

    sequences: Count | None = None
    """Sequences in a step: packs when packing, conversations when not."""
    tokens: Count | None = None
    """Tokens in a step, in whole packs of `max_length`."""


def _empty_is_auto(value: Any) -> Any:
    return "auto" if value in (None, {}) else value


def _null_is_none(value: Any) -> Any:
    return "none" if value is None else value


def _word_or_section(value: Any) -> str:
    return "section" if isinstance(value, Mapping | Section) else "word"


def _on_or_off(value: Any) -> Any:
    return {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value


Switch = Annotated[Literal["on", "off"], BeforeValidator(_on_or_off)]


class Kernels(Section):
    """Fast operations that tonnage brings along, most of them for CPUs; what is `off` is computed by torch's own."""

    attention: Switch = "on"
    """Attention within documents by loops; without them, document by document, and no prefixes are shared."""
    products: Switch = "on"
    """Computes gradients of weights by tile registers on CPUs with AMX, and adds products to sums piece by piece."""
    widening: Switch = "on"
    """Computes 16-bit products in fp32 on processors where those are faster."""
    norms: Switch = "on"
    """Root-mean-square norms in one pass over memory."""
    gates: Switch = "on"
    """The gate of an MLP, and its gradients, in one pass over memory."""
    softmax: Switch = "on"
    """Cross-entropy and its gradient in the memory of the logits."""
    sums: Switch = "on"
    """Adds gradients of several micro-batches up in fp32 where they are computed."""
    embedding: Switch = "on"
    """The gradient of the embedding: only rows that were looked up, summed in fp32."""
    quantized: Switch = "on"
    """Widens weights of 4 and 8 bits block by block in the cache for their products, never a whole layer."""
    adamw: Switch = "on"
    """The update of AdamW in one pass over weights, masters and moments."""


KERNELS = tuple(Kernels.model_fields)
"""Names of what can be switched off, as ``kernels.switches`` of the program has them."""


class Group(Section):
    """Parameters that are updated with another rate or decay than the rest."""

    match: Text
    """Which parameters, as a pattern of the kind that `train` takes: `*embed*`, `blocks[-2:].*`, `*lora_B*`."""
    lr: Annotated[float, Field(gt=0, le=1)] | None = None
    """Their highest learning rate, which follows the schedule as `optimizer.lr` does; none: that one."""
    weight_decay: Annotated[float, Field(ge=0, le=1)] | None = None
    """Weight decay of the matrices among them; none: `optimizer.weight_decay`."""


class Optimizer(Section):
    """What updates the weights: AdamW, or Muon for the matrices of the blocks; its schedule, and gradient clipping."""

    kind: Literal["adamw", "muon"] = "adamw"
    """`muon`: matrices of the blocks, whole, by their momentum made orthogonal; AdamW updates all else."""
    lr: Annotated[float, Field(gt=0, le=1)] = DEFAULT_LR
    """Highest learning rate, after warm-up; by default 1e-6 for preferences, and ten times as much with `adapter`."""
    weight_decay: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Decoupled weight decay of matrices: not of norms, biases, scales and vectors, however they are shaped."""
    betas: Annotated[
        tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]],
        BeforeValidator(_as_tuple),
    ] = (0.9, 0.95)
    """Decay rates of the first and second moment."""
    eps: Annotated[float, Field(gt=0, le=1)] = 1e-8
    """Added to the root of the second moment."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Of `muon`: decay rate of its momentum, which is Nesterov's."""
    adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Of `muon`: times what `lr` is taken: 0.2 times the root of the larger side, or the root of rows over columns."""
    adamw_lr: Annotated[float, Field(gt=0, le=1)] | None = None
    """Of `muon`: highest learning rate of what AdamW updates; none: `lr`."""
    clip: Annotated[float, Field(ge=0), BeforeValidator(_off_is_zero)] = 1.0
    """Largest global norm of the gradient; 0 or `none` turns clipping off."""
    schedule: Literal["cosine", "linear", "constant", "wsd", "polynomial", "cosine_with_restarts", "inverse_sqrt"] = (
        "cosine"
    )
    """Shape of the learning rate after warm-up; `wsd`: it stays, and decays in the last steps (`decay`)."""
    warmup: Annotated[float, Field(ge=0, le=MOST)] = 0.03
    """Length of the warm-up: a fraction of all steps if below 1, else a whole number of steps."""
    warmup_from: Literal["first", "zero"] = "first"
    """Where warm-up begins: with a `first` rate above zero, or with a step at `zero`, as in transformers."""
    warmup_shape: Literal["linear", "quadratic"] = "linear"
    """How the rate rises in warm-up: evenly, or with the square of the step."""
    final: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Learning rate at the last step, as a fraction of `lr`; `constant` ignores it; `wsd`'s warm-up begins there."""
    decay: Annotated[float, Field(gt=0, le=MOST)] = 0.1
    """Of `wsd`: length of the decay, a fraction of all steps if below 1, else a whole number of steps."""
    decay_shape: Literal["cosine", "linear", "1-sqrt"] = "cosine"
    """Of `wsd`: how the rate falls in the decay."""
    power: Annotated[float, Field(gt=0, le=100)] = 1.0
    """Of `polynomial`: power of the steps that are left; 1 is `linear`."""
    cycles: Count = 1
    """Of `cosine_with_restarts`: how many cosines there are, each from `lr` down."""
    timescale: Count | None = None
    """Of `inverse_sqrt`: steps after which the rate is 71% of `lr`; none: as many as warm-up, or 10,000."""
    groups: Annotated[tuple[Group, ...], BeforeValidator(_as_tuple)] = ()
    """Parameters with a rate or decay of their own, as `{match: '*lora_B*', lr: 3e-3}`; the first match counts."""
    skips: CountOrNone = 10
    """Steps in a row that may be skipped because their loss or gradient is not finite; one more ends the run."""
    loss_scale: Annotated[float, Field(ge=1, le=2.0**64)] = 65536.0
    """Where the loss scale of `precision: fp16` starts; it halves at every overflow."""
    loss_scale_growth: Count = 2000
    """Good steps in a row after which fp16's loss scale doubles."""


ObjectiveKind = Literal["supervised", "dft", "eaft", "distil", "dpo", "ipo", "hinge", "kto", "orpo", "simpo", "reward"]
FOCUSED = ("dft", "eaft")
"""Kinds of ``objective`` in which tokens count by what the model makes of them."""
REFERRED = ("dpo", "ipo", "hinge", "kto")
"""Kinds of ``objective`` that compare with the model as it was."""
COMPARED = (*REFERRED, "orpo", "simpo")
"""Kinds of ``objective`` whose loss is made of log-probabilities of two answers."""
PREFERENCES = (*COMPARED, "reward")
"""Kinds of ``objective`` that learn which answers are preferred."""
BETAS = {"simpo": 2.0}
"""``objective.beta`` where it is not said, if it is another than ``DEFAULT_BETA``."""
DEFAULT_BETA = 0.1
MOST_TAUGHT = 1 << 16
"""Of a teacher's likeliest tokens."""


def _kind(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else value


class Objective(Section):
    """What is minimised: the loss of answers, alone or beside a teacher, or one that prefers some to others."""

    kind: ObjectiveKind = "supervised"
    """`supervised`; `dft`, `eaft`: tokens count by their probability, by the model's entropy; `distil`: by a teacher;
    `kto`: rows with a `label`; `reward`: a model of scores; others: pairs."""
    power: Annotated[float, Field(gt=0, le=100)] = 1.0
    """Of `eaft`: to which power the entropy of the likeliest tokens is taken (its alpha)."""
    beta: Annotated[float, Field(gt=0, le=1e6)] = Field(
        default_factory=lambda data: BETAS.get(data.get("kind", ""), DEFAULT_BETA)
    )
    """Of preferences: what log-probabilities are multiplied by; IPO's tau, ORPO's weight of the odds ratio."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Of `dpo`: the probability that the two answers of a pair were swapped."""
    margin: Annotated[float, Field(ge=0, le=1e6)] = 1.0
    """Of `simpo`: how far apart the answers' rewards are to be (its gamma)."""
    center: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Of `reward`: weight of the squared sum of a pair's two scores, which keeps their mean near zero."""
    per_token: bool = False
    """Of `dpo` and `hinge`: divide the log-probability of an answer by its tokens (`ipo`, `orpo` and `simpo` do)."""
    supervised: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Weight of the chosen answers' own loss, nats a token (`orpo`: 1); of `distil`: its share beside the teacher's."""
    reference: PathOrId | None = None
    """Another model of the same vocabulary that log-probabilities are compared with; none is the model as it was."""
    reference_revision: Name = None
    """Branch, tag or commit of a reference on the hub; none is its newest state."""
    teacher: PathOrId | None = None
    """Of `distil`: a model of the same vocabulary, whose likeliest tokens are computed once, before training."""
    teacher_revision: Name = None
    """Branch, tag or commit of a teacher on the hub; none is its newest state."""
    top_k: Annotated[int, Field(ge=1, le=MOST_TAUGHT)] = 64
    """Of `distil`: how many of the teacher's likeliest tokens are kept for every supervised token."""
    temperature: Annotated[float, Field(gt=0, le=1e3)] = 1.0
    """Of `distil`: what the logits of teacher and student are divided by; above 1, unlikely tokens count for more."""
    desirable: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """Of `kto`: weight of the loss of desirable answers."""
    undesirable: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """Of `kto`: weight of the loss of undesirable answers."""

    @property
    def distils(self) -> bool:
        """Whether a teacher is learned from."""
        return self.kind == "distil"

    @property
    def goes_with_tiles(self) -> bool:
        """Whether the vocabulary may come in tiles, in which likeliest tokens are not looked for."""
        return self.kind not in ("distil", "eaft")

    @property
    def rows(self) -> RowPurpose:
        """What rows are for."""
        if self.kind == "kto":
            return "verdicts"
        return "pairs" if self.kind in PREFERENCES else "supervised"

    @property
    def is_preference(self) -> bool:
        """Whether answers are compared, so that a document holds two of them."""
        return self.rows != "supervised"

    @property
    def compares(self) -> bool:
        """Whether the loss is made of log-probabilities of two answers."""
        return self.kind in COMPARED

    @property
    def scores_first(self) -> bool:
        """Whether the loss needs log-probabilities of all answers before it has a gradient."""
        return self.compares or self.kind in FOCUSED

    @property
    def has_reference(self) -> bool:
        """Whether log-probabilities are compared with those of the model as it was."""
        return self.kind in REFERRED

    @property
    def scores(self) -> bool:
        """Whether the model ends in a head of one number: a reward model."""
        return self.kind == "reward"


Quantize = Literal["none", "widened", "nf4", "nf4-double", "int8"]
"""How frozen weights rest: as they are, as plain numbers, in blocks of 4-bit numbers, with their scales in 8 bits too,
or in 8 bits."""


class RankPattern(Section):
    """Layers whose additions have another rank or alpha than the rest."""

    match: Text
    """Which of the targets, as a name or pattern of the kind that `targets` takes: `q_proj`, `layers.3?.mlp.*`."""
    rank: Annotated[int, Field(ge=1, le=65536)] | None = None
    """Their rank; none: `adapter.rank`."""
    alpha: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Their alpha; none: `adapter.alpha`."""


class Adapter(Section):
    """Low-rank additions to layers (LoRA), which are trained in place of the model's own weights."""

    kind: Literal["lora", "dora", "oft"] = "lora"
    """`dora` trains a length for each row of the adapted weights besides (DoRA), which takes memory and time; `oft`
    trains rotations of the inputs of layers in place of additions (OFT)."""
    oft_block_size: Annotated[int, Field(ge=2, le=4096)] = 32
    """Of `oft`: how many inputs of a layer are rotated together."""
    rank: Annotated[int, Field(ge=1, le=65536)] = 32
    """Rank of the additions: a layer's is the product of two matrices of so many rows and columns."""
    alpha: Annotated[float, Field(gt=0, le=1e6)] = 64.0
    """Additions are multiplied by `alpha` over `rank`, or over its root with `scaling: rank_stabilised`."""
    targets: Annotated[
        Literal["all-linear"] | Annotated[tuple[Text, ...], Field(min_length=1)], BeforeValidator(_targets)
    ] = "all-linear"
    """What is adapted: linear layers of the blocks and experts, or names and patterns (`q_proj`, `embed_tokens`)."""
    patterns: Annotated[tuple[RankPattern, ...], BeforeValidator(_as_tuple)] = ()
    """Layers with a rank or alpha of their own, as `{match: q_proj, rank: 64}`; the first match counts."""
    scaling: Literal["plain", "rank_stabilised"] = "plain"
    """Whether the factor falls with the rank, or with its root."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability that an input of an addition is dropped in a step; layout and resume do not change which are."""
    init: Literal["zero", "pissa", "loftq"] = "zero"
    """Where additions begin: at zero, as part of the weights (PiSSA), or as what quantising takes from them (LoftQ)."""
    rounds: Annotated[int, Field(ge=0, le=64)] = 0
    """Of `pissa`: rounds of a fast decomposition, 0: an exact one; of `loftq`: how often it quantises, 0 is once."""
    quantize: Quantize = "none"
    """How frozen weights of linear layers and experts of the blocks rest: as they are, in 4 bits (NF4), or in 8;
    `widened` reads those of a quantised checkpoint as plain numbers."""
    also: Annotated[tuple[Literal["embeddings", "head", "norms"], ...], BeforeValidator(_one_or_many)] = ()
    """What is trained whole beside the additions; an embedding and a head that are one stay one."""

    @property
    def exported_rank(self) -> int:
        """The largest of all additions in the export, where those that began as a part of the weights have twice."""
        largest = max((self.rank, *(pattern.rank or 0 for pattern in self.patterns)))
        return largest if self.init == "zero" else 2 * largest


Rounding = Literal["none", "int4", "int8", "int8-int4", "mxfp4", "nvfp4"]


class QuantizeAware(Section):
    """Training with weights as they will be rounded once the model is quantised; torchao's numbers."""

    scheme: Rounding = "none"
    """Rounds weights to 4 or 8 bits; `int8-int4`, `mxfp4` and `nvfp4` inputs of layers too, to 8 bits and to 4."""
    group_size: Literal[32, 64, 128, 256] | None = None
    """Of `int4` and `int8-int4`: numbers of a row that share a scale; none: torchao's, 128 and 32."""
    after_steps: CountOrNone = 0
    """Steps that are trained without rounding at first."""


def _scheme(value: Any) -> Any:
    return {"scheme": value} if isinstance(value, str) else {} if value is None else value


class MemoryBudget(Section):
    """How much the run may take of memory, and of disks for what has no room there."""

    device: Bytes = "auto"
    """Bytes, as 6GB or 6GiB: of one GPU, or of this machine for all CPU workers; `auto` is what is free."""
    host: Bytes = "auto"
    """Bytes of a machine's memory that all its GPU workers may take for what rests there; `auto` is what is free."""
    disk: BytesOrNone = "auto"
    """Bytes of a machine's disks for what rests there of all its workers; 0: nothing does; `auto`: what is free."""


class Memory(Section):
    """How a step is cut up to fit: what is `auto` the planner chooses, the fastest way that fits."""

    zero: Literal[0, 1, 2, 3, "auto"] = "auto"
    """What workers do not keep twice: 0 nothing (replicated), 1 optimizer, 2 also gradients, 3 also parameters."""
    recompute: Literal["none", "selective", "full", "auto"] = "auto"
    """Activations recomputed in the backward pass (activation checkpointing): none, the cheap ones, or whole blocks."""
    recompute_blocks: Count | Literal["auto"] = "auto"
    """How many blocks `full` recomputes, the first ones; `auto`: as few as must, all if `recompute: full` is said."""
    activation_tier: Literal["device", "host", "auto"] = "auto"
    """Where inputs of blocks wait for their backward pass, with `recompute: full`: the device, or the host's memory."""
    moments: Literal["fp32", "bf16", "int8", "auto"] = "auto"
    """How the optimizer's two moments rest between updates: in 8, 4 or about 2 bytes a parameter."""
    optimizer_tier: Literal["device", "host", "disk", "auto"] = "auto"
    """Where the optimizer's state rests: beside the parameters, or streamed at every step from host memory or disk."""
    optimizer_resident: BytesOrNone = "auto"
    """Of that state, bytes kept beside a worker's parameters, as 6GB; `auto`: what fits, none if the tier is said."""
    gradient_tier: Literal["device", "host", "disk", "auto"] = "auto"
    """Where gradients rest between the backward pass and the update."""
    parameter_tier: Literal["device", "host", "disk", "auto"] = "auto"
    """Where the blocks' parameters rest: on the `host` or on `disk` they come block by block (several need ZeRO 3)."""
    sequence_tiles: Count | Literal["auto"] = "auto"
    """In how many tiles of a row's tokens MLPs are computed, and again backward; `auto`: 1 (whole) if that fits."""
    tiles: Count | Literal["auto"] = "auto"
    """In how many tiles the largest weight is gathered, or comes from elsewhere; `auto`: 1 (whole) if that fits."""
    offload_dirs: Annotated[tuple[PathText, ...], BeforeValidator(_one_or_many)] = ()
    """Directories for what rests on disk, filled evenly; none is one inside the run's directory."""
    micro_batch: Count | Literal["auto"] = "auto"
    """Packs in one forward and backward of one worker; the loss does not depend on it."""
    budget: MemoryBudget = Field(default_factory=lambda: MemoryBudget())
    """How much the run may take of memory, and of disks for what has no room there."""


class Parallel(Section):
    """How the workers divide packs and model: what the other axes leave of the workers shards the model's states."""

    replicate: Workers = 1
    """Groups of workers that each hold everything once; states are sharded inside a group (hybrid sharding)."""
    tensor: Workers | Literal["auto"] = 1
    """Neighbouring workers that compute every block together, each with a part of its heads and columns."""
    context: Workers | Literal["auto"] = 1
    """Neighbouring workers that divide the tokens of each row of packs; for attention they exchange heads."""
    pipeline: Workers | Literal["auto"] = 1
    """Workers that divide successive blocks among themselves, each with one or more stages of the model."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b"
    """The order in which the workers of a pipeline take their passes."""
    stages_per_worker: Annotated[int, Field(ge=2, le=MOST_WORKERS)] = 2
    """Stages of each worker under `schedule: interleaved`; under the others each has one."""

    @property
    def together(self) -> int:
        """Workers that train the same packs; fewest of them, where the planner chooses."""
        return self.alike * (1 if self.context == "auto" else self.context)

    @property
    def alike(self) -> int:
        """Those of them that have the same tokens."""
        return (1 if self.tensor == "auto" else self.tensor) * (1 if self.pipeline == "auto" else self.pipeline)

    @property
    def is_open(self) -> bool:
        """Whether the planner chooses how many workers train the same packs."""
        return "auto" in (self.tensor, self.context, self.pipeline)


class Launch(Section):
    """Where the workers run, and how many."""

    launcher: Literal["local", "slurm", "ray"] = Field(default="local", alias="with")
    """What starts the workers: `local` processes on this machine, `slurm` a job on a cluster, `ray` Ray Train."""
    workers: Workers | Literal["auto"] = "auto"
    """Processes over all machines; `auto`: one a visible GPU, or a machine without any; Ray: also `[least, most]`."""
    threads: Workers | Literal["auto"] = "auto"
    """CPU threads of each worker; `auto` divides the physical cores that the workers of a machine may use."""
    timeout: Seconds = 900.0
    """Seconds without progress after which a run ends and says which worker is where."""

    @property
    def num_workers(self) -> int:
        """Number of workers, where it is decided; the config of a run may leave it open, its plan does not."""
        assert self.workers != "auto", "planning.workers says how many"
        return self.workers

    @property
    def fewest_workers(self) -> int:
        """With which the run goes on when others are lost."""
        return self.num_workers

    @property
    def is_elsewhere(self) -> bool:
        """Whether the workers run on other machines than the one that starts them."""
        return self.launcher != "local"

    @property
    def num_nodes(self) -> int:
        """Machines that the workers are spread over, by a launcher that asks for them."""
        return int(getattr(self, "nodes", 1))

    @property
    def node_hardware(self) -> Name:
        """A node's hardware, where a launcher may be told and is."""
        return cast(Name, getattr(self, "hardware", None))

    @property
    def reserved_cpus(self) -> int | Literal["auto"]:
        """CPUs that each worker is given, where a launcher reserves some and it is said how many."""
        return cast(int | Literal["auto"], getattr(self, "cpus_per_worker", "auto"))

    def on(self, kind: str) -> Self:
        """This section as it is on devices of a ``kind``."""
        return self


class LocalLaunch(Launch):
    """Workers as processes of this machine."""

    launcher: Literal["local"] = Field(default="local", alias="with")
    """Of this kind."""


class SlurmLaunch(Launch):
    """Workers as the tasks of one Slurm job. What a cluster asks for besides goes into ``options``."""

    launcher: Literal["slurm"] = Field(default="slurm", alias="with")
    """Of this kind."""
    nodes: Workers = 1
    """Slurm: machines, each with an equal part of the workers."""
    hardware: Name = None
    """Slurm and Ray: a node's hardware, as `tonnage plan --hardware` takes it (`8xH100`); none is like this machine."""
    cpus_per_worker: Workers = 1
    """Slurm: CPUs that each worker is given, as Slurm counts them (often two for a physical core)."""
    gpus_per_node: Annotated[int, Field(ge=0, le=MOST_WORKERS)] = 0
    """Slurm: GPUs on each machine, one for each of its workers; 0 trains on CPUs."""
    partition: Name = None
    """Slurm: partition of the job; none is the cluster's default."""
    account: Name = None
    """Slurm: account that is charged."""
    qos: Name = None
    """Slurm: quality of service."""
    time: Annotated[Text, BeforeValidator(_as_text)] | None = None
    """Slurm: time limit of one job, as minutes, `H:MM:SS` or `D-HH:MM:SS`; the run goes on in as many as it needs."""
    save_seconds: Annotated[int, Field(ge=1, le=65535)] = 120
    """Slurm: seconds before the time limit at which the workers are told to save and the job is queued again."""
    options: Lines = ()
    """Slurm: further options of `sbatch`, such as `--mem=64G` or `--constraint=a100`."""
    setup: Lines = ()
    """Slurm: shell lines that the job runs first, such as `module load cuda`; one that fails ends the job."""
    python: PathText | None = None
    """Slurm: Python that runs the workers, if it is another than the one that submits."""


class RayLaunch(Launch):
    """Workers of Ray Train, on this machine or on a cluster. Shorthand: ``workers: [1, 8]`` is ``least`` and
    ``workers``."""

    launcher: Literal["ray"] = Field(default="ray", alias="with")
    """Of this kind."""
    least: Workers | None = None
    """Ray: fewest workers with which the run goes on when nodes are lost; none is always `workers`."""
    address: Name = None
    """Ray: address of a cluster (`auto`, or HOST:PORT of its head); none starts Ray on this machine, for this run."""
    nodes: Workers = 1
    """Ray: machines that `workers` will be spread over, for the plan; where they run is Ray's choice."""
    hardware: Name = None
    """Slurm and Ray: a node's hardware, as `tonnage plan --hardware` takes it (`8xH100`); none is like this machine."""
    cpus_per_worker: Workers | Literal["auto"] = "auto"
    """Ray: CPUs that each worker reserves and uses at most; `auto` reserves one, and uses its share of the cores."""
    gpus_per_worker: Literal[0, 1, "auto"] = "auto"
    """Ray: GPUs that each worker reserves; 0 trains on CPUs; `auto`: one where a node, as `hardware` says, has any."""
    max_failures: CountOrNone = 3
    """Ray: how often the run begins again from its last checkpoint after a worker or node was lost."""
    resize_seconds: Seconds = 60.0
    """Ray: seconds between two looks at whether there is room for more workers."""
    wait_seconds: Seconds = 300.0
    """Ray: seconds without room for the fewest workers after which the run ends."""
    runtime_env: dict[str, Any] = Field(default_factory=dict)
    """Ray: runtime environment of the workers in Ray's words, such as `pip` or `env_vars`; not for secrets."""

    @model_validator(mode="before")
    @classmethod
    def _spell_out_workers(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and isinstance(value.get("workers"), list | tuple) and len(value["workers"]) == 2:
            least, most = value["workers"]
            return {**value, "least": least, "workers": most}
        return value

    def on(self, kind: str) -> Self:
        """This section with the GPUs of a worker written out, on devices of a ``kind``."""
        if self.gpus_per_worker != "auto":
            return self
        return self.model_copy(update={"gpus_per_worker": int(kind == "cuda")})

    @property
    def num_gpus(self) -> int:
        """GPUs of a worker, where that is decided; the config of a run may leave it open, its plan does not."""
        assert self.gpus_per_worker != "auto", "planning.workers says how many"
        return self.gpus_per_worker

    @property
    def fewest_workers(self) -> int:
        return self.num_workers if self.least is None else self.least

    @property
    def is_elsewhere(self) -> bool:
        return self.address is not None


AnyLaunch = LocalLaunch | SlurmLaunch | RayLaunch
"""Of each kind. Who asks which it is matches all of them, so that the type checker finds what a new kind needs."""


def _launcher_of(value: Any) -> str:
    """The kind of a launch section; what is no known kind is reported as a faulty `with` of the first one."""
    kind = value.get("with", "local") if isinstance(value, Mapping) else getattr(value, "launcher", "local")
    return kind if kind in ("local", "slurm", "ray") else "local"


class Checkpoint(Section):
    """When the run is saved so that it can be carried on."""

    every: CountOrNone | Literal["auto"] = "auto"
    """Steps between checkpoints; 0: none before the end; `auto`: at most 30 minutes are lost, 2% of the time waited."""
    keep: Count = 2
    """How many of the latest checkpoints stay on disk."""
    best: Best = "none"
    """Figure of the evaluations by which the best step is saved, kept and exported; `none` exports the last one."""
    push: Repository = None
    """Repository of the Hugging Face hub, as owner/name, to which each save is pushed as a model, beside training."""
    public: bool = False
    """With `push`: the repository may be one that everybody can read; otherwise it is private, or nothing is pushed."""

    @property
    def steps_between(self) -> int:
        """Steps between checkpoints, which a run's config has as a number; 0 is none before the end."""
        assert self.every != "auto", "planning.saving says what it is"
        return self.every


def _scorer(value: str) -> str:
    if value not in SCORERS and not FUNCTION.fullmatch(value):
        raise ValueError
    return value


def _pattern(value: str | None) -> str | None:
    if value is not None:
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError from error
    return value


def _bounds(value: dict[str, str]) -> dict[str, str]:
    for text in value.values():
        Bound.of(text)
    return value


class Evaluate(Section):
    """When the validation rows are evaluated, how answers are scored, and what must come out."""

    every: CountOrNone | Annotated[float, Field(gt=0, lt=1)] = 0
    """Steps between evaluations, or below 1 a fraction of all steps; 0 is only before the first and at the end."""
    before: bool = True
    """Evaluate before the first step as well, so that the run says what it changed."""
    scorer: Annotated[Text, AfterValidator(_scorer), Words(f"one of {', '.join(SCORERS)}, or module:function")] = "none"
    """How answers to validation rows are scored: `number` takes the last one, as in `#### 42`; `none` asks nothing."""
    pattern: Annotated[Text | None, AfterValidator(_pattern), Words("a regular expression of Python's")] = None
    """With `scorer: regex`: what is compared of answer and row, its first group or all that it matches."""
    answers: Annotated[int, Field(ge=1, le=1_000_000)] = 100
    """With a `scorer`: to how many validation rows, at most, an answer is generated at each evaluation."""
    general: Annotated[Sources | None, Words("sources of rows")] = None
    """Rows that are not trained on: by how much their loss rises is what the model forgets."""
    gate: Annotated[
        dict[Gated, Text],
        AfterValidator(_bounds),
        Words("figures with bounds, as {exact_match: '>= 0.6', forgets: '<= 0.02'}"),
    ] = Field(default_factory=dict)
    """What must hold at the end, as `{exact_match: ">= 0.6"}`; a run that fails it exports and ends with status 4."""
    patience: CountOrNone = 0
    """Evaluations in a row without a better figure (`checkpoint.best`, else `eval_loss`) that end the run; 0: none."""
    prompts: Annotated[int, Field(ge=0, le=200)] | PathText = 0
    """Validation rows, or a file of rows, that the model answers greedily each time: `samples.jsonl`; 0 asks none."""
    max_new_tokens: Count = 64
    """Longest answer, in tokens; of models whose documents need rows of their own, each costs a pass over its row."""

    def steps_between(self, num_steps: int) -> int:
        """Steps between evaluations of a run of so many; 0 is none before the end."""
        return math.ceil(self.every * num_steps) if self.every < 1 else int(self.every)


class Config(Section):
    """Everything about a run: what to train, on what data, with what hardware."""

    model: PathOrId
    """Hub id or local directory of the model."""
    revision: Name = None
    """Branch, tag or commit of a hub model; none is its main branch, and the run keeps the commit that this was."""
    tokenizer: PathOrId | None = None
    """Hub id or local directory of the tokenizer, where that is another than the model's."""
    init: Literal["pretrained", "random"] = "pretrained"
    """Start from the model's weights, or from random ones of the same shape."""
    allow_missing: Lines = ()
    """Parameters that the weight files may lack and that are initialised then, as patterns such as `lm_head.*`."""
    allow_unexpected: Lines = ()
    """Tensors of the weight files that have no place in the model and are left out, as patterns such as `score.*`."""
    trust_remote_code: bool = False
    """Let the model's own Python code run on this machine."""
    rope: Rope | None = None
    """Rotary positions scaled for longer sequences, as `{type: yarn, factor: 4}`; none: as the model has them."""
    data: Data
    """What to train on, and how rows become packs."""
    objective: Annotated[
        Objective, BeforeValidator(_kind), Words(f"a section of keys or one of {', '.join(get_args(ObjectiveKind))}")
    ] = Field(default_factory=Objective)
    """What is minimised; `dpo` is short for `{kind: dpo}`."""
    batch: Annotated[
        Annotated[Batch, Tag("section")] | Annotated[Literal["auto"], Tag("word")],
        Discriminator(_word_or_section),
        BeforeValidator(_empty_is_auto),
    ] = "auto"
    """`tokens` or `sequences` of a step; `auto`: as many packs as leave 20 steps an epoch, at most 65,536 tokens."""
    steps: Count | None = None
    """Length of the run in steps; write this or `epochs`."""
    epochs: Annotated[float, Field(gt=0, le=MOST)] | None = Field(
        default_factory=lambda data: None if data.get("steps") else DEFAULT_EPOCHS
    )
    """Length of the run in passes over the data, such as 0.5; the default where `steps` is not given."""
    optimizer: Optimizer = Field(default_factory=Optimizer, validate_default=True)
    """What updates the weights: AdamW, or Muon for the matrices of the blocks; its schedule, and gradient clipping."""
    adapter: Annotated[
        Annotated[Adapter, Tag("section")] | Annotated[Literal["none", "auto"], Tag("word")],
        Discriminator(_word_or_section),
        BeforeValidator(_null_is_none),
    ] = "none"
    """Train low-rank additions (LoRA), as `{rank: 32}`; `none`: all weights; `auto`: all if they fit, else LoRA."""
    train: Lines = ()
    """Parameters that are trained, as patterns (`model.layers.3?.*`, `blocks[-2:].*`); none: all but a tower's."""
    router_loss: Annotated[float, Field(ge=0, le=1000)] | Literal["auto", "model"] = "auto"
    """Weight of the loss that evens out experts' shares; `model`: the config's; `auto`: that if it asks for one."""
    precision: Literal["bf16", "fp16", "fp32", "fp8", "fp8-emulated"] = "bf16"
    """Precision of weights and arithmetic in the forward and backward; `fp8`: bf16, and products of blocks in fp8."""
    quantize_aware: Annotated[
        QuantizeAware,
        BeforeValidator(_scheme),
        Words(f"a section of keys or one of {', '.join(get_args(Rounding))}"),
    ] = Field(default_factory=QuantizeAware)
    """Round weights as a quantised model has them, so that it loses less; `int4` is short for `{scheme: int4}`."""
    memory: Memory = Field(default_factory=Memory)
    """How a step is cut up to fit."""
    parallel: Parallel = Field(default_factory=Parallel)
    """How the workers divide the model's states."""
    launch: Annotated[
        Annotated[LocalLaunch, Tag("local")] | Annotated[SlurmLaunch, Tag("slurm")] | Annotated[RayLaunch, Tag("ray")],
        Discriminator(_launcher_of),
    ] = Field(default_factory=LocalLaunch)
    """Where the workers run, and how many."""
    kernels: Annotated[
        Annotated[Kernels, Tag("section")] | Annotated[Literal["auto", "plain"], Tag("word")],
        Discriminator(_word_or_section),
        BeforeValidator(_empty_is_auto),
    ] = "auto"
    """Fast operations: `auto` uses all of them, `plain` none, `{norms: off}` all but those that are off."""
    deterministic: bool = False
    """On GPUs: the same bits in every run on the same ones, by kernels that may be slower; on a CPU it is always so."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile each block: `auto` on a GPU, if that works and saves a minute; `on` everywhere, or the run is refused."""
    track: Annotated[
        tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...], BeforeValidator(_one_or_many)
    ] = ()
    """Where metrics are shown besides `metrics.jsonl`; each is an extra: in the checkout, `pip install '.[wandb]'`."""
    track_samples: bool = False
    """Whether trackers are also sent what the model answers to `evaluate.prompts`: prompts and answers as text."""
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    """When the run is saved so that it can be carried on."""
    evaluate: Evaluate = Field(default_factory=Evaluate)
    """When the validation rows are evaluated, how answers are scored, and what must come out."""
    output: PathText = Field(default_factory=lambda data: default_output(data))
    """Directory of the run; by default `runs/` and a name made from the model and the first data file."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of the data order, the validation split, random weights and what is dropped."""

    @model_validator(mode="before")
    @classmethod
    def _default_lr_of_adapters(cls, value: Any) -> Any:
        """The default of ``optimizer.lr`` where additions are trained."""
        if not isinstance(value, Mapping) or not isinstance(value.get("adapter"), Mapping | Adapter):
            return value
        optimizer, objective = value.get("optimizer", {}), value.get("objective")
        if not isinstance(optimizer, Mapping) or "lr" in optimizer:
            return value
        kind = objective.get("kind") if isinstance(objective, Mapping) else getattr(objective, "kind", objective)
        return {**value, "optimizer": {**optimizer, "lr": adapter_lr(compares=kind in COMPARED)}}

    @field_validator("optimizer")
    @classmethod
    def _default_lr_of_pairs(cls, optimizer: Optimizer, info: ValidationInfo) -> Optimizer:
        """The default of ``optimizer.lr`` where preferences are learned. It stays one that nobody has said."""
        objective = info.data.get("objective")
        if objective is None or not objective.compares or "lr" in optimizer.model_fields_set:
            return optimizer
        lower = optimizer.model_copy(update={"lr": PREFERENCE_LR})
        lower.model_fields_set.discard("lr")
        return lower

    @property
    def dtype(self) -> Literal["bf16", "fp16", "fp32"]:
        """Type of weights and activations in the forward and backward pass: with fp8, products alone are in that."""
        return "bf16" if self.precision == "fp8" or self.precision == "fp8-emulated" else self.precision

    @property
    def fp8(self) -> Literal["fp8", "fp8-emulated"] | None:
        """How products are computed in fp8, if they are."""
        return self.precision if self.precision == "fp8" or self.precision == "fp8-emulated" else None

    @property
    def leaves_lr_open(self) -> bool:
        """Whether nothing was said of ``optimizer.lr``."""
        return "lr" not in self.optimizer.model_fields_set

    def for_adapter(self) -> Optimizer:
        """The optimizer's keys where additions are trained: with the learning rate that is usual for them, unless
        another was given."""
        if not self.leaves_lr_open:
            return self.optimizer
        return self.optimizer.model_copy(update={"lr": adapter_lr(compares=self.objective.compares)})

    @property
    def data_workers(self) -> int:
        """Workers, or groups of them, that have tokens of their own, and may share states: all but those of the tensor
        and pipeline axes. Most of them, where the planner chooses."""
        return max(1, self.launch.num_workers // self.parallel.alike)

    @property
    def pack_groups(self) -> int:
        """Workers, or groups of them, that take packs of their own. Most of them, where the planner chooses."""
        return max(1, self.launch.num_workers // self.parallel.together)

    @property
    def kernels_off(self) -> tuple[str, ...]:
        if isinstance(self.kernels, str):
            return KERNELS if self.kernels == "plain" else ()
        return tuple(name for name in KERNELS if getattr(self.kernels, name) == "off")

    @field_serializer("kernels")
    def _write_kernels(self, _: Any) -> str | dict[str, str]:
        """``auto``, ``plain``, or what is off: one way to write each choice."""
        off = self.kernels_off
        return "auto" if not off else "plain" if off == KERNELS else dict.fromkeys(off, "off")

    @property
    def stages_per_worker(self) -> int:
        """Stages of a pipeline that each of its workers has."""
        return self.parallel.stages_per_worker if self.parallel.schedule == "interleaved" else 1

    @property
    def packs_per_step(self) -> int:
        """Packs in one step over all workers (without packing, a pack holds one conversation)."""
        assert self.batch != "auto", "planning.batch says what it is"
        if self.batch.sequences is not None:
            return self.batch.sequences
        assert self.batch.tokens is not None
        return self.batch.tokens // self.data.max_length


def default_output(values: Mapping[str, Any]) -> str:
    """``runs/NAME`` from the model's name and the first data file's, both already validated.

    Where one of them is at fault, pydantic before 2.12 asks all the same, and nobody sees the answer.
    """
    model, data = values.get("model"), values.get("data")
    if model is None or data is None:
        return "runs/run"
    assert isinstance(data, Data)
    stem = PurePosixPath(data.train[0].path.rstrip("/")).name
    stem = re.sub(r"\.(json|jsonl|parquet|csv|arrow|gz|zst)\b", "", stem)
    name = f"{PurePosixPath(model.rstrip('/')).name}-{stem}"
    return "runs/" + (re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "run")
