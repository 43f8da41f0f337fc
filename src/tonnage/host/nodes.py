"""Whether the machines of a run agree: what they see of its files, which versions they have, what time it is there.

Each worker describes its machine; one compares the descriptions and says what differs, machine by machine, before a
weight is loaded. Standard library only: it also runs where nothing else is installed.
"""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from urllib.parse import urlsplit

from tonnage.errors import Problem

LOCAL = ("localhost", "127.0.0.1", "::1")
"""What every machine calls itself."""
PACKAGES = ("tonnage", "torch", "transformers")
CLOCK_SECONDS = 5.0
"""Difference of clocks from which the order of events on two machines is no longer what their times say."""
NONE = "none"


@dataclass(frozen=True)
class Node:
    """A worker's machine as it found it."""

    host: str
    versions: Mapping[str, str]
    """Of Python and packages, and a digest of tonnage's own code."""
    missing: Mapping[str, str]
    """Files of the run that it does not see: what they are, and where they were looked for."""
    offset_seconds: float = 0.0
    """Its clock minus that of worker 0."""


def machine_within(namespace: str) -> str:
    """A name of this machine as it runs now, the same in all of its containers that share a ``namespace`` of Linux:
    ``net``, ``pid``."""
    try:
        running = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return running + str(Path(f"/proc/self/ns/{namespace}").readlink())
    except OSError:
        return socket.gethostname()


def describe_node(paths: Mapping[str, str | None], offset_seconds: float = 0.0) -> Node:
    """This machine; ``paths`` are what it must see (what they are -> where they are)."""
    missing = {what: path for what, path in paths.items() if path is not None and not Path(path).exists()}
    return Node(socket.gethostname(), versions(), missing, offset_seconds)


def versions() -> dict[str, str]:
    """What has to be the same on all machines."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = NONE
    return found | {"code": code_digest()}


def code_digest() -> str:
    """Digest of this package's own code: two states of development have the same version."""
    digest, root = hashlib.blake2b(digest_size=6), Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def disagreements(nodes: Sequence[Node], unseen: Mapping[str, Sequence[int]]) -> list[Problem]:
    """What keeps the machines of all ranks from one run.

    ``unseen`` are ranks by what is wrong with the run's directory between them and worker 0.
    """
    problems = []
    for subject, ranks in unseen.items():
        problems.append(
            Problem(
                found=f"{subject}: {_hosts(nodes, ranks)}",
                needed="a run directory on a file system that all machines share, and may write to",
                change="write output=... on one, or mount it there",
                where="output",
            )
        )
    for subject in dict.fromkeys(subject for node in nodes for subject in node.missing):
        ranks = [rank for rank, node in enumerate(nodes) if subject in node.missing]
        problems.append(
            Problem(
                found=f"no {subject} at {nodes[ranks[0]].missing[subject]}: {_hosts(nodes, ranks)}",
                needed=f"the {subject} at the same place on every machine",
                change="put it on a file system that is shared, or copy it to each",
            )
        )
    for name in nodes[0].versions:
        ranks_of: dict[str, list[int]] = {}
        for rank, node in enumerate(nodes):
            ranks_of.setdefault(node.versions.get(name, NONE), []).append(rank)
        if len(ranks_of) > 1:
            subject = "tonnage's code" if name == "code" else name
            listed = "; ".join(f"{value}: {_hosts(nodes, ranks)}" for value, ranks in ranks_of.items())
            problems.append(
                Problem(
                    found=f"{subject} differs between machines: {listed}",
                    needed=f"the same {subject} everywhere",
                    change="use one Python environment for all, or install the same versions",
                )
            )
    return problems


def wrong_clocks(nodes: Sequence[Node]) -> str:
    """A line on the machines whose clocks differ from worker 0's; empty where none does."""
    wrong = {node.host: node.offset_seconds for node in nodes if abs(node.offset_seconds) > CLOCK_SECONDS}
    listed = ", ".join(f"{host} by {seconds:+.0f} s" for host, seconds in wrong.items())
    return f"clocks differ from worker 0's: {listed}; times in logs do not tell what came first" if wrong else ""


def _hosts(nodes: Sequence[Node], ranks: Sequence[int]) -> str:
    """Some ranks by machine: ``node1 (workers 0, 1), node2 (worker 2)``."""
    by_host: dict[str, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(nodes[rank].host, []).append(rank)
    return ", ".join(
        f"{host} (worker{'s' if len(there) > 1 else ''} {', '.join(map(str, there))})"
        for host, there in by_host.items()
    )


def leave_token(directory: Path, name: str) -> None:
    """Write a small file that others will look for."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / name).write_text(name)


def sees_token(directory: Path, name: str, seconds: float) -> bool:
    """Whether a file that another machine has written appears in time: directories are cached for some seconds."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            os.listdir(directory)  # makes network file systems look again  # noqa: PTH208
            if (directory / name).read_text() == name:
                return True
        except OSError:
            pass
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)


def names_this_machine(host: str) -> bool:
    """Whether a request's header ``Host`` does. Other names may be a web page's, which the browser was told is here."""
    try:
        return urlsplit(f"//{host}").hostname in LOCAL
    except ValueError:  # no address at all
        return False
