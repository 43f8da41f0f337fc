"""Which kernels are switched off in this process: the one question that every kernel asks before it is used.

All are on until somebody switches some off: a worker does so once, at its start, as its plan says (``kernels`` of the
config), and a process that weighs a model for such a plan does so while it weighs. What is off is computed by the
kernel's plain twin in torch. Where no kernel applies (to other types of numbers, say, or on a GPU to most) a switch
changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

Kernel = Literal[
    "attention", "products", "widening", "norms", "gates", "softmax", "sums", "embedding", "quantized", "adamw"
]

KERNELS: Mapping[Kernel, str] = {
    "attention": "attention within the documents of a row, by loops; on a GPU by a newer FlashAttention, if installed",
    "products": "gradients of weights by tile registers on CPUs with AMX, products added to sums piece by piece",
    "widening": "16-bit products computed in fp32, on processors where those are faster",
    "norms": "root-mean-square norms in one pass over memory",
    "gates": "silu(gate) * up of 16-bit numbers and its gradients in one pass over memory",
    "softmax": "cross-entropy of 16-bit logits and its gradient in the logits' own memory",
    "sums": "gradients of several micro-batches added to sums in fp32 where they are computed",
    "embedding": "the gradient of the embedding rows that were looked up, summed in fp32",
    "quantized": "weights of 4 and 8 bits widened for products: block by block in the cache, on a GPU by one kernel",
    "adamw": "the update of AdamW in one pass over weights, masters and moments",
}
"""Every kernel that can be switched off, and what it does."""

_off: frozenset[str] = frozenset()


def is_on(kernel: Kernel) -> bool:
    """Whether a kernel may be used in this process."""
    return kernel not in _off


def switch_off(kernels: Iterable[str]) -> None:
    """From now on in this process exactly these ``kernels`` are off; none: all are on.

    Raises:
        ValueError: there is no kernel of such a name.
    """
    global _off
    off = frozenset(kernels)
    if unknown := sorted(off.difference(KERNELS)):
        raise ValueError(f"no kernel is called {', '.join(unknown)}; there are {', '.join(KERNELS)}")
    _off = off


@contextmanager
def switched_off(kernels: Iterable[str]) -> Iterator[None]:
    """Exactly these ``kernels`` are off inside, in all threads of this process; afterwards it is as before.

    Raises:
        ValueError: there is no kernel of such a name.
    """
    before = _off
    switch_off(kernels)
    try:
        yield
    finally:
        switch_off(before)
