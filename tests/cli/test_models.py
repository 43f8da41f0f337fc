"""What commands say of a model's weights and code: before a worker starts, in the plan, and in a sentence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import entry
import tiny
import tonnage
from tonnage.cli.main import app
from tonnage.config import compare, read_config
from tonnage.config.changes import as_json
from tonnage.errors import UserError
from tonnage.files.reading import parse_record
from tonnage.inference.generate import Decoding, generate, load
from tonnage.model import pretrained
from tonnage.model.files import find_model
from tonnage.planning.plan import Plan
from tonnage.rundir.weights import WeightFacts

HEAD = "lm_head.weight"


def run(*words: object) -> str:
    result = CliRunner().invoke(app, [*map(str, words)], input="y\n" * 9, terminal_width=200)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stdout


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny.llama_config(num_hidden_layers=1, tie_word_embeddings=False, initializer_range=0.2)
    return tiny.write_model(tmp_path_factory.mktemp("models") / "llama", config)


@pytest.fixture
def model(whole: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the model with other tensors, and other entries in config.json."""

    def make(change: Callable[[dict[str, Any]], dict[str, Any]], **entries: Any) -> Path:
        copied = Path(shutil.copytree(whole, tmp_path / "model"))
        described = json.loads((copied / "config.json").read_text())
        (copied / "config.json").write_text(json.dumps(described | entries))
        tensors = change(load_file(copied / "model.safetensors"))
        save_file({name: value.clone() for name, value in tensors.items()}, copied / "model.safetensors")
        return copied

    return make


def config_for(model: Path, **keys: Any) -> Path:
    folder = model.parent
    data = {
        "train": str(tiny.write_rows(folder / "rows.jsonl", tiny.alpaca_rows(40))),
        "max_length": 128,
        "template": "plain",
        "cache": str(folder / "cache"),
    }
    config = {"model": str(model), "data": data, "batch": {"sequences": 2}, "steps": 2, "launch": {"threads": 1}}
    path = folder / "config.yaml"
    path.write_text(json.dumps(config | {"output": str(folder / "run")} | keys))
    return path


def plan_of(*words: object) -> Plan:
    return parse_record(run("plan", *words, "--json"), Plan, "plan")


@pytest.mark.slow
def test_a_plan_says_what_is_missing_and_what_is_left_out(model: Callable[..., Path]) -> None:
    visual = {f"visual.{number}.weight": torch.ones(3) for number in range(5)}
    config = config_for(model(lambda t: {n: v for n, v in t.items() if n != HEAD} | visual))
    with pytest.raises(UserError) as caught:
        run("train", config, "--dry-run")
    lost, more = caught.value.problems
    assert "lm_head.weight" in lost.found
    assert "visual.0.weight" in more.found
    assert not (config.parent / "run").exists()
    words = ["allow_missing=[lm_head.*]", "allow_unexpected=[visual.*]"]
    said = " ".join(run("plan", config, *words).split())
    assert "weights 1 parameter is (lm_head.weight) not in the files and initialised (allow_missing)" in said
    assert "5 tensors are (visual.0.weight, visual.1.weight, visual.2.weight and 2 more) not in the model" in said
    facts = plan_of(config, *words).weights
    assert facts == WeightFacts(missing=(HEAD,), left_out=tuple(sorted(visual)))


@pytest.mark.slow
def test_a_plan_says_what_else_is_remarkable(model: Callable[..., Path]) -> None:
    entry = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    copied = model(
        lambda t: {f"_orig_mod.{name}": value for name, value in t.items()},
        quantization_config=entry,
        tie_word_embeddings=True,
    )
    config = config_for(copied)
    plan = plan_of(config)
    assert plan.weights == WeightFacts(unwrapped=True, untied=True, once_quantised="bitsandbytes, 4-bit")
    assert plan.model.embedding_parameters > 0, "the head is no longer the embedding"
    said = " ".join(run("plan", config).split())
    for words in ("taken off the names", "both are trained", "config.json says quantised (bitsandbytes, 4-bit)"):
        assert words in said


def test_stored_plans_keep_it_and_older_ones_have_none_of_it(model: Callable[..., Path], tmp_path: Path) -> None:
    plan = replace(plan_of(config_for(model(lambda t: t))), weights=WeightFacts(missing=("a", "b"), untied=True))
    plan.write(tmp_path / "plan.json")
    assert Plan.read(tmp_path / "plan.json") == plan
    older = asdict(plan)
    del older["weights"]
    assert parse_record(json.dumps(older), Plan, "plan").weights == WeightFacts()


