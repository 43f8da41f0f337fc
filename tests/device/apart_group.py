"""Collectives of the device ``apart``, for workers that are processes: gloo's, on the same memory.

As NCCL's, they are put into a stream of their own behind the one that asks for them, and ``wait`` makes the stream that
calls it wait for them.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
from torch.futures import Future

from device import apart
from device import apart_order as order


class _Done(c10d.Work):
    """A collective that is through, as far as the host is concerned."""

    def __init__(self, event: order.Event, result: Any) -> None:
        super().__init__()
        self._event, self._future = event, Future[Any]()
        self._future.set_result(result)

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._event.wait()
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Future[Any]:
        return self._future


def _all(values: Any) -> Iterable[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for one in values:
            yield from _all(one)


def _twins(values: Any) -> Any:
    if isinstance(values, Tensor):
        return apart.twin(values) if apart.is_apart(values) else values
    return [_twins(one) for one in values] if isinstance(values, (list, tuple)) else values


def _refuse_cpu(tensors: Any) -> None:
    """As NCCL does, which sends from device to device. (Sums of the CPU's numbers have a group of their own there.)"""
    if not all(map(apart.is_apart, _all(tensors))):
        raise RuntimeError(f"no back end that sends what is not on {apart.NAME}")


class _Sending(_Done):
    """Something that is sent, to whoever receives it when they come to it."""

    def __init__(self, event: order.Event, sent: Any, work: c10d.Work) -> None:
        super().__init__(event, sent)
        self._work = work

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._work.wait()
        return super().wait()


class Group(dist.ProcessGroup):
    """A process group for tensors of the CPU and of the device."""

    def __init__(self, store: c10d.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._gloo = c10d.ProcessGroupGloo(store, rank, size, timeout)
        self._stream, self._name = order.Stream(), ""

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def getBackendName(self) -> str:  # noqa: N802
        return "apart"

    def _do(self, name: str, written: int, *args: Any) -> Any:
        """``written`` is how many of the first arguments it writes to."""
        self._begin(name, written, *args).wait()
        return _Done(self._stream.record_event(), list(_all(args[:written])))

    def _begin(self, name: str, written: int, *args: Any) -> Any:
        ours = [one for one in _all(args) if apart.is_apart(one)]
        self._stream.wait_stream(order.current_stream())
        order.current_stream().run()
        with order.stream(self._stream):
            changed = [one for one in _all(args[:written]) if apart.is_apart(one)]
            same = set(map(id, changed))
            apart.note(name, [one for one in ours if id(one) not in same], changed)
            self._stream.run()
        return getattr(self._gloo, name)(*map(_twins, args))

    def allreduce(self, tensors: Any, options: Any = None) -> Any:  # type: ignore[override]
        return self._do("allreduce", 1, tensors, options or c10d.AllreduceOptions())

    def broadcast(self, tensors: Any, options: Any = None) -> Any:  # type: ignore[override]
        return self._do("broadcast", 1, tensors, options or c10d.BroadcastOptions())

    def allgather(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
        return self._do("allgather", 1, outputs, inputs, options or c10d.AllgatherOptions())

    def _allgather_base(self, output: Any, inputs: Any, options: Any = None) -> Any:
        return self._do("_allgather_base", 1, output, inputs, options or c10d.AllgatherOptions())

    def _reduce_scatter_base(self, output: Any, inputs: Any, options: Any = None) -> Any:
        return self._do("_reduce_scatter_base", 1, output, inputs, options or c10d.ReduceScatterOptions())

    def all_gather_single(self, output: Any, inputs: Any, options: Any = None) -> Any:
        """As newer versions of torch call it, here and below."""
        return self._allgather_base(output, inputs, options)

    def reduce_scatter_single(self, output: Any, inputs: Any, options: Any = None) -> Any:
        return self._reduce_scatter_base(output, inputs, options)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
        """What ``torch.ops._c10d_functional`` calls, of one tensor, here and below."""
        ((output,), (own,)) = outputs, inputs
        return self._allgather_base(output, own)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
        ((output,), (whole,)) = outputs, inputs
        return self._reduce_scatter_base(output, whole)

    # As torch before 2.13 calls them.
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    def send(self, tensors: Any, to: int, tag: int) -> Any:
        _refuse_cpu(tensors)
        work = self._begin("send", 0, tensors, to, tag)
        return _Sending(self._stream.record_event(), [], work)

    def recv(self, tensors: Any, from_: int, tag: int) -> Any:
        _refuse_cpu(tensors)
        return self._do("recv", 1, tensors, from_, tag)

    def barrier(self, options: Any = None) -> Any:
        return self._do("barrier", 0, options or c10d.BarrierOptions())


def register() -> None:
    """Let ``init_process_group("apart")`` make such groups, and FSDP2 free what it has gathered."""
    vars(_fsdp_param).update(free_storage=_free, alloc_storage=lambda tensor: None)
    vars(_fsdp_param_group).update(alloc_storage=lambda tensor: None)
    if "apart" not in dist.Backend.backend_list:
        dist.Backend.register_backend("apart", _made, devices=["cpu", apart.NAME])


def _free(tensor: Tensor) -> None:
    """What FSDP2 frees has no numbers from then on. (A device of Python's cannot take back the memory of a storage.)"""
    if apart.is_apart(tensor):
        apart.note("free", [], [tensor])
        order.current_stream().run()
        apart.twin(tensor).view(torch.uint8).fill_(255)


def _made(store: c10d.Store, rank: int, size: int, timeout: timedelta) -> Group:
    return Group(store, rank, size, timeout)
