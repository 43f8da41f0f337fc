"""Choosing and reading back: what is damaged is refused by name, and masters change form without losing a bit."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tonnage.checkpoint.resume import choose, restore, set_aside
from tonnage.checkpoint.save import COMPLETE, Cursor, Saver, checkpoint_path, complete_checkpoints, publish
from tonnage.errors import UserError
from tonnage.kernels.adamw import join, split
from tonnage.kernels.moments import Codec, Moments, decode, encode, noise_key
from tonnage.parallel.world import World, join_world

SHARD = "shard-00001-model-00001-of-00001.safetensors"


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with join_world() as world:
        yield world


def masters() -> dict[str, torch.Tensor]:
    """Values whose low halves round both ways, ties and the ends of the range among them."""
    torch.manual_seed(0)
    bits = torch.randint(-(2**31), 2**31 - 1, (64, 32), dtype=torch.int64).to(torch.int32)
    values = bits.view(torch.float32)
    values = torch.where(values.isfinite() & (values.abs() < 1e38), values, 1.0)
    values[0, :4] = torch.tensor([0x3F808000, 0x3F818000, 0x3F807FFF, -0x7FFF8000], dtype=torch.int32).view(
        torch.float32
    )
    return {"w": values, "b": torch.randn(7)}


def moments(names: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {f"{name}.{part}": torch.randn(masters()[name].shape) for name in names for part in "mv"}


def whole(weights: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    return {name: value.clone() for name, value in weights.items()}, moments(weights)


def halves(weights: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    high_low = {name: split(value) for name, value in weights.items()}
    low = {f"{name}.low": pair[1] for name, pair in high_low.items()}
    return {name: pair[0] for name, pair in high_low.items()}, moments(weights) | low


FORMS = {"fp32": whole, "split": halves}


@pytest.mark.parametrize("stored", FORMS)
@pytest.mark.parametrize("wanted", FORMS)
def test_masters_keep_every_bit_in_either_form(tmp_path: Path, stored: str, wanted: str, world: World) -> None:
    want = masters()
    Saver(tmp_path, 2, world).save(Cursor(1, 8, 1), *FORMS[stored](want), {}, wait=True)
    model, optimizer = FORMS[wanted]({name: torch.zeros_like(value) for name, value in want.items()})
    for tensor in (*model.values(), *optimizer.values()):
        tensor.zero_()
    said: list[str] = []
    state = restore(checkpoint_path(tmp_path, 1), model, optimizer, world, said.append)
    assert Cursor.of(state) == Cursor(1, 8, 1)
    for name, value in want.items():
        got = model[name] if wanted == "fp32" else join(model[name], optimizer[f"{name}.low"])
        assert torch.equal(got.view(torch.int32), value.view(torch.int32)), name
        for part in "mv":
            assert torch.equal(optimizer[f"{name}.{part}"], moments(want)[f"{name}.{part}"])
    assert [("masters" in line) for line in said] == [True] * (stored != wanted)


SHAPES = {"matrix": (37, 300), "short rows": (64, 32), "vector": (7,)}
CODECS: tuple[Codec, ...] = ("fp32", "bf16", "int8")


def resting(codec: Codec, name: str) -> Moments:
    """Moments of a parameter as they rest in ``codec``, made from random ones."""
    torch.manual_seed(2)
    m, v = torch.randn(SHAPES[name]).view(-1), torch.rand(SHAPES[name]).view(-1)
    return rounded(codec, name, m, v)


def rounded(codec: Codec, name: str, m: torch.Tensor, v: torch.Tensor) -> Moments:
    found = Moments.zeros(codec, SHAPES[name], torch.device("cpu"))
    key = noise_key(0, 0, name)
    key -= 2**32 if key >= 2**31 else 0
    encode(found, m, v, v.sqrt(), torch.tensor(key, dtype=torch.int32), torch.tensor(0, dtype=torch.int32))
    return found


def named(codec: Codec) -> dict[str, torch.Tensor]:
    found = {name: resting(codec, name).named() for name in SHAPES}
    return {f"{name}.{part}": tensor for name, parts in found.items() for part, tensor in parts.items()}


@pytest.mark.parametrize("stored", CODECS)
@pytest.mark.parametrize("wanted", CODECS)
def test_moments_change_their_form_and_it_is_said(tmp_path: Path, stored: Codec, wanted: Codec, world: World) -> None:
    weights = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    Saver(tmp_path, 2, world).save(Cursor(1, 8, 1), weights, named(stored), {}, wait=True)
    target = {name: torch.zeros_like(tensor) for name, tensor in named(wanted).items()}
    said: list[str] = []
    restore(
        checkpoint_path(tmp_path, 1), {n: torch.zeros_like(w) for n, w in weights.items()}, target, world, said.append
    )
    for name in SHAPES:
        as_stored = resting(stored, name)
        want = as_stored.named() if stored == wanted else rounded(wanted, name, *decode(as_stored)).named()
        for part, tensor in want.items():
            assert torch.equal(target[f"{name}.{part}"], tensor), (name, part)
    assert bool(said) == (stored != wanted)
    if stored == "fp32" and wanted == "int8":  # the others have rows too short for it
        assert said == ["converted 1 tensors of step-00000001, moments: float32 as int8, rounded where it must be"]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)


def plant(path: Path) -> None:
    path.with_name("extra.pt").write_bytes(pickle.dumps({"w": 1}))


def replace_by_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps({"w": 1}))


DAMAGE: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "a truncated shard": (cut, SHARD, f"{SHARD}: a damaged checkpoint: .* bytes"),
    "a flipped bit in a tensor": (flip, SHARD, f"{SHARD}: a damaged checkpoint: content that has changed"),
    "a flipped bit in the state": (flip, "state.json", "state.json: a damaged checkpoint: content that has changed"),
    "a missing shard": (Path.unlink, SHARD, f"{SHARD}: a damaged checkpoint: no such file"),
    "a list that is no JSON": (lambda path: path.write_text("{"), COMPLETE, "COMPLETE: a damaged checkpoint"),
    "a pickle beside the shards": (plant, SHARD, r"extra.pt: a damaged checkpoint: .*not written by the run"),
    "a pickle in the place of a shard": (replace_by_pickle, SHARD, f"{SHARD}: a damaged checkpoint"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_stops_the_run_and_an_earlier_checkpoint_is_offered(tmp_path: Path, what: str, world: World) -> None:
    damage, name, message = DAMAGE[what]
    saver = Saver(tmp_path, 9, world)
    for step in (10, 20):
        saver.save(Cursor(step, 8 * step, step), *whole(masters()), {}, wait=True)
    damage(checkpoint_path(tmp_path, 20) / name)
    (checkpoint_path(tmp_path, 10) / ".DS_Store").write_bytes(b"what a file manager leaves is no damage")
    model, optimizer = whole({name: torch.zeros_like(value) for name, value in masters().items()})
    before = {name: value.clone() for name, value in model.items()}
    with pytest.raises(UserError, match=message) as caught:
        restore(choose(tmp_path), model, optimizer, world)
    assert "--from 10" in str(caught.value)
    assert all(torch.equal(model[name], before[name]) for name in model)
    restore(choose(tmp_path, 10), model, optimizer, world)
    assert torch.equal(model["w"].view(torch.int32), masters()["w"].view(torch.int32))


@pytest.mark.parametrize("name", ["evil.pt", "evil.pkl", "evil.bin"])
def test_a_pickle_is_refused_even_if_the_list_names_it(tmp_path: Path, name: str, world: World) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return exec, (f"open({str(tmp_path / 'ran')!r}, 'w')",)

    Saver(tmp_path, 9, world).save(Cursor(1, 8, 1), *whole(masters()), {}, wait=True)
    path = checkpoint_path(tmp_path, 1)
    (path / name).write_bytes(pickle.dumps(Evil()))
    (path / COMPLETE).unlink()
    publish(path)
    with pytest.raises(UserError, match=rf"{name}: a damaged checkpoint: a file of a kind that is never read"):
        choose(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, world: World) -> None:
    Saver(tmp_path, 2, world).save(Cursor(1, 8, 1), *whole(masters()), {}, wait=True)
    model, optimizer = whole(masters())
    model["c"], model["w"] = model.pop("b"), torch.zeros(65, 32)
    with pytest.raises(UserError) as caught:
        restore(checkpoint_path(tmp_path, 1), model, optimizer, world)
    message = str(caught.value)
    assert "lacks model.c" in message
    assert "also holds model.b" in message
    assert "model.w of shape (64, 32)" in message
    assert "(65, 32)" in message


def test_nothing_to_go_on_from(tmp_path: Path, world: World) -> None:
    checkpoint_path(tmp_path, 3).mkdir()
    with pytest.raises(UserError, match=r"no complete checkpoint \(interrupted: step-00000003\)"):
        choose(tmp_path)
    Saver(tmp_path, 2, world).save(Cursor(1, 8, 1), *whole(masters()), {}, wait=True)
    with pytest.raises(UserError, match=r"no complete checkpoint of step 3\n  needed: one of 1"):
        choose(tmp_path, 3)
    state = checkpoint_path(tmp_path, 1) / "state.json"
    state.write_text(state.read_text().replace('"format": 1', '"format": 9'))
    (state.parent / COMPLETE).unlink()
    publish(state.parent)
    with pytest.raises(UserError, match="format 9"):
        choose(tmp_path)


def test_checkpoints_after_the_chosen_one_are_set_aside(tmp_path: Path, world: World) -> None:
    saver = Saver(tmp_path, 9, world)
    for step in (1, 2, 3):
        saver.save(Cursor(step, 8 * step, step), *whole(masters()), {}, wait=True)
    assert [path.name for path in set_aside(tmp_path, 1)] == ["aside-1-step-00000002", "aside-1-step-00000003"]
    assert complete_checkpoints(tmp_path) == [checkpoint_path(tmp_path, 1)]
    saver.save(Cursor(2, 16, 2), *whole(masters()), {}, wait=True)
    assert [path.name for path in set_aside(tmp_path, 1)] == ["aside-2-step-00000002"]
