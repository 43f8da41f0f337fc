"""The packed weights of a base: made once, by whoever comes first, and what `pack` makes of them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tiny import byte_tokenizer, llama_config
from tonnage.errors import UserError
from tonnage.host.quantized import Format
from tonnage.kernels.quantized import pack
from tonnage.model import adapters
from tonnage.model.adapters import AdapterSpec, Trains
from tonnage.model.anatomy import dissect
from tonnage.model.build import build_on_meta
from tonnage.model.files import read_model
from tonnage.model.matching import find_places
from tonnage.model.merging import Match
from tonnage.model.packed_layers import PackedLayer, pack_layers
from tonnage.offload.pages import Pages
from tonnage.training.packed_base import INDEX, WEIGHTS, packed_base


def base(folder: Path, form: Format) -> tuple[Any, Match, list[PackedLayer]]:
    """A model on the meta device whose frozen layers are packed, where its weights are, and those layers."""
    files, config = read_model(str(folder))
    model: Any = build_on_meta(config, torch.bfloat16)
    anatomy = dissect(model)
    found = find_places(model, files)
    adapters.prepare(model, anatomy, Trains(AdapterSpec(4, 2.0), quantize=form), torch.bfloat16)
    return model, found, pack_layers(model, anatomy.blocks, form)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    config = llama_config(initializer_range=0.2)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("form", ["nf4", "nf4-double", "int8"])
def test_it_is_packed_once_and_as_it_would_be_in_memory(folder: Path, tmp_path: Path, form: Format) -> None:
    """By several at the same time, too: one packs, the others wait."""
    said: list[str] = []
    directory = tmp_path / "cache" / "packed" / "key"
    bases = [base(folder, form) for _ in range(3)]
    with ThreadPoolExecutor(3) as several:
        made = [several.submit(packed_base, directory, *one, log=said.append) for one in bases]
        places, *others = [one.result() for one in made]
    assert others == [places, places]
    assert len([line for line in said if line.startswith("packing")]) == 1
    assert sorted(one.name for one in directory.iterdir()) == [INDEX, WEIGHTS]
    assert [one.name for one in directory.parent.iterdir() if one.is_dir()] == ["key"]
    mapped = Pages({}, [], "", places)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    for path, weight in model.model.layers.named_parameters():
        for part, tensor in pack(weight, form).named().items() if weight.dim() == 2 else ():
            found = torch.frombuffer(mapped.memory(f"model.layers.{path}_{part}"), dtype=tensor.dtype)
            assert torch.equal(found.view(tensor.shape), tensor), path
    assert len(places) == 14 * len(pack(weight.new_ones(64, 64), form).named())


@pytest.mark.parametrize("damage", ["a byte", "the end", "the index", "another part", "a file"])
def test_one_that_is_damaged_is_not_used(folder: Path, tmp_path: Path, damage: str) -> None:
    directory = tmp_path / "cache" / "packed" / "key"
    whole = packed_base(directory, *base(folder, "nf4"))
    content = (directory / WEIGHTS).read_bytes()
    match damage:
        case "a byte":
            middle = len(content) // 2
            (directory / WEIGHTS).write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        case "the end":
            (directory / WEIGHTS).write_bytes(content[:-1000])
        case "the index":
            (directory / INDEX).write_text("{}")
        case "another part":
            (directory / INDEX).write_text((directory / INDEX).read_text().replace("layers.1", "layers.2"))
        case "a file":
            (directory / WEIGHTS).unlink()
    said: list[str] = []
    assert packed_base(directory, *base(folder, "nf4"), log=said.append) == whole
    assert (directory / WEIGHTS).read_bytes() == content
    assert "is damaged" in said[0]
    assert [one.name for one in directory.parent.iterdir() if one.is_dir()] == ["key"]
    said.clear()
    packed_base(directory, *base(folder, "nf4"), log=said.append)
    assert said == []


def test_a_cache_that_cannot_be_written_is_said(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "packed").write_text("no directory")
    with pytest.raises(UserError, match="TONNAGE_CACHE"):
        packed_base(tmp_path / "packed" / "key", *base(folder, "nf4"))


def test_nothing_stays_of_one_that_was_interrupted(folder: Path, tmp_path: Path) -> None:
    directory = tmp_path / "cache" / "packed" / "key"

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        packed_base(directory, *base(folder, "nf4"), stop)
    assert not directory.exists()
    assert not [one for one in directory.parent.iterdir() if one.is_dir()]
