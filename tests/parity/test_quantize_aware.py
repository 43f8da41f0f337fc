"""Training with fake quantisation: every layout equals torchao's own recipe over plain transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from plain import metrics, plain_loop, split_documents
from ready import of_families, run_of
from test_adapters import with_peft
from torch import nn
from torchao.quantization import quantize_
from torchao.quantization.qat import QATConfig
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen2Config

from forked import train, work
from tiny import byte_tokenizer, llama_config
from tonnage.checkpoint.verify import verify
from tonnage.data import PackedDataset
from tonnage.decide.decision import Decision
from tonnage.decide.exports import export_checkpoint
from tonnage.decide.handing import Wishes
from tonnage.errors import UserError
from tonnage.inference.generate import load
from tonnage.report.comparison import compare
from tonnage.training.building import scheme_of

STEPS, SEQUENCES = 10, 6
LARGE: dict[str, Any] = {"initializer_range": 0.2}
OPTIMIZER: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, "clip": 0.5, "warmup": 0, "eps": 1e-5}


def families() -> dict[str, PreTrainedConfig]:
    return {
        "llama": llama_config(hidden_size=96, intermediate_size=128, tie_word_embeddings=False, **LARGE),
        "qwen2": Qwen2Config(  # with biases
            vocab_size=264,  # its tokenizer has a token of its own
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            **LARGE,
        ),
    }


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Decision]:
    return of_families(
        tmp_path_factory.mktemp("aware"), write_family, sequences=SEQUENCES, steps=STEPS, optimizer=OPTIMIZER
    )


def write_family(family: str, directory: Path) -> None:
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(families()[family], dtype=torch.float32).bfloat16()
    made.save_pretrained(directory, save_original_format=False)
    byte_tokenizer().save_pretrained(directory)


def by_torchao(decision: Decision) -> Callable[[Any], Any]:
    """torchao's recipe: a model whose linear layers but the head were prepared by it."""
    scheme = scheme_of(decision.config)
    assert scheme is not None

    def change(model: Any) -> Any:
        prepare = QATConfig(scheme.for_torchao(), step="prepare")
        quantize_(model, prepare, filter_fn=lambda module, path: isinstance(module, nn.Linear) and path != "lm_head")
        return model

    return change


def losses(decision: Decision) -> list[tuple[float, float]]:
    return [(record["loss"], record["grad_norm"]) for record in metrics(run_of(decision))]


def assert_as_torchao(decisions: list[Decision]) -> None:
    """Of every step loss, norm and update are those of torchao's recipe in the plain loop, at the weights that the run
    had. Left to itself that loop would go elsewhere: of weights that differ in their last bits some lie on the border
    between two rounded ones, and 3 that go to either side after the first update become 1,000 in ten steps (of 74,000,
    in int8), with a loss 3e-4 apart. So does the loop from itself, with the documents of a batch one by one.
    """
    for decision in decisions:
        steps, _ = plain_loop(decision, by_torchao(decision), along=run_of(decision))
        assert_steps(decision, steps)
        assert max(plain["apart"] for plain in steps) < 1e-3, decision.plan.layout


def assert_steps(decision: Decision, steps: list[dict[str, float]]) -> None:
    got = metrics(run_of(decision))
    assert len(got) == decision.config.steps
    for record, plain in zip(got, steps, strict=True):
        where = f"{decision.plan.layout}, step {record['step']}"
        assert record["loss"] == pytest.approx(plain["loss"], rel=1e-5), where
        assert record["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-4), where


ALONE: list[dict[str, Any]] = [{"recompute": "full", "micro_batch": 1}, {"recompute": "selective"}]
TOGETHER: list[dict[str, Any]] = [
    {"zero": 0, "recompute": "none", "micro_batch": 1},
    {"zero": 3, "recompute": "full", "micro_batch": 1},
]
ELSEWHERE: list[dict[str, Any]] = [
    {"zero": 2, "recompute": "selective"},
    {"parallel": {"pipeline": 2}, "recompute": "full"},
    {"zero": 3, "optimizer_tier": "host", "gradient_tier": "host", "activation_tier": "host", "recompute": "full"},
    {"zero": 3, "parameter_tier": "disk"},
]
INT4: dict[str, Any] = {"scheme": "int4", "group_size": 32}
NAMES = ("plain", "quantised")


@pytest.mark.matrix
def test_whole_weights_train_as_with_torchao(write: Callable[..., Decision]) -> None:
    alone = [write("llama", quantize_aware=INT4, **memory) for memory in ALONE]
    together = [write("llama", 2, quantize_aware=INT4, **memory) for memory in TOGETHER]
    train((1, map(run_of, alone)), (2, map(run_of, together)))
    assert_as_torchao([*alone, *together])


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(("family", "aware"), [("llama", INT4), ("qwen2", INT4), ("qwen2", {"scheme": "int8"})])
def test_whole_weights_train_as_with_torchao_in_every_layout(
    write: Callable[..., Decision], family: str, aware: dict[str, Any]
) -> None:
    alone = [write(family, quantize_aware=aware, **memory) for memory in ALONE]
    together = [write(family, 2, quantize_aware=aware, **memory) for memory in ELSEWHERE]
    train((1, map(run_of, alone)), (2, map(run_of, together)))
    assert_as_torchao([*alone, *together])


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("family", "aware"),
    [
        ("llama", "int8-int4"),
        *(
            pytest.param(*both, marks=pytest.mark.matrix)
            for both in (
                ("llama", INT4),
                ("llama", "mxfp4"),
                ("llama", "nvfp4"),
                ("qwen2", {"scheme": "int8"}),
                ("qwen2", "int8-int4"),
            )
        ),
    ],
)
def test_losses_have_the_bits_of_those_with_torchaos_layers(
    write: Callable[..., Decision], family: str, aware: Any
) -> None:
    """Over ten steps, in the same layout, by workers whose layers are torchao's (``by_torchao_runs``)."""
    ours, theirs = (
        [write(family, quantize_aware=aware, **ALONE[0]), write(family, 2, quantize_aware=aware, **TOGETHER[1])]
        for _ in "12"
    )
    train((1, [run_of(ours[0])]), (2, [run_of(ours[1])]))
    work("by_torchao_runs", (1, [str(run_of(theirs[0]).path)]), (2, [str(run_of(theirs[1]).path)]))
    for mine, other in zip(ours, theirs, strict=True):
        assert losses(mine) == losses(other)
        assert len(losses(mine)) == STEPS


