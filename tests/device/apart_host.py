"""What the host does itself with its memory that is locked for the device ``apart``: it, too, must wait for what the
device does there.

``watched`` looks at the operations of the thread that enters it, of backward passes that it asks for, and of threads
that update in the background. (Reading from a file, or writing to one, is none.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from device import apart
from device import apart_order as order
from tonnage.optim.background import Background


@contextmanager
def watched() -> Iterator[None]:
    """Reading or changing locked memory that the device may still change, or read, is a race."""
    carried_out = Background._run

    def run(self: Background) -> None:
        with Watched():
            carried_out(self)

    with pytest.MonkeyPatch.context() as patch, Watched():
        patch.setattr(Background, "_run", run)
        yield


class Watched(TorchDispatchMode):
    """What ``watched`` enters in each thread."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What is done with parts of tensors is asked again, of the parts."""
        kwargs = kwargs or {}
        if FakeTensor in types:
            return func(*args, **kwargs)
        if any(kind not in (Tensor, nn.Parameter) for kind in types):
            return NotImplemented
        given = [one for value in (*args, *kwargs.values()) for one in _tensors(value)]
        if not any(map(apart.is_apart, given)) and apart.places_of(given):
            name, _, writes, is_view = apart.described(func)
            changed = [
                one for place, key in writes for one in _tensors(args[place] if place < len(args) else kwargs.get(key))
            ]
            of_changed = set(map(id, changed))
            if not is_view:
                read = [one for one in given if id(one) not in of_changed]
                order.touched_by_host(name, *(apart.places_of(ones) for ones in (read, changed)))
        return func(*args, **kwargs)


def _tensors(value: Any) -> list[Tensor]:
    return [one for one in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(one, Tensor)]
