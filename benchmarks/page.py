"""What ``tonnage page`` takes over many long runs: seconds for the list and for a run, memory, and what those who watch
cost a run that trains beside it.

    python benchmarks/page.py [--runs 200] [--steps 10000] [--watchers 20] [--seconds 30] [--output FILE]

One run of a tiny model is decided as any other and copied; what the steps measured is made up. The server is a process
of its own, asked over its socket, from the question to the last byte; every run is asked for once, so no answer has
been given before. Then one of them is locked and gets a record every tenth of a second, as if it trained, and clients
watch it and the list by server-sent events: the processor's time that the server takes meanwhile, as a part of one core
and of all of them, is the most that it can take from a training that uses them all. Prints and writes JSON.
"""

from __future__ import annotations

import argparse
import fcntl
import http.client
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from urllib.parse import quote

TESTS = Path(__file__).resolve().parent.parent / "tests"
TICKS = os.sysconf("SC_CLK_TCK")
EACH_SECONDS = 0.1
"""Between two records of the run that is watched."""


class Server:
    """``tonnage page`` over a folder."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "tonnage", "page", str(folder), "--port", "0"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        text = ""
        while "token=" not in text or not text.endswith("\n"):
            text += self.process.stderr.readline()
        address = text[text.index("http://") :].split()[0]
        self.host, _, self._token = address.removeprefix("http://").partition("/#token=")

    def open(self, path: str) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Ask, and leave the answer to be read."""
        connection = http.client.HTTPConnection(self.host, timeout=120)
        connection.request("GET", path, headers={"Authorization": f"Bearer {self._token}"})
        response = connection.getresponse()
        assert response.status == 200, (path, response.status, response.read())
        return connection, response

    def seconds(self, path: str) -> float:
        """Until all of an answer is there."""
        began = time.perf_counter()
        connection, response = self.open(path)
        response.read()
        taken = time.perf_counter() - began
        connection.close()
        return taken

    def cpu_seconds(self) -> float:
        """That it has used."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def memory_bytes(self) -> int:
        """The most that it has held."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

    def has_torch(self) -> bool:
        """Whether torch's library is in its memory."""
        return "libtorch" in Path(f"/proc/{self.process.pid}/maps").read_text()


def furnish(folder: Path, num_runs: int, steps: int) -> list[str]:
    """Runs that were never trained; their names."""
    from report.recorded import decided, record

    first = decided(folder, output=str(folder / "runs" / "run-000"), steps=steps)
    record(first, steps)
    names = [f"run-{number:03}" for number in range(num_runs)]
    for name in names[1:]:
        shutil.copytree(first.path, folder / "runs" / name)
    return names


def watch(server: Server, name: str, num_watchers: int, stop: threading.Event) -> list[threading.Thread]:
    """Clients of which all but one in five watch a run, and the others the list."""

    def read(path: str) -> None:
        connection, response = server.open(path)
        while not stop.is_set():
            response.readline()
        connection.close()

    paths = ["/api/runs/live" if number % 5 == 4 else f"/api/run/live?run={name}" for number in range(num_watchers)]
    threads = [threading.Thread(target=read, args=(path,), daemon=True) for path in paths]
    for thread in threads:
        thread.start()
    return threads


def train(path: Path, stop: threading.Event) -> None:
    """Lock a run, and write records and where its worker is, as training would."""
    from tonnage.rundir.directory import RunDirectory
    from tonnage.rundir.positions import PositionFile

    run = RunDirectory(path)
    last = json.loads(next(line for line in reversed(run.metrics.read_bytes().splitlines()) if b"grad_norm" in line))
    position = PositionFile(run.worker_position(0))
    with run.lock.open("w") as lock, run.metrics.open("a") as file:
        fcntl.flock(lock, fcntl.LOCK_EX)
        while not stop.wait(EACH_SECONDS):
            last |= {"step": last["step"] + 1, "step_seconds": EACH_SECONDS}
            position.update(phase="backward", step=last["step"])
            file.write(json.dumps(last) + "\n")
            file.flush()


def watched(server: Server, folder: Path, name: str, asked: argparse.Namespace) -> dict[str, float]:
    """What the server takes while clients watch a run that trains."""
    stop = threading.Event()
    watch(server, name, asked.watchers, stop)
    writer = threading.Thread(target=train, args=(folder / "runs" / name, stop))
    writer.start()
    time.sleep(3)
    began, used = time.perf_counter(), server.cpu_seconds()
    time.sleep(asked.seconds)
    share = (server.cpu_seconds() - used) / (time.perf_counter() - began)
    stop.set()
    writer.join()
    return {"of_one_core": share, "of_all_cores": share / (os.cpu_count() or 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--watchers", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    sys.path[0] = str(TESTS)  # where ``report`` is not the file beside this one
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        names = furnish(folder, asked.runs, asked.steps)
        server = Server(folder / "runs")
        try:
            used = [server.cpu_seconds()]
            first = server.seconds("/api/runs")
            used.append(server.cpu_seconds())
            again = server.seconds("/api/runs")
            used.append(server.cpu_seconds())
            live = [server.seconds(f"/api/run?run={quote(name)}") for name in names[:20]]
            used.append(server.cpu_seconds())
            sections = [server.seconds(f"/api/run/sections?run={quote(name)}") for name in names[:20]]
            beside = server.seconds("/api/compare?" + "&".join(f"run={quote(name)}" for name in names[:12]))
            held = server.memory_bytes()
            cost = watched(server, folder, names[0], asked)
            has_torch = server.has_torch()
        finally:
            server.process.terminate()
            server.process.wait()
    measured = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "runs": asked.runs,
        "steps": asked.steps,
        "list_seconds": {"first": first, "again": again},
        "run_seconds": {"median": statistics.median(live), "most": max(live)},
        "list_cpu_seconds": used[1] - used[0],
        "run_cpu_seconds": (used[3] - used[2]) / len(live),
        "sections_seconds": {"median": statistics.median(sections), "most": max(sections)},
        "compare_12_seconds": beside,
        "memory_bytes": held,
        "has_torch": has_torch,
        "watchers": asked.watchers,
        "watched_cpu": cost,
    }
    text = json.dumps(measured, indent=2)
    print(text)
    if asked.output is not None:
        asked.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
