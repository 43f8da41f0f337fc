"""Adapters out of a run and into one: peft loads what we write, we load what peft writes, and merging is addition."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, OFTConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from forked import train
from tiny import alpaca_rows, byte_tokenizer, llama_config, mixture_config, write_rows
from tonnage.checkpoint.save import checkpoint_path
from tonnage.checkpoint.shards import Shards
from tonnage.checkpoint.verify import verify
from tonnage.config import read_config
from tonnage.decide.decision import Decision, decide
from tonnage.decide.evaluation import Loading, evaluate_model
from tonnage.decide.exports import export_checkpoint, export_run
from tonnage.decide.handing import Wishes
from tonnage.decide.resumption import decide_resumption
from tonnage.decide.written import write_run
from tonnage.errors import UserError
from tonnage.inference.generate import load, resolve_model
from tonnage.kernels.quantized import pack, unpack
from tonnage.model.adapter_files import read_adapter
from tonnage.model.adapters import find_targets
from tonnage.model.anatomy import dissect
from tonnage.model.files import find_model
from tonnage.model.packed_layers import packable_names
from tonnage.rundir.directory import RunDirectory

FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: llama_config(initializer_range=0.2),
    "qwen3_moe": lambda: mixture_config("qwen3_moe"),
    "untied": lambda: llama_config(initializer_range=0.1, tie_word_embeddings=False),
}
MORE: dict[str, dict[str, Any]] = {
    "llama": {"also": ["embeddings", "norms"], "dropout": 0.1},
    "untied": {"targets": ["all-linear", "embed_tokens"], "also": ["norms"]},
}
"""Of the adapters of some families."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    write_rows(folder / "rows.jsonl", alpaca_rows(30))
    for family, config in FAMILIES.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config(), dtype=torch.bfloat16)
        model.save_pretrained(folder / family, save_original_format=False)
        byte_tokenizer().save_pretrained(folder / family)
    return folder


@pytest.fixture(scope="module")
def decided(folder: Path) -> Callable[..., Decision]:
    """What was decided for a run that is ready for its workers."""
    number = iter(range(1000))

    def decided(model: str, workers: int = 1, **more: Any) -> Decision:
        text = {
            "model": model,
            "data": {
                "train": str(folder / "rows.jsonl"),
                "max_length": 96,
                "template": "plain",
                "over_length": "drop",
                "max_loss": 1.0,
                "cache": str(folder / "cache"),
            },
            "batch": {"sequences": 4},
            "steps": 3,
            "optimizer": {"lr": 1e-2, "warmup": 0},
            "precision": "fp32",
            "adapter": {"rank": 4, "alpha": 12},
            "launch": {"workers": workers, "threads": 1},
            "output": str(folder / f"run-{next(number)}"),
            **more,
        }
        path = folder / "config.yaml"
        path.write_text(json.dumps(text))
        decision = decide(str(path), [])
        write_run(RunDirectory(decision.config.output), decision)
        return decision

    return decided


def trained(decision: Decision) -> RunDirectory:
    run = RunDirectory(decision.config.output)
    train((decision.plan.workers, [run]))
    return run


def logits(model: Any) -> Tensor:
    ids = torch.arange(40).remainder(250)[None]
    with torch.no_grad():
        found: Tensor = model.float().eval()(ids).logits
    return found


@pytest.fixture(
    scope="module", params=["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3_moe", "untied"))]
)
def exported(request: pytest.FixtureRequest, folder: Path, decided: Callable[..., Decision]) -> RunDirectory:
    """A run that trained an adapter, and what else is whole, exported."""
    more = MORE.get(request.param, {})
    run = trained(decided(str(folder / request.param), adapter={"rank": 4, "alpha": 12, **more}))
    export_run(run)
    return run


def exported_dropout(run: RunDirectory) -> float:
    adapter = read_config(run.config, [], check_files=False).adapter
    assert not isinstance(adapter, str)
    return adapter.dropout


def targets_of(run: RunDirectory) -> list[str]:
    config = read_config(run.config, [], check_files=False)
    assert not isinstance(config.adapter, str)
    model = AutoModelForCausalLM.from_pretrained(config.model)
    return [one.path for one in find_targets(model, dissect(model), config.adapter.targets)]


