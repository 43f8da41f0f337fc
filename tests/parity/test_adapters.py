"""Low-rank additions: every layout equals peft over plain transformers, from the same first matrices."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, OFTConfig, get_peft_model
from peft.utils.loftq_utils import _low_rank_decomposition
from plain import metrics, plain_loop
from ready import of_families, run_of
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Lfm2Config, PreTrainedConfig, Qwen3Config

from forked import train
from tiny import byte_tokenizer, llama_config, mixture_config, neox_config
from tonnage.checkpoint.save import checkpoint_path
from tonnage.checkpoint.shards import Shards
from tonnage.data import pack_at
from tonnage.decide.decision import Decision
from tonnage.errors import UserError
from tonnage.kernels.dropout import Mask, kept, salt_of, threshold_of, token_keys
from tonnage.kernels.quantized import pack, unpack
from tonnage.model.adapters import initialise
from tonnage.planning.rules import shards_packed
from tonnage.planning.space import packed_base, packed_directory, resting_bytes
from tonnage.rundir.directory import RunDirectory
from tonnage.training.batch import draw_of

STEPS, SEQUENCES = 4, 6
LARGE: dict[str, Any] = {"initializer_range": 0.2}
OPTIMIZER: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "clip": 0.5, "warmup": 0, "eps": 1e-5}
"""``eps`` is above the gradients that are rounding alone, which Adam would make as large as any other."""


def families() -> dict[str, PreTrainedConfig]:
    small: dict[str, Any] = {"vocab_size": 258, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads: dict[str, Any] = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
    }
    return {
        "llama": llama_config(tie_word_embeddings=False, **LARGE),
        "tied": llama_config(**LARGE),
        "gpt_neox": neox_config(**LARGE),
        "qwen3": Qwen3Config(**small, **heads, **LARGE),
        "wide": Qwen3Config(
            **small | {"intermediate_size": 128, "hidden_size": 128}, **heads | {"head_dim": 32}, **LARGE
        ),
        "qwen3_moe": mixture_config("qwen3_moe"),
        "lfm2": Lfm2Config(**small, **heads, layer_types=["conv", "full_attention"], **LARGE),
    }


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Decision]:
    """What was decided for a run that is ready for its workers: of a family, on so many, with other keys of config."""
    return of_families(
        tmp_path_factory.mktemp("adapters"),
        write_family,
        sequences=SEQUENCES,
        steps=STEPS,
        optimizer=OPTIMIZER,
        adapter={"rank": 4, "alpha": 12},
    )


def write_family(family: str, directory: Path) -> None:
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(families()[family], dtype=torch.float32).bfloat16()
    made.save_pretrained(directory, save_original_format=False)
    byte_tokenizer().save_pretrained(directory)


def with_peft(decision: Decision, **more: Any) -> Callable[[Any], Any]:
    """A model with peft's additions, as a run's config has them and with ``more`` that peft is told, that begin as the
    run's do."""
    said = decision.config.adapter
    assert not isinstance(said, str)

    def change(model: Any) -> Any:
        if said.quantize != "none":
            for name, weight in model.base_model.layers.named_parameters():
                if weight.dim() > 1 and "norm" not in name and not name.endswith("gate.weight"):
                    weight.data = unpack(pack(weight.data, said.quantize), torch.float32)
        named = {"embeddings": "embed_tokens", "head": "lm_head", "norms": "norm"}
        experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        wanted: Any = said.targets
        if not hasattr(model.config, "num_experts"):
            experts = []
        elif wanted == "all-linear":  # which is the router too, with peft
            wanted = ["q_proj", "k_proj", "v_proj", "o_proj"]
        if said.kind == "oft":
            return get_peft_model(model, OFTConfig(oft_block_size=said.oft_block_size, target_modules=wanted))
        config = LoraConfig(
            r=said.rank,
            lora_alpha=round(said.alpha),
            target_modules=wanted,
            target_parameters=experts or None,
            use_rslora=said.scaling == "rank_stabilised",
            modules_to_save=[named[one] for one in said.also] or None,
            ensure_weight_tying=bool(said.also),
            use_dora=said.kind == "dora",
            **more,
        )
        adapted = get_peft_model(model, config)
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if parameter.requires_grad and ("lora_A" in name or "lora_B" in name or "embedding" in name):
                    start = {ours(name): torch.empty(stacked(name, parameter.shape, model))}
                    initialise(start, decision.config.seed)
                    parameter.copy_(as_peft(name, start[ours(name)]))
        return adapted

    return change


