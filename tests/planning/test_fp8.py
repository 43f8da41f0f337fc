"""What products in fp8 take: counted as on CUDA, at the rates of cards that have them, and refused on others."""

from __future__ import annotations

from dataclasses import replace

import pytest
from transformers import LlamaConfig

from planning.profiles import layout
from tonnage.config import Config
from tonnage.errors import UserError
from tonnage.model.adapters import Trains
from tonnage.planning.catalogue import EFFICIENCY, ROUNDED
from tonnage.planning.machine import Machine, of_cpu, parse_hardware
from tonnage.planning.profile import ModelProfile
from tonnage.planning.rules import check_fp8
from tonnage.planning.seconds import Work, compute_seconds
from tonnage.training.weigh import Conditions, weigh

TOKENS = 8192
LLAMA = LlamaConfig(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
)


def weighed(fp8: str | None, device: str = "cuda") -> ModelProfile:
    conditions = Conditions("bf16", 2048, device, trains=Trains(fp8=fp8))  # type: ignore[arg-type]
    return weigh(LLAMA, None, conditions, recomputes=("none",))


@pytest.fixture(scope="module")
def profiles() -> dict[str | None, ModelProfile]:
    return {fp8: weighed(fp8) for fp8 in (None, "fp8")}


@pytest.mark.matrix
def test_what_a_block_multiplies_and_keeps(profiles: dict[str | None, ModelProfile]) -> None:
    """All its products are in fp8; what is kept for the backward pass is what bf16 keeps; and rounding moves as many
    bytes for each number as plans take away again where blocks are compiled."""
    plain, rounded = (profiles[fp8].blocks["none"] for fp8 in (None, "fp8"))
    products = rounded.forward_flops(TOKENS) + rounded.backward_flops(TOKENS)
    assert rounded.fp8_flops(TOKENS) == pytest.approx(products)
    assert products == pytest.approx(plain.forward_flops(TOKENS) + plain.backward_flops(TOKENS))
    assert plain.fp8_flops(TOKENS) == 0
    assert rounded.saved(TOKENS) == pytest.approx(plain.saved(TOKENS), rel=1e-6)
    inputs, outputs = (sum(sizes) for sizes in zip(*SHAPES, strict=True))
    matrices = sum(first * second for first, second in SHAPES)
    assert rounded.fp8_numbers(TOKENS) == pytest.approx(2 * (TOKENS * (inputs + outputs) + matrices))
    traffic = [cost.forward_traffic(TOKENS) + cost.backward_traffic(TOKENS) for cost in (rounded, plain)]
    assert traffic[0] - traffic[1] == pytest.approx(ROUNDED * rounded.fp8_numbers(TOKENS), rel=0.05)


SHAPES = [(4096, 4096)] * 2 + [(4096, 1024)] * 2 + [(4096, 14336)] * 2 + [(14336, 4096)]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("card", "least", "most"),
    [("H100", 1.1, 1.5), ("RTX5090", 1.1, 1.8)],
)
def test_a_compiled_model_is_as_much_faster_as_was_published(
    profiles: dict[str | None, ModelProfile], card: str, least: float, most: float
) -> None:
    """1.1 to 1.3 on H100s, 1.4 to 1.8 on an RTX 5090; and not compiled it is slower."""
    machine = parse_hardware(card)
    compiled, plain = (speed_up(profiles, machine, compiled=compiled) for compiled in (True, False))
    print(card, compiled, plain)
    assert least < compiled < most
    assert plain < 1


def speed_up(profiles: dict[str | None, ModelProfile], machine: Machine, *, compiled: bool) -> float:
    work = Work(TOKENS, TOKENS, 2048)
    seconds = [
        compute_seconds(layout(device="cuda", recompute="none", compiled=compiled), profile, work, machine)
        for profile in profiles.values()
    ]
    return seconds[0] / seconds[1]


def test_a_measured_card_multiplies_as_much_faster_as_its_peaks_say() -> None:
    card = parse_hardware("H100")
    assert card.fp8_flops == pytest.approx(EFFICIENCY["products"] * 1979e12)
    measured = replace(card, source="measured", flops={"fp32": 1.0, "bf16": 600e12, "fp16": 600e12})
    assert measured.fp8_flops == pytest.approx(1200e12, rel=0.001)
    assert replace(measured, name="unknown").fp8_flops is None


@pytest.mark.parametrize(
    ("machine", "found"),
    [
        (parse_hardware("8xA100-80GB"), "fp8 on A100-80GB, whose"),
        (parse_hardware("RTX3090"), "fp8 on RTX3090-24GB, whose"),
        (of_cpu(8, 10**10), "fp8 on a CPU, whose"),
        (parse_hardware("H100"), ""),
        (replace(parse_hardware("A100-80GB"), name="NVIDIA RTX 5000 Ada"), ""),
    ],
    ids=["A100", "RTX3090", "cpu", "H100", "unknown"],
)
def test_who_has_it(machine: Machine, found: str) -> None:
    config = Config.model_validate({"model": "m", "data": {"train": "rows.jsonl"}, "precision": "fp8"})
    if not found:
        check_fp8(config, machine)
        return
    with pytest.raises(UserError, match=rf"{found}[\s\S]*8\.9 or newer[\s\S]*precision=bf16"):
        check_fp8(config, machine)
    check_fp8(config.model_copy(update={"precision": "fp8-emulated"}), machine)