def base_of(run: RunDirectory) -> Any:
    said = json.loads((run.export / "adapter_config.json").read_text())
    return AutoModelForCausalLM.from_pretrained(said["base_model_name_or_path"], dtype=torch.float32)


def assert_goes_merged_alone(run: RunDirectory, adapted: Any, with_peft: Tensor, folder: Path) -> None:
    """vLLM takes such an adapter merged alone, and what is merged is what peft merges and computes."""
    with pytest.raises(UserError, match="which vLLM does not compute"):
        export_checkpoint(run, folder / "vllm", wishes=Wishes(target="vllm"))
    export_checkpoint(run, folder / "merged", wishes=Wishes("fp32", merge=True))
    merged = AutoModelForCausalLM.from_pretrained(folder / "merged", dtype=torch.float32)
    torch.testing.assert_close(logits(merged), with_peft, rtol=1e-5, atol=1e-4)
    by_peft = adapted.merge_and_unload().state_dict()
    for name, value in merged.state_dict().items():
        torch.testing.assert_close(value, by_peft[name], rtol=1e-5, atol=1e-6, msg=name)


def test_a_checkpoint_holds_no_frozen_weight(exported: RunDirectory) -> None:
    names = Shards(checkpoint_path(exported.checkpoints, 3)).names("model.")
    frozen = [name for name in names if "lora_" not in name and "norm" not in name and "embed" not in name]
    assert names
    assert not frozen


def test_peft_loads_an_export_and_merging_it_gives_the_merged_export(exported: RunDirectory, tmp_path: Path) -> None:
    assert verify(exported.export) == []
    adapted = PeftModel.from_pretrained(base_of(exported), exported.export)
    assert adapted.peft_config["default"].to_dict()["lora_dropout"] == exported_dropout(exported)
    with safe_open(exported.export / "adapter_model.safetensors", framework="pt") as file:
        stored = set(file.keys())
    names = (name for name, _ in adapted.named_parameters(remove_duplicate=False))
    assert len(stored) == sum("lora_" in name or "modules_to_save" in name for name in names)
    with_peft = logits(adapted)
    assert not torch.allclose(with_peft, logits(base_of(exported)), atol=1e-2)
    export_checkpoint(exported, tmp_path / "merged", wishes=Wishes("fp32", merge=True))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    torch.testing.assert_close(logits(merged), with_peft, rtol=1e-5, atol=1e-4)
    by_peft = adapted.merge_and_unload().state_dict()
    for name, value in merged.state_dict().items():
        torch.testing.assert_close(value, by_peft[name], rtol=1e-6, atol=1e-6, msg=name)
    assert (tmp_path / "merged" / "config.json").is_file()
    loaded = load(resolve_model(exported.path)).model.float()
    torch.testing.assert_close(logits(loaded), with_peft, rtol=1e-2, atol=0.3)  # merged in bf16


def test_a_merged_export_in_bf16_is_rounded_once(exported: RunDirectory, tmp_path: Path) -> None:
    for dtype in ("bf16", "fp32"):
        export_checkpoint(exported, tmp_path / dtype, wishes=Wishes(dtype, 100_000, merge=True))
    exact, rounded = (
        {name: value for file in (tmp_path / dtype).glob("*.safetensors") for name, value in load_file(file).items()}
        for dtype in ("fp32", "bf16")
    )
    assert exact.keys() == rounded.keys()
    for name, value in exact.items():
        assert torch.equal(value.to(rounded[name].dtype), rounded[name]), name


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("family", "form"),
    [("llama", "nf4"), ("qwen3_moe", "nf4-double"), pytest.param("llama", "int8", marks=pytest.mark.slow)],
)
def test_a_merged_export_says_how_far_packing_moved_the_weights(
    folder: Path, decided: Callable[..., Decision], tmp_path: Path, family: str, form: Any
) -> None:
    adapter = {"rank": 4, "alpha": 12, "quantize": form}
    run = trained(decided(str(folder / family), adapter=adapter))
    notes = export_checkpoint(run, tmp_path / "merged", wishes=Wishes("fp32", merge=True))
    (said,) = (note for note in notes if form in note)
    assert said in (tmp_path / "merged" / "README.md").read_text().split("\n\n")
    before = AutoModelForCausalLM.from_pretrained(folder / family, dtype=torch.bfloat16).state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).state_dict()
    size = off = moved = 0.0
    for name, value in before.items():
        if name.endswith("_proj.weight") or ".experts." in name:  # a router is adapted by nobody
            size += float(value.double().square().sum())
            off += float((value.double() - unpack(pack(value, form), torch.float32)).square().sum())
            moved += float((after[name].double() - value).square().sum())
    assert off > 0
    assert [float(one) for one in re.findall(r"([\d.]+)%", said)] == [
        pytest.approx(100 * (one / size) ** 0.5, abs=0.006) for one in (off, moved)
    ]


