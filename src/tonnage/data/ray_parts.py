"""Parts built all over a Ray cluster, by a Ray Data pipeline: ``python -m tonnage.data.ray_parts``.

``processes`` starts it. It speaks as ``worker`` does, of all parts at once: one JSON object on its standard input, and
on its standard output one per line: the totals of a part, or a problem that the user can mend. A part is built by the
same code from the same bytes wherever that is, so the packs are those of one machine to the bit. Rows stay in the files
and parts go to the cache, which all nodes must see; only totals travel.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tonnage.data.builder import PartBuilder
from tonnage.data.formats import Form
from tonnage.data.recipe import Recipe
from tonnage.data.sources import part_of
from tonnage.errors import Problem


class Builder:
    """What Ray Data keeps in each of its actors: a tokenizer that is ready."""

    def __init__(self, recipe: str, directory: str) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self._builder = PartBuilder(Recipe.from_json(recipe), overlap=False)
        self._directory = Path(directory)

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """One task to its answer, both as JSON; what this node does not see is an answer too."""
        task = json.loads(row["task"])
        part = part_of(task["part"])
        for what, path in (("the rows", Path(part.file)), ("data.cache", self._directory)):
            if not path.exists():
                return {"answer": json.dumps({"unseen": str(path), "what": what, "node": socket.gethostname()})}
        totals = self._builder.build(part, Form(**task["form"]), Path(task["out"]))
        told = {"number": task["number"], "rows": totals.rows, "totals": totals.to_json()}
        return {"answer": json.dumps(told)}


def main() -> None:
    """Build all parts, and say so one by one."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nothing printed by a library ends up among the answers
    job = json.loads(sys.stdin.readline())
    from tonnage.host.ray_cluster import join, unreachable  # noqa: I001  (it sets what ray reads when it is imported)
    import ray
    import ray.data

    def answer(**said: Any) -> None:
        answers.write(json.dumps(said) + "\n")
        answers.flush()

    if (problem := unreachable(job["address"])) is not None:
        answer(problem=asdict(problem))
        return
    join(job["address"], job["runtime_env"])
    try:
        num_cpus = int(ray.cluster_resources().get("CPU", 1))
        tasks = [{"task": json.dumps(task)} for task in job["tasks"]]
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        built = ray.data.from_items(tasks, override_num_blocks=len(tasks)).map(
            Builder,
            fn_constructor_args=(job["recipe"], job["directory"]),
            compute=ray.data.ActorPoolStrategy(min_size=1, max_size=min(num_cpus, len(tasks))),
            num_cpus=1,
        )
        for row in built.iter_rows():
            said = json.loads(row["answer"])
            if "unseen" in said:
                answer(problem=asdict(_unseen(said)))
                return
            answer(**said)
    finally:
        ray.shutdown()


def _unseen(said: Mapping[str, str]) -> Problem:
    return Problem(
        found=f"{said['what']} at {said['unseen']}: not there on node {said['node']}",
        needed="rows and cache on a file system that all nodes of the cluster share: each prepares some of the parts",
        change="put both on one, and name their places in data.train and data.cache",
        where="launch.address",
    )


if __name__ == "__main__":
    main()
