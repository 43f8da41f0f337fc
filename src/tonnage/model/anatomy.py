"""Where the parts of a causal language model are: its backbone, its blocks, its head.

transformers names these parts in public ways (``base_model``, ``get_output_embeddings``, ``_no_split_modules``);
this file reads them once, so that no other room asks a model what family it is. Families differ in data here,
not in code elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from tonnage.errors import Problem, UserError


@dataclass(frozen=True)
class Anatomy:
    """The parts of one model. Modules are the model's own, not copies."""

    backbone: nn.Module
    """Everything but the head: token ids in, hidden states (batch, tokens, hidden) out."""
    blocks: tuple[nn.Module, ...]
    """The transformer blocks, first to last."""
    block_path: str
    """Where the list of blocks is, from the whole model (``model.layers``)."""
    embedding: nn.Embedding
    head: nn.Linear
    """The vocabulary projection; its weight may be the embedding's (tied)."""
    logit_scale: float
    """Factor applied to the logits (Granite divides, Cohere multiplies); 1 for most."""
    logit_softcap: float | None
    """Logits are squashed to (-softcap, softcap) (Gemma 2); None for most."""

    @property
    def tied(self) -> bool:
        """Whether head and embedding are one parameter."""
        return self.head.weight is self.embedding.weight


def dissect(model: PreTrainedModel) -> Anatomy:
    """Find the parts of ``model``.

    Raises:
        UserError: a part cannot be found; says which, and what was looked for.
    """
    block_names = set(model._no_split_modules or ())
    found = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) > 0
        and all(type(child).__name__ in block_names for child in module)
    ]
    if len(found) != 1:
        paths = ", ".join(path for path, _ in found) or "none"
        raise UserError(
            Problem(
                where=f"model type {model.config.model_type}",
                found=f"{len(found)} lists of transformer blocks in {type(model).__name__} ({paths})",
                needed=f"exactly one list of modules of class {' or '.join(sorted(block_names)) or '(none declared)'}",
                change="choose a decoder-only text model",
            )
        )
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if not isinstance(head, nn.Linear) or not isinstance(embedding, nn.Embedding):
        raise UserError(
            Problem(
                where=f"model type {model.config.model_type}",
                found=f"head {type(head).__name__}, embedding {type(embedding).__name__}",
                needed="a linear vocabulary projection and a token embedding",
                change="choose a causal language model",
            )
        )
    path, blocks = found[0]
    return Anatomy(
        backbone=model.base_model,
        blocks=tuple(blocks),
        block_path=path,
        embedding=embedding,
        head=head,
        logit_scale=_logit_scale(model.config),
        logit_softcap=getattr(model.config, "final_logit_softcapping", None),
    )


def _logit_scale(config: PreTrainedConfig) -> float:
    if (divisor := getattr(config, "logits_scaling", None)) is not None:
        return 1.0 / float(divisor)
    if (factor := getattr(config, "logit_scale", None)) is not None:
        return float(factor)
    return 1.0
