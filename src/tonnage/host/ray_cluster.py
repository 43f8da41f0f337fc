"""A cluster of Ray: whether one is there, and how a process of ours becomes a part of it with its code.

Only processes of their own import this module, for it imports Ray: the trainer's (``launch.ray_trainer``) and the one
that shares out the preparation of data (``data.ray_parts``).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # read when ray is imported

import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import tonnage
from tonnage.errors import Problem
from tonnage.host import nodes

CONNECT_SECONDS = 10.0
PROBE_SECONDS = 60.0
ENVIRONMENTS = {"pip", "uv", "conda", "container", "image_uri"}
"""Keys of a runtime environment that bring a Python environment of their own, and tonnage with it."""


def join(address: str, environment: Mapping[str, Any]) -> None:
    """Be a part of a cluster, with a runtime environment and, where a node has another or none, this code."""
    ray.init(address=address, log_to_driver=False)
    if whole := _with_code(environment):
        ray.shutdown()  # what a job carries is said when it begins
        ray.init(address=address, log_to_driver=False, runtime_env=whole)


def unreachable(address: str | None) -> Problem | None:
    """What is wrong with the address of a cluster, if nobody listens there: Ray would try for minutes."""
    host, _, port = (address or "").rpartition(":")
    if not host:
        return None
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:
        return Problem(
            found=f"no Ray cluster at {address}: {error}",
            needed="the address of a running head, HOST:PORT, or auto on one of its nodes",
            change="start one (ray start --head), another launch.address, or none for Ray on this machine",
            where="launch.address",
        )
    return None


def _with_code(environment: Mapping[str, Any]) -> dict[str, Any]:
    """What the processes of this job need: what the user says, and this code where a node has another or none."""
    environment = dict(environment)
    here = nodes.code_digest()
    if not ENVIRONMENTS & environment.keys() and any(digest != here for digest in _code_of_nodes()):
        environment["py_modules"] = [str(Path(tonnage.__file__).parent), *environment.get("py_modules", [])]
        environment["excludes"] = ["__pycache__", *environment.get("excludes", [])]
    return environment


def _code_of_nodes() -> list[str]:
    """A digest of the package on each node; empty where it is not installed."""

    def digest() -> str:
        import importlib.util

        if importlib.util.find_spec("tonnage") is None:
            return ""
        from tonnage.host.nodes import code_digest

        return code_digest()

    probe = ray.remote(num_cpus=0, max_retries=1)(digest)
    node_ids = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    digests = [
        probe.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote()
        for node in node_ids
    ]
    try:
        return list(ray.get(digests, timeout=PROBE_SECONDS))
    except (ray.exceptions.RayError, ImportError):
        return [""]
