"""What a model directory says is a stranger's word: read within bounds, believed where it fits, and never run."""

from __future__ import annotations

import builtins
import json
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from transformers import Gemma3Config, GPTNeoConfig, LlamaConfig

from tiny import alpaca_rows, byte_tokenizer, llama_config, neox_config, write_model, write_rows
from tonnage.config import read_config
from tonnage.decide.models import find, use_model
from tonnage.decide.plans import suppose
from tonnage.errors import UserError
from tonnage.inference.generate import load
from tonnage.model.build import build_on_meta, on_meta
from tonnage.model.files import ModelFiles, check_fit, find_model, read_model_config, read_tokenizer
from tonnage.model.matching import check_weights
from tonnage.training.weigh import Conditions, weigh

CONFIGURATION = """
from pathlib import Path
from transformers import Gemma3Config, GPTNeoConfig, LlamaConfig
(Path({ran!r})).touch()

class MineConfig(LlamaConfig):
    model_type = "mine"
"""
MODELING = """
from transformers import LlamaForCausalLM
from .configuration_mine import MineConfig

class MineForCausalLM(LlamaForCausalLM):
    config_class = MineConfig
"""
AUTO_MAP = {"AutoConfig": "configuration_mine.MineConfig", "AutoModelForCausalLM": "modeling_mine.MineForCausalLM"}


