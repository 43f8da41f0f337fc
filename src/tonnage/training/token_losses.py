"""Losses of supervised rows in which tokens count by what the model makes of them.

Each is cross-entropy whose weights are multiplied by factors, one for a token, that are taken as they are: no gradient
goes through them. So every way in which the head is computed is there for it; the factors cost one more pass over the
vocabulary. An evaluation tells cross-entropy, in which all tokens count alike.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from tonnage.config import Objective
from tonnage.training.head import Head
from tonnage.training.tiled_vocabulary import TiledHead

LIKELIEST = 20
"""Tokens whose entropy is taken."""
MOST_ENTROPY = 3.0
"""The logarithm of ``LIKELIEST``, as its authors round it."""

Factors = Callable[[Head | TiledHead, Tensor, Tensor], Tensor]
"""Takes the head, hidden states (tokens, hidden) and targets int64 (tokens,); returns fp32 (tokens,)."""


def factors_of(objective: Objective) -> Factors | None:
    """What an objective multiplies the weights of tokens by; None where they count alike."""
    match objective.kind:
        case "dft":
            return probabilities
        case "eaft":
            return partial(entropies, power=objective.power)
        case _:
            return None


def probabilities(head: Head | TiledHead, hidden: Tensor, targets: Tensor) -> Tensor:
    """Those of the targets: what the model holds unlikely counts for little.

    Wu et al. 2025, "On the Generalization of SFT: A Reinforcement Learning Perspective with Reward Rectification"
    (dynamic fine-tuning), eq. 9.
    """
    return head.log_probabilities(hidden, targets).exp()


def entropies(head: Head | TiledHead, hidden: Tensor, targets: Tensor, *, power: float) -> Tensor:
    """(H / ln 20)^power of the 20 likeliest tokens' entropy H: where the model is sure, what contradicts it counts for
    little.

    Diao et al. 2026, "Entropy-Adaptive Fine-Tuning: Resolving Confident Conflicts to Mitigate Forgetting".
    """
    assert isinstance(head, Head), "the likeliest tokens are not looked for in tiles"
    logprobs = head.largest(hidden, LIKELIEST).log_softmax(1)
    return (-(logprobs.exp() * logprobs).sum(1) / MOST_ENTROPY) ** power
