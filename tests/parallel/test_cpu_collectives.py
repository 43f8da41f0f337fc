"""Gradients are summed in the memory in which they are collected."""

from __future__ import annotations

import torch

from tonnage.parallel.cpu_collectives import InPlace


def test_a_sum_that_is_left_whole_has_the_memory_of_what_was_collected() -> None:
    memory = InPlace(None, is_whole=True)
    for _ in range(2):
        collected, summed, of_next = (
            memory.allocate((8,), dtype=torch.float32, device=torch.device("cpu")) for _ in range(3)
        )
        assert summed is collected
        assert of_next is not collected
        memory.allocate((8,), dtype=torch.float32, device=torch.device("cpu"))


def test_a_part_of_a_sum_has_memory_of_its_own() -> None:
    memory = InPlace(None, is_whole=False)
    collected, part = (memory.allocate((size,), dtype=torch.float32, device=torch.device("cpu")) for size in (8, 4))
    assert part.data_ptr() != collected.data_ptr()