def described(directory: Path, **changes: Any) -> Path:
    """The directory, with other entries in its config.json."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return directory


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", llama_config(num_hidden_layers=1))


@pytest.fixture
def ran(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that is there once code of the model ran; somebody who says yes to whatever is asked makes a test fail."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(builtins, "input", lambda *given: pytest.fail(f"it asks: {given}"))
    path = tmp_path / "ran"
    (model / "configuration_mine.py").write_text(CONFIGURATION.format(ran=str(path)))
    (model / "modeling_mine.py").write_text(MODELING)
    return path


def config_for(model: Path, tmp_path: Path, **keys: Any) -> Any:
    path = tmp_path / "config.yaml"
    data = {"train": str(write_rows(tmp_path / "rows.jsonl", alpaca_rows(9))), "max_length": 64}
    path.write_text(json.dumps({"model": str(model), "data": data, "output": str(tmp_path / "run")} | keys))
    return read_config(path)


def test_code_of_a_model_does_not_run_unless_allowed(model: Path, ran: Path, tmp_path: Path) -> None:
    described(model, model_type="mine", auto_map=AUTO_MAP)
    files = find_model(str(model))
    for attempt in (
        lambda: read_model_config(files),
        lambda: find(config_for(model, tmp_path)),
        lambda: suppose(str(model), [], None),
        lambda: load(model),
    ):
        with pytest.raises(UserError, match=r"code of its own \(configuration_mine\.MineConfig\)") as caught:
            attempt()
        assert "trust_remote_code: true" in str(caught.value)
        assert "--trust-remote-code" in str(caught.value)
    read_tokenizer(files)  # needs none of it
    assert not ran.exists()


@pytest.mark.slow
def test_allowed_code_is_used_for_plans_weights_and_answers(model: Path, ran: Path, tmp_path: Path) -> None:
    described(model, model_type="mine", auto_map=AUTO_MAP)
    files = find_model(str(model))
    config = read_model_config(files, trust_remote_code=True)
    assert ran.exists()
    assert type(config).__name__ == "MineConfig"
    assert type(on_meta(config, torch.float32)).__name__ == "MineForCausalLM"
    assert weigh(config, None, Conditions(document_tokens=32)).num_blocks == 1
    check_weights(files, config)
    assert find(config_for(model, tmp_path, trust_remote_code=True)).config.model_type == "mine"
    assert suppose(str(model), ["trust_remote_code=true"], None).model.model_type == "mine"
    assert type(load(model, trust_remote_code=True).model).__name__ == "MineForCausalLM"


def test_where_transformers_has_the_classes_they_are_used(model: Path, ran: Path) -> None:
    described(model, auto_map=AUTO_MAP)
    config = read_model_config(find_model(str(model)))
    assert type(config) is LlamaConfig
    assert not hasattr(config, "auto_map"), "an export would point to code that it does not have"
    on_meta(config, torch.float32)
    load(model)
    assert not ran.exists()


def test_code_for_the_model_alone_is_refused_by_name(model: Path, ran: Path) -> None:
    described(model, model_type="clip_text_model", auto_map={"AutoModelForCausalLM": AUTO_MAP["AutoModelForCausalLM"]})
    with pytest.raises(UserError, match=r"code of its own \(modeling_mine\.MineForCausalLM\)"):
        read_model_config(find_model(str(model)))
    assert not ran.exists()


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "experts_implementation"])
def test_a_config_does_not_choose_kernels_of_a_hub_repository(key: str, model: Path) -> None:
    described(model, **{key: "somebody/kernels"})
    config = read_model_config(find_model(str(model)))
    assert config._attn_implementation is None
    assert config._experts_implementation is None
    assert load(model).model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("auto_map", [{"AutoTokenizer": ["t.MineTokenizer", None]}, ["t.MineTokenizer", None]])
def test_code_of_a_tokenizer_is_refused_by_name(auto_map: Any, model: Path, ran: Path) -> None:
    (model / "t.py").write_text(f"from pathlib import Path\nPath({str(ran)!r}).touch()\nclass MineTokenizer: pass\n")
    path = model / "tokenizer_config.json"
    path.write_text(json.dumps({"auto_map": auto_map, "tokenizer_class": "MineTokenizer"}))
    described(model, model_type="mine")
    with pytest.raises(UserError, match=r"code of its own \(t\.MineTokenizer\)"):
        read_tokenizer(find_model(str(model)))
    assert not ran.exists()


def test_a_run_says_itself_whether_code_may_run_and_tensors_may_be_left_out(model: Path, tmp_path: Path) -> None:
    assert use_model(str(model), trust_remote_code=True).trust_remote_code
    assert not use_model(str(model)).trust_remote_code
    for said in (True, False):
        run = tmp_path / str(said)
        run.mkdir()
        (run / "export").symlink_to(model)
        keys = f"trust_remote_code: {str(said).lower()}\nallow_unexpected: ['*.bias']\n"
        (run / "config.yaml").write_text(f"model: m\ndata: {{train: d}}\n{keys}")
        in_use = use_model(str(run), allow_unexpected=["x"])
        assert in_use.trust_remote_code is said
        assert in_use.allow_unexpected == ("x", "*.bias")


HOSTILE: dict[str, bytes] = {
    "nothing": b"",
    "a list": b"[1]",
    "a number": b"5",
    "null": b"null",
    "100,000 levels": b"[" * 100_000 + b"]" * 100_000,
    "100,000 levels of objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "no UTF-8": b'{"model_type": "\xff"}',
    "half of it": b'{"model_type": "ll',
    "5,000 digits": b'{"model_type": "llama", "hidden_size": ' + b"9" * 5000 + b"}",
    "no family": b'{"hidden_size": 64}',
    "a family that is none": b'{"model_type": "no such family"}',
    "a family that is a list": b'{"model_type": ["llama"]}',
    "a family that is null": b'{"model_type": null}',
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_config_that_is_none_is_refused(what: str, model: Path) -> None:
    (model / "config.json").write_bytes(HOSTILE[what])
    with pytest.raises(UserError, match=r"config\.json: ") as caught:
        read_model_config(find_model(str(model)))
    (problem,) = caught.value.problems
    assert "\n" not in problem.found
    assert len(problem.found) < 400


KEYS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
VALUES: tuple[Any, ...] = (0, -1, 10**6, 10**12, 2**63, 1e308, 0.5, "64", [], {}, None, True, float("nan"))


@pytest.mark.parametrize("key", [*KEYS, "vocab_size", "max_position_embeddings", "rope_parameters", "hidden_act"])
def test_impossible_values_are_refused_or_right_within_seconds(key: str, tmp_path: Path, model: Path) -> None:
    """With weights they must fit them; without, whatever is left must fit the machine."""
    whole = (model / "config.json").read_text()
    for value in VALUES:
        (model / "config.json").write_text(whole)
        described(model, **{key: value})
        started, accepted = time.process_time(), False
        with suppress(UserError):
            files = find_model(str(model))
            check_weights(files, read_model_config(files))
            accepted = True
        assert time.process_time() - started < 5, value
        assert not (accepted and key in KEYS and value in (0, -1, 10**6, 10**12, "64", [], {})), value
        if key in ("num_hidden_layers", "vocab_size") and value in (10**12, 2**63):
            with pytest.raises(UserError, match="needed: at most"):
                suppose(str(model), ["data.max_length=64", "batch.tokens=64"], None)


TOKENIZERS: dict[str, dict[str, bytes]] = {
    "a tokenizer.json of nothing": {"tokenizer.json": b""},
    "a tokenizer.json of a list": {"tokenizer.json": b"[]"},
    "a tokenizer.json of an empty object": {"tokenizer.json": b"{}"},
    "a tokenizer.json of 100,000 levels": {"tokenizer.json": b"[" * 100_000 + b"]" * 100_000},
    "a tokenizer.json of other bytes": {"tokenizer.json": b"\xff\xfe\x00"},
    "no vocabulary": {"tokenizer.json": b'{"version": "1.0", "added_tokens": [], "model": {"type": "BPE"}}'},
    "a vocabulary of text": {
        "tokenizer.json": b'{"version":"1.0","added_tokens":[],"model":{"type":"BPE","vocab":{"a":"b"},"merges":[]}}'
    },
    "an empty vocabulary": {
        "tokenizer.json": b'{"version":"1.0","added_tokens":[],"model":{"type":"BPE","vocab":{},"merges":[]}}',
        "tokenizer_config.json": b"{}",
    },
    "a tokenizer_config.json of a list": {"tokenizer_config.json": b"[]"},
    "a tokenizer_config.json of 100,000 levels": {"tokenizer_config.json": b"[" * 100_000 + b"]" * 100_000},
    "a class that is a number": {"tokenizer_config.json": b'{"tokenizer_class": 5}'},
    "a template of a number": {"tokenizer_config.json": b'{"chat_template": {"default": 5}}'},
    "half a pair of surrogates": {"tokenizer_config.json": b'{"legacy": "\\ud800"}'},
    "a length that is a list": {"tokenizer_config.json": b'{"model_max_length": []}'},
    "special tokens that are lists": {"tokenizer_config.json": b'{"eos_token": [1, 2]}'},
}


@pytest.mark.parametrize("what", TOKENIZERS)
def test_a_tokenizer_that_is_none_is_refused(what: str, model: Path) -> None:
    for name, content in TOKENIZERS[what].items():
        (model / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_tokenizer(find_model(str(model)))
    (problem,) = caught.value.problems
    assert str(model) in problem.where
    assert "\n" not in problem.found


def test_weights_in_other_forms_and_adapters_are_called_by_name(model: Path) -> None:
    (model / "model.safetensors").rename(model / "model.gguf")
    with pytest.raises(UserError, match=r"no safetensors weights \(only model\.gguf\)"):
        find_model(str(model))
    (model / "config.json").unlink()
    said = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "base_model_name_or_path": str(model / "base")}
    (model / "adapter_config.json").write_text(json.dumps(said | {"use_qalora": True}))
    with pytest.raises(UserError, match=r"use_qalora is True\s*needed: False") as refused:
        find_model(str(model))
    assert "an adapter without weights" in str(refused.value)


COMMITS = {"main": "a" * 40, "v1.0": "b" * 40}


@pytest.fixture
def hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model in the hub's cache at two commits, as ``huggingface_hub`` lays it out; the hub cannot be reached."""
    cache = tmp_path / "cache"
    repository = cache / "models--me--mine"
    for number, (name, commit) in enumerate(COMMITS.items()):
        made = write_model(tmp_path / name, llama_config(num_hidden_layers=1), seed=number)
        snapshot = repository / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (repository / "blobs").mkdir(exist_ok=True)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / name).write_text(commit)
        for path in made.iterdir():
            blob = repository / "blobs" / f"{number}-{path.name}"
            blob.write_bytes(path.read_bytes())
            (snapshot / path.name).symlink_to(Path("../../blobs") / blob.name)
    fetch = partial(huggingface_hub.snapshot_download, cache_dir=cache, local_files_only=True)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    monkeypatch.chdir(tmp_path)
    return "me/mine"


