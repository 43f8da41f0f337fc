"""A process that tokenises parts: ``python -m tonnage.data.worker``, started and fed by ``processes``.

It reads one JSON object per line from its standard input, a recipe first and then parts, answers with one per line on
its standard output, and ends when its input ends, which it does when its parent is gone, however that went: at once,
in the middle of a part, as nobody waits for it any more and somebody else may want to build what it is building.
"""

from __future__ import annotations

import json
import os
import select
import sys
import threading
from pathlib import Path


def main() -> None:
    """Serve until the input ends."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, args=(sys.stdin.fileno(),), daemon=True).start()
    from tonnage.data.builder import PartBuilder
    from tonnage.data.formats import Form
    from tonnage.data.recipe import Recipe
    from tonnage.data.sources import part_of

    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nothing printed by a library ends up among the answers

    def answer(value: dict[str, object]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    builder = PartBuilder(Recipe.from_json(sys.stdin.readline()), overlap=False)
    for line in sys.stdin:
        task = json.loads(line)
        try:
            totals = builder.build(
                part_of(task["part"]), Form(**task["form"]), Path(task["out"]), lambda rows: answer({"rows": rows})
            )
        except OSError as error:  # a full disk, for instance: not a defect of this process
            answer({"refused": [error.errno, error.strerror or str(error), error.filename and str(error.filename)]})
            return
        answer({"totals": totals.to_json()})
    builder.close()


def _end_with_parent(standard_input: int) -> None:
    """End this process when nobody can write to its input any more; until then, wait."""
    watched = select.poll()
    watched.register(standard_input, 0)  # that everybody has hung up is always told
    watched.poll()
    os._exit(0)


if __name__ == "__main__":
    main()
