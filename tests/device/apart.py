"""A device that is not the CPU, for machines that have no other: its operations are the CPU's, and so are its numbers.

``register`` gives torch a device type ``apart``, for the rest of the process. Its tensors are tensors like any other,
with storage of their own that says where it is; each operation on them is done by the CPU on the same memory. As on a
GPU, operations refuse to mix them with tensors of the CPU, and backward passes run in a thread of their own.

It has streams and events (``apart_order``), by the names that ``torch.cuda`` has for them. Where two operations of
different streams touch the same memory, one of them changes it, and nothing makes one wait for the other, that is a
race: it is found, whichever happens first, and whether or not it happens to do harm. With ``streams_run_late``, copies
in streams other than the first are made as late as what is waited for allows, so that what reads too early reads wrong
numbers.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from torch.utils.dlpack import from_dlpack

from device import apart_order as order

NAME = "apart"
CPU = torch.device("cpu")
WITHOUT_KERNEL = 0
"""What ``scaled_dot_product_attention`` is told: to compute scores and probabilities by operations of their own."""
_EXTENSION, _UNSIGNED = 12, 1
"""From dlpack.h: the device type of what is none of the others, and a type of numbers."""

streams_run_late = False


class _Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("id", ctypes.c_int32)]


class _Type(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Array(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_Managed._fields_ = [("array", _Array), ("context", ctypes.c_void_p), ("deleter", _Deleter)]
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

_nothing = ctypes.cast(ctypes.CDLL(None).abs, _Deleter)
"""What torch calls when it has a storage no more: a function that does nothing. It may be on its way out of a function
that has failed, and one in Python would lose why."""
_memory: dict[int, Tensor] = {}
"""By the address of a storage's memory: the CPU's bytes there."""
LOOKED_AT = 32


@dataclass(frozen=True)
class _Held:
    """A storage that torch has, as far as is known."""

    reference: StorageWeakRef
    bytes_: Tensor
    described: tuple[Any, ...]
    """What torch was told of it."""


_young: deque[_Held] = deque()
_old: deque[_Held] = deque()


def _let_go(*, all_: bool = False) -> None:
    """Give back the memory of what torch has no more: of that which came last, or longest was not looked at."""
    for some in (_young, _old):
        for _ in range(len(some) if all_ else min(len(some), LOOKED_AT)):
            held = some.popleft()
            if not held.reference.expired():
                (some if len(some) < LOOKED_AT else _old).append(held)
                continue
            del _memory[held.bytes_.data_ptr()]
            allocated.change(-held.bytes_.nbytes)
            order.freed(held.bytes_.data_ptr())


class Allocated:
    """Bytes of the device that are taken."""

    def __init__(self) -> None:
        self._now = self.most = 0

    @property
    def now(self) -> int:
        _let_go(all_=True)
        return self._now

    def change(self, num_bytes: int) -> None:
        self._now += num_bytes
        self.most = max(self.most, self._now)


allocated = Allocated()


def _storage_over(memory: Tensor) -> Tensor:
    """All bytes of a CPU tensor's storage, as a tensor of the device."""
    _let_go()
    storage = memory.untyped_storage()
    if not storage.nbytes():  # which would have no address
        storage = torch.empty(16, dtype=torch.uint8).untyped_storage()
    size = storage.nbytes()
    bytes_ = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (size,), (1,))
    assert bytes_.data_ptr() not in _memory, "somebody has this memory"
    shape, strides = (ctypes.c_int64 * 1)(size), (ctypes.c_int64 * 1)(1)
    array = _Array(bytes_.data_ptr(), _Device(_EXTENSION, 0), 1, _Type(_UNSIGNED, 8, 1), shape, strides, 0)
    managed = _Managed(array, None, _nothing)
    _memory[bytes_.data_ptr()] = bytes_
    allocated.change(size)
    order.allocated(bytes_.data_ptr())
    made: Tensor = from_dlpack(_new_capsule(ctypes.addressof(managed), b"dltensor", None))
    _young.append(_Held(StorageWeakRef(made.untyped_storage()), bytes_, (managed, shape, strides)))
    return made


