"""An adapter's directory as peft writes it: ``adapter_config.json``, and headers of ``adapter_model.safetensors``."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tonnage.errors import Problem, UserError
from tonnage.model.stored import StoredTensor, read_headers, read_json_object, same_numbers

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
POSITIONS = "adapter_positions.json"
"""Positions of the model as the adapter was trained, where they are not the model's own: keys of its configuration, as
``from_pretrained`` of transformers takes them by name. peft has no place for them."""
KNOWN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", "SEQ_CLS", None),
    "bias": ("none",),
    "lora_bias": (False,),
    "use_dora": (True, False, None),
    "use_qalora": (False,),
    "fan_in_fan_out": (True, False),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva", None),
    "use_bdlora": (None, False),
    **dict.fromkeys(("layer_replication", "trainable_token_indices", "alora_invocation_tokens"), (None,)),
    **dict.fromkeys(("arrow_config", "kasa_config", "velora_config", "monteclora_config"), (None,)),
    **dict.fromkeys(("megatron_config", "lora_ga_config"), (None,)),
}
"""Fields that change what an adapter computes, and the values that are known here. Of the ways to begin, those that
change the model's own weights (PiSSA, OLoRA, LoftQ, CorDA) are not among them: the additions belong to what is left."""
ROTATIONS: Mapping[str, Any] = {
    "r": 0,
    "coft": False,
    "block_share": False,
    "use_cayley_neumann": True,
    "num_cayley_neumann_terms": 5,
    "module_dropout": 0.0,
}
"""Fields of rotations of inputs (OFT) that have one value that is known here, which is also peft's own default."""
KNOWN_OF_ROTATIONS: Mapping[str, tuple[Any, ...]] = {
    **KNOWN,
    **{key: (value,) for key, value in ROTATIONS.items()},
    "peft_type": ("OFT",),
    "init_weights": (True, False),
}
OFT_SINCE = (0, 18)
"""The first version of peft whose rotations are those of today."""
NO_MATTER = frozenset(
    {
        "alpha_pattern",
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "ensure_weight_tying",
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_alpha",
        "lora_dropout",
        "eps",
        "megatron_core",
        "modules_to_save",
        "oft_block_size",
        "peft_version",
        "qalora_group_size",
        "r",
        "rank_pattern",
        "revision",
        "runtime_config",
        "target_modules",
        "target_parameters",
        "use_rslora",
    }
)
"""Fields that are read elsewhere, or say how an adapter began or which layers it has, which its file says too."""
_COPY = re.compile(r"\.(original_module|modules_to_save)(?=\.[^.]+$)")
"""What peft writes of an embedding or a head that was trained whole beside its weights, where their rows have grown."""
_VOCABULARY = re.compile(r"(embed|wte|head|output)[^.]*\.weight$")
"""Ends of the names of embeddings and heads."""


@dataclass(frozen=True)
class AdapterFiles:
    """An adapter on this disk."""

    directory: Path
    base: str
    """Directory or hub id of the model that it belongs to, as it says."""
    revision: str | None
    rank: int
    alpha: float
    rank_stabilised: bool
    stored: tuple[StoredTensor, ...]
    experts: tuple[str, ...] = ()
    """Ends of the names of stacked parameters that are adapted."""
    dropout: float = 0.0
    """With which it was trained; it changes nothing of what an adapter computes."""
    scores: bool = False
    """Whether it belongs to a model of scores."""
    ranks: tuple[tuple[str, int], ...] = ()
    """Expressions for the ends of names of layers that have another rank; the first that matches counts."""
    alphas: tuple[tuple[str, float], ...] = ()
    """The same of those that have another alpha."""
    ties: bool = False
    """Whether an embedding and a head that are one in the model are one in it, too, where they are trained whole."""
    magnitudes: bool = False
    """Whether it has lengths of rows (DoRA)."""
    oft_block_size: int = 0
    """Inputs that are rotated together, if it rotates them (OFT): then it has no rank and no alpha."""
    positions: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the model's configuration that were others when it was trained (``POSITIONS``)."""

    @property
    def factor(self) -> float:
        """By which its additions are multiplied."""
        if self.oft_block_size:
            return 1.0
        return factor_of(self.rank, self.alpha, rank_stabilised=self.rank_stabilised)

    def rank_of(self, path: str) -> int:
        return next((rank for named, rank in self.ranks if _ends_with(path, named)), self.rank)

    def alpha_of(self, path: str) -> float:
        return next((alpha for named, alpha in self.alphas if _ends_with(path, named)), self.alpha)

    @property
    def vocabulary(self) -> int:
        """Rows of an embedding or a head that is whole in it, which may be more than the model's; 0 if none is."""
        whole = (
            tensor
            for tensor in self.stored
            if not re.search("lora_|oft_", tensor.key) and _VOCABULARY.search(tensor.key)
        )
        return max((tensor.shape[0] for tensor in whole if len(tensor.shape) == 2), default=0)


def factor_of(rank: int, alpha: float, *, rank_stabilised: bool) -> float:
    """What additions are multiplied by."""
    return alpha / (math.sqrt(rank) if rank_stabilised else rank)


