"""Parts built all over a Ray cluster, by a Ray Data pipeline, for a ``worker`` that is told so.

A part is built by the same code from the same bytes wherever that is, so the packs are those of one machine to the bit.
Rows stay in the files and parts go to the cache, which all nodes must see; only totals travel.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tonnage.data.building.builder import PartBuilder
from tonnage.data.building.recipe import Recipe
from tonnage.errors import Problem


class Builder:
    """What Ray Data keeps in each of its actors: a tokenizer that is ready."""

    def __init__(self, recipe: str) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self._builder = PartBuilder(Recipe.from_json(recipe), overlap=False)

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """One task to its answer, both as JSON; what this node does not see is an answer too."""
        task = json.loads(row["task"])
        for name, path in (("the rows", Path(task["part"]["file"])), ("data.cache", Path(task["out"]).parent)):
            if not path.exists():
                return {"answer": json.dumps({"problem": asdict(_unseen(name, path))})}
        return {"answer": json.dumps(self._builder.build_task(task))}


def build_on_cluster(
    cluster: Mapping[str, Any], recipe: str, tasks: Sequence[Mapping[str, Any]], answer: Callable[..., None]
) -> None:
    """Build all parts, and say so one by one, or what the user has to mend."""
    from tonnage.host.ray_cluster import join, unreachable  # noqa: I001  (it sets what ray reads when it is imported)
    import ray
    import ray.data

    if (problem := unreachable(cluster["address"])) is not None:
        answer(problem=asdict(problem))
        return
    join(cluster["address"], cluster["runtime_env"])
    try:
        num_cpus = int(ray.cluster_resources().get("CPU", 1))
        ray.data.DataContext.get_current().enable_progress_bars = False
        rows = [{"task": json.dumps(task)} for task in tasks]
        built = ray.data.from_items(rows, override_num_blocks=len(rows)).map(
            Builder,
            fn_constructor_args=(recipe,),
            compute=ray.data.ActorPoolStrategy(min_size=1, max_size=min(num_cpus, len(rows))),
            num_cpus=1,
        )
        for row in built.iter_rows():
            done = json.loads(row["answer"])
            if "totals" in done:
                answer(rows=done["totals"]["rows"])
            answer(**done)
            if "problem" in done:
                return
    finally:
        ray.shutdown()


def _unseen(what: str, path: Path) -> Problem:
    return Problem(
        found=f"{what} at {path}: not there on node {socket.gethostname()}",
        needed="rows and cache on a file system that all nodes of the cluster share: each prepares some of the parts",
        change="put both on one, and name their places in data.train and data.cache",
        where="launch.address",
    )
