"""A newer FlashAttention in place of torch's own, where it is installed and made for the card.

The kernel for a row of documents (``torch.nn.attention.varlen``) and ``scaled_dot_product_attention`` call operations
of torch's, forward and backward, for which an installed package may register its own kernels:

    FA3   FlashAttention 3, of the package ``flash_attn_interface``     cards of capability 9.x (Hopper)
    FA4   FlashAttention 4, of the package ``flash_attn.cute``          9.x and 10.x (Blackwell of data centres)

It does for the whole process (``torch.nn.attention.activate_flash_attention_impl``), and raises for what its kernels do
not take: kinds of heads, and dropout. So whoever attends lets each kind be tried first (``check``), and with the first
that fails torch's own are back, for all. No card has run this so far: that it is faster is not said here.
"""

from __future__ import annotations

import importlib.util
import logging
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    restore_flash_attention_impl,
)


@dataclass(frozen=True)
class Newer:
    """An implementation that torch knows to activate."""

    key: str
    """By which torch knows it."""
    title: str
    package: str
    capabilities: tuple[int, ...]
    """First numbers of the capabilities of cards for which torch lets it be."""

    @property
    def is_installed(self) -> bool:
        """Whether its package is there, which is not imported for that."""
        parent, *inside = self.package.split(".")
        spec = importlib.util.find_spec(parent)
        if spec is None or not inside:
            return spec is not None
        return any(Path(place, *inside).exists() for place in spec.submodule_search_locations or ())

    def __str__(self) -> str:
        return f"{self.title} ({self.package})"


NEWER = (
    Newer("FA3", "FlashAttention 3", "flash_attn_interface", (9,)),
    Newer("FA4", "FlashAttention 4", "flash_attn.cute", (9, 10)),
)
"""The first that is installed and made for a card is used."""

_log: Callable[[str], None] = logging.getLogger(__name__).warning
_tried: set[Hashable] = set()


def installed_for(capability: tuple[int, int]) -> list[Newer]:
    """Those that are installed and made for cards of a capability."""
    return [kernel for kernel in NEWER if capability[0] in kernel.capabilities and kernel.is_installed]


def choose(device: torch.device, log: Callable[[str], None], *, newer: bool) -> Newer | None:
    """Let a ``newer`` FlashAttention compute attention in this process, if that may be and one is installed and made
    for ``device``; else torch's own.

    Returns it; ``log`` is told of it, of one that cannot be had and why, and later if a kind of heads takes it back.
    """
    global _log
    if device.type != "cuda":
        return None
    _log = log
    _tried.clear()
    if not newer:
        use_own()
        return None
    for candidate in installed_for(torch.cuda.get_device_capability(device)):
        try:
            activate_flash_attention_impl(candidate.key)
        except Exception as error:  # whatever its import raises
            log(f"{candidate} is installed, and attention does without: {_in_a_line(error)}")
            continue
        log(f"attention: {candidate}, which is installed; kernels.attention=off keeps torch's own")
        return candidate
    return None


def use_own() -> None:
    """Let torch's own FlashAttention compute attention again."""
    if current_flash_attention_impl() is not None:
        restore_flash_attention_impl()


def is_newer() -> bool:
    """Whether attention is computed by a newer one than torch's own."""
    return current_flash_attention_impl() is not None


def check(kind: Hashable, attempt: Callable[[], object]) -> None:
    """Before a newer one computes a ``kind`` of attention for the first time: ``attempt`` that, forward and backward.
    If it raises, torch's own computes all attention from then on."""
    if kind in _tried:
        return
    _tried.add(kind)
    name = current_flash_attention_impl()
    if (error := _error_of(attempt)) is not None:
        use_own()
        _log(f"attention: torch's own FlashAttention, as {name} does not take {kind}: {_in_a_line(error)}")


def _error_of(attempt: Callable[[], object]) -> Exception | None:
    """What an attempt raises, in a thread of its own: a block that is recomputed keeps what is saved inside of it, by
    hooks and modes that torch has for each thread."""
    errors = list[Exception]()
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def run() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)
            attempt()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="attention-attempt")
    thread.start()
    thread.join()
    return errors[0] if errors else None


def _in_a_line(error: Exception) -> str:
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