def test_a_run_goes_on_whatever_may_be_missing_but_not_as_another_revision(model: Callable[..., Path]) -> None:
    config = read_config(config_for(model(lambda t: t)))
    update = {"allow_missing": ("a",), "allow_unexpected": ("b",), "revision": "c"}
    changes = compare(as_json(config), config.model_copy(update=update))
    assert {change.key: change.is_free for change in changes} == {
        "allow_missing": True,
        "allow_unexpected": True,
        "revision": False,
    }


def test_answers_come_from_whole_weights_whatever_lies_beside_them(whole: Path, model: Callable[..., Path]) -> None:
    """Under the prefixes of wrappers, with a stale entry of quantisation, beside a tower that may be left out."""
    asked = [[{"role": "user", "content": "abc"}]]
    expected = generate(load(whole, template="plain"), asked, Decoding(8))
    entry = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    more = {"visual.scale": torch.ones(3)}
    beside = model(lambda t: t | more, quantization_config=entry)
    assert generate(load(beside, template="plain", allow_unexpected=["visual.*"]), asked, Decoding(8)) == expected
    shutil.rmtree(beside)
    other = model(lambda t: t, transformers_weights="other.safetensors")
    save_file(
        {name: value * 0 for name, value in load_file(other / "model.safetensors").items()}, other / "other.safetensors"
    )
    assert generate(load(other, template="plain"), asked, Decoding(8)) == expected
    shutil.rmtree(other)
    wrapped = model(lambda t: {f"module._orig_mod.{n}": v for n, v in t.items()} | more, quantization_config=entry)
    assert generate(load(wrapped, template="plain", allow_unexpected=["*visual*"]), asked, Decoding(8)) == expected


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "eval", "plan", "init"])
@pytest.mark.parametrize(
    ("layers", "found"),
    [
        (0, "tensors that the model has no place for: model.layers.0.input_layernorm.weight"),
        (2, "parameters are not in the weight files: model.layers.1."),
    ],
)
def test_no_command_answers_with_half_a_model(
    command: str, layers: int, found: str, model: Callable[..., Path]
) -> None:
    half = model(lambda t: t, num_hidden_layers=layers)
    rows = tiny.write_rows(half.parent / "rows.jsonl", tiny.alpaca_rows(3))
    words = {
        "generate": ["--prompt", "abc"],
        "serve": ["--port", "0"],
        "eval": ["--data", str(rows)],
        "plan": [f"data.train={rows}", "data.max_length=128"],
        "init": [str(rows), "--output", str(half.parent / "new.yaml")],
    }
    said = entry.refusal(command, str(half), *words.get(command, []))
    assert found in said
    if command in ("generate", "chat", "serve", "eval"):
        assert "allow_missing" not in said
        assert (" --allow-unexpected 'model.layers.0.*'" in said) == (layers == 0)


def test_python_answers_with_no_half_a_model_either(model: Callable[..., Path]) -> None:
    half = model(lambda t: t, num_hidden_layers=0)
    folder = half.parent / "run"
    folder.mkdir()
    shutil.copyfile(config_for(half), folder / "config.yaml")
    (folder / "export").symlink_to(half)
    (folder / "plan.json").touch()
    done, rows = tonnage.open_run(folder), [{"instruction": "a", "output": "b"}]
    for ask in (lambda: done.generate(["abc"]), done.chat, lambda: done.evaluate(rows)):
        with pytest.raises(UserError, match="no place for"):
            ask()


@pytest.mark.matrix
def test_what_may_be_left_out_is_said_by_an_option_or_by_the_run(model: Callable[..., Path]) -> None:
    config = config_for(
        model(lambda t: t | {"visual.scale": torch.ones(3)}),
        allow_unexpected=["visual.*"],
        adapter={"rank": 2},
        track=[],
    )
    run("train", config)
    made, words = config.parent / "run", ["--prompt", "abc", "--max-new-tokens", "2"]
    answer = run("generate", made, *words)
    assert "visual.scale" in entry.refusal("generate", str(made / "export"), *words)
    assert run("generate", made / "export", *words, "--allow-unexpected", "visual.*") == answer