@pytest.mark.slow
def test_a_run_over_a_quantised_base_is_evaluated_over_it(
    folder: Path, decided: Callable[..., Decision], tmp_path: Path
) -> None:
    run = trained(decided(str(folder / "llama"), adapter={"rank": 4, "quantize": "nf4"}))
    export_run(run)
    model = AutoModelForCausalLM.from_pretrained(folder / "llama", dtype=torch.float32)
    for name in packable_names(model, model.model.layers):
        with torch.no_grad():
            weight = model.get_parameter(name)
            weight.copy_(unpack(pack(weight, "nf4"), torch.float32))
    model.save_pretrained(tmp_path / "base")
    byte_tokenizer().save_pretrained(tmp_path / "base")
    shutil.copytree(run.export, tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": str(tmp_path / "base")}))
    rows, said = [{"path": str(folder / "rows.jsonl")}], list[str]()
    found = evaluate_model(str(run.path), rows, template="plain", loading=Loading("fp32"), tell=said.append)
    expected = evaluate_model(str(tmp_path / "adapter"), rows, template="plain", loading=Loading("fp32"))
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)
    over_16_bits = evaluate_model(str(run.export), rows, template="plain", loading=Loading("fp32"))
    assert abs(over_16_bits.loss - found.loss) > 1e-3
    assert (found.base, over_16_bits.base) == ("nf4", "none")
    assert said == ["The weights under the adapter are in nf4, as they were in training."]


@pytest.mark.slow
def test_an_adapter_goes_on_and_is_evaluated_as_it_was(
    exported: RunDirectory, folder: Path, decided: Callable[..., Decision]
) -> None:
    evaluated = evaluate_model(
        str(exported.export), [{"path": str(folder / "rows.jsonl")}], template="plain", loading=Loading("fp32")
    )
    merged = folder / f"{exported.path.name}-merged"
    export_checkpoint(exported, merged, wishes=Wishes("fp32", merge=True))
    whole = evaluate_model(
        str(merged), [{"path": str(folder / "rows.jsonl")}], template="plain", loading=Loading("fp32")
    )
    assert evaluated.loss == pytest.approx(whole.loss, rel=1e-5)
    further = decided(str(exported.export), adapter="none", optimizer={"lr": 1e-9, "warmup": 0})
    assert not isinstance(further.config.adapter, str)
    assert further.config.adapter.rank == 4
    assert further.config.adapter.dropout == exported_dropout(exported)
    run = trained(further)
    before, after = (
        {
            name: shards.read(name, tuple(slice(0, size) for size in shards.shape(name)))
            for name in shards.names("model.")
        }
        for shards in (Shards(checkpoint_path(one.checkpoints, 3)) for one in (exported, run))
    )
    assert before.keys() == after.keys()
    for name, value in before.items():
        torch.testing.assert_close(value, after[name], rtol=1e-5, atol=1e-6)
    said = further.config.adapter.model_dump(mode="json")
    decided(str(exported.export), adapter=said | {"dropout": 0})
    every = dict.fromkeys(path.rpartition(".")[2] for path in targets_of(exported))
    for targets in (list(every), list(reversed(targets_of(exported)))):
        again = decided(str(exported.export), adapter=said | {"targets": targets})
        assert not isinstance(again.config.adapter, str)
        assert list(again.config.adapter.targets) == targets
    with pytest.raises(UserError, match="another adapter"):
        decided(str(exported.export), adapter=said | {"targets": list(every)[1:]})
    with pytest.raises(UserError, match="another adapter"):
        decided(str(exported.export), adapter={"rank": 8})


