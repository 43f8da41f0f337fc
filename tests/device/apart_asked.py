"""A worker that evaluates and asks a model on the device ``apart``: with all of it there, and block by block."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from device import apart, apart_runs
from tonnage.data import stop_tokens
from tonnage.data.text.choice import choose
from tonnage.decide import evaluation, models
from tonnage.host import locked
from tonnage.inference.generate import Decoding, Loaded, generate
from tonnage.kernels.switches import KERNELS, switch_off
from tonnage.model.anatomy import dissect
from tonnage.model.files import find_model, read_tokenizer
from tonnage.parallel import host_blocks
from tonnage.parallel.world import World
from tonnage.training import building, isolation
from tonnage.training.isolation import Isolation

ASKED = [[{"role": "user", "content": content}] for content in ("red and blue", "count to ten", "a")]


def main(given: list[str]) -> None:
    """Prints figures and answers of a model on rows, twice of each kind."""
    model, rows = given
    apart.streams_run_late = True
    taken = locked.host_memory
    locked.host_memory = lambda num_bytes: apart.locked(taken(num_bytes))
    with apart_runs.joined() as world, pytest.MonkeyPatch.context() as patch:

        @contextmanager
        def ranks() -> Iterator[World]:
            yield world

        def isolation_for(config: PreTrainedConfig, _: torch.device, max_length: int) -> Isolation:
            return isolation.isolation_for(config, torch.device("cpu"), max_length)

        patch.setattr(evaluation, "ranks", ranks)
        patch.setattr(evaluation, "isolation_for", isolation_for)
        patch.setattr(models, "switch_off", lambda _: switch_off(KERNELS))
        print(json.dumps([_figures(model, rows, patch, away=away) for away in (False, True)]))
        print(json.dumps([_answers(model, world.device, away=away) for away in (False, True)]))


def _figures(model: str, rows: str, patch: pytest.MonkeyPatch, *, away: bool) -> Any:
    said = list[str]()
    patch.setattr(building, "has_no_room", lambda *_: away)
    found = evaluation.evaluate_model(
        model, [{"path": str(rows)}], max_length=512, answers=evaluation.Answers(6, 5), tell=said.append
    )
    return found.loss, repr(found.evaluated), found.exact, said


def _answers(model: str, device: torch.device, *, away: bool) -> Any:
    tokenizer, _ = choose("plain", read_tokenizer(find_model(model)), (), True)
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    if away:
        there = host_blocks.come_and_go(whole, dissect(whole).blocks, device)
    else:
        whole.to(device)
    loaded = Loaded(whole, tokenizer, stop_tokens(tokenizer))
    said = generate(loaded, ASKED, Decoding(max_new_tokens=6))
    return said, away and there.copied_bytes > 3 * sum(one.nbytes for one in there._blocks[0].parameters())
