"""Kernels that are switched off: nobody calls them, what torch computes instead is the same, and plans know."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from tiny import llama_config, write_model
from tonnage.config import schema
from tonnage.decide.models import use_model
from tonnage.kernels import (
    adamw,
    along_rows,
    attention_loops,
    embedding,
    gates,
    norms,
    products,
    softmax,
    sums,
    switches,
    widening,
)
from tonnage.kernels.switches import KERNELS, switch_off, switched_off
from tonnage.model.anatomy import dissect
from tonnage.model.build import allocate, build_on_meta
from tonnage.optim.optimizer import ShardedOptimizer
from tonnage.training.batch import MicroBatch
from tonnage.training.loss import LossModel
from tonnage.training.resting import accumulate_in_fp32
from tonnage.training.weigh import Conditions, weigh, weigh_once

STEPS = 3
LENGTHS = (13, 40, 11)
INNERMOST: dict[str, tuple[Any, str]] = {
    "attention": (attention_loops, "forward"),
    "products": (along_rows, "takes"),
    "widening": (products, "_fill"),
    "norms": (norms, "_forward"),
    "gates": (gates, "_forward"),
    "softmax": (softmax, "_rows"),
    "sums": (sums, "_has_sum"),
    "embedding": (embedding, "add_rows"),
    "adamw": (adamw, "_update_elements"),
}
"""What each kernel calls in the end that a model of full weights uses (``quantized``: see test_quantized_products)."""
TOLERANCES = {
    "attention": 2**-7,
    "products": 2**-8,
    "widening": 2**-8,
    "norms": 2**-7,
    "gates": 2**-7,
    "softmax": 2e-6,
    "sums": 0.0,
    "embedding": 1e-4,
    "adamw": 1e-6,
}
"""Those of the tests that hold each to its twin, of the losses of a short run."""


@pytest.fixture(autouse=True)
def a_processor_that_wants_all_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(widening, "_slow", {torch.bfloat16: False})
    with switched_off(()):
        yield


def config() -> LlamaConfig:
    return llama_config(initializer_range=0.3, tie_word_embeddings=False)


def theirs(dtype: torch.dtype = torch.bfloat16) -> Any:
    """The model as transformers has it."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config(), dtype=dtype, attn_implementation="sdpa")


def ours(dtype: torch.dtype = torch.bfloat16) -> LossModel:
    """The same model as it is trained."""
    model = build_on_meta(config(), dtype)
    allocate(model, torch.device("cpu"))
    model.load_state_dict(theirs(dtype).state_dict())
    return LossModel(model, dissect(model))


def rows() -> list[MicroBatch]:
    """Two micro-batches: of some documents, and of one."""
    chance = torch.Generator().manual_seed(1)
    found = []
    for lengths in (LENGTHS, LENGTHS[:1]):
        ids = torch.randint(0, 256, (1, sum(lengths)), generator=chance)
        ends = torch.tensor(lengths).cumsum(0)
        positions = torch.tensor([place for place in range(sum(lengths)) if place + 1 not in ends])
        found.append(MicroBatch(ids, lengths, positions, ids[0, positions + 1], torch.ones(len(positions))))
    return found


def short_run(dtype: torch.dtype = torch.bfloat16) -> list[float]:
    """The losses of some steps."""
    model = ours(dtype)
    named = dict(model.model.named_parameters())
    accumulate_in_fp32(named.values())
    optimizer = ShardedOptimizer(named, betas=(0.9, 0.95), eps=1e-8, decay=0.1)
    batches, losses = rows(), []
    supervised = float(sum(len(batch.positions) for batch in batches))
    for _ in range(STEPS):
        parts = [model(batch, supervised) for batch in batches]
        for part in parts:
            part.backward()
        losses.append(sum(float(part.detach()) for part in parts))
        optimizer.step(1e-3)
        for parameter in named.values():
            parameter.grad = None
    return losses


class Called(Exception):
    """Of what should not be."""


