"""Additions that begin as a part of a weight begin where peft's do, and what comes of it is the weight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora.layer import Linear
from peft.utils.loftq_utils import _low_rank_decomposition
from safetensors.torch import load_file, save_file
from torch import nn

from tonnage.errors import UserError
from tonnage.kernels.quantized import pack, unpack
from tonnage.model.adapters import AdapterSpec, Ranked, Target
from tonnage.model.starts import Low, Origins, beginning_of, doubled, tensors_of, write_index

RANK, FACTOR = 6, 1.5


@pytest.fixture
def weight() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(96, 64)


@pytest.mark.parametrize(("told", "rounds"), [("pissa", 0), ("pissa_niter_16", 16)])
def test_pissa_begins_as_that_of_peft(weight: torch.Tensor, told: Any, rounds: int) -> None:
    weight = weight @ torch.diag(0.5 ** torch.arange(64.0))  # of which a fast decomposition finds the largest values
    spec = AdapterSpec(RANK, FACTOR, init="pissa", rounds=rounds)
    addition, taken = beginning_of(weight.clone(), spec, "layer", None, 3)
    assert taken == addition
    layer = nn.Linear(64, 96)
    layer.weight.data = weight.clone()
    config = LoraConfig(r=RANK, lora_alpha=9, init_lora_weights=told)
    theirs: Any = Linear(layer, "default", config, r=RANK, lora_alpha=9)
    product = theirs.lora_B["default"].weight @ theirs.lora_A["default"].weight
    torch.testing.assert_close(addition.up @ addition.down, product, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(weight - FACTOR * addition.up @ addition.down, layer.weight, rtol=1e-4, atol=2e-3)
    again = beginning_of(weight.clone(), spec, "layer", None, 3).addition
    assert torch.equal(again.down, addition.down)
    if not rounds:
        torch.testing.assert_close(addition.down, theirs.lora_A["default"].weight.data)


@pytest.mark.parametrize("rounds", [0, 1, 4])
def test_loftq_is_the_same_algorithm_over_our_quantiser(weight: torch.Tensor, rounds: int) -> None:
    spec = AdapterSpec(RANK, 1.0, init="loftq", rounds=rounds)
    addition, taken = beginning_of(weight, spec, "layer", "nf4", 0)
    rest, before = weight, None
    for number in range(max(1, rounds)):
        kept = unpack(pack(rest, "nf4"), torch.float32)
        parts = _low_rank_decomposition(weight - kept, reduced_rank=RANK)  # type: ignore[no-untyped-call]
        if number + 1 < max(1, rounds):
            before = parts
            rest = weight - parts["L"] @ parts["R"]
    torch.testing.assert_close(addition.down, parts["R"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(addition.up, parts["L"], rtol=1e-5, atol=1e-5)
    assert (taken is None) == (before is None)
    if taken is not None and before is not None:
        torch.testing.assert_close(taken.up @ taken.down, before["L"] @ before["R"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("init", ["pissa", "loftq"])
def test_a_quantised_weight_and_its_addition_are_nearer_to_the_weight(weight: torch.Tensor, init: Any) -> None:
    """Whatever additions are multiplied by."""
    decaying = weight * torch.linspace(3, 0.1, 64) ** 2  # with few large singular values, as trained weights have
    spec = AdapterSpec(RANK, FACTOR, init=init, patterns=(Ranked("layer", 8, 5.0, 0.625),))
    addition, taken = beginning_of(decaying, spec, "layer", "nf4", 0)
    assert addition.down.shape == (8, 64)
    rest = decaying if taken is None else decaying - 0.625 * taken.up @ taken.down
    kept = unpack(pack(rest, "nf4"), torch.float32)
    plain = unpack(pack(decaying, "nf4"), torch.float32)
    lost = [float((decaying - one).norm()) for one in (kept + 0.625 * addition.up @ addition.down, plain)]
    assert lost[0] < 0.9 * lost[1]


def test_what_a_run_began_with_is_read_or_refused(weight: torch.Tensor, tmp_path: Path) -> None:
    spec = AdapterSpec(RANK, FACTOR, init="loftq", rounds=2)
    beginning = beginning_of(weight, spec, "layer", "nf4", 0)
    file = tmp_path / "rank-0.safetensors"
    save_file(tensors_of("layer", beginning, "loftq"), file)
    write_index(tmp_path, spec, [file])
    origins, target = Origins(tmp_path, spec), Target("layer", nn.Linear(64, 96), "", (96, 64))
    taken = origins.taken(target)
    assert taken is not None
    assert beginning.taken is not None
    torch.testing.assert_close(taken, FACTOR * beginning.taken.up @ beginning.taken.down)
    now = Low(torch.randn(RANK, 64), torch.randn(96, RANK))
    since = origins.since("layer", now)
    began = beginning.addition
    torch.testing.assert_close(since.up @ since.down, now.up @ now.down - began.up @ began.down)
    with pytest.raises(UserError, match="other files than those"):
        Origins(tmp_path, AdapterSpec(RANK, FACTOR, init="pissa"))
    save_file({name: value + 1 for name, value in load_file(file).items()}, file)
    with pytest.raises(UserError, match="other files than those"):
        Origins(tmp_path, spec)
    file.unlink()
    with pytest.raises(UserError, match="files that cannot be read"):
        Origins(tmp_path, spec)


@pytest.mark.parametrize("stabilised", [False, True])
def test_twice_the_rank_is_multiplied_by_the_same(stabilised: bool) -> None:
    factor = 12 / (4**0.5 if stabilised else 4)
    spec = AdapterSpec(4, factor, init="pissa", patterns=(Ranked("q_proj", 8, 4.0, 4 / (8**0.5 if stabilised else 8)),))
    wide, alpha = doubled(spec, 12.0, rank_stabilised=stabilised)
    assert (wide.rank, wide.init, wide.patterns[0].rank) == (8, "zero", 16)
    assert wide.factor == pytest.approx(alpha / (8**0.5 if stabilised else 8)) == pytest.approx(factor)
    assert wide.patterns[0].factor == pytest.approx(spec.patterns[0].factor)