def test_a_quantised_model_that_transformers_loads_has_all_its_tensors(
    model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of packed weights transformers alone knows which belongs where: what it says of names is not left unread."""
    whole = model(lambda t: t)
    names = {"missing_keys": set[str](), "unexpected_keys": {"model.layers.1.mlp.up_proj.qweight"}}
    made = AutoModelForCausalLM.from_pretrained(whole)
    monkeypatch.setattr(pretrained, "method_of", lambda config: "gptq")
    monkeypatch.setattr(pretrained, "check_weights", lambda *given, **named: WeightFacts())
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *given, **named: (made, names))
    with pytest.raises(UserError, match=r"no place for: model\.layers\.1\.mlp\.up_proj\.qweight"):
        load(whole)
    load(whole, allow_unexpected=["model.layers.1.*"])
    names |= {"missing_keys": {"model.norm.weight"}, "unexpected_keys": {"model.layers.0.mlp.up_proj.g_idx"}}
    with pytest.raises(UserError, match=r"not in the weight files: model\.norm\.weight"):
        load(whole)


def test_links_that_lead_nowhere_are_followed_in_words(model: Callable[..., Path]) -> None:
    copied = model(lambda t: t)
    (copied / "model.safetensors").unlink()
    (copied / "model.safetensors").symlink_to("../blobs/0a1b")
    rows = tiny.write_rows(copied.parent / "rows.jsonl", tiny.alpaca_rows(3))
    for words in (("generate", "--prompt", "abc"), ("plan", f"data.train={rows}")):
        said = entry.refusal(words[0], str(copied), *words[1:])
        assert f"{copied / 'model.safetensors'}: a link to ../blobs/0a1b, where no file is" in said
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (copied / "model.safetensors.index.json").write_text(json.dumps(index))
    (copied / "model-2.safetensors").symlink_to("/nowhere/at-all")
    assert "a link to /nowhere/at-all, where no file is" in entry.refusal("generate", str(copied), "--prompt", "abc")


def test_no_answer_comes_from_weights_that_are_no_numbers(model: Callable[..., Path]) -> None:
    def spoil(tensors: dict[str, Any]) -> dict[str, Any]:
        tensors["model.norm.weight"][3] = float("nan")
        return tensors

    with pytest.raises(UserError, match=r"not finite: model\.norm\.weight"):
        load(model(spoil))


@pytest.mark.parametrize("key", ["repetition_penalty", "num_beams", "no_repeat_ngram_size", "cache_implementation"])
def test_decoding_that_cannot_be_is_told_in_a_sentence(key: str, model: Callable[..., Path]) -> None:
    odd = model(lambda t: t)
    (odd / "generation_config.json").write_text(json.dumps({key: "odd"}))
    with pytest.raises(UserError) as caught:
        run("generate", odd, "--prompt", "abc", "--template", "plain")
    assert "\n" not in caught.value.problems[0].found


def test_what_transformers_cannot_load_is_told_in_a_sentence(model: Callable[..., Path]) -> None:
    """A quantised model whose library is not there; whether it can be answered with is for transformers to say."""

    def quantise(tensors: dict[str, Any]) -> dict[str, Any]:
        name = "model.layers.0.mlp.up_proj.weight"
        scale = {f"{name}_scale_inv": torch.ones(2, 1)}
        return tensors | {name: tensors[name].to(torch.float8_e4m3fn)} | scale

    entry = {"quant_method": "gptq", "bits": 4}
    packed = model(quantise, quantization_config=entry)
    with pytest.raises(UserError) as caught:
        load(packed)
    assert "\n" not in caught.value.problems[0].found


def test_commands_that_load_a_model_take_the_flag() -> None:
    for command in ("eval", "chat", "generate", "plan"):
        assert "--trust-remote-code" in run(command, "--help")


def test_an_evaluation_says_what_it_leaves_out(model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    more = model(lambda t: t | {"visual.weight": torch.ones(3)})
    rows = tiny.write_rows(more.parent / "rows.jsonl", tiny.alpaca_rows(3))
    monkeypatch.setenv("TONNAGE_CACHE", str(more.parent / "cache"))
    words = ["eval", str(more), "--data", str(rows), "--max-length", "512", "--exact-match", "0"]
    assert (
        "change: put the right config.json beside them, or, to go on without them, --allow-unexpected 'visual.*'"
        in (entry.refusal(*words))
    )
    said = run(*words, "--allow-unexpected", "visual.*")
    assert "1 tensors that the model has no place for are left out" in said
    assert find_model(str(more)).weights