@pytest.mark.parametrize(
    ("family", "targets"),
    [("llama", "all-linear"), ("llama", ["q_proj", "v_proj"]), ("untied", ["embed_tokens", "v_proj"])],
)
def test_an_adapter_of_peft_is_the_same_here(folder: Path, tmp_path: Path, family: str, targets: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / family, dtype=torch.float32)
    adapted: Any = get_peft_model(model, LoraConfig(r=4, lora_alpha=9, target_modules=targets, use_rslora=True))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
    wanted = logits(adapted)
    adapted.save_pretrained(tmp_path)
    torch.testing.assert_close(logits(load(tmp_path).model.float()), wanted, rtol=1e-2, atol=0.3)
    evaluated = evaluate_model(
        str(tmp_path), [{"path": str(folder / "rows.jsonl")}], template="plain", loading=Loading("fp32")
    )
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    byte_tokenizer().save_pretrained(tmp_path / "merged")
    whole = evaluate_model(
        str(tmp_path / "merged"), [{"path": str(folder / "rows.jsonl")}], template="plain", loading=Loading("fp32")
    )
    assert evaluated.loss == pytest.approx(whole.loss, rel=1e-5)


@pytest.mark.matrix
def test_magnitudes_go_to_peft_and_come_back(folder: Path, decided: Callable[..., Decision], tmp_path: Path) -> None:
    run = trained(decided(str(folder / "untied"), adapter={"kind": "dora", "rank": 4, "alpha": 12}))
    export_run(run)
    adapted: Any = PeftModel.from_pretrained(base_of(run), run.export)
    with_peft = logits(adapted)
    vectors = [one for name, one in adapted.named_parameters() if "magnitude" in name]
    first = Shards(checkpoint_path(run.checkpoints, 3)).names("model.model.layers.0.self_attn.q_proj")
    assert any(name.endswith("lora_magnitude") for name in first)
    assert len(vectors) == 14
    assert_goes_merged_alone(run, adapted, with_peft, tmp_path)
    rows, loading = [{"path": str(folder / "rows.jsonl")}], Loading("fp32")
    losses = [
        evaluate_model(str(path), rows, template="plain", loading=loading).loss
        for path in (run.export, tmp_path / "merged")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    torch.testing.assert_close(logits(load(resolve_model(run.path)).model.float()), with_peft, rtol=1e-2, atol=0.3)
    further = decided(str(run.export), adapter="none", optimizer={"lr": 1e-9, "warmup": 0})
    assert not isinstance(further.config.adapter, str)
    assert further.config.adapter.kind == "dora"
    account = "additions with lengths of rows (DoRA) of rank 4 to q_proj"
    assert account in further.plan.reasons["trains"]
    assert "(14 matrices: 8 of 8 in attention, 6 of 6 in MLPs)" in further.plan.reasons["trains"]
    before, after = (Shards(checkpoint_path(one.checkpoints, 3)) for one in (run, trained(further)))
    for name in before.names("model."):
        torch.testing.assert_close(before.read(name), after.read(name), rtol=1e-5, atol=1e-6)


@pytest.mark.matrix
@pytest.mark.parametrize("family", ["untied", "llama"])
def test_rotations_go_to_peft_and_come_back(
    folder: Path, decided: Callable[..., Decision], tmp_path: Path, family: str
) -> None:
    """With an embedding that is trained whole too, also where it is the head."""
    rotated = {"kind": "oft", "oft_block_size": 8, "also": ["embeddings"]}
    run = trained(decided(str(folder / family), adapter=rotated, optimizer={"lr": 3e-2, "warmup": 0}))
    export_run(run)
    adapted: Any = PeftModel.from_pretrained(base_of(run), run.export)
    with_peft = logits(adapted)
    with adapted.disable_adapter():  # nothing of it lies in the model's own weights
        torch.testing.assert_close(logits(adapted), logits(base_of(run)), rtol=1e-5, atol=1e-5)
    rotations = [one for name, one in adapted.named_parameters() if "oft_R" in name]
    assert len(rotations) == 14
    assert all(float(one.detach().abs().sum()) > 0 for one in rotations)
    assert_goes_merged_alone(run, adapted, with_peft, tmp_path)
    torch.testing.assert_close(logits(load(resolve_model(run.path)).model.float()), with_peft, rtol=1e-2, atol=0.3)
    further = decided(str(run.export), adapter="none", optimizer={"lr": 1e-9, "warmup": 0})
    assert not isinstance(further.config.adapter, str)
    assert (further.config.adapter.kind, further.config.adapter.oft_block_size) == ("oft", 8)
    assert "rotations of 8 inputs each (OFT) of q_proj" in further.plan.reasons["trains"]
    before, after = (Shards(checkpoint_path(one.checkpoints, 3)) for one in (run, trained(further)))
    for name in before.names("model."):
        torch.testing.assert_close(before.read(name), after.read(name), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("coft", True, "coft is True"),
        ("oft_block_size", 0, "oft_block_size is 0"),
        ("peft_version", "0.17.1", "rotations were others before"),
        ("use_cayley_neumann", False, "use_cayley_neumann is False"),
        ("num_cayley_neumann_terms", 7, "num_cayley_neumann_terms is 7"),
    ],
)
def test_other_rotations_are_refused(folder: Path, tmp_path: Path, field: str, value: Any, told: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "llama", dtype=torch.float32)
    get_peft_model(model, OFTConfig(oft_block_size=8, target_modules=["q_proj"])).save_pretrained(str(tmp_path))
    assert read_adapter(tmp_path).oft_block_size == 8
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(UserError, match=told):
        read_adapter(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "begins",
    [
        {"init": "pissa", "scaling": "rank_stabilised", "patterns": [{"match": "q_proj", "rank": 6, "alpha": 9}]},
        pytest.param({"init": "loftq", "quantize": "nf4", "rounds": 2}, marks=pytest.mark.matrix),
    ],
)
def test_additions_that_began_as_a_part_of_weights_are_exported_for_these_weights(
    folder: Path, decided: Callable[..., Decision], tmp_path: Path, begins: dict[str, Any]
) -> None:
    run = trained(decided(str(folder / "untied"), adapter={"rank": 4, "alpha": 12, **begins}))
    export_run(run)
    with_peft = logits(PeftModel.from_pretrained(base_of(run), run.export))
    expected, shards = base_of(run), Shards(checkpoint_path(run.checkpoints, 3))
    began = {name: value for file in run.start.glob("*.safetensors") for name, value in load_file(file).items()}
    moved = 0.0
    for name in (one.removesuffix(".lora_A") for one in began if one.endswith(".lora_A")):
        down, up = (shards.read(f"model.{name}.lora_{letter}") for letter in "AB")
        rank, alpha = (6, 9) if "patterns" in begins and name.endswith("q_proj") else (4, 12)
        factor = alpha / (rank**0.5 if "scaling" in begins else rank)
        with torch.no_grad():
            change = factor * (up @ down - began[f"{name}.lora_B"] @ began[f"{name}.lora_A"])
            expected.get_parameter(f"{name}.weight").add_(change)
        moved += float(change.norm())
    assert moved > 0.1
    torch.testing.assert_close(logits(expected), with_peft, rtol=1e-5, atol=1e-4)
    assert not torch.allclose(with_peft, logits(base_of(run)), atol=1e-2)
    export_checkpoint(run, tmp_path / "merged", wishes=Wishes("fp32", merge=True))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    torch.testing.assert_close(logits(merged), with_peft, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(logits(load(resolve_model(run.path)).model.float()), with_peft, rtol=1e-2, atol=0.3)
    shutil.rmtree(run.start)
    with pytest.raises(UserError, match="where the additions of the run began"):
        export_checkpoint(run, tmp_path / "lost")


RANKED = [{"match": "layers.1.*.q_proj", "rank": 8, "alpha": 5}, {"match": "q_proj", "alpha": 3}]


@pytest.mark.matrix
def test_ranks_by_pattern_go_to_peft_and_come_back(
    folder: Path, decided: Callable[..., Decision], tmp_path: Path
) -> None:
    adapter = {"rank": 4, "alpha": 12, "patterns": RANKED}
    run = trained(decided(str(folder / "llama"), adapter=adapter))
    export_run(run)
    adapted: Any = PeftModel.from_pretrained(base_of(run), run.export)
    layers = adapted.base_model.model.model.layers
    assert [layer.self_attn.q_proj.r["default"] for layer in layers] == [4, 8]
    assert [layer.self_attn.q_proj.scaling["default"] for layer in layers] == [0.75, 0.625]
    with_peft = logits(adapted)
    export_checkpoint(run, tmp_path / "merged", wishes=Wishes("fp32", merge=True))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    torch.testing.assert_close(logits(merged), with_peft, rtol=1e-5, atol=1e-4)
    further = decided(str(run.export), adapter="none").config.adapter
    assert not isinstance(further, str)
    assert {(one.match.rpartition("layers")[2], one.rank, one.alpha) for one in further.patterns} == {
        (".0.self_attn.q_proj", 4, 3),
        (".1.self_attn.q_proj", 8, 5),
    }
    decided(str(run.export), adapter=adapter)
    with pytest.raises(UserError, match="another adapter"):
        decided(str(run.export), adapter={"rank": 4, "alpha": 12})


def test_an_adapter_of_peft_with_patterns_is_the_same_here(folder: Path, tmp_path: Path) -> None:
    """Expressions that peft reads in its own way: of ends of names, the first that matches."""
    model = AutoModelForCausalLM.from_pretrained(folder / "llama", dtype=torch.float32)
    named: dict[str, Any] = {
        "rank_pattern": {r"layers\.0\..*": 2, "q_proj": 8, "rest": 1},
        "alpha_pattern": {"[qv]_proj": 3},
    }
    adapted: Any = get_peft_model(model, LoraConfig(r=4, lora_alpha=9, target_modules="all-linear", **named))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
    wanted = logits(adapted)
    adapted.save_pretrained(tmp_path)
    torch.testing.assert_close(logits(load(tmp_path).model.float()), wanted, rtol=1e-2, atol=0.3)


def test_an_adapter_that_keeps_another_embedding_is_refused(folder: Path, tmp_path: Path) -> None:
    """As peft's of a model whose embedding was changed before."""
    model = AutoModelForCausalLM.from_pretrained(folder / "untied", dtype=torch.float32)
    adapted: Any = get_peft_model(model, LoraConfig(r=4, target_modules=["embed_tokens"]))
    with torch.no_grad():
        model.model.embed_tokens.base_layer.weight[7] += 1
    adapted.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="an embedding with other weights"):
        load(tmp_path)


