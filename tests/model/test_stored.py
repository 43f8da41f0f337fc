"""Weight files that are none, and weights that are no numbers, end in a sentence before anything is trained."""

from __future__ import annotations

import json
import os
import pickle
import resource
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tiny import llama_config, load, write_model
from tonnage.errors import UserError
from tonnage.model.build import allocate, build_on_meta
from tonnage.model.files import find_model
from tonnage.model.stored import read_headers


def header(described: Any, content: bytes = b"") -> bytes:
    text = described if isinstance(described, bytes) else json.dumps(described).encode()
    return struct.pack("<Q", len(text)) + text + content


def entry(shape: list[Any], offsets: list[Any], dtype: Any = "F32") -> dict[str, Any]:
    return {"w": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


FALSE = {
    "nothing": b"",
    "a few bytes": b"abc",
    "a pickle of torch.save": b"PK\x03\x04" + bytes(100),
    "a pickle": pickle.dumps({"w": list(range(99))}),
    "a GGUF file": b"GGUF" + bytes(100),
    "a pointer of git-lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 123\n",
    "a header of 2**60 bytes": struct.pack("<Q", 1 << 60) + b"{}",
    "no JSON": header(b"{{{{"),
    "a list": header([1]),
    "100,000 levels": header(b'{"w":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "2**80 numbers": header(entry([1 << 40, 1 << 40], [0, 4]), bytes(4)),
    "more bytes than the file has": header(entry([1 << 30], [0, 4 << 30]), bytes(4)),
    "a negative size": header(entry([-1], [0, 4]), bytes(4)),
    "sizes as text": header(entry(["4"], [0, 16]), bytes(16)),
    "no such type": header(entry([1], [0, 4], "X9"), bytes(4)),
    "offsets that overlap": header(entry([1], [0, 4]) | {"v": entry([1], [0, 4])["w"]}, bytes(4)),
    "other bytes than UTF-8": header(b'{"\xff":1}'),
    "more than it says": header(entry([1], [0, 4]), bytes(8)),
}


@pytest.mark.parametrize("what", FALSE)
def test_what_is_no_safetensors_file_is_called_so(what: str, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(FALSE[what])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match="safetensors file") as caught:
        read_headers([file])
    (problem,) = caught.value.problems
    assert problem.where == str(file)
    assert "\n" not in problem.found
    if what.startswith("a p") or "GGUF" in what:
        assert what in problem.found
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000, "KiB, for a false claim"


def test_a_file_that_is_cut_short_is_called_so(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"w": torch.ones(100)}, file)
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(UserError, match="cut short"):
        read_headers([file])


def test_every_false_file_is_named(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).write_bytes(b"PK\x03\x04")
    save_file({"w": torch.ones(3)}, tmp_path / "b")
    with pytest.raises(UserError) as caught:
        read_headers([tmp_path / name for name in ("a", "b", "c")])
    assert [Path(problem.where).name for problem in caught.value.problems] == ["a", "c"]


def test_of_a_tensor_in_several_files_the_index_says_which_counts(tmp_path: Path) -> None:
    files = []
    for name in ("a.safetensors", "b.safetensors"):
        files.append(tmp_path / name)
        save_file({"w": torch.ones(3)}, files[-1])
    assert [one.file.name for one in read_headers(files, {"w": "a.safetensors"})] == ["a.safetensors"]
    assert [one.file.name for one in read_headers(files)] == ["b.safetensors"]


INDEXES: dict[str, bytes] = {
    "nothing": b"",
    "a list": b"[]",
    "a number": b"7",
    "text": b'"model.safetensors"',
    "100,000 levels": b"[" * 100_000 + b"]" * 100_000,
    "100,000 levels of objects": b'{"weight_map":' * 100_000 + b"0" + b"}" * 100_000,
    "no UTF-8": b'{"weight_map": {"\xff": "model.safetensors"}}',
    "no weight_map": b"{}",
    "an empty weight_map": b'{"weight_map": {}}',
    "a weight_map of null": b'{"weight_map": null}',
    "a list of names": b'{"weight_map": ["model.safetensors"]}',
    "numbers for names": b'{"weight_map": {"w": 5}}',
    "a way up": b'{"weight_map": {"w": "../../etc/passwd"}}',
    "a way up to weights": b'{"weight_map": {"w": "../other/model.safetensors"}}',
    "an absolute path": b'{"weight_map": {"w": "/etc/passwd"}}',
    "a directory": b'{"weight_map": {"w": "deep/model.safetensors"}}',
    "a NUL": b'{"weight_map": {"w": "model\\u0000.safetensors"}}',
    "a pickle": b'{"weight_map": {"w": "pytorch_model.bin"}}',
    "a number of 5,000 digits": b'{"weight_map": ' + b"9" * 5000 + b"}",
}


@pytest.mark.parametrize("what", INDEXES)
def test_what_is_no_index_is_refused_before_a_file_is_opened(what: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", llama_config(num_hidden_layers=1))
    write_model(tmp_path / "other", llama_config(num_hidden_layers=1))
    (model / "model.safetensors.index.json").write_bytes(INDEXES[what])
    with pytest.raises(UserError, match=r"model\.safetensors\.index\.json: ") as caught:
        find_model(str(model))
    (problem,) = caught.value.problems
    assert "\n" not in problem.found


def test_files_that_are_missing_are_named(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", llama_config(num_hidden_layers=1))
    entries = {"w": "model.safetensors", "v": "model-2.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": entries}))
    with pytest.raises(UserError, match=r"1 of 2 weight files missing: model-2\.safetensors"):
        find_model(str(model))


@pytest.mark.parametrize("indexed", [True, False])
def test_links_lead_out_of_a_model_directory_only_within_the_cache_of_the_hub(indexed: bool, tmp_path: Path) -> None:
    elsewhere = write_model(tmp_path / "elsewhere", llama_config(num_hidden_layers=1))

    def linked(model: Path, weights: Path) -> Path:
        model.mkdir(parents=True)
        for path in elsewhere.glob("*.json"):
            (model / path.name).write_bytes(path.read_bytes())
        (model / "model.safetensors").symlink_to(weights)
        if indexed:
            index = {"weight_map": {"w": "model.safetensors"}}
            (model / "model.safetensors.index.json").write_text(json.dumps(index))
        return model

    with pytest.raises(UserError, match="a link out of the model directory"):
        find_model(str(linked(tmp_path / "linked", elsewhere / "model.safetensors")))
    cache = tmp_path / "models--me--mine"
    (cache / "blobs").mkdir(parents=True)
    (cache / "blobs" / "abc").write_bytes((elsewhere / "model.safetensors").read_bytes())
    found = find_model(str(linked(cache / "snapshots" / ("0" * 40), Path("../../blobs/abc"))))
    assert found.weight_bytes == (elsewhere / "model.safetensors").stat().st_size
    (tmp_path / "by-another-name").symlink_to(cache / "snapshots" / ("0" * 40))
    assert find_model(str(tmp_path / "by-another-name")).weights
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "store").write_bytes((elsewhere / "model.safetensors").read_bytes())
    (tmp_path / "rest").mkdir()
    for path in linked(tmp_path / "rest" / "x", Path("store")).iterdir():
        path.rename(inside / path.name)
    assert find_model(str(inside)).weights


