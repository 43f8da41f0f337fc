"""Variables of the environment that are as they were when something has come to its end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

OF_TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""By which torch's processes meet."""


@contextmanager
def variables_of_torch(*, hidden: bool = False) -> Iterator[None]:
    """Leave torch's as they were: processes that this one starts later would see them. ``hidden``: they are not there
    within it, before somebody sets them."""
    before = {name: os.environ[name] for name in OF_TORCH if name in os.environ}
    try:
        for name in OF_TORCH if hidden else ():
            os.environ.pop(name, None)
        yield
    finally:
        for name in OF_TORCH:
            os.environ.pop(name, None)
        os.environ.update(before)
