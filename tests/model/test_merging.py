"""What is stored in parts is merged as transformers merges it, bit for bit; and parts that are lost are missed."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from stored_models import MIXTURES, Tensors, changed, check, refusal, same, without, write_mixture
from tiny import load
from tonnage.model.build import allocate, load_weights, on_meta
from tonnage.model.files import find_model, read_model_config
from tonnage.model.matching import match
from tonnage.model.stored import read, read_headers
from tonnage.rundir.weights import WeightFacts

BESIDE = {"deepseek_v3": ["e_score_correction_bias"], "apertus": ["beta", "eps"], "lfm2_moe": ["expert_bias"]}
"""What models keep beside their parameters."""
QUICK = ("mixtral", "deepseek_v3", "jamba")
EXPERT = "model.layers.0.block_sparse_moe.experts.{}.{}.weight"
FUSED = "model.layers.0.mlp.experts.gate_up_proj"


def loaded(folder: Path) -> Any:
    files = find_model(str(folder))
    model = on_meta(read_model_config(files), torch.float32)
    allocate(model, torch.device("cpu"))
    load(model, folder)
    return model


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixture(tmp_path_factory.mktemp("model"), "mixtral")


@pytest.mark.parametrize(
    "family", [pytest.param(one, marks=[] if one in QUICK else pytest.mark.slow) for one in MIXTURES]
)
def test_a_mixture_is_loaded_as_transformers_loads_it(family: str, tmp_path: Path) -> None:
    folder = write_mixture(tmp_path, family)
    found = check(folder)
    assert replace(found, carried=(), carried_digest="") == WeightFacts()
    assert [one.part for one in found.carried] == BESIDE.get(family, [])
    same(loaded(folder), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


@pytest.mark.parametrize("how", [{"save_original_format": False}, {"max_shard_size": "10KB"}])
def test_experts_are_found_fused_and_in_several_files(how: dict[str, Any], mixtral: Path, tmp_path: Path) -> None:
    folder = write_mixture(tmp_path, "mixtral", **how)
    files = find_model(str(folder))
    keys = [one.key for one in read_headers(files.weights)]
    assert (FUSED in keys) == ("save_original_format" in how)
    assert (len(files.weights) > 1) == ("max_shard_size" in how)
    assert check(folder) == WeightFacts()
    same(loaded(folder), loaded(mixtral))


def test_wrappers_around_experts_are_taken_off(mixtral: Path, tmp_path: Path) -> None:
    folder = changed(mixtral, tmp_path, lambda t: {f"module.{name}": value for name, value in t.items()})
    assert check(folder) == WeightFacts(unwrapped=True)
    same(loaded(folder), loaded(mixtral))


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("part", ["w1", "w2", "w3"])
def test_an_expert_that_is_lost_is_missed(number: int, part: str, mixtral: Path, tmp_path: Path) -> None:
    lost = EXPERT.format(number, part)
    message = refusal(changed(mixtral, tmp_path, without(lost)))
    of, name = (3, "down_proj") if part == "w2" else (6, "gate_up_proj")
    assert f"1 of the {of} tensors that make up model.layers.0.mlp.experts.{name} are not in the" in message
    assert f"weight files: {lost}\n" in message
    refusal(tmp_path, allow_missing=["*"])


def test_experts_of_which_nothing_is_there_are_a_missing_parameter(mixtral: Path, tmp_path: Path) -> None:
    def take(tensors: Tensors) -> Tensors:
        return {name: value for name, value in tensors.items() if not re.search(r"layers\.0.*\.w[13]\.", name)}

    assert f"1 of the model's 21 parameters are not in the weight files: {FUSED}\n" in refusal(
        changed(mixtral, tmp_path, take)
    )
    assert check(tmp_path, allow_missing=["model.layers.0.*"]) == WeightFacts(missing=(FUSED,))


def renamed(old: str, new: str) -> Any:
    return lambda tensors: {name.replace(old, new): value for name, value in tensors.items()}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda t: t | {EXPERT.format(1, "w1"): t[EXPERT.format(1, "w1")][:-1]}, r"shape \(23, 32\)\n.*\(24, 32\), as"),
        (lambda t: t | {EXPERT.format(3, "w2"): t[EXPERT.format(1, "w2")]}, "1 tensors more than the 3 that make up"),
        (renamed("experts.2.w2", "experts.3.w2"), r"1 of the 3 tensors that make up .*experts\.2\.w2"),
        (
            lambda t: t | {"module." + EXPERT.format(1, "w1"): t[EXPERT.format(1, "w1")]},
            f"2 tensors for one part of {FUSED}",
        ),
        (lambda t: t | {FUSED: torch.zeros(3, 48, 32)}, f"2 tensors for {FUSED}"),
        (
            lambda t: {name: value[:-1] if ".w1." in name else value for name, value in t.items()},
            r"shape \(23, 32\)\n.*\(24, 32\), as",
        ),
        (lambda t: t | {EXPERT.format(0, "w4"): torch.zeros(2)}, r"1 tensors that the model has no place for: .*w4"),
    ],
    ids=["another shape", "one too many", "a gap", "twice", "fused besides", "all of another shape", "unknown"],
)
def test_groups_that_do_not_fit_are_refused(change: Any, told: str, mixtral: Path, tmp_path: Path) -> None:
    assert re.search(told, refusal(changed(mixtral, tmp_path, change)))


def test_a_configuration_of_fewer_experts_is_refused(mixtral: Path, tmp_path: Path) -> None:
    message = refusal(changed(mixtral, tmp_path, lambda t: t, num_local_experts=2))
    assert f"2 tensors more than the 4 that make up {FUSED}" in message


def test_an_expert_that_is_not_finite_is_refused(mixtral: Path, tmp_path: Path) -> None:
    def spoil(tensors: Tensors) -> Tensors:
        tensors[EXPERT.format(1, "w3")][2, 3] = float("inf")
        return tensors

    folder = changed(mixtral, tmp_path, spoil)
    with pytest.raises(Exception, match="1 of the values that were read are not finite as float32"):
        loaded(folder)


@pytest.mark.parametrize("at_a_time", [1, 1 << 30])
def test_a_rank_reads_the_experts_of_its_rows(at_a_time: int, mixtral: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As FSDP shards them, with another axis across: rows 1 and 2, and half of the columns; one row, or all, at a
    time."""
    want = loaded(mixtral).get_parameter(FUSED)
    model = on_meta(read_model_config(find_model(str(mixtral))), torch.float32)
    found = match(model, read_headers(find_model(str(mixtral)).weights), str(mixtral))
    region = (slice(1, 3), slice(0, 48), slice(16, 32))
    target = torch.nn.Parameter(torch.full((2, 48, 16), float("nan")))
    model.get_submodule("model.layers.0.mlp.experts").gate_up_proj = target
    seen: list[str] = []

    def spying(stored: Any) -> Any:
        seen.extend(one.key for one in stored)
        return read(stored)

    def region_of(tensor: Tensor) -> Any:
        return (tensor.detach(), region) if tensor.shape == target.shape else (torch.empty(0), ())

    monkeypatch.setattr("tonnage.model.build.ROWS_BYTES", at_a_time)
    monkeypatch.setattr("tonnage.model.merging.read", spying)
    monkeypatch.setattr("tonnage.model.build.region_of", region_of)
    one = next(group for group in found.groups if FUSED in group.parameters)
    load_weights(model, type(found)(places=(), groups=(one,)), seed=0)
    assert torch.equal(target, want[region])
    assert sorted(seen) == sorted(EXPERT.format(number, part) for number in (1, 2) for part in ("w1", "w3"))
    assert len(load_file(mixtral / "model.safetensors")) > len(seen)