def test_files_without_an_end_are_no_weights(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", llama_config(num_hidden_layers=1))
    (model / "model.safetensors").unlink()
    os.mkfifo(model / "model.safetensors")
    with pytest.raises(UserError, match="no weights"):
        find_model(str(model))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_weights_that_are_not_finite_are_named(bad: float, dtype: torch.dtype, tmp_path: Path) -> None:
    write_model(tmp_path, llama_config(), dtype)
    file = tmp_path / "model.safetensors"
    whole = load_file(file)
    for name in ("model.norm.weight", "model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"):
        broken = {key: value.clone() for key, value in whole.items()}
        broken[name].view(-1)[-3:-1] = bad
        save_file(broken, file)
        model = build_on_meta(llama_config(), dtype)
        allocate(model, torch.device("cpu"))
        with pytest.raises(UserError) as caught:
            load(model, tmp_path)
        (problem,) = caught.value.problems
        assert problem.where == f"{file}: {name}"
        assert problem.found.startswith("2 of the values that were read are not finite")


def test_weights_that_a_narrower_type_cannot_hold_are_named(tmp_path: Path) -> None:
    write_model(tmp_path, llama_config())
    file = tmp_path / "model.safetensors"
    broken = {key: value.clone() for key, value in load_file(file).items()}
    broken["model.norm.weight"][5] = 1e5
    save_file(broken, file)
    model = build_on_meta(llama_config(), torch.float16)
    allocate(model, torch.device("cpu"))
    with pytest.raises(UserError, match="1 of the values that were read are not finite as float16"):
        load(model, tmp_path)