@pytest.mark.parametrize(
    "said",
    [{"init_lora_weights": "pissa"}, {"rank_pattern": {"q_(": 8}}, {"alpha_pattern": {"q": -1}}, {"new_field": 1}],
)
def test_an_adapter_that_computes_otherwise_is_refused(folder: Path, tmp_path: Path, said: dict[str, Any]) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "llama", dtype=torch.float32)
    get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"])).save_pretrained(str(tmp_path))
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | said))
    (key,) = said
    with pytest.raises(UserError, match=f"{key} is"):
        find_model(str(tmp_path))


@pytest.mark.slow
def test_a_run_does_not_go_on_over_other_weights(
    folder: Path, decided: Callable[..., Decision], tmp_path: Path
) -> None:
    model = tmp_path / "model"
    made = AutoModelForCausalLM.from_pretrained(folder / "llama", dtype=torch.bfloat16)
    made.save_pretrained(model)
    byte_tokenizer().save_pretrained(model)
    run = trained(decided(str(model)))
    decide_resumption(run, [])
    with torch.no_grad():
        made.model.layers[1].mlp.down_proj.weight[0, 0] += 1
    made.save_pretrained(model)
    with pytest.raises(UserError, match="other weights"):
        decide_resumption(run, [])
    with pytest.raises(UserError, match="not trained"):
        export_checkpoint(run, tmp_path / "merged", wishes=Wishes(merge=True))