def test_a_revision_is_found_and_its_commit_told(hub_id: str) -> None:
    found = {revision: find_model(hub_id, revision=revision) for revision in (None, "v1.0", COMMITS["v1.0"])}
    assert {revision: files.commit for revision, files in found.items()} == {
        None: COMMITS["main"],
        "v1.0": COMMITS["v1.0"],
        COMMITS["v1.0"]: COMMITS["v1.0"],
    }
    assert found[None].weights[0].read_bytes() != found["v1.0"].weights[0].read_bytes()
    with pytest.raises(UserError, match=r"model: me/mine: "):
        find_model(hub_id, revision="v2.0")


def test_a_run_keeps_the_commit_that_its_revision_was(hub_id: str, tmp_path: Path) -> None:

    from tonnage.decide.decision import decide_on
    from tonnage.decide.written import write_run
    from tonnage.files.reading import read_json
    from tonnage.rundir.directory import RunDirectory

    data = {
        "train": str(write_rows(tmp_path / "rows.jsonl", alpaca_rows(9))),
        "max_length": 128,
        "template": "plain",
        "cache": str(tmp_path / "prepared"),
    }
    path = tmp_path / "config.yaml"
    keys = {"batch": {"sequences": 1}, "steps": 1, "output": str(tmp_path / "run")}
    path.write_text(json.dumps({"model": hub_id, "revision": "v1.0", "data": data} | keys))
    decision = decide_on(read_config(path))
    run = RunDirectory(tmp_path / "run")
    write_run(run, decision)
    assert read_config(run.config).revision == COMMITS["v1.0"]
    assert read_json(run.environment)["model_commit"] == COMMITS["v1.0"]
    (tmp_path / "cache" / "models--me--mine" / "refs" / "v1.0").write_text(COMMITS["main"])  # the tag moves on
    again = decide_on(read_config(run.config))
    assert again.model.files == decision.model.files


def test_a_local_directory_has_no_revisions(model: Path) -> None:
    with pytest.raises(UserError, match="a revision of the local directory"):
        find_model(str(model), revision="main")
    assert find_model(str(model)).commit is None


def test_files_of_a_model_are_what_they_were(tmp_path: Path) -> None:
    write_model(tmp_path, neox_config())
    assert find_model(str(tmp_path)) == ModelFiles(tmp_path, (tmp_path / "model.safetensors",))
    assert len(read_tokenizer(find_model(str(tmp_path)))) == len(byte_tokenizer())


def test_a_model_of_images_and_text_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="model type gemma3: a model of more than text"):
        check_fit(Gemma3Config(), byte_tokenizer(), 16)


def test_a_family_with_a_table_of_attention_of_its_own_is_refused_by_name() -> None:
    config = GPTNeoConfig(num_layers=2, attention_types=[[["global"], 2]], hidden_size=32, num_heads=2)
    with pytest.raises(UserError, match="model type gpt_neo: the family does not accept an attention function"):
        build_on_meta(config, torch.float32)