def ours(name: str) -> str:
    """Our name of a parameter of peft's."""
    name = name.removeprefix("base_model.model.").replace(".modules_to_save.default", "")
    if ".experts." in name:
        stacked = "gate_up_proj" if ".base_layer." in name else "down_proj"
        name = name.replace(".base_layer", "").replace(".experts.lora", f".experts.{stacked}_lora")
    name = name.replace("lora_magnitude_vector", "lora_magnitude")
    return name.removesuffix(".default.weight").removesuffix(".default")


def stacked(name: str, shape: torch.Size, model: Any) -> tuple[int, ...]:
    """Our shape of a parameter of peft's, which lays the experts side by side."""
    if "lora_embedding_A" in name:
        return tuple(shape)[::-1]
    if ".experts." not in name:
        return tuple(shape)
    experts = model.config.num_experts
    return (experts, shape[0] // experts, shape[1]) if "lora_A" in name else (experts, shape[0], shape[1] // experts)


def as_peft(name: str, value: Tensor) -> Tensor:
    """Our parameter as peft has it."""
    if "lora_embedding_A" in name:
        return value.t()
    if ".experts." not in name:
        return value
    return value.flatten(0, 1) if "lora_A" in name else value.permute(1, 2, 0).flatten(1)


def trained(run: RunDirectory, step: int = STEPS) -> dict[str, Tensor]:
    """What a checkpoint has of a model."""
    shards = Shards(checkpoint_path(run.checkpoints, step))
    names = [name for name in shards.names() if name.startswith("model.")]
    return {
        name.removeprefix("model."): shards.read(name, tuple(slice(0, size) for size in shards.shape(name)))
        for name in names
    }


def assert_as_peft(decisions: list[Decision], change: Callable[[Any], Any] | None = None) -> None:
    """Losses, norms and last weights are those of peft over the plain loop, and nothing else is saved."""
    steps, weights = plain_loop(decisions[0], change or with_peft(decisions[0]))
    assert abs(steps[-1]["loss"] - steps[0]["loss"]) > 2e-3 * steps[0]["loss"]
    for decision in decisions:
        got = metrics(run_of(decision))
        assert len(got) == decision.config.steps
        for one, plain in zip(got, steps, strict=True):
            where = f"{decision.plan.layout}, step {one['step']}"
            assert one["loss"] == pytest.approx(plain["loss"], rel=1e-5), where
            assert one["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-4), where
        saved = trained(run_of(decision), len(got))
        assert saved.keys() == {ours(name) for name in weights}
        for name, weight in weights.items():
            found = as_peft(name, saved[ours(name)])
            assert float((found - weight).norm()) <= 1e-4 * float(weight.norm()) + 1e-7, name


ONE: list[dict[str, Any]] = [{"recompute": "none"}, {"recompute": "full", "micro_batch": 1}, {"recompute": "selective"}]
TWO: list[dict[str, Any]] = [
    {"zero": 0, "recompute": "none", "micro_batch": 1},
    {"zero": 2, "recompute": "full"},
    {"zero": 3, "recompute": "full", "micro_batch": 1},
]


@pytest.mark.matrix
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt_neox", "tied", "qwen3"])
def test_additions_equal_those_of_peft_in_every_layout(write: Callable[..., Decision], family: str) -> None:
    alone = [write(family, **memory) for memory in ONE]
    together = [write(family, 2, **memory) for memory in TWO]
    axes = [write(family, 2, parallel={"pipeline": 2}, recompute="full")]
    if family != "qwen3_moe":
        axes.append(write(family, 2, parallel={"tensor": 2}, recompute="none"))
    train((1, map(run_of, alone)), (2, map(run_of, [*together, *axes])))
    assert_as_peft([*alone, *together, *axes])


MANY_STEPS = 20
"""Of each combination: no difference may grow."""
RECOMPUTES = ("none", "full")
AXES: list[dict[str, Any]] = [
    *({"zero": zero, "micro_batch": 1} for zero in (0, 3)),
    *({"parallel": {axis: 2}} for axis in ("tensor", "pipeline")),
]


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("form", ["none", "nf4"])
@pytest.mark.parametrize("family", ["llama", "tied", "gpt_neox", "qwen3", "wide", "qwen3_moe"])
def test_every_combination_equals_peft_for_many_steps(write: Callable[..., Decision], family: str, form: str) -> None:
    also = ["embeddings"] if family == "tied" else []
    adapter = {"rank": 4, "alpha": 12, "quantize": form, "also": also}
    keys: dict[str, Any] = {"steps": MANY_STEPS, "optimizer": OPTIMIZER | {"lr": 3e-3}, "adapter": adapter}
    undivided = family == "qwen3_moe" or (form == "nf4" and family != "wide")  # these have no tensor axis
    axes = [one for one in AXES if not (undivided and "tensor" in one.get("parallel", {}))]
    alone = [write(family, recompute=recompute, **keys) for recompute in RECOMPUTES]
    together = [write(family, 2, recompute=recompute, **one, **keys) for one in axes for recompute in RECOMPUTES]
    train((1, map(run_of, alone)), (2, map(run_of, together)))
    assert_as_peft([*alone, *together])


PATTERNS = [{"match": "layers.0.*.q_proj", "rank": 8, "alpha": 5}, {"match": "down_proj", "rank": 2}]


@pytest.mark.matrix
@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3_moe", marks=pytest.mark.matrix)])
def test_ranks_by_pattern_are_those_of_peft(write: Callable[..., Decision], family: str) -> None:
    adapter = {"rank": 4, "alpha": 12, "scaling": "rank_stabilised", "patterns": PATTERNS}
    alone = [write(family, adapter=adapter, recompute="full", micro_batch=1)]
    together = [write(family, 2, adapter=adapter, **TWO[2])]
    train((1, map(run_of, alone)), (2, map(run_of, together)))
    named: dict[str, Any] = {
        "rank_pattern": {r"layers\.0\..*q_proj": 8, "down_proj": 2},
        "alpha_pattern": {r"layers\.0\..*q_proj": 5},
    }
    assert_as_peft([*alone, *together], with_peft(alone[0], **named))


EVERY = pytest.mark.parametrize(
    "every", [pytest.param(False, marks=pytest.mark.slow), pytest.param(True, marks=pytest.mark.matrix)]
)
"""A slice of the layouts, or all of them."""
OFT: dict[str, Any] = {"steps": 10, "adapter": {"kind": "oft", "oft_block_size": 8}}


@pytest.mark.matrix
@pytest.mark.parametrize("every", [False, True])
def test_rotations_are_those_of_peft(write: Callable[..., Decision], every: bool) -> None:
    """Wherever states rest, over weights as they are and in 4 bits, and when a run goes on."""
    over: dict[str, Any] = OFT | {"adapter": OFT["adapter"] | {"quantize": "nf4"}}
    alone, packed = [write("llama", **OFT, **ONE[2])], [write("llama", **over, recompute="full", micro_batch=1)]
    together, packed_together = list[Decision](), list[Decision]()
    if every:
        alone += [write("llama", **OFT, **memory) for memory in (ONE[0], *ELSEWHERE)]
        packed.append(write("llama", **over, parameter_tier="disk"))
        axes: list[dict[str, Any]] = [{"pipeline": 2}, {"pipeline": 2, "schedule": "zero_bubble"}, {"context": 2}]
        together = [write("llama", 2, **OFT, **memory) for memory in TWO]
        together += [write("llama", 2, **OFT, parallel=axis, recompute="full") for axis in axes]
        packed_together = [write("llama", 2, **over, **memory) for memory in TWO if may_share(memory)]
    train((1, map(run_of, [*alone, *packed])), (2, map(run_of, [*together, *packed_together])))
    assert_as_peft([*alone, *together])
    assert_as_peft([*packed, *packed_together])
    again = write("llama", 1, (run_of(alone[0]), 4), **OFT, recompute="full")
    train((1, [run_of(again)]))
    wanted = trained(run_of(alone[0]), 10)
    assert all(torch.equal(value, wanted[name]) for name, value in trained(run_of(again), 10).items())


DORA: dict[str, Any] = {"steps": 10, "adapter": {"kind": "dora", "rank": 4, "alpha": 12}}


@pytest.mark.matrix
@pytest.mark.parametrize("every", [False, True])
def test_magnitudes_are_those_of_peft(write: Callable[..., Decision], every: bool) -> None:
    """With tied embeddings, wherever states rest, and when a run goes on."""
    tied = [write("tied", **DORA, **memory) for memory in (ONE[2], *([ONE[1], *ELSEWHERE] if every else []))]
    tied_on_two = [write("tied", 2, **DORA, **memory) for memory in (TWO if every else TWO[2:])]
    if every:
        axes: list[dict[str, Any]] = [{"pipeline": 2}, {"pipeline": 2, "schedule": "zero_bubble"}]
        tied_on_two += [write("tied", 2, **DORA, parallel=axis, recompute="full") for axis in axes]
    train((1, map(run_of, tied)), (2, map(run_of, tied_on_two)))
    assert_as_peft([*tied, *tied_on_two])
    again = write("tied", 1, (run_of(tied[0]), 4), **DORA, recompute="selective")
    train((1, [run_of(again)]))
    wanted = trained(run_of(tied[0]), 10)
    assert all(torch.equal(value, wanted[name]) for name, value in trained(run_of(again), 10).items())


@pytest.mark.matrix
@EVERY
def test_magnitudes_over_packed_weights_are_those_over_widened_ones(
    write: Callable[..., Decision], every: bool
) -> None:
    over = DORA | {"adapter": DORA["adapter"] | {"quantize": "nf4"}}
    packed = [write("tied", **over, recompute="selective")]
    if every:
        packed.append(write("tied", **over, parameter_tier="disk"))
    layouts = [memory for memory in (TWO if every else TWO[2:]) if may_share(memory)]
    packed_on_two = [write("tied", 2, **over, **memory) for memory in layouts]
    train((1, map(run_of, packed)), (2, map(run_of, packed_on_two)))
    assert_as_peft([*packed, *packed_on_two])


def began(decision: Decision) -> dict[str, Tensor]:
    """Where the additions of a run began. A decomposition that rounds otherwise may move a number of 4 bits to the
    next, so what is held against the run begins at the very same numbers, once these are known to be right."""
    return {name: value for file in run_of(decision).start.iterdir() for name, value in read_start(file).items()}


def read_start(file: Path) -> dict[str, Tensor]:
    return load_file(file) if file.suffix == ".safetensors" else {}


def layers_with(adapted: Any) -> dict[str, Any]:
    """The layers of peft's model that have additions, by our names."""
    return {
        name.removeprefix("base_model.model."): layer
        for name, layer in adapted.named_modules()
        if hasattr(layer, "lora_A")
    }


def with_pissa(decision: Decision) -> Callable[[Any], Any]:
    """A model whose additions begin as peft lets them, and whose base, less these, is packed as the run's is."""
    said = decision.config.adapter
    assert not isinstance(said, str)

    def change(model: Any) -> Any:
        whole = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        config = LoraConfig(r=4, lora_alpha=12, target_modules="all-linear", init_lora_weights="pissa")
        adapted = get_peft_model(model, config)
        start = began(decision)
        for name, layer in layers_with(adapted).items():
            down, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            torch.testing.assert_close(start[f"{name}.lora_A"], down.data, rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(start[f"{name}.lora_B"], up.data, rtol=1e-3, atol=1e-4)
            if said.quantize != "none":
                down.data, up.data = start[f"{name}.lora_A"].clone(), start[f"{name}.lora_B"].clone()
                rest = whole[f"{name}.weight"] - (up.data @ down.data).mul_(3.0)
                layer.base_layer.weight.data = unpack(pack(rest, said.quantize), torch.float32)
        return adapted

    return change


def goes_on_with_the_same_bits(write: Callable[..., Decision], first: Decision, family: str, **keys: Any) -> None:
    again = write(family, 1, (run_of(first), 4), **keys)
    shutil.copytree(run_of(first).start, run_of(again).start)  # as it is there where the same run goes on
    train((1, [run_of(again)]))
    wanted = trained(run_of(first), 10)
    assert all(torch.equal(value, wanted[name]) for name, value in trained(run_of(again), 10).items())


@pytest.mark.matrix
@EVERY
def test_pissa_is_that_of_peft(write: Callable[..., Decision], every: bool) -> None:
    keys: dict[str, Any] = {"steps": 10, "adapter": {"init": "pissa", "rank": 4, "alpha": 12}}
    alone = [write("tied", **keys, **memory) for memory in (ONE[0], *(ELSEWHERE if every else []))]
    together = [write("tied", 2, **keys, **memory) for memory in (TWO if every else TWO[2:])]
    if every:
        together += [write("tied", 2, **keys, parallel=axis) for axis in ({"tensor": 2}, {"pipeline": 2})]
    train((1, map(run_of, alone)), (2, map(run_of, together)))
    assert_as_peft([*alone, *together], with_pissa(alone[0]))
    goes_on_with_the_same_bits(write, alone[0], "tied", recompute="none", **keys)


@pytest.mark.matrix
@pytest.mark.parametrize("every", [False, True])
def test_pissa_over_4_bits_is_that_of_peft_over_what_they_leave(write: Callable[..., Decision], every: bool) -> None:
    keys: dict[str, Any] = {"steps": 10, "adapter": {"init": "pissa", "rank": 4, "alpha": 12, "quantize": "nf4"}}
    alone = write("tied", **keys, recompute="full", micro_batch=1)
    together = [write("tied", 2, **keys, **memory) for memory in (TWO if every else TWO[2:]) if may_share(memory)]
    train((1, [run_of(alone)]), (2, map(run_of, together)))
    if every:
        together.append(write("wide", 2, **keys, parallel={"tensor": 2}))
        train((2, [run_of(together[-1])]))
    for decision in (alone, *together):
        assert_as_peft([decision], with_pissa(decision))
    with pytest.raises(UserError, match="where quantised weights are those of every run"):
        write("tied", **keys, parameter_tier="disk")


def with_loftq(decision: Decision) -> Callable[[Any], Any]:
    """As peft begins them, in two rounds, over our quantiser: theirs is on a GPU alone."""

    def decomposed(weight: Tensor, rest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        kept = unpack(pack(rest, "nf4"), torch.float32)
        parts = _low_rank_decomposition(weight - kept, reduced_rank=4)  # type: ignore[no-untyped-call]
        return kept, parts["R"].contiguous(), parts["L"].contiguous()

    def change(model: Any) -> Any:
        adapted: Any = get_peft_model(model, LoraConfig(r=4, lora_alpha=4, target_modules="all-linear"))
        start = began(decision)
        for name, layer in layers_with(adapted).items():
            weight = layer.base_layer.weight.data
            taken = start[f"{name}.taken_B"] @ start[f"{name}.taken_A"]
            _, down, up = decomposed(weight, weight)
            torch.testing.assert_close(taken, up @ down, rtol=1e-3, atol=1e-4)
            layer.base_layer.weight.data, down, up = decomposed(weight, weight - taken)
            ours = start[f"{name}.lora_A"], start[f"{name}.lora_B"]
            torch.testing.assert_close(ours[1] @ ours[0], up @ down, rtol=1e-3, atol=1e-4)
            layer.lora_A["default"].weight.data, layer.lora_B["default"].weight.data = map(torch.clone, ours)
        return adapted

    return change


@pytest.mark.matrix
@EVERY
def test_loftq_begins_as_that_of_peft_over_our_quantiser(write: Callable[..., Decision], every: bool) -> None:
    adapter = {"init": "loftq", "rounds": 2, "rank": 4, "alpha": 4, "quantize": "nf4"}
    keys: dict[str, Any] = {"steps": 10, "adapter": adapter}
    alone = write("tied", **keys, recompute="selective")
    together = [write("tied", 2, **keys, **memory) for memory in (TWO if every else TWO[2:]) if may_share(memory)]
    train((1, [run_of(alone)]), (2, map(run_of, together)))
    for decision in (alone, *together):
        assert_as_peft([decision], with_loftq(decision))
    if every:
        goes_on_with_the_same_bits(write, alone, "tied", recompute="selective", **keys)


LOOKED_UP: list[dict[str, Any]] = [*TWO, {"zero": 1, "recompute": "selective", "optimizer_tier": "disk"}]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("llama", ["embed_tokens", "q_proj", "down_proj"]),
        pytest.param("gpt_neox", ["embed_in"], marks=pytest.mark.matrix),
    ],
)
def test_additions_to_an_embedding_equal_those_of_peft(
    write: Callable[..., Decision], family: str, targets: list[str]
) -> None:
    adapter = {"rank": 4, "alpha": 12, "targets": targets, "scaling": "rank_stabilised"}
    alone = [write(family, adapter=adapter, **memory) for memory in (*ONE, ELSEWHERE[0])]
    together = [write(family, 2, adapter=adapter, **memory) for memory in LOOKED_UP]
    ways: list[dict[str, Any]] = [{"pipeline": 2}, {"tensor": 2}]
    if family == "llama":
        ways.append({"pipeline": 2, "schedule": "zero_bubble"})
    axes = [write(family, 2, adapter=adapter, parallel=one) for one in ways]
    train((1, map(run_of, alone)), (2, map(run_of, [*together, *axes])))
    assert_as_peft([*alone, *together, *axes])


ELSEWHERE: list[dict[str, Any]] = [
    {"optimizer_tier": "disk", "gradient_tier": "disk", "parameter_tier": "disk", "recompute": "full"},
    {"optimizer_tier": "host", "gradient_tier": "host", "activation_tier": "host", "recompute": "full"},
]
DIVIDED: list[dict[str, Any]] = [
    {"zero": 3, "parameter_tier": "disk", "recompute": "selective", "micro_batch": 1},
    {"zero": 3, "optimizer_tier": "host", "gradient_tier": "host", "activation_tier": "host", "recompute": "full"},
    {"zero": 1, "optimizer_tier": "disk", "micro_batch": 1},
]


@pytest.mark.matrix
def test_additions_are_the_same_wherever_states_rest(write: Callable[..., Decision]) -> None:
    also = {"rank": 4, "alpha": 12, "also": ["embeddings", "norms"], "scaling": "rank_stabilised"}
    alone = [write("tied", adapter=also, **memory) for memory in ELSEWHERE]
    together = [write("tied", 2, adapter=also, **memory) for memory in DIVIDED]
    ways: list[dict[str, Any]] = [{"pipeline": 2}, {"pipeline": 2, "schedule": "zero_bubble"}, {"tensor": 2}]
    axes = [write("tied", 2, adapter=also, parallel=one) for one in ways]
    train((1, map(run_of, alone)), (2, map(run_of, [*together, *axes])))
    assert_as_peft([*alone, *together, *axes])


@pytest.mark.slow
def test_a_run_goes_on_with_other_workers_to_the_same_adapter(write: Callable[..., Decision]) -> None:
    whole = write("llama", zero=3)
    first = write("llama", 4, zero=3, micro_batch=1)
    train((1, [run_of(whole)]), (4, [run_of(first)]))
    others = [write("llama", workers, (run_of(first), 2), zero=3, micro_batch=1) for workers in (1, 2, 3)]
    for decision in others:
        train((decision.plan.workers, [run_of(decision)]))
    wanted = trained(run_of(whole))
    for decision in (first, *others):
        got = trained(run_of(decision))
        assert got.keys() == wanted.keys()
        for name, value in wanted.items():
            assert float((got[name] - value).norm()) <= 1e-4 * float(value.norm()) + 1e-7, name


@pytest.mark.matrix
@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.matrix)])
def test_additions_train_in_16_bits(write: Callable[..., Decision], precision: str) -> None:
    exact = write("llama")
    alone = write("llama", precision=precision, recompute="selective")
    together = write("llama", 2, precision=precision, micro_batch=1)
    train((1, [run_of(exact), run_of(alone)]), (2, [run_of(together)]))
    steps = metrics(run_of(exact))
    for decision in (alone, together):
        for got, wanted in zip(metrics(run_of(decision)), steps, strict=True):
            assert got["loss"] == pytest.approx(wanted["loss"], rel=2e-2)


