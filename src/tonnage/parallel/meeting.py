"""How the ranks of one launch find one another.

torchrun says where rank 0 listens (``MASTER_ADDR``, ``MASTER_PORT``), and so may the user. mpirun and srun do not. Then
rank 0 takes any free port and writes where it listens into a file in the run directory, which every rank can read
anyway; the others read it there. So no port is agreed on beforehand, and none can be taken by somebody else.

    rank 0    listens, then writes   {"addresses": [...], "port": ..., "word": ...}
    others    read it, connect, and ask for the word; a file of an earlier launch leads nowhere or to another word

The file's name holds what the launcher calls this launch, so two launches on one directory do not meet; where the
launcher says no such thing, a rank whose place is taken learns so here.

torchrun keeps one store through all of its restarts, and what the dead have left in it leads nowhere. So rank 0 begins
every start with a word of its own, each rank shows that it has read it, and rank 0 that it has seen that; what follows
goes under that word.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from tonnage.errors import UserError, user_error
from tonnage.files.reading import read_json
from tonnage.files.writing import write_json
from tonnage.host.nodes import machine_within
from tonnage.parallel.place import Place

LOOK_SECONDS = 0.05
PROBE_SECONDS = 3.0
"""For a listening port to answer."""
CONNECT_SECONDS = 60.0
"""For torch's store to connect: it looks for the name of every address, which takes long where no name server is."""
WORD, START = "word", "start"


@contextlib.contextmanager
def meet(place: Place, directory: Path, timeout_seconds: float) -> Iterator[Store]:
    """A store that all ranks of this launch share, as long as the context is open (on rank 0).

    ``directory`` is one that every rank sees; it is used only where the launcher gives no address. ``timeout_seconds``
    is how long ranks wait for each other here and in the store.

    Raises:
        UserError: rank 0 was not found in time, or another process has this rank.
    """
    timeout = timedelta(seconds=timeout_seconds)
    if place.address:
        store, _, _ = next(rendezvous("env://", place.rank, place.size, timeout=timeout))
        yield _begin(store, place, timeout_seconds)
        return
    file = directory / f"meeting-{hashlib.blake2b(place.launch.encode(), digest_size=4).hexdigest()}.json"
    if place.rank == 0:
        store = TCPStore("127.0.0.1", 0, None, is_master=True, timeout=timeout, wait_for_workers=False)
        word = secrets.token_hex(8)
        store.set(WORD, word)
        write_json(file, {"host": machine_within("net"), "addresses": addresses(), "port": store.port, "word": word})
        try:
            yield _begin(store, place, timeout_seconds)
        finally:
            file.unlink(missing_ok=True)
    else:
        yield _begin(_find(place, file, timeout), place, timeout_seconds)


def addresses() -> list[str]:
    """Names and addresses under which other machines may reach this one, the likeliest first."""
    candidates = [os.environ.get("SLURMD_NODENAME", ""), socket.gethostname()]
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # an address for documentation; nothing is sent, only a route is chosen
        candidates.append(probe.getsockname()[0])
    with contextlib.suppress(OSError):
        candidates += [
            str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        ]
    return [name for name in dict.fromkeys(candidates) if name and not name.startswith("127.") and name != "::1"]


def _begin(store: Store, place: Place, timeout_seconds: float) -> Store:
    """The part of a store that belongs to this start, once all ranks are there. Raises ``UserError`` if one is not."""
    deadline = time.monotonic() + timeout_seconds
    if place.rank == 0:
        start = secrets.token_hex(8)
        store.set(START, start)
        for rank in range(1, place.size):
            while not store.check([f"{start}/{rank}"]):
                if time.monotonic() > deadline:
                    raise _absent(rank, timeout_seconds)
                time.sleep(LOOK_SECONDS)
            store.set(f"{start}/{rank}/seen", store.get(f"{start}/{rank}").decode())
        return PrefixStore(start, store)
    mine = secrets.token_hex(8)
    while time.monotonic() < deadline:
        if store.check([START]):
            start = store.get(START).decode()
            store.set(f"{start}/{place.rank}", mine)
            confirmation_key = f"{start}/{place.rank}/seen"
            if store.check([confirmation_key]) and store.get(confirmation_key).decode() == mine:
                return PrefixStore(start, store)
        time.sleep(LOOK_SECONDS)
    raise _absent(0, timeout_seconds)


def _absent(rank: int, timeout_seconds: float) -> UserError:
    return user_error(
        found=f"worker {rank} did not come within {timeout_seconds:g} s (launch.timeout)",
        needed="all workers of the run",
        change="look at why it did not start; start all of them",
    )


def _find(place: Place, file: Path, timeout: timedelta) -> Store:
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError):
            record = read_json(file)
            names = ["127.0.0.1"] if record["host"] == machine_within("net") else record["addresses"]
            for name in names:
                store = _connect(name, record["port"], record["word"], timeout)
                if store is not None and store.add(f"rank-{place.rank}", 1) > 1:
                    raise user_error(
                        found=f"another process is worker {place.rank} of the launch that works here",
                        needed="one launch at a time",
                        change="wait for its end, or stop it",
                        where=str(file.parent),
                    )
                if store is not None:
                    return store
        time.sleep(LOOK_SECONDS)
    raise user_error(
        found=f"worker {place.rank} did not find worker 0 within {timeout.total_seconds():g} s",
        needed=f"worker 0, and {file.parent} on a file system that all workers share",
        change="set MASTER_ADDR and MASTER_PORT for all workers if the directory is not shared",
        where=str(file),
    )


def _connect(name: str, port: int, word: str, timeout: timedelta) -> Store | None:
    """The store at an address, if it is the one that the file speaks of."""
    try:
        socket.create_connection((name, port), PROBE_SECONDS).close()
        store = TCPStore(name, port, None, is_master=False, timeout=timedelta(seconds=CONNECT_SECONDS))
        if not store.check([WORD]) or store.get(WORD).decode() != word:
            return None
    except (OSError, RuntimeError):  # nobody listens there any more, or somebody else does
        return None
    store.set_timeout(timeout)
    return store