def over(value: Tensor) -> Tensor:
    """A tensor of the device with the memory of a CPU tensor, which nobody else has."""
    base = _storage_over(value)
    base.as_strided_((base.numel() // value.itemsize * value.itemsize,), (1,), 0)
    return _seen_as(base.view(value.dtype), value)


def _seen_as(base: Tensor, like: Tensor) -> Tensor:
    """The storage of ``base`` by the shape of ``like``."""
    return base.detach().as_strided_(like.size(), like.stride(), like.storage_offset())


def twin(tensor: Tensor) -> Tensor:
    """The CPU's tensor with the memory of one of the device."""
    if not tensor.numel():  # which may be given some
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    memory = _memory[tensor.untyped_storage().data_ptr()]
    found = torch.empty(0, dtype=tensor.dtype)
    return found.set_(memory.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


def is_apart(value: Any) -> bool:
    """Whether it is a tensor of the device."""
    return isinstance(value, Tensor) and value.device.type == NAME


# Operations.


def _compute(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Any operation with a tensor of the device, or for one."""
    name, takes, writes, is_view = described(op)
    args = tuple(  # torch hands over a tensor that it made of a number as that number
        _as_tensor(value) if isinstance(value, (int, float)) and place in takes else value
        for place, value in enumerate(args)
    )
    ours: list[Tensor] = []
    theirs: list[Tensor] = []
    others: list[Tensor] = []
    cpu_args = [_on_cpu(value, ours, theirs, others) for value in args]
    cpu_kwargs = {key: _on_cpu(value, ours, theirs, others) for key, value in kwargs.items()}
    if ours and not name.startswith("aten::index"):
        _refuse(name, others)
    changed = [one for place, key in writes for one in _in(args[place] if place < len(args) else kwargs.get(key))]
    of_changed = set(map(id, changed))
    if not is_view:
        note(name, [one for one in ours if id(one) not in of_changed], changed)
        order.current_stream().run()
    found = op(*cpu_args, **cpu_kwargs)

    for one, its in zip(ours, theirs, strict=True):
        if id(one) in of_changed and its.size() != one.size():
            one.data = over(its)
    if not isinstance(found, (Tensor, list, tuple)):  # a number, for which the host waits
        order.current_stream().synchronize()
        return found
    return _back(found, name, ours, theirs)


def _as_tensor(number: float) -> Tensor:
    """A number as a tensor without a dimension; bits that are no int64 as the one that has them."""
    return torch.tensor(number - (1 << 64) if isinstance(number, int) and number >= 1 << 63 else number)


def _on_cpu(value: Any, ours: list[Tensor], theirs: list[Tensor], others: list[Tensor]) -> Any:
    """An argument as the CPU's operation takes it. Its tensors are noted: the device's, their twins, and others."""
    if isinstance(value, Tensor):
        if not is_apart(value):
            others.append(value)
            return value
        ours.append(value)
        theirs.append(twin(value))
        return theirs[-1]
    if isinstance(value, (list, tuple)):
        return [_on_cpu(one, ours, theirs, others) for one in value]
    return CPU if isinstance(value, torch.device) else value


def _back(value: Any, name: str, ours: list[Tensor], theirs: list[Tensor]) -> Any:
    """What an operation returned, on the device: what it was given, the same memory seen anew, or other memory."""
    if isinstance(value, (list, tuple)):
        return type(value)(_back(one, name, ours, theirs) for one in value)
    if not isinstance(value, Tensor):
        return value
    for one, its in zip(ours, theirs, strict=True):
        if its is value:
            return one
    if value.numel():
        address = value.untyped_storage().data_ptr()
        for one, its in zip(ours, theirs, strict=True):
            if its.numel() and its.untyped_storage().data_ptr() == address:
                return _seen_as(one, value)
    else:  # which may be nothing of somebody's memory
        value = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype)
    if name.startswith("aten::empty"):
        _make_useless(value)
    made = over(value)
    note(name, [], [made])
    ours.append(made)  # others may be seen in the same memory
    theirs.append(value)
    return made


@cache
def described(op: Any) -> tuple[str, set[int], list[tuple[int, str]], bool]:
    """The name of an operation, which of its arguments are tensors, which of them it writes to, and whether it only
    looks at memory anew."""
    arguments = op._schema.arguments
    takes = {place for place, one in enumerate(arguments) if str(one.type) == "Tensor"}
    writes = [
        (place, one.name)
        for place, one in enumerate(arguments)
        if one.alias_info is not None and one.alias_info.is_write
    ]
    return op._schema.name, takes, writes, not writes and any(one.alias_info is not None for one in op._schema.returns)


def _in(value: Any) -> list[Tensor]:
    """The device's tensors that an argument is or has."""
    return [one for one in (value if isinstance(value, (list, tuple)) else [value]) if is_apart(one)]


def _make_useless(value: Tensor) -> None:
    """What nobody has written to yet is not a number."""
    ctypes.memset(value.untyped_storage().data_ptr(), 255, value.untyped_storage().nbytes())


def _copy(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """From the device, to it, or within it."""
    both = [one for one in (source, target) if not is_apart(one)]
    from_, to = (twin(one) if is_apart(one) else one for one in (source, target))
    note("copy", [source], [target])
    here = order.current_stream()
    behind = non_blocking and all(map(is_locked, both))
    if streams_run_late and here is not order.default and behind:
        here.put(lambda: _do_copy(from_, to))
        return target
    here.run()
    to.copy_(from_)
    if both and not behind:
        here.synchronize()
    return target


def _do_copy(from_: Tensor, to: Tensor) -> None:
    with _disable_current_modes():  # whoever waits for it does not copy
        to.copy_(from_)


def _resize(tensor: Tensor, size: Any, *, memory_format: Any = None) -> Tensor:
    like = torch.empty(size, dtype=tensor.dtype, device="meta")
    if like.nbytes <= tensor.untyped_storage().nbytes():
        return tensor.as_strided_(like.size(), like.stride(), tensor.storage_offset())
    made = torch.empty(size, dtype=tensor.dtype)
    _make_useless(made)
    if tensor.numel():
        made.view(-1)[: tensor.numel()] = twin(tensor).reshape(-1)
    tensor.data = over(made)
    return tensor


def _choose_attention(*args: Any, **kwargs: Any) -> int:
    return WITHOUT_KERNEL


def _to_copy(source: Tensor, *, device: Any = None, non_blocking: bool = False, **how: Any) -> Tensor:
    """As torch does for a GPU: what the host does not wait for goes into memory that is locked."""
    given = {key: value for key, value in how.items() if value is not None and key in ("dtype", "memory_format")}
    made = torch.empty_like(source, device=device, **given)
    if non_blocking and not is_apart(made):
        locked(made)
    return made.copy_(source, non_blocking=non_blocking)


def _count(numbers: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """A GPU counts whole numbers as well, of which a mixture's experts have as many as they have rows."""
    note("aten::histc", [numbers], [])
    order.current_stream().run()
    made = over(torch.histc(twin(numbers).float(), bins, min, max).to(numbers.dtype))
    note("aten::histc", [], [made])
    return made


KERNELS: dict[str, Callable[..., Any]] = {
    "aten::histc": _count,
    "aten::_copy_from": _copy,
    "aten::_to_copy": _to_copy,
    "aten::resize_": _resize,
    "aten::_fused_sdp_choice": _choose_attention,
}


def _refuse(name: str, others: list[Tensor]) -> None:
    """As a GPU does: numbers without a dimension, and indices, may be the CPU's."""
    if any(one.dim() for one in others):
        raise RuntimeError(f"{name}: expected all tensors to be on the same device, {NAME}, and one is the CPU's")


# Memory of the host that is locked: what is copied from there, or to it, does not make the host wait.

_locked: dict[int, int] = {}


def locked(memory: Tensor) -> Tensor:
    """The host's memory, which is locked from now on."""
    if memory.numel():
        address = memory.untyped_storage().data_ptr()
        _locked[address] = memory.untyped_storage().nbytes()
        weakref.finalize(memory.untyped_storage(), _unlock, address).atexit = False
    return memory


def _unlock(address: int) -> None:
    _locked.pop(address, None)
    order.forget(address)


def is_locked(tensor: Tensor) -> bool:
    """Whether a tensor of the CPU lies in memory that is locked."""
    return tensor.untyped_storage().data_ptr() in _locked


def note(name: str, read: Sequence[Tensor], written: Sequence[Tensor]) -> None:
    """Tell ``order`` what an operation touches."""
    order.touched(name, *(places_of(ones) for ones in (read, written)))


def places_of(tensors: Sequence[Tensor]) -> list[tuple[int, int, int]]:
    """Where those lie that are watched: address of the piece of memory, first byte and end in it."""
    return [_bytes_of(one) for one in tensors if _is_watched(one)]


def _is_watched(tensor: Tensor) -> bool:
    return tensor.numel() > 0 and (is_apart(tensor) or is_locked(tensor))


def _bytes_of(tensor: Tensor) -> tuple[int, int, int]:
    first = int(tensor.storage_offset()) * tensor.itemsize
    last: int = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return tensor.untyped_storage().data_ptr(), first, first + (last + 1) * tensor.itemsize


# What torch wants of a device.


class _Module(ModuleType):
    """``torch.apart``, by the names of ``torch.cuda``."""

    Stream, Event = order.Stream, order.Event
    stream = staticmethod(order.stream)
    current_stream = staticmethod(order.current_stream)
    set_stream = staticmethod(order.set_stream)
    synchronize = staticmethod(order.synchronize)

    @staticmethod
    def default_stream(device: Any = None) -> order.Stream:
        return order.default

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def is_initialized() -> bool:
        return True

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def set_device(device: Any) -> None:
        assert torch.device(device).index in (0, None)

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        """The CPU's random numbers are this device's."""

    manual_seed = manual_seed_all

    @staticmethod
    def get_rng_state(device: Any = None) -> Tensor:
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    @staticmethod
    def max_memory_allocated(device: Any = None) -> int:
        return allocated.most

    @staticmethod
    def reset_peak_memory_stats(device: Any = None) -> None:
        allocated.most = allocated.now

    @staticmethod
    def empty_cache() -> None:
        """Nothing is kept."""


@cache
def register() -> list[torch.library.Library]:
    """Give torch the device, for the rest of the process. What is returned must stay."""
    _setup_privateuseone_for_python_backend(NAME, _Module(f"torch.{NAME}"))
    torch.__future__.set_swap_module_params_on_conversion(True)  # or moving a module would untie what is tied
    for_all, for_some = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    for_all.fallback(_compute, "PrivateUse1")
    for name, kernel in KERNELS.items():
        for_some.impl(name.removeprefix("aten::"), kernel, "PrivateUse1")
    return [for_all, for_some]