PACKED: list[dict[str, Any]] = [{"recompute": "none"}, {"recompute": "selective", "micro_batch": 1}]
PACKED_ON_TWO: list[dict[str, Any]] = [
    {"zero": 0, "recompute": "none", "micro_batch": 1},
    {"zero": 3, "recompute": "full", "micro_batch": 1},
    {"zero": 3, "parameter_tier": "disk"},
]


def may_share(memory: dict[str, Any]) -> bool:
    """Whether the installed torch can: that of 2.11 has no ZeRO 3 for a packed base, which is refused."""
    return memory["zero"] < 3 or shards_packed()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "form"),
    [("llama", "nf4"), ("tied", "nf4-double"), ("qwen3", "int8"), ("qwen3_moe", "nf4"), ("qwen3", "nf4-double")],
)
def test_additions_to_packed_weights_equal_those_to_widened_ones(
    write: Callable[..., Decision], family: str, form: str
) -> None:
    keys: dict[str, Any] = {
        "adapter": {"rank": 4, "alpha": 12, "quantize": form},
        "optimizer": OPTIMIZER | {"lr": 3e-3},
    }
    alone = [write(family, **keys, **memory) for memory in (*PACKED, {"parameter_tier": "disk"})]
    together = [write(family, 2, **keys, **memory) for memory in PACKED_ON_TWO if may_share(memory)]
    axes = [write(family, 2, **keys, parallel={"pipeline": 2}, recompute="full")]
    train((1, map(run_of, alone)), (2, map(run_of, [*together, *axes])))
    assert_as_peft([*alone, *together, *axes])


