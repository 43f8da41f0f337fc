"""Where the parts of a causal language model, or of a scorer, are: its backbone, its blocks, its head.

transformers names these parts in public ways (``base_model``, ``get_output_embeddings``, ``_no_split_modules``);
this file reads them once, so that no other room asks a model what family it is. Families differ in data here,
not in code elsewhere.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tonnage.errors import user_error
from tonnage.model.scorer import head_of, is_scorer

WEIGHTED = (nn.Linear, Conv1D, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding)
"""Layers whose ``weight`` is a matrix, or a stack of them, whatever they or their subclasses are called."""
CHANNELWISE = ("A_log", "D")
"""State-space parameters that are multiplied number by number: Mamba's authors do not decay them."""


@dataclass(frozen=True)
class Anatomy:
    """The parts of one model. Modules are the model's own, not copies."""

    backbone: nn.Module
    """Everything but the head: token ids in, hidden states (batch, tokens, hidden) out."""
    blocks: tuple[nn.Module, ...]
    """The transformer blocks, first to last."""
    embedding: nn.Embedding
    head: nn.Linear
    """The vocabulary projection, whose weight may be the embedding's (tied); of a scorer, what gives its number."""
    logit_scale: float
    """Factor applied to the logits (Granite divides, Cohere multiplies); 1 for most."""
    logit_softcap: float | None
    """Logits are squashed to (-softcap, softcap) (Gemma 2); None for most."""
    scores: bool = False
    """Whether the head gives one number, and no logits."""

    @property
    def tied(self) -> bool:
        """Whether head and embedding are one parameter."""
        return self.head.weight is self.embedding.weight


def dissect(model: PreTrainedModel) -> Anatomy:
    """Find the parts of ``model``.

    Raises:
        UserError: a part cannot be found; says which, and what was looked for.
    """
    blocks = _blocks(model)
    head, embedding = head_of(model), model.get_input_embeddings()
    if not isinstance(head, nn.Linear) or not isinstance(embedding, nn.Embedding):
        raise user_error(
            where=f"model type {model.config.model_type}",
            found=f"head {type(head).__name__}, embedding {type(embedding).__name__}",
            needed="a linear vocabulary projection and a token embedding",
            change="choose a causal language model",
        )
    return Anatomy(
        backbone=_backbone(model),
        blocks=blocks,
        embedding=embedding,
        head=head,
        logit_scale=_logit_scale(model.config),
        logit_softcap=getattr(model.config, "final_logit_softcapping", None),
        scores=is_scorer(model.config),
    )


def _backbone(model: PreTrainedModel) -> nn.Module:
    """The base model; of a family that names it wrongly, the model inside it."""
    if model.base_model is not model:
        backbone: nn.Module = model.base_model
        return backbone
    return next((child for child in model.children() if isinstance(child, PreTrainedModel)), model)


def _blocks(model: PreTrainedModel) -> tuple[nn.Module, ...]:
    """The modules of the lists that hold the classes of blocks named by the family; if it names none, of the list that
    holds most parameters."""
    names = set(model._no_split_modules or ())
    lists = [
        module
        for module in _backbone(model).modules()
        if isinstance(module, nn.ModuleList) and next(module.parameters(), None) is not None
    ]
    named = [module for module in lists if all(type(child).__name__ in names for child in module)]
    inside = {id(part) for module in named for child in module for part in child.modules()}
    if outermost := [module for module in named if id(module) not in inside]:
        return tuple(child for module in outermost for child in module)
    if not lists:
        raise user_error(
            where=f"model type {model.config.model_type}",
            found=f"no list of transformer blocks in {type(model).__name__}",
            needed="a list of modules that hidden states go through one after another",
            change="choose a decoder-only text model",
        )
    return tuple(max(lists, key=lambda blocks: sum(one.numel() for block in blocks for one in block.parameters())))


def mlps_of(block: nn.Module) -> list[nn.Module]:
    """The MLPs of a block that take hidden states alone, (..., hidden), and make of each token what no other token
    changes. Mixtures of experts are none of them: what a router does with a token may depend on the others, and its
    loss is taken over all."""
    return [child for child in block.children() if _is_mlp(child)]


def norms_of(block: nn.Module) -> list[nn.Module]:
    """The norms of a block, of its hidden states, that normalise every token by itself."""
    return [child for child in block.children() if _is_named(child, ("RMSNorm", "LayerNorm"))]


def _is_named(module: nn.Module, ends: tuple[str, ...]) -> bool:
    """Whether a module's class is called so, and takes one argument."""
    takes = list(inspect.signature(type(module).forward).parameters)[1:]
    return type(module).__name__.endswith(ends) and len(takes) == 1


def _is_mlp(module: nn.Module) -> bool:
    if not _is_named(module, ("MLP", "Mlp", "FeedForward", "FFN")):
        return False
    layers = [part for part in module.modules() if part._parameters and not isinstance(part, (nn.Linear, Conv1D))]
    routes = any(isinstance(part, nn.ModuleList) for part in module.modules())
    return not routes and all(is_norm("", layer) for layer in layers)


def _logit_scale(config: PreTrainedConfig) -> float:
    if (divisor := getattr(config, "logits_scaling", None)) is not None:
        return 1.0 / float(divisor)
    if (factor := getattr(config, "logit_scale", None)) is not None:
        return float(factor)
    return 1.0


def is_norm(path: str, module: nn.Module) -> bool:
    """Whether a module normalises, by its class or by the name that the model has for it."""
    names = type(module).__name__, path.rpartition(".")[2]
    return not isinstance(module, WEIGHTED) and any("norm" in name.lower() for name in names)


def undecayed(model: nn.Module) -> set[str]:
    """Names of the parameters without weight decay: biases, norms, scales, state-space parameters and vectors, of
    however many dimensions they are stored. The others are matrices: of linear layers, experts, routers, convolutions
    and embeddings, and low-rank additions."""
    return {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and not _is_decayed(path, module, name, parameter)
    }


def _is_decayed(path: str, module: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    if "lora_" in name:
        return parameter.dim() > 1
    if "bias" in name or "bias" in path.rpartition(".")[2]:  # the latter is an embedding that is added to scores
        return False
    if name == "weight" and isinstance(module, WEIGHTED):
        return True
    if name in CHANNELWISE or name.endswith("scale") or "norm" in name or is_norm(path, module):
        return False
    return sum(size > 1 for size in parameter.shape) > 1
