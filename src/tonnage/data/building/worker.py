"""A process that builds parts: ``python -m tonnage.data.building.worker``, started and fed by ``processes``.

    in    {"recipe", "cluster"}                      first; cluster: null, or {"address", "runtime_env"}
          [{"number", "part", "form", "out"}, ...]   parts to build, and more of them when these are done
    out   {"rows"}                                   so many more rows are done
          {"number", "totals"}                       a part is done
          {"refused"} or {"problem"}                 the end: what the system refuses, or what the user has to mend

Each is a line of JSON. It builds parts itself, one after another, or has the nodes of a Ray cluster do it
(``ray_parts``). It ends when its input ends, which it does when its parent is gone, however that went: at once, in the
middle of a part, as nobody waits for it any more and somebody else may want to build what it is building.
"""

from __future__ import annotations

import json
import os
import select
import sys
import threading
from typing import Any


def main() -> None:
    """Serve until the input ends."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, args=(sys.stdin.fileno(),), daemon=True).start()
    from tonnage.data.building.builder import PartBuilder
    from tonnage.data.building.recipe import Recipe

    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nothing printed by a library ends up among the answers

    def answer(**value: Any) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    job = json.loads(sys.stdin.readline())
    if job["cluster"] is not None:
        from tonnage.data.building.ray_parts import build_on_cluster

        for line in sys.stdin:
            build_on_cluster(job["cluster"], job["recipe"], json.loads(line), answer)
        return
    builder = PartBuilder(Recipe.from_json(job["recipe"]), overlap=False)
    for line in sys.stdin:
        for task in json.loads(line):
            try:
                answer(**builder.build_task(task, lambda rows: answer(rows=rows)))
            except OSError as error:  # a full disk, for instance: not a defect of this process
                answer(refused=[error.errno, error.strerror or str(error), error.filename and str(error.filename)])
                return


def _end_with_parent(standard_input: int) -> None:
    """End this process when nobody can write to its input any more; until then, wait."""
    watched = select.poll()
    watched.register(standard_input, 0)  # that everybody has hung up is always told
    watched.poll()
    os._exit(0)


if __name__ == "__main__":
    main()
