"""Units that visit a device: whose slot is whose, what goes home, and what is waited for (see also ``tape``)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tape import Tape, put_on_tapes
from tonnage.kernels.streams import Stream
from tonnage.offload.ring import Home, Pairs, Ring, Tensors

CPU = torch.device("cpu")


class Numbers(Home[int]):
    """Every unit is some of its number, at first."""

    def __init__(self) -> None:
        self.rest = [torch.full((3,), float(number)) for number in range(5)]

    def pairs(self, unit: int, memory: Tensor) -> Pairs:
        return [(self.rest[unit], memory[:3])]


def ring(num_slots: int) -> Ring[int]:
    made = Ring(Numbers(), Stream(CPU), Stream(CPU))
    made.open(torch.zeros(4) for _ in range(num_slots))
    return made


def test_a_unit_gives_its_slot_to_another_unless_it_is_kept() -> None:
    units, left, came = ring(2), list[int](), list[int]()
    units.left, units.came = left.append, lambda unit, memory: came.append(unit)
    assert units.have(0)[:3].eq(0).all()
    units.call(1, keeping=0)
    units.call(1, keeping=0)
    units.call(2, keeping=0)
    assert (came, left, list(units.here)) == ([0, 1, 2], [1], [0, 2])
    units.call(3, keeping=2)
    assert (left, list(units.here)) == ([1, 0], [2, 3])
    assert units.have(3)[:3].eq(3).all()


def test_what_was_changed_goes_home_and_what_was_not_is_dropped() -> None:
    units = ring(2)
    for unit in (0, 1):
        units.call(unit)
    memory = units.have(0)
    memory += 7
    units.give(0, memory)
    units.drop(1)
    assert not units.here
    assert units.have(0)[:3].eq(7).all()
    assert units.have(1)[:3].eq(1).all()


@pytest.mark.parametrize("prompt", [(False, False), (False, True), (True, False), (True, True)])
def test_without_slots_the_last_keep_their_memory_and_others_come_back(prompt: tuple[bool, bool]) -> None:
    rest = [torch.zeros(3) for _ in range(4)]
    home = Tensors[int](lambda number: rest[number], CPU)
    units = Ring(home, Tape(CPU), Tape(CPU), num_leaving=2)
    put_on_tapes(units, prompt)
    given = [torch.full((3,), float(number)) for number in range(4)]
    for number, content in enumerate(given):
        units.give(number, content)
    assert list(units.leaving) == [2, 3]
    assert units.take(3) is given[3]
    for number in (2, 0, 1):
        units.call(number)
        back = units.take(number)
        assert back is not given[number]
        assert back.eq(number).all()
    assert not units.here
    units.forget()
    assert not units.leaving
    assert home.copied_bytes == 12 * (4 + 3)
