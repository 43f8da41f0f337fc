"""Of tests that take arguments, those that run: what a fixture need not make for the others."""

from __future__ import annotations

from typing import Any

import pytest


def arguments_that_run(request: pytest.FixtureRequest, *names: str) -> set[tuple[Any, ...]]:
    """The values of the arguments ``names`` in those tests of the fixture's file that run and take all of them."""
    calls = (getattr(item, "callspec", None) for item in request.session.items if item.path == request.path)
    every = (call.params for call in calls if call is not None)
    return {tuple(values[name] for name in names) for values in every if set(names) <= set(values)}
