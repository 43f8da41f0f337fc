"""Checkpoints are whole or nothing, and exports need no rank that wrote them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from tiny import byte_tokenizer, llama_config, neox_config
from tonnage.checkpoint import export as export_module
from tonnage.checkpoint.export import export
from tonnage.checkpoint.save import Cursor, Saver, checkpoint_path, complete_checkpoints, prune, read_state
from tonnage.errors import UserError
from tonnage.model.build import allocate, build_on_meta, initialise_randomly
from tonnage.parallel.world import World, join_world


@pytest.fixture(scope="module")
def world() -> object:
    with join_world() as world:
        yield world


def saved(folder: Path, config: PreTrainedConfig, world: World, step: int = 7) -> tuple[Path, dict[str, torch.Tensor]]:
    model = build_on_meta(config, torch.float32)
    allocate(model, torch.device("cpu"))
    initialise_randomly(model, 0)
    named = dict(model.named_parameters())
    path = checkpoint_path(folder, step)
    low = {f"{n}.low": torch.zeros(p.shape, dtype=torch.int16) for n, p in named.items()}
    Saver(folder, 9, world).save(Cursor(step, 28, 6), named, low, {"kind": "test"}, wait=True)
    return path, {name: p.detach() for name, p in named.items()}


def test_complete_holds_the_hash_of_every_file_and_no_pickle(tmp_path: Path, world: World) -> None:
    path, _ = saved(tmp_path, llama_config(), world)
    files = json.loads((path / "COMPLETE").read_text())["files"]
    assert set(files) == {p.name for p in path.iterdir()} - {"COMPLETE"}
    for name, entry in files.items():
        content = (path / name).read_bytes()
        assert hashlib.sha256(content).hexdigest() == entry["sha256"]
        assert len(content) == entry["bytes"]
        assert not content.startswith(b"\x80")
    assert {Path(name).suffix for name in files} == {".safetensors", ".json"}
    assert read_state(path) == {"format": 1, "step": 7, "position": 28, "num_updates": 6, "kind": "test"}


@pytest.mark.parametrize("max_file_bytes", [10**9, 200_000])
@pytest.mark.parametrize("config", [llama_config(), neox_config()], ids=["tied", "renamed keys"])
def test_export_loads_in_transformers_bit_for_bit(
    config: PreTrainedConfig, max_file_bytes: int, tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_module, "MAX_FILE_BYTES", max_file_bytes)
    path, weights = saved(tmp_path, config, world)
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    told: list[tuple[int, int]] = []
    export(
        path,
        tmp_path / "out",
        config=config,
        tokenizer=tmp_path / "tokenizer",
        stop_tokens=[256],
        dtype=torch.float32,
        progress=lambda done, total: told.append((done, total)),
    )
    assert (len(list((tmp_path / "out").glob("*.safetensors"))) > 1) == (max_file_bytes < 10**9)
    assert told[-1][0] == told[-1][1] == 4 * sum(w.numel() for w in weights.values())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, weights[name]), name
    reference = tmp_path / "reference"
    loaded.save_pretrained(reference)
    assert keys(tmp_path / "out") == keys(reference)


def keys(directory: Path) -> set[str]:
    from safetensors import safe_open

    found: set[str] = set()
    for file in directory.glob("*.safetensors"):
        with safe_open(file, framework="pt") as source:
            found |= set(source.keys())
    return found


def test_a_missing_shard_is_refused(tmp_path: Path, world: World) -> None:
    path, _ = saved(tmp_path, llama_config(), world)
    file = next(path.glob("*.safetensors"))
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    name = next(iter(tensors))
    info = {key: {"saved_offsets": [0] * value.dim()} for key, value in tensors.items()}
    info[name]["saved_offsets"][0] = tensors[name].shape[0]
    save_file(tensors, file, metadata={"DCP_SHARDING_INFO": json.dumps(info)})
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    with pytest.raises(UserError, match="every shard"):
        export(
            path,
            tmp_path / "out",
            config=llama_config(),
            tokenizer=tmp_path / "tokenizer",
            stop_tokens=[],
            dtype=torch.float32,
        )
    assert not (tmp_path / "out").exists()


def test_prune_keeps_the_newest_complete_and_never_counts_incomplete_ones(tmp_path: Path, world: World) -> None:
    paths = [saved(tmp_path, llama_config(), world, step)[0] for step in (1, 2, 3)]
    broken = checkpoint_path(tmp_path, 4)
    broken.mkdir()
    assert complete_checkpoints(tmp_path) == paths
    prune(tmp_path, keep=2)
    assert complete_checkpoints(tmp_path) == paths[1:]
    assert broken.exists()