@pytest.mark.matrix
def test_additions_to_rounded_layers_train_as_peft_over_torchao(write: Callable[..., Decision]) -> None:
    keys: dict[str, Any] = {
        "quantize_aware": INT4,
        "adapter": {"rank": 4, "alpha": 12},
        "optimizer": OPTIMIZER | {"lr": 1e-2},
        "steps": 4,
    }
    alone, together = write("llama", **keys, **ALONE[1]), write("llama", 2, **keys, **TOGETHER[1])
    train((1, [run_of(alone)]), (2, [run_of(together)]))
    steps, _ = plain_loop(alone, lambda model: with_peft(alone)(by_torchao(alone)(model)))
    for decision in (alone, together):  # weights that are not trained are rounded alike in all steps
        assert_steps(decision, steps)


@pytest.mark.matrix
def test_inputs_of_layers_with_additions_are_rounded_as_by_torchao(write: Callable[..., Decision]) -> None:
    """The first loss and the norm of its gradient; later steps would differ, as a number on the border between two
    rounded ones goes to either side. As in torchtune, an addition is given the inputs as they are."""
    decision = write("llama", quantize_aware="int8-int4", adapter={"rank": 4, "alpha": 12}, steps=1, **ALONE[0])
    train((1, [run_of(decision)]))
    (got,) = metrics(run_of(decision))
    (plain,), _ = plain_loop(decision, lambda model: with_peft(decision)(by_torchao(decision)(model)))
    (exact,), _ = plain_loop(decision, with_peft(decision))
    assert got["loss"] == pytest.approx(plain["loss"], rel=5e-5)
    assert got["grad_norm"] == pytest.approx(plain["grad_norm"], rel=2e-3)
    assert abs(plain["loss"] - exact["loss"]) > 1e-3 * exact["loss"]


@pytest.mark.matrix
@pytest.mark.matrix
@pytest.mark.parametrize("scheme", ["int8-int4", "mxfp4"])
def test_inputs_of_layers_are_rounded_as_by_torchao(write: Callable[..., Decision], scheme: str) -> None:
    """At the weights that the run had, over steps of few tokens: in most of them no input lies so near a border between
    two rounded numbers that it goes to either side, and loss and norm have the same digits. One that does moves a loss
    by up to 2e-4, as it moves what is rounded after it; rounded alike in the plain loop, it moves nothing."""
    decision = write("llama", quantize_aware=scheme, batch={"sequences": 2}, micro_batch=1, recompute="full")
    train((1, [run_of(decision)]))
    rounded, exact = (
        plain_loop(decision, change, along=run_of(decision))[0]
        for change in (by_torchao(decision), lambda model: model)
    )
    assert len(rounded) == STEPS
    assert median(distances(decision, rounded, "loss")) < 1e-6
    assert median(distances(decision, rounded, "grad_norm")) < 1e-6
    assert max(distances(decision, rounded, "loss")) < 1e-3
    assert median(distances(decision, exact, "loss")) > 1e-3


def distances(decision: Decision, steps: list[dict[str, float]], figure: str) -> list[float]:
    """How far a figure of each step is from that of the plain loop, as a share of it."""
    pairs = zip(metrics(run_of(decision)), steps, strict=True)
    return [abs(record[figure] / plain[figure] - 1) for record, plain in pairs]


