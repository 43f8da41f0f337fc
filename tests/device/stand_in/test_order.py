"""Races are found where nothing orders two accesses, and only there; no GPU and no stand-in is needed for that."""

from __future__ import annotations

import pytest

from device.stand_in.hook.order import Access, Agent, Order

INWARD, UPDATE, HOST = 1, 2, "host:main"


def touch(order: Order, agent: Agent, start: int, end: int, *, writes: bool) -> int:
    """How many races an access is in."""
    found = order.access(Access(start, end, agent, order.act(agent), writes, "copy", f"by {agent}"))
    return len(found)


@pytest.mark.parametrize("waits", [True, False])
def test_an_update_that_does_not_wait_for_its_copy_is_a_race(waits: bool) -> None:
    order = Order()
    assert touch(order, INWARD, 0, 4096, writes=True) == 0
    if waits:
        order.learn(UPDATE, order.knowledge(INWARD))
    assert touch(order, UPDATE, 1024, 2048, writes=False) == (not waits)
    assert touch(order, UPDATE, 4096, 8192, writes=True) == 0  # nobody else's


@pytest.mark.parametrize("forgets", [True, False])
def test_what_is_given_out_once_its_copies_are_over_is_forgotten(forgets: bool) -> None:
    order = Order()
    touch(order, INWARD, 100, 200, writes=False)
    if forgets:
        order.forget(150, 160)
    assert touch(order, HOST, 150, 160, writes=True) == (not forgets)
    assert touch(order, UPDATE, 160, 170, writes=True) == 1  # of the rest nothing was


def test_what_is_heard_of_a_mark_is_what_came_before_it() -> None:
    order = Order()
    touch(order, INWARD, 0, 10, writes=True)
    mark = order.knowledge(INWARD)
    touch(order, INWARD, 10, 20, writes=True)
    order.learn(UPDATE, mark)
    assert touch(order, UPDATE, 0, 10, writes=True) == 0
    assert touch(order, UPDATE, 10, 20, writes=True) == 1


def test_what_is_known_is_passed_on() -> None:
    order = Order()
    touch(order, INWARD, 0, 10, writes=True)
    order.learn(HOST, order.knowledge(INWARD))
    order.learn(UPDATE, order.knowledge(HOST))
    assert touch(order, UPDATE, 0, 10, writes=True) == 0


def test_two_that_read_are_no_race_and_pages_are_looked_at_whole() -> None:
    order, far = Order(), 5 << 20
    assert touch(order, INWARD, 0, far, writes=False) == 0
    assert touch(order, UPDATE, 0, far, writes=False) == 0
    assert touch(order, HOST, far - 1, far, writes=True) == 2  # both of them, found on the last page
    assert sum(order.races.values()) == 2
