"""Whether 16-bit products go through fp32: found once, and the same for every process from then on."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from tonnage.kernels import widening
from tonnage.kernels.widening import processor_is_slow


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TONNAGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(widening, "_slow", {})


def slow_products(monkeypatch: pytest.MonkeyPatch, slow: torch.dtype) -> list[int]:
    """Products of one type take 2 ms; the threads of each call."""
    calls = []

    def mm(left: Tensor, right: Tensor) -> None:
        calls.append(torch.get_num_threads())
        time.sleep(0.002 if left.dtype == slow else 0)

    monkeypatch.setattr(torch, "mm", mm)
    return calls


@pytest.mark.parametrize("slow", [torch.bfloat16, torch.float32])
def test_what_is_slow_is_measured_once(monkeypatch: pytest.MonkeyPatch, slow: torch.dtype) -> None:
    calls = slow_products(monkeypatch, slow)
    threads = torch.get_num_threads()
    with FakeTensorMode():  # in which nothing takes any time
        assert processor_is_slow(torch.bfloat16) == (slow == torch.bfloat16)
    assert processor_is_slow(torch.bfloat16) == (slow == torch.bfloat16)
    assert calls == [1] * 2 * widening.TURNS
    assert torch.get_num_threads() == threads
    assert not processor_is_slow(torch.float32)


def test_other_processes_take_what_was_found_whatever_they_would_find(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_products(monkeypatch, torch.bfloat16)
    assert processor_is_slow(torch.bfloat16)
    widening._slow.clear()  # as another process
    calls = slow_products(monkeypatch, torch.float32)
    assert processor_is_slow(torch.bfloat16)
    assert not processor_is_slow(torch.float16)  # measured by itself
    assert len(calls) == 2 * widening.TURNS
    widening.forget()
    assert not processor_is_slow(torch.bfloat16)


def test_of_processes_that_measure_at_a_time_the_first_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    found, pids = iter([True, False, True, False]), iter(range(100, 104))

    def measure(dtype: torch.dtype) -> bool:
        time.sleep(0.05)
        return next(found)

    monkeypatch.setattr(widening, "_takes_longer", measure)
    monkeypatch.setattr(os, "getpid", lambda: next(pids))
    with ThreadPoolExecutor(4) as pool:
        answers = set(pool.map(lambda _: widening._recalled(torch.bfloat16), range(4)))
    assert len(answers) == 1
    assert answers == {widening._recalled(torch.bfloat16)}
    assert len(list(widening._file(torch.bfloat16).parent.iterdir())) == 1


def test_a_file_system_without_links_keeps_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def link(source: Path, target: Path) -> None:
        raise PermissionError

    slow_products(monkeypatch, torch.bfloat16)
    monkeypatch.setattr(os, "link", link)
    path = widening._file(torch.bfloat16)
    assert widening._recalled(torch.bfloat16)
    assert widening._read(path) is True
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("text", ["", "[]", "{}"])
def test_a_spoilt_file_is_replaced(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    slow_products(monkeypatch, torch.bfloat16)
    path = widening._file(torch.bfloat16)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert widening._recalled(torch.bfloat16)
    assert widening._read(path) is True


def test_another_processor_or_torch_measures_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    here = widening._file(torch.bfloat16)
    monkeypatch.setattr(widening, "processor", lambda: ("another", ()))
    there = widening._file(torch.bfloat16)
    monkeypatch.setattr(torch, "__version__", "3.0")
    assert len({here, there, widening._file(torch.bfloat16)}) == 3


def test_a_cache_that_cannot_be_written_costs_the_measurement(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "products").write_text("not a directory")
    slow_products(monkeypatch, torch.bfloat16)
    assert processor_is_slow(torch.bfloat16)
