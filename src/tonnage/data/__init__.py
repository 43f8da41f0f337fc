"""Rows in, packs of tokens out, and an account of every token on the way.

    sources ──► reading ──► (forms) ──► text ──► tokens ──► packs
    files       rows        messages    marked   in an      best fit, and
    and rows                            text     Arrow      what a worker
                                                 cache      reads

Each is a folder; ``building`` goes all the way to tokens, in several processes. ``prepare`` runs all of it once, before
any worker starts, and keeps the result in a content-addressed cache. A worker opens a ``PackedDataset`` (memory-mapped,
no tokenizer needed) and asks ``pack_at`` which pack comes next. This room imports no torch. What may be said of data is
the config's section ``data``.
"""

from __future__ import annotations

from tonnage.data.account import Account, SourceAccount
from tonnage.data.held import HeldPacks, Packer
from tonnage.data.packs.dataset import Pack, PackedDataset
from tonnage.data.packs.order import first_packs, pack_at
from tonnage.data.prepare import ModelFacts, Prepared, prepare
from tonnage.data.progress import Progress, silent
from tonnage.data.prompt import encode_prompt, stop_tokens
from tonnage.data.refusals import DataError
from tonnage.data.sources.in_memory import keep_rows

__all__ = [
    "Account",
    "DataError",
    "HeldPacks",
    "ModelFacts",
    "Pack",
    "PackedDataset",
    "Packer",
    "Prepared",
    "Progress",
    "SourceAccount",
    "encode_prompt",
    "first_packs",
    "keep_rows",
    "pack_at",
    "prepare",
    "silent",
    "stop_tokens",
]