@pytest.mark.parametrize("kernel", INNERMOST)
def test_what_is_off_is_not_called_and_changes_no_loss(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernel == "widening":
        monkeypatch.setattr(widening, "_slow", {torch.bfloat16: True})
    others = {"gates"} - {kernel}  # whose twin gives torch's bits: a gradient rounded the other way is another update
    with switched_off(others):
        before = short_run()
    assert before[-1] < before[0] - 0.1

    def called(*_: Any, **__: Any) -> None:
        raise Called

    monkeypatch.setattr(*INNERMOST[kernel], called)
    with switched_off(others), pytest.raises(Called):
        short_run()
    with switched_off([kernel, *others]):
        without = short_run()
    assert without == pytest.approx(before, rel=TOLERANCES[kernel])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_is_what_transformers_computes(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Document by document, where products have the same sizes: no operation rounds otherwise, in bf16 either."""
    for place, name in INNERMOST.values():
        monkeypatch.setattr(place, name, None)
    switch_off(KERNELS)
    model, reference = ours(dtype), theirs(dtype)
    for ids in rows()[0].input_ids.split(LENGTHS, dim=1):
        positions = torch.arange(ids.shape[1] - 1)
        batch = MicroBatch(ids, (ids.shape[1],), positions, ids[0, 1:], torch.ones(len(positions)))
        loss, logits = model(batch, float(len(positions))), reference(ids, use_cache=False).logits
        expected = F.cross_entropy(logits[0, :-1].float(), ids[0, 1:])
        loss.backward()
        expected.backward()
        assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    gradients = dict(model.model.named_parameters())
    for name, parameter in reference.named_parameters():
        found, wanted = gradients[name].grad, parameter.grad
        assert isinstance(found, Tensor)
        assert float((found - wanted).float().norm() / wanted.float().norm()) < 1e-5, name


def test_names_are_those_of_the_config() -> None:
    assert set(KERNELS) == {*INNERMOST, "quantized"}
    assert tuple(KERNELS) == schema.KERNELS == tuple(schema.Kernels.model_fields)


def test_switches_are_as_before_afterwards() -> None:
    switch_off(["norms"])
    with switched_off(["sums", "adamw"]):
        assert [kernel for kernel in KERNELS if not switches.is_on(kernel)] == ["sums", "adamw"]
    with pytest.raises(Called), switched_off(KERNELS):
        raise Called
    assert [kernel for kernel in KERNELS if not switches.is_on(kernel)] == ["norms"]
    with pytest.raises(ValueError, match="no kernel is called norm; there are attention, products"):
        switch_off(["norm"])


def test_what_asks_a_run_computes_as_it_did(tmp_path: Path) -> None:
    """``tonnage eval``, ``chat`` and ``generate`` of a run; of anything else with all kernels."""
    text = f"model: x/y\ndata: {{train: x/rows}}\noutput: {tmp_path}\nkernels: {{norms: off, sums: off}}\n"
    (tmp_path / "config.yaml").write_text(text)
    export = write_model(tmp_path / "export", llama_config(num_hidden_layers=1))
    assert use_model(str(tmp_path)).directory == export
    assert [kernel for kernel in KERNELS if not switches.is_on(kernel)] == ["norms", "sums"]
    use_model(str(export))
    assert all(map(switches.is_on, KERNELS))


@pytest.mark.matrix
def test_a_model_is_weighed_without_what_is_off(tmp_path: Path) -> None:
    """And what was found with other switches is not taken for it."""

    def weighed(*off: str) -> Any:
        conditions = Conditions(precision="bf16", document_tokens=64, device_type="cpu")
        return weigh_once(config(), None, conditions, cache=tmp_path, kernels_off=off)

    whole, plain = weighed(), weighed(*KERNELS)
    assert whole.shares_prefixes
    assert not plain.shares_prefixes
    assert plain.blocks["none"].saved(1000) > 1.1 * whole.blocks["none"].saved(1000)  # norms keep more
    with switched_off(KERNELS):
        assert weigh(config(), None, Conditions(precision="bf16", document_tokens=64)) == plain
    assert weighed() == whole
    assert switches.is_on("norms")