def _ends_with(path: str, expression: str) -> bool:
    """Whether an expression of ``rank_pattern`` or ``alpha_pattern`` is of the layer at a path, as peft reads it."""
    return re.match(rf"(.*\.)?({expression})$", path) is not None


def _patterns(value: Any, *, whole: bool) -> tuple[tuple[str, Any], ...] | None:
    """``rank_pattern`` or ``alpha_pattern`` as pairs; None where it is not expressions and numbers above 0."""
    if not isinstance(value, dict | None):
        return None
    for expression, number in (value or {}).items():
        try:
            re.compile(expression)
        except re.error:
            return None
        if isinstance(number, bool) or not isinstance(number, int if whole else int | float) or number <= 0:
            return None
    return tuple((value or {}).items())


Wrong = Callable[[str, str], None]
"""Notes what is wrong with a field: its key, and what is needed."""


def _check_additions(fields: Mapping[str, Any], wrong: Wrong) -> None:
    rank, alpha, dropout = fields.get("r"), fields.get("lora_alpha"), fields.get("lora_dropout", 0.0)
    if type(rank) is not int or rank < 1:
        wrong("r", "the rank, a number of at least 1")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or alpha <= 0:
        wrong("lora_alpha", "a number above 0")
    if not isinstance(dropout, int | float) or isinstance(dropout, bool) or not 0 <= dropout < 1:
        wrong("lora_dropout", "a number from 0 to below 1")


def _check_rotations(fields: Mapping[str, Any], wrong: Wrong) -> None:
    size, version = fields.get("oft_block_size"), re.match(r"(\d+)\.(\d+)", str(fields.get("peft_version")))
    if type(size) is not int or size < 2:
        wrong("oft_block_size", "a number of at least 2")
    if version is None or (int(version[1]), int(version[2])) < OFT_SINCE:
        wrong("peft_version", f"{'.'.join(map(str, OFT_SINCE))} or newer: rotations were others before")


def _without_copies(stored: tuple[StoredTensor, ...]) -> tuple[StoredTensor, ...]:
    """Without what a file has of a module twice: peft reads what has its plain name."""
    by_key = {tensor.key: tensor for tensor in stored}

    def is_copy(tensor: StoredTensor) -> bool:
        plain = by_key.get(_COPY.sub("", tensor.key), tensor)
        return plain is not tensor and ("original_module" in tensor.key or same_numbers(plain, tensor))

    return tuple(tensor for tensor in stored if not is_copy(tensor))


def read_adapter(directory: Path) -> AdapterFiles:
    """The adapter in a directory; of its weights, the headers.

    Raises:
        UserError: it is none of LoRA or OFT as they are computed here, or its files are missing or damaged.
    """
    path = directory / CONFIG
    fields, problems = read_json_object(path), list[Problem]()
    rotates = fields.get("peft_type") == "OFT"
    accepted, kind = (KNOWN_OF_ROTATIONS, "rotations") if rotates else (KNOWN, "plain low-rank additions")

    def wrong(key: str, needed: str) -> None:
        observed = f"{key} is {str(fields.get(key))[:100]}"
        problems.append(
            Problem(observed, needed, "merge it with peft (merge_and_unload), and train on that", str(path))
        )

    for key, value in fields.items():
        if key in accepted and value not in accepted[key]:
            wrong(key, f"{' or '.join(map(str, accepted[key]))}: {kind} as they are computed here")
        elif key not in accepted and key not in NO_MATTER and value not in (None, False, {}, []):
            wrong(key, "a field that is known here")
    (_check_rotations if rotates else _check_additions)(fields, wrong)
    ranks = _patterns(fields.get("rank_pattern"), whole=True)
    alphas = _patterns(fields.get("alpha_pattern"), whole=False)
    for key, patterns in (("rank_pattern", ranks), ("alpha_pattern", alphas)):
        if patterns is None:
            wrong(key, "expressions for names of layers, each with a number above 0")
    base = fields.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        wrong("base_model_name_or_path", "the directory or hub id of the model that the adapter belongs to")
    if not (directory / WEIGHTS).is_file():
        needed = f"{WEIGHTS} beside {CONFIG}"
        problems.append(Problem("an adapter without weights", needed, "save it as safetensors", str(directory)))
    if problems:
        raise UserError(*problems)
    assert isinstance(base, str)
    beside = directory / base
    revision, experts = fields.get("revision"), fields.get("target_parameters") or ()
    return AdapterFiles(
        directory,
        str(beside) if not Path(base).is_dir() and beside.is_dir() else base,
        revision if isinstance(revision, str) else None,
        0 if rotates else fields["r"],
        0.0 if rotates else float(fields["lora_alpha"]),
        bool(fields.get("use_rslora")),
        _without_copies(read_headers([directory / WEIGHTS])),
        tuple(map(str, experts)),
        0.0 if rotates else float(fields.get("lora_dropout", 0.0)),
        fields.get("task_type") == "SEQ_CLS",
        ranks or (),
        tuple((named, float(alpha)) for named, alpha in alphas or ()),
        bool(fields.get("ensure_weight_tying")),
        bool(fields.get("use_dora")),
        fields["oft_block_size"] if rotates else 0,
        read_json_object(directory / POSITIONS) if (directory / POSITIONS).is_file() else {},
    )
