"""The chunked vocabulary projection and its loss, beside whole logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tonnage.prove.proof import Proof
from tonnage.training.head import Head

VOCABULARY, HIDDEN, TOKENS, CHUNK = 8192, 256, 700, 128


def prove(proof: Proof) -> None:
    """In fp32 and bf16, plain, and with a scale and a cap of the logits; in chunks and in one."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator) / HIDDEN**0.5
    targets = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator).to(proof.device)
    weights = torch.rand(TOKENS, generator=generator).to(proof.device)
    weights = weights / weights.sum()
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        for how, scale, cap in (("plain", 1.0, None), ("scaled and capped", 0.5, 30.0)):
            for chunk in (CHUNK, TOKENS):
                operands = [tensor.to(proof.device, dtype) for tensor in (hidden, weight)]
                ours = _ours(operands, targets, weights, scale, cap, chunk)
                right = _theirs(operands, targets, weights, scale, cap)
                case = f"{how}, {'one chunk' if chunk == TOKENS else f'chunks of {chunk}'}"
                loss = float((ours[0] - right[0]).abs() / right[0].abs())
                proof.found(f"head, {name}", f"{case}, loss", loss)
                if name == "fp32":
                    for name_of, mine, other in zip(("hidden states", "weight"), ours[1:], right[1:], strict=True):
                        error = float((mine - other).norm() / other.norm().clamp_min(1e-30))
                        proof.found("head, fp32", f"{case}, gradient of {name_of}", error)


def _ours(
    operands: list[Tensor], targets: Tensor, weights: Tensor, scale: float, cap: float | None, chunk: int
) -> list[Tensor]:
    hidden, weight = (tensor.clone().requires_grad_() for tensor in operands)
    loss = Head(weight, None, scale, cap, chunk).loss(hidden, targets, weights)
    return [loss.detach(), *torch.autograd.grad(loss, (hidden, weight))]


def _theirs(operands: list[Tensor], targets: Tensor, weights: Tensor, scale: float, cap: float | None) -> list[Tensor]:
    hidden, weight = (tensor.float().requires_grad_() for tensor in (part.clone() for part in operands))
    logits = (hidden @ weight.T) * scale
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    loss = (F.cross_entropy(logits, targets, reduction="none") * weights).sum()
    return [loss.detach(), *torch.autograd.grad(loss, (hidden, weight))]