@pytest.mark.matrix
def test_packed_weights_are_divided_where_that_cuts_no_block(write: Callable[..., Decision]) -> None:
    adapter = {"rank": 4, "alpha": 12, "quantize": "nf4"}
    both = write("wide", 2, adapter=adapter, parallel={"tensor": 2})
    train((2, [run_of(both)]))
    assert_as_peft([both])
    with pytest.raises(UserError, match="needed: nf4, and parts"):
        write("wide", 2, adapter={**adapter, "quantize": "int8"}, parallel={"tensor": 2})


@pytest.mark.matrix
def test_a_packed_base_that_rests_on_disk_is_packed_once(write: Callable[..., Decision]) -> None:
    """Then it is read, by runs of two workers as well, each of which has its share of every block."""
    adapter = {"rank": 4, "alpha": 12, "quantize": "int8"}

    def streamed(workers: int, **more: Any) -> Decision:
        return write("llama", workers, adapter=adapter, parameter_tier="disk", micro_batch=1, **more)

    first = streamed(1)
    directory, (size, coming) = packed_directory(first.config, first.plan), packed_base(first.config, first.plan)
    assert directory is not None
    assert "packed once" in first.plan.reasons["base"]
    assert coming == size
    assert resting_bytes(first.plan) == 0
    train((1, [run_of(first)]))
    assert size == pytest.approx((directory / "weights").stat().st_size, rel=0.02)
    alone, together = streamed(1), streamed(2, zero=3)
    assert "packed before" in alone.plan.reasons["base"]
    assert packed_base(alone.config, alone.plan)[1] == 0
    train((1, [run_of(alone)]), (2, [run_of(together)]))
    logs = [run_of(one).log.read_text() for one in (first, alone, together)]
    assert ["packing" in log for log in logs] == [True, False, False]
    assert all(f"GB read from {directory}" in log for log in logs)
    assert metrics(run_of(alone))[-1]["loss"] == metrics(run_of(first))[-1]["loss"]
    assert_as_peft([first, alone, together])