@pytest.mark.matrix
def test_a_part_of_a_model_is_trained(folder: Path, decided: Callable[..., Decision], tmp_path: Path) -> None:
    decision = decided(str(folder / "llama"), adapter="none", train=["model.layers.1.*"])
    run = trained(decision)
    export_checkpoint(run, tmp_path / "whole", wishes=Wishes("bf16"))
    before = AutoModelForCausalLM.from_pretrained(folder / "llama", dtype=torch.bfloat16).state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.bfloat16).state_dict()
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if name.startswith("model.layers.1.")}


@pytest.mark.parametrize(
    ("adapter", "told"),
    [
        ({"dropout": 0.1}, "gate_up_proj, down_proj are stacks of experts"),
        ({"targets": ["q_prj"]}, "q_prj: no layers of the model"),
        ({"targets": ["lm_head"]}, "cannot be adapted"),
        ({"kind": "dora", "targets": ["embed_tokens", "q_proj"]}, "embeddings have no magnitudes here"),
        ({"kind": "dora", "dropout": 0.1}, "adapter.kind is dora, and adapter.dropout is 0.1"),
        ({"kind": "oft", "targets": ["embed_tokens", "q_proj"]}, "embeddings have no rotations here"),
        ({"kind": "oft", "rank": 4, "dropout": 0.1}, "adapter.rank and adapter.dropout are given"),
        ({"kind": "oft", "oft_block_size": 5}, "q_proj has 96 inputs"),
        ({"oft_block_size": 8}, "adapter.oft_block_size is 8, and adapter.kind is lora"),
        ({"patterns": [{"match": "q_proj"}]}, "has neither rank nor alpha"),
        ({"init": "pissa", "rank": 97, "alpha": 9}, "k_proj is a matrix of 32 x 96"),
        ({"init": "pissa", "kind": "dora"}, "no addition to the model's own weights"),
        ({"init": "loftq"}, "adapter.quantize is none"),
        ({"rounds": 3}, "adapter.rounds is 3, and adapter.init is zero"),
        ({"patterns": [{"match": "q_prj", "rank": 2}]}, "q_prj: no targets of the model"),
        ({"patterns": [{"match": "q_proj", "rank": 2}, {"match": "layers.*.q_proj", "rank": 3}]}, "matched by a patt"),
        ({"targets": ["embed_tokens"]}, "the model's head is the same matrix"),
        ({"targets": ["embed_tokens"], "also": ["embeddings"]}, "embeddings trained whole"),
    ],
)
def test_what_cannot_be_adapted_is_refused(
    folder: Path, decided: Callable[..., Decision], adapter: dict[str, Any], told: str
) -> None:
    family = "qwen3_moe" if "dropout" in adapter else "untied" if {"also", "kind"} & {*adapter} else "llama"
    with pytest.raises(UserError, match=told):
        decided(str(folder / family), adapter=adapter)


