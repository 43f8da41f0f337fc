"""Files of tensors: what other readers read, by region, and what is refused."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import load_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from tonnage.checkpoint import shards as module
from tonnage.checkpoint.shards import Shards, TensorPart, held_parts, read_header, write_file
from tonnage.errors import UserError
from tonnage.parallel.world import World, join_world


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with join_world() as world:
        yield world


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "odd": torch.randint(-100, 100, (3,), dtype=torch.int8),
        "matrix": torch.randn(37, 5),
        "low": torch.randint(-(2**15), 2**15, (37, 5), dtype=torch.int16),
        "narrow": torch.randn(11, 3, 2).bfloat16(),
        "scalar": torch.tensor(3.5),
        "wide": torch.arange(6, dtype=torch.int64),
    }


def halves(path: Path) -> dict[str, torch.Tensor]:
    """``tensors()`` as two files, as two ranks would write them."""
    whole = tensors()
    for rank in range(2):
        parts = []
        for name, tensor in whole.items():
            if tensor.dim() == 0:
                parts += [TensorPart(name, (), tensor)] if rank == 0 else []
                continue
            middle = tensor.shape[0] // 2
            rows = tensor[middle:] if rank else tensor[:middle]
            parts.append(TensorPart(name, (middle * rank, *[0] * (tensor.dim() - 1)), rows))
        write_file(path / f"{rank}.safetensors", parts)
    return whole


def test_other_readers_read_what_is_written(tmp_path: Path, world: World) -> None:
    whole = tensors()
    digest = write_file(tmp_path / "y.safetensors", held_parts(whole, world.mesh), hash_name="sha256")
    assert digest == hashlib.sha256((tmp_path / "y.safetensors").read_bytes()).hexdigest()
    digest = write_file(tmp_path / "x.safetensors", held_parts(whole, world.mesh))
    assert digest == xxhash.xxh3_128((tmp_path / "x.safetensors").read_bytes()).hexdigest()
    for name, value in load_file(tmp_path / "x.safetensors").items():
        assert torch.equal(value, whole[name]), name

    (tmp_path / "parts").mkdir()
    halves(tmp_path / "parts")
    target = {name: torch.empty_like(value) for name, value in whole.items()}
    load(target, storage_reader=HuggingFaceStorageReader(str(tmp_path / "parts")))
    for name, value in target.items():
        assert torch.equal(value, whole[name]), name


@pytest.mark.parametrize("chunk_bytes", [1 << 20, 64])
def test_any_region_of_any_tensor_is_read_exactly(
    tmp_path: Path, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", chunk_bytes)
    whole = halves(tmp_path)
    shards = Shards(tmp_path)
    assert shards.names() == sorted(whole)
    for name, value in whole.items():
        assert shards.shape(name) == tuple(value.shape)
        assert shards.dtype(name) == value.dtype
        assert torch.equal(shards.read(name), value)
    for region in ((slice(0, 37), slice(1, 3)), (slice(17, 20), slice(0, 5)), (slice(30, 37), slice(4, 5))):
        assert torch.equal(shards.read("matrix", region), whole["matrix"][region])
        wide = torch.empty(whole["matrix"][region].shape, dtype=torch.float64)
        shards.read_into(wide, "matrix", region)
        assert torch.equal(wide, whole["matrix"][region].double())


def test_a_read_touches_no_byte_outside_of_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    halves(tmp_path)
    read: list[tuple[str, int, int]] = []
    fill = module._fill

    def noted(file, position, target):  # type: ignore[no-untyped-def]
        read.append((Path(file.name).name, position, len(target)))
        fill(file, position, target)

    monkeypatch.setattr(module, "_fill", noted)
    Shards(tmp_path).read("matrix", (slice(20, 23), slice(0, 5)))
    start = read_header(tmp_path / "1.safetensors")["matrix"].position
    assert read == [("1.safetensors", start + 2 * 20, 3 * 20)]


def test_files_that_are_not_whole_safetensors_are_refused(tmp_path: Path) -> None:
    halves(tmp_path)
    sound = (tmp_path / "0.safetensors").read_bytes()
    header = int.from_bytes(sound[:8], "little")
    larger = json.loads(sound[8 : 8 + header])
    larger["matrix"]["shape"][0] += 1
    text = json.dumps(larger).encode()
    for content in (
        sound[:-1],
        sound + b"\0",
        sound[:5],
        b"",
        (2**40).to_bytes(8, "little") + sound[8:],
        len(text).to_bytes(8, "little") + text + sound[8 + header :],
        pickle.dumps({"matrix": [1.0]}),
    ):
        (tmp_path / "0.safetensors").write_bytes(content)
        with pytest.raises(UserError, match=r"0\.safetensors: a file that is not whole"):
            Shards(tmp_path)


def test_a_missing_file_is_told_from_what_is_there(tmp_path: Path) -> None:
    halves(tmp_path)
    (tmp_path / "1.safetensors").unlink()
    shards = Shards(tmp_path)
    with pytest.raises(UserError, match=r"90 of 100 values of matrix(.|\n)*every shard"):
        shards.read("matrix", (slice(0, 20), slice(0, 5)))
