"""Checkpoints are whole or nothing, and exports need no rank that wrote them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

from tiny import byte_tokenizer, llama_config, mixture_config, neox_config
from tonnage.checkpoint import export as export_module
from tonnage.checkpoint.description import ExportForm
from tonnage.checkpoint.export import Start, export, parse_size
from tonnage.checkpoint.publishing import check_empty
from tonnage.checkpoint.save import (
    Cursor,
    Saver,
    checkpoint_path,
    complete_checkpoints,
    prune,
    read_state,
    shard_name,
)
from tonnage.checkpoint.shards import TensorPart, write_file
from tonnage.checkpoint.verify import CHECKSUMS, verify
from tonnage.errors import UserError
from tonnage.kernels.adamw import split
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
        assert xxhash.xxh3_128(content).hexdigest() == entry["xxh3_128"]
        assert len(content) == entry["bytes"]
        assert not content.startswith(b"\x80")
    assert {Path(name).suffix for name in files} == {".safetensors", ".json"}
    shards = {name: entry for name, entry in files.items() if name != "state.json"}
    assert read_state(path) == {"format": 1, **asdict(Cursor(7, 28, 6)), "kind": "test", "shards": shards}


@pytest.mark.parametrize("max_file_bytes", [10**9, 200_000])
@pytest.mark.parametrize("config", [llama_config(), neox_config()], ids=["tied", "renamed keys"])
def test_export_loads_in_transformers_bit_for_bit(
    config: PreTrainedConfig, max_file_bytes: int, tmp_path: Path, world: World
) -> None:
    path, weights = saved(tmp_path, config, world)
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    told: list[tuple[int, int]] = []
    export(
        path,
        tmp_path / "out",
        ExportForm(config, tmp_path / "tokenizer", [256], torch.float32),
        Start(tmp_path),
        shard_bytes=max_file_bytes,
        progress=lambda done, total: told.append((done, total)),
    )
    assert (len(list((tmp_path / "out").glob("*.safetensors"))) > 1) == (max_file_bytes < 10**9)
    assert told[-1][0] == told[-1][1] == 8 * sum(w.numel() for w in weights.values())
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
            ExportForm(llama_config(), tmp_path / "tokenizer", [], torch.float32),
            Start(tmp_path),
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


def test_masters_that_are_split_are_exported_whole(tmp_path: Path, world: World) -> None:
    """In bf16 the weights that were trained with, in other types the fp32 masters."""
    config = llama_config(num_hidden_layers=1)
    model = build_on_meta(config, torch.float32)
    allocate(model, torch.device("cpu"))
    initialise_randomly(model, 0)
    masters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    halves = {name: split(master) for name, master in masters.items()}
    Saver(tmp_path, 1, world).save(
        Cursor(1, 8, 1),
        {name: pair[0] for name, pair in halves.items()},
        {f"{name}.low": pair[1] for name, pair in halves.items()},
        {},
        wait=True,
    )
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        out = tmp_path / str(dtype)
        export(
            checkpoint_path(tmp_path, 1),
            out,
            ExportForm(config, tmp_path / "tokenizer", [], dtype),
            Start(tmp_path),
        )
        loaded = AutoModelForCausalLM.from_pretrained(out)
        assert loaded.dtype == dtype
        for name, parameter in loaded.named_parameters():
            want = halves[name][0] if dtype == torch.bfloat16 else masters[name].to(dtype)
            assert torch.equal(parameter, want), (dtype, name)


def test_what_a_model_keeps_in_fp32_is_exported_in_fp32(tmp_path: Path, world: World) -> None:
    config = mixture_config("ernie4_5_moe")
    path, weights = saved(tmp_path, config, world)
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    export(
        path,
        tmp_path / "out",
        ExportForm(config, tmp_path / "tokenizer", [256], torch.bfloat16),
        Start(tmp_path),
    )
    name = "model.layers.1.mlp.gate.weight"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16).get_parameter(name)
    assert torch.equal(loaded, weights[name])
    assert not torch.equal(weights[name], weights[name].bfloat16().float())


def exported(folder: Path, world: World, **changes: Any) -> Path:
    path, _ = saved(folder, llama_config(), world)
    byte_tokenizer().save_pretrained(folder / "tokenizer")
    form = ExportForm(llama_config(), folder / "tokenizer", [256], torch.float32)
    export(path, folder / "out", form, Start(folder), **changes)
    return folder / "out"


def test_an_export_lists_what_it_holds(tmp_path: Path, world: World) -> None:
    out = exported(tmp_path, world, shard_bytes=200_000, card=lambda said: "# A model\n")
    assert (out / "README.md").read_text() == "# A model\n"
    told: list[tuple[int, int]] = []
    assert verify(out, lambda done, total: told.append((done, total))) == []
    assert told[-1][0] == told[-1][1] == sum(p.stat().st_size for p in out.iterdir()) - (out / CHECKSUMS).stat().st_size
    weights = sorted(out.glob("*.safetensors"))[1]
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    (out / "config.json").write_text("{}")
    (out / "generation_config.json").unlink()
    (out / "model.bin").touch()
    (out / ".gitattributes").touch()  # the hub's
    assert sorted((Path(problem.where).name, problem.found.split(" ")[0]) for problem in verify(out)) == [
        ("config.json", "2"),
        ("generation_config.json", "no"),
        (weights.name, "content"),
        ("model.bin", "a"),
    ]


def test_a_mount_point_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``/out`` of a container: the directory that is written beside it could not be renamed to it."""
    (tmp_path / "out").mkdir()
    check_empty(tmp_path / "out")
    monkeypatch.setattr(os.path, "ismount", lambda path: path == str(tmp_path / "out"))
    with pytest.raises(UserError, match=f"a mount point.*\n.*\n.*{tmp_path}/out/model"):
        check_empty(tmp_path / "out")


