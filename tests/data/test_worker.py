"""A process that tokenises parts, and what it does when nobody waits for them any more."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from types import SimpleNamespace
from typing import Any

from tonnage.data.building import builder, recipe, worker


def serve(standard_input: int, began: int) -> None:
    """As the process does, with parts that take a minute."""

    def build(*_: Any) -> None:
        os.write(began, b"x")
        time.sleep(60)

    os.dup2(standard_input, 0)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = os.fdopen(1, "w")
    builder.PartBuilder = lambda *_, **__: SimpleNamespace(build_task=build)  # type: ignore[assignment, misc]
    recipe.Recipe = SimpleNamespace(from_json=json.loads)  # type: ignore[assignment, misc]
    worker.main()


def test_it_ends_in_the_middle_of_a_part_when_its_parent_is_gone() -> None:
    (read, write), (seen, began) = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(write)
            signal.alarm(50)
            serve(read, began)
        finally:
            os._exit(1)
    os.close(read)
    os.close(began)
    task = {"number": 0, "part": {}, "form": {}, "out": "nowhere"}
    job = {"recipe": "{}", "cluster": None}
    os.write(write, "".join(json.dumps(line) + "\n" for line in (job, [task], [task])).encode())
    assert os.read(seen, 1) == b"x"
    assert os.waitpid(child, os.WNOHANG) == (0, 0)
    os.close(write)  # with a task that it has not read yet
    began_to_end = time.monotonic()
    assert os.waitpid(child, 0)[1] == 0
    assert time.monotonic() - began_to_end < 10
    os.close(seen)