@pytest.mark.matrix
def test_a_streamed_base_is_read_from_its_own_files(write: Callable[..., Decision]) -> None:
    """Of a bf16 model nothing is copied, and nothing in its files changes."""
    kept: dict[str, Any] = {"precision": "bf16", "recompute": "full", "micro_batch": 2}
    streamed, there = write("llama", parameter_tier="disk", **kept), write("llama", **kept)
    file = Path(streamed.config.model, "model.safetensors")
    before = (file.read_bytes(), file.stat().st_mtime_ns)
    train((1, map(run_of, (streamed, there))))
    assert (file.read_bytes(), file.stat().st_mtime_ns) == before
    log = run_of(streamed).log.read_text()
    assert "parameters of the blocks on disk: 0.00 GB" in log
    assert "GB read from the model's own files" in log
    assert [step["loss"] for step in metrics(run_of(streamed))] == [step["loss"] for step in metrics(run_of(there))]
    wanted = trained(run_of(there))
    assert all(torch.equal(value, wanted[name]) for name, value in trained(run_of(streamed)).items())


@pytest.mark.matrix
def test_a_part_of_a_model_is_trained_as_plain_transformers_do(write: Callable[..., Decision]) -> None:
    """The last block and the final norm; with a pipeline, the first worker trains nothing."""
    some_trained: dict[str, Any] = {"train": ["model.layers.1.*", "model.norm.*"], "adapter": "none"}
    alone = [write("llama", **some_trained, **memory) for memory in ONE[:2]]
    together = [write("llama", 2, **some_trained, **memory) for memory in TWO[1:]]
    axes = [write("llama", 2, **some_trained, parallel=one) for one in ({"pipeline": 2}, {"tensor": 2})]
    train((1, map(run_of, alone)), (2, map(run_of, [*together, *axes])))

    def some(model: Any) -> Any:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith(("model.layers.1.", "model.norm.")))
        return model

    steps, weights = plain_loop(alone[0], some)
    for decision in (*alone, *together, *axes):
        for got, plain in zip(metrics(run_of(decision)), steps, strict=True):
            assert got["loss"] == pytest.approx(plain["loss"], rel=1e-5), decision.plan.layout
            assert got["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-4), decision.plan.layout
        saved = trained(run_of(decision))
        assert saved.keys() == weights.keys()
        for name, weight in weights.items():
            assert float((saved[name] - weight).norm()) <= 1e-4 * float(weight.norm()), name


class Dropped(nn.Module):
    """In the place of peft's dropout: zeros where a layer's mask has them, the rest divided by what share is kept."""

    def __init__(self, layer: str, probability: float, keys: list[Tensor]) -> None:
        super().__init__()
        self.salt, self.threshold, self.keys = salt_of(layer), threshold_of(probability), keys

    def forward(self, inputs: Tensor) -> Tensor:
        mask = kept(Mask(self.keys[-1], self.salt, 0, self.threshold), inputs.shape[-1]).view(inputs.shape)
        return torch.where(mask, inputs / (1 - self.threshold / 65536), 0)


def with_dropout(decision: Decision) -> Callable[[Any], Any]:
    """As ``with_peft``, with the masks of the run's steps, in rows as the plain loop pads them."""
    said, data, seed = decision.config.adapter, decision.prepared.train, decision.config.seed
    assert not isinstance(said, str)
    probability, keys = said.dropout, list[Tensor]()

    def begin_step(*_: Any) -> None:
        first = len(keys) * SEQUENCES
        packs = [data.pack(pack_at(at, data.num_packs, seed)) for at in range(first, first + SEQUENCES)]
        documents, lengths = (
            np.concatenate([getattr(one, name) for one in packs]) for name in ("documents", "lengths")
        )
        longest, number = int(lengths.max()), len(documents)
        places = np.tile(np.arange(longest), number)
        keys.append(token_keys(draw_of(seed, len(keys) + 1), documents.repeat(longest), places))

    def change(model: Any) -> Any:
        adapted = with_peft(decision)(model)
        for name, module in adapted.named_modules():
            if hasattr(module, "lora_dropout"):
                module.lora_dropout["default"] = Dropped(name.removeprefix("base_model.model."), probability, keys)
        adapted.register_forward_pre_hook(begin_step)
        return adapted

    return change


DROPPING: list[dict[str, Any]] = [
    {"recompute": "none"},
    {"recompute": "full", "micro_batch": 1},
    {"recompute": "selective", "micro_batch": 4},
]
DROPPING_ON_TWO: list[dict[str, Any]] = [
    {"zero": 0, "recompute": "none", "micro_batch": 1},
    {"zero": 3, "recompute": "full"},
    {"parallel": {"tensor": 2}, "recompute": "selective"},
    {"parallel": {"pipeline": 2, "schedule": "zero_bubble"}, "recompute": "full", "micro_batch": 1},
]


@pytest.mark.matrix
def test_no_layout_changes_what_is_dropped(write: Callable[..., Decision]) -> None:
    adapter = {"rank": 4, "alpha": 12, "dropout": 0.25}
    alone = [write("llama", adapter=adapter, **named) for named in DROPPING]
    together = [write("llama", 2, adapter=adapter, **named) for named in DROPPING_ON_TWO]
    padded = write("lfm2", adapter=adapter, recompute="full", micro_batch=2)
    assert not alone[0].plan.layout.share_prefixes
    assert "adapter.dropout" in alone[0].plan.reasons["prefixes"]
    assert padded.plan.layout.arrangement == "padded"
    train((1, map(run_of, [*alone, padded])), (2, map(run_of, together)))
    again = write("llama", 2, (run_of(alone[0]), 2), adapter=adapter, zero=2, micro_batch=1)
    train((2, [run_of(again)]))
    assert_as_peft([*alone, *together], with_dropout(alone[0]))
    assert_as_peft([padded], with_dropout(padded))
    wanted, got = trained(run_of(alone[0])), trained(run_of(again))
    for name, value in wanted.items():
        assert float((got[name] - value).norm()) <= 1e-4 * float(value.norm()) + 1e-7, name