def test_an_export_that_reads_back_differently_is_not_published(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_file = vars(export_module)["write_file"]

    def careless(path: Path, *arguments: Any, **keywords: Any) -> Any:
        digest = write_file(path, *arguments, **keywords)
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        return digest

    monkeypatch.setattr(export_module, "write_file", careless)
    with pytest.raises(UserError, match=r"model\.safetensors: other content than was written"):
        exported(tmp_path, world)
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == []


@pytest.mark.parametrize("damage", ["missing", "renamed"])
def test_an_export_that_is_no_such_model_is_not_published(
    damage: str, tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert = vars(export_module)["revert_weight_conversion"]

    def wrong(model: Any, tensors: dict[str, torch.Tensor]) -> Any:
        converted = dict(convert(model, tensors))
        value = converted.pop("model.norm.weight")
        return converted | ({"model.gone.weight": value} if damage == "renamed" else {})

    monkeypatch.setattr(export_module, "revert_weight_conversion", wrong)
    with pytest.raises(UserError, match=r"without model\.norm\.weight and with (nothing|model\.gone\.weight)"):
        exported(tmp_path, world)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "size"), [("500MB", 5 * 10**8), ("1.5 GB", 15 * 10**8), ("2GiB", 2**31), ("3kb", 3000)]
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["5", "GB", "-1GB", "0MB", "5 apples", ""])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="500MB"):
        parse_size(text)


PEAK = """
import json, sys
from pathlib import Path
import torch
from transformers import LlamaConfig
from tonnage.checkpoint.description import ExportForm
from tonnage.checkpoint.export import Start, export
from tonnage.training.memory import take_peak

def run(folder, **shape):
    config = LlamaConfig(vocab_size=512, hidden_size=1024, intermediate_size=4096, **shape)
    form = ExportForm(config, folder / "tokenizer", [1], torch.float32)
    export(folder / "step-00000001", folder / "out", form, Start(folder), shard_bytes=20_000_000)

def peak():
    return take_peak().host

run(Path(sys.argv[1]) / "small", num_hidden_layers=1)  # imports everything
before = peak()
run(Path(sys.argv[1]) / "large", num_hidden_layers=7)
print(json.dumps([before, peak()]))
"""


@pytest.mark.matrix
def test_an_export_never_holds_more_than_two_of_its_files(tmp_path: Path, world: World) -> None:
    """400 MB in files of 20: the peak of the exporting process, as the kernel counted it."""
    for name, layers in (("small", 1), ("large", 7)):
        config = LlamaConfig(vocab_size=512, hidden_size=1024, intermediate_size=4096, num_hidden_layers=layers)
        with torch.device("meta"):
            shapes = {n: p.shape for n, p in AutoModelForCausalLM.from_config(config).named_parameters()}
        checkpoint = checkpoint_path(tmp_path / name, 1)
        checkpoint.mkdir(parents=True)
        for rank in range(4):  # as four ranks write it, and none of them whole in memory
            parts = []
            for key, shape in shapes.items():
                rows = shape[0] // 4
                parts.append(
                    TensorPart(
                        f"model.{key}", (rows * rank, *[0] * (len(shape) - 1)), torch.zeros(1).expand(rows, *shape[1:])
                    )
                )
            write_file(checkpoint / shard_name(rank), parts)
        byte_tokenizer().save_pretrained(tmp_path / name / "tokenizer")
    command = [sys.executable, "-c", PEAK, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    before, peak = json.loads(result.stdout)
    files = [path.stat().st_size for path in (tmp_path / "large" / "out").glob("*.safetensors")]
    assert sum(files) > 4.5e8
    assert max(files) < 20_100_000
    assert peak - before < 2 * 20_000_000 + 50_000_000