@pytest.mark.slow
def test_an_adapter_of_peft_with_magnitudes_goes_on_without_dropout(
    folder: Path, decided: Callable[..., Decision], tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "llama", dtype=torch.float32)
    told = LoraConfig(r=4, lora_alpha=9, target_modules=["q_proj"], use_dora=True, lora_dropout=0.1)
    get_peft_model(model, told).save_pretrained(str(tmp_path))
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UserError, match="trained with dropout of") as refused:
        decided(str(tmp_path), adapter="none")
    (problem,) = refused.value.problems
    adapter = decided(str(tmp_path), adapter=json.loads(re.findall(r"{.*}", problem.change)[0])).config.adapter
    assert not isinstance(adapter, str)
    assert (adapter.kind, adapter.rank, adapter.targets, adapter.dropout) == ("dora", 4, ("q_proj",), 0)


@pytest.mark.parametrize(("kind", "told"), [("dora", "the lengths of whole rows"), ("oft", "all inputs of a layer")])
def test_kinds_of_whole_layers_have_no_tensor_axis(
    folder: Path, decided: Callable[..., Decision], kind: str, told: str
) -> None:
    with pytest.raises(UserError, match=f"needs {told}"):
        decided(str(folder / "llama"), 2, adapter={"kind": kind}, parallel={"tensor": 2})
