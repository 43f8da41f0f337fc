"""A tower that is attached to a model of text: its names, what names it, and where its weights are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tonnage.model.adapters import AdapterSpec, Trains, apart, find_targets, prepare, trained_names
from tonnage.model.anatomy import Anatomy, dissect
from tonnage.model.build import on_meta
from tonnage.model.files import ModelFiles, read_model
from tonnage.model.matching import find_places
from tonnage.model.towers import in_tower
from tonnage.model.vision import attach_tower

pytest.importorskip("PIL")
from visions import FAMILIES, write_vision

Seeing = tuple[PreTrainedModel, Anatomy, ModelFiles]


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    return _seeing(tmp_path_factory.mktemp("seeing"), "llava")


def _seeing(folder: Path, family: str) -> Seeing:
    write_vision(folder, family)
    files, config = read_model(str(folder))
    model = on_meta(config, torch.float32)
    anatomy = dissect(model)
    attach_tower(model, files, torch.float32)
    return model, anatomy, files


@pytest.mark.parametrize("family", FAMILIES)
def test_all_that_is_stored_has_a_place(tmp_path: Path, family: str) -> None:
    model, _, files = _seeing(tmp_path, family)
    match = find_places(model, files)
    assert not match.missing
    buffers = {name.rpartition(".")[2] for name, _ in model.named_buffers()}  # Gemma 4's blocks have some
    assert {stored.key.rpartition(".")[2] for stored in match.carried} <= buffers
    placed = {name for _, name in match.places}.union(*(group.parameters.values() for group in match.groups))
    assert placed == {name for name, _ in model.named_parameters()}
    assert any(map(in_tower, placed))


@pytest.mark.parametrize(
    ("pattern", "sees"),
    [
        ("*", False),
        ("*.q_proj.weight", False),
        ("blocks[-1:].*", False),
        ("tower.*", True),
        ("*multi_modal_projector*", True),
        ("model.vision_tower.*", True),
        ("vision_tower.*.mlp.*", True),
    ],
)
def test_a_pattern_is_of_the_text_if_that_has_anything_of_it(seeing: Seeing, pattern: str, sees: bool) -> None:
    model, anatomy, _ = seeing
    names = trained_names(model, anatomy, Trains(patterns=(pattern,)))
    assert names
    assert {in_tower(name) for name in names} == {sees}
    if pattern in ("*", "tower.*"):
        assert names == {name for name, _ in model.named_parameters() if in_tower(name) is sees}
    trains = apart(model, anatomy, Trains(patterns=(pattern, "model.norm.weight")))
    assert trains.tower == ((pattern,) if sees else ())


@pytest.mark.parametrize(
    ("targets", "sees"),
    [("all-linear", {False}), ("q_proj", {False}), ("*vision_tower*", {True}), ("linear_1", {True})],
)
def test_so_is_a_target(seeing: Seeing, targets: str, sees: set[bool]) -> None:
    model, anatomy, _ = seeing
    assert {in_tower(target.path) for target in find_targets(model, anatomy, (targets,))} == sees


def test_norms_beside_an_adapter_are_those_of_the_text(tmp_path: Path) -> None:
    model, anatomy, _ = _seeing(tmp_path, "llava")
    prepare(model, anatomy, Trains(AdapterSpec(2, 1.0, ("all-linear",), ("norms",))), torch.float32)
    assert not any(in_tower(name) for name, parameter in model.named_parameters() if parameter.requires_grad)