@pytest.mark.matrix
def test_a_run_that_goes_on_has_the_same_bits(write: Callable[..., Decision]) -> None:
    """Its rounding begins after the checkpoint from which it goes on."""
    keys: dict[str, Any] = {"quantize_aware": {"scheme": "int8-int4", "after_steps": 5}, "precision": "bf16"}
    whole, plain = write("llama", **keys), write("llama", precision="bf16")
    train((1, [run_of(whole), run_of(plain)]))
    again = write("llama", start=(run_of(whole), 3), **keys)
    train((1, [run_of(again)]))
    losses, resumed, exact = ([record["loss"] for record in metrics(run_of(one))] for one in (whole, again, plain))
    assert resumed == losses[3:]
    assert losses[:5] == exact[:5]
    assert losses[5] != exact[5]


def with_validation(write: Callable[..., Decision], **keys: Any) -> Decision:
    of_others = write("llama").config.data
    data = {
        "train": of_others.train[0].path,
        "validation": 0.2,
        "max_length": 96,
        "template": "plain",
        "over_length": "drop",
        "max_loss": 1.0,
        "cache": of_others.cache,
    }
    return write("llama", data=data, steps=1, **keys)


def evaluations(decision: Decision) -> list[dict[str, Any]]:
    return [record for record in run_of(decision).read_metrics() if "eval_loss" in record]


@pytest.mark.matrix
def test_an_evaluation_tells_what_rounding_costs(write: Callable[..., Decision]) -> None:
    """Before the first step, with and without; though training would round only after it."""
    decision = with_validation(write, quantize_aware=INT4 | {"after_steps": 1})
    train((1, [run_of(decision)]))
    before = evaluations(decision)[0]
    model = decision.config.model
    rounded, exact = mean_loss(decision, model, by_torchao(decision)), mean_loss(decision, model)
    assert before["eval_loss"] == pytest.approx(rounded, rel=1e-5)
    assert before["unquantized_loss"] == pytest.approx(exact, rel=1e-5)
    assert abs(rounded - exact) > 1e-3 * exact
    assert "validation, not rounded" in {line.rows for line in compare(run_of(decision)).lines()}


@pytest.mark.matrix
def test_a_quantised_export_has_the_loss_that_was_evaluated(write: Callable[..., Decision], tmp_path: Path) -> None:
    """As transformers loads it, which takes what is rounded from the files."""
    decision = with_validation(write, quantize_aware="int8-int4")
    train((1, [run_of(decision)]))
    last = evaluations(decision)[-1]
    export_checkpoint(run_of(decision), tmp_path / "plain")
    notes = export_checkpoint(run_of(decision), tmp_path / "quantised", wishes=Wishes(quantized=True))
    assert "weights of the blocks are in int8-int4: to load them, pip install torchao" in notes
    assert not verify(tmp_path / "quantised")
    sizes = [sum(file.stat().st_size for file in tmp_path.glob(f"{name}/*.safetensors")) for name in NAMES]
    assert sizes[1] < 0.6 * sizes[0]
    plain, quantised = (mean_loss(decision, str(tmp_path / name)) for name in NAMES)
    assert last["unquantized_loss"] == pytest.approx(plain, rel=1e-5)
    assert last["eval_loss"] == pytest.approx(quantised, rel=1e-4)
    assert abs(plain - quantised) > 1e-3 * plain
    assert "The weights here are fp32, those of the blocks int8-int4." in (tmp_path / "quantised/README.md").read_text()
    answering, ids = load(tmp_path / "quantised").model, torch.arange(40, 80)[None]
    torch.testing.assert_close(
        answering(ids).logits, AutoModelForCausalLM.from_pretrained(tmp_path / "quantised")(ids).logits
    )


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "a run whose weights were not rounded"),
        ({"quantize_aware": INT4}, r"TorchAoConfig\(Int4WeightOnlyConfig\(group_size=32\)\)"),
        ({"quantize_aware": "int8", "adapter": {"rank": 4}}, "an adapter"),
    ],
)
def test_what_is_not_exported_quantised(
    write: Callable[..., Decision], keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    decision = write("llama", steps=1, **keys)
    train((1, [run_of(decision)]))
    with pytest.raises(UserError, match=message):
        export_checkpoint(run_of(decision), tmp_path / "export", wishes=Wishes(quantized=True))
    assert not (tmp_path / "export").exists()


@torch.no_grad()
def mean_loss(decision: Decision, directory: str, change: Callable[[Any], Any] = lambda model: model) -> float:
    """Of the validation rows, by transformers."""
    validation = decision.prepared.validation
    assert isinstance(validation, PackedDataset)
    model = change(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32))
    total, number = 0.0, 0
    for pack in range(validation.num_packs):
        for ids, supervised in split_documents(validation, pack):
            logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
            losses = F.cross_entropy(logits, ids[1:], reduction="none")[supervised[1:]]
            total, number = total + float(losses.sum()), number + len(losses)
    return total / number
