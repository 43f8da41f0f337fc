"""How the matrices of a model are divided among ranks that compute every block together.

transformers says it for most families: which linear layers are cut by columns, so that each rank has some of the heads
or inner units, and which by rows, so that their outputs are summed (Megatron-LM, Shoeybi et al. 2019, section 3). This
file reads that plan and turns the names into modules. Embedding and head are cut by vocabulary whatever it says.

    tokens of ──► gather ──► columns ──► heads or units of this rank ──► rows ──► sum, ──► tokens of
    this rank     backward: sum,                                            and scatter    this rank
                  and scatter                                     backward: gather

Between a sum and the next entrance each rank has the hidden states of its own part of a row's tokens (Korthikanti et
al. 2022, arXiv:2205.05198), where that is all that a token needs there (``TensorPlan.divides_tokens``). Elsewhere every
rank has those of all tokens: it enters without gathering, and leaves without scattering.
"""

from __future__ import annotations

import inspect
import math
import re
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from tonnage.errors import UserError, user_error
from tonnage.model.anatomy import Anatomy
from tonnage.model.attention import NAME

COLUMNS, ROWS, INSIDE = "colwise", "rowwise", "replicated_with_grad_allreduce"
"""Words of transformers' plans."""


@dataclass(frozen=True)
class TensorPlan:
    """What becomes of the modules of one model; modules it does not name every rank has whole."""

    columns: tuple[nn.Linear, ...]
    """Linear layers of which a rank has some outputs."""
    rows: tuple[nn.Linear, ...]
    """Linear layers of which a rank has some inputs; outputs are summed."""
    inside: tuple[nn.Module, ...]
    """Modules between the two that every rank has whole, and applies to its own heads."""
    entrances: tuple[nn.Module, ...]
    """Modules whose first argument is what columns multiply: its gradient is summed there, once for all of them."""
    embedding: nn.Embedding
    head: nn.Linear
    divides_tokens: bool
    """Whether ranks divide the tokens of a row wherever they do not divide a matrix. Else each computes all of them."""

    def token_ranks(self, ranks: int) -> int:
        """How many of so many ranks divide the tokens of a row."""
        return ranks if self.divides_tokens else 1


def tensor_plan(model: PreTrainedModel, anatomy: Anatomy) -> TensorPlan:
    """The plan of ``model``.

    Raises:
        UserError: transformers has no plan for the family, or one of another kind than by columns and rows.
    """
    styles: dict[str, str] = dict(model.tp_plan or {})
    by_style: dict[str, list[Any]] = {COLUMNS: [], ROWS: [], INSIDE: []}
    strange = {_generic(path): style for path, _ in model.named_parameters() if (style := styles.get(_generic(path)))}
    for path, module in model.named_modules():
        style = styles.get(_generic(path))
        if style is None or module is anatomy.embedding or module is anatomy.head:
            continue
        if style not in by_style or (style != INSIDE and type(module) is not nn.Linear):
            strange[_generic(path)] = style
        else:
            by_style[style].append(module)
    if strange or not by_style[COLUMNS] or not by_style[ROWS]:
        path, style = next(iter(strange.items()), ("", ""))
        raise user_error(
            where="parallel.tensor",
            found=f"a plan of transformers for model type {model.config.model_type} that treats {path} as {style}"
            if strange
            else f"no plan of transformers for model type {model.config.model_type}",
            needed="a family whose blocks transformers cuts by columns and rows alone, as llama, mistral, qwen2, "
            "qwen3, gemma2, gemma3, olmo, phi or gpt_neox",
            change="leave parallel.tensor out: more workers shard the states without it",
        )
    divided = {id(module) for modules in by_style.values() for module in modules}
    divides_tokens = _is_by_token(model, anatomy, divided)
    paths = {id(module): path for path, module in model.named_modules()}
    entrances: dict[int, nn.Module] = {}
    for module in by_style[COLUMNS]:
        parent = model.get_submodule(paths[id(module)].rpartition(".")[0])
        entrance = parent if divides_tokens or _is_divided(parent, divided) else module
        entrances[id(entrance)] = entrance
    return TensorPlan(
        columns=tuple(by_style[COLUMNS]),
        rows=tuple(by_style[ROWS]),
        inside=tuple(by_style[INSIDE]),
        entrances=tuple(entrances.values()),
        embedding=anatomy.embedding,
        head=anatomy.head,
        divides_tokens=divides_tokens,
    )


def check_degree(config: PreTrainedConfig, degree: int) -> None:
    """Refuse a number of ranks that would cut through a head, or leave a rank without a part of the vocabulary.

    Raises:
        UserError: says which numbers would do.
    """
    heads = {
        "attention heads": getattr(config, "num_attention_heads", None),
        "key-value heads": getattr(config, "num_key_value_heads", None),
    }
    counts = {name: number for name, number in heads.items() if isinstance(number, int)}
    largest = math.gcd(*counts.values()) if counts else 1
    if largest % degree or (degree - 1) * -(-config.vocab_size // degree) >= config.vocab_size:
        listed = " and ".join(f"{number} {name}" for name, number in counts.items())
        fitting = [str(number) for number in range(1, largest + 1) if largest % number == 0]
        raise user_error(
            where="parallel.tensor",
            found=f"parallel.tensor is {degree}, and the model has {listed or 'no number of heads'}",
            needed=f"a number that divides them: {', '.join(fitting)}",
            change="set parallel.tensor to one of them",
        )


def fitting_degrees(config: PreTrainedConfig, most: int) -> list[int]:
    """Numbers of ranks up to ``most`` that ``check_degree`` accepts."""
    degrees = []
    for degree in range(1, most + 1):
        try:
            check_degree(config, degree)
        except UserError:
            continue
        degrees.append(degree)
    return degrees


def first_argument(module: nn.Module) -> str:
    """Name of the first argument of a module's forward."""
    return list(inspect.signature(type(module).forward).parameters)[1]


def _generic(path: str) -> str:
    """A path with ``*`` for numbers of layers, as plans have it."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", path)


def _is_by_token(model: PreTrainedModel, anatomy: Anatomy, divided: set[int]) -> bool:
    """Whether packed rows are all that a model is given, and all it has besides what is ``divided``, embedding and head
    are vectors: norms and scales, which look at one token. A matrix elsewhere may be of attention that every rank has
    whole, of an embedding of positions, or of what a block has for each token besides its hidden state."""
    ends = {id(anatomy.embedding), id(anatomy.head)}
    others = (module for module in model.modules() if id(module) not in divided | ends)
    is_small = all(one.dim() < 2 for module in others for one in module.parameters(recurse=False))
    return is_small and model.config._attn_implementation == NAME


def _is_divided(parent: nn.Module, divided: set[int]) -> bool:
    """Whether all of a module's parameters are in divided modules, so that nothing else in it multiplies its input."""
    return all(
        id(module) in divided for module in parent.modules() if next(module.parameters(recurse=False), None) is not None
    )
