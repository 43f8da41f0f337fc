"""A process that has imported what workers need, and forks them: each would spend seconds of the processor on that.

    launcher ──► forkserver ──┬── worker 0        forked, in a process group of its own
                              └── worker N-1

The launcher imports everything itself and then forks this process, before it has computed anything: a copy of a process
in which other threads are at work, or a GPU is in use, could not go on. The fork server computes nothing either. It
forks a worker when it is told to, and says how each has ended. It lives in a session of its own, so that nothing that
is typed reaches it; it ends with the launcher, whichever way that ends, and workers end with it.

The fork server of ``multiprocessing`` is a Python of its own, which imports everything a second time, and gives its
children neither an environment nor a group of their own.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import gc
import importlib
import io
import json
import logging
import os
import select
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tonnage.errors import WorkerFailed
from tonnage.host.parent import PR_SET_NAME, control, end_with
from tonnage.launch.watch import STOP_SIGNALS
from tonnage.rundir.directory import LAUNCHER_PROCESS

LENGTH = struct.Struct("!I")
MOST_DESCRIPTORS = 16


def can_fork() -> bool:
    """Whether this process may be copied: on Linux, from its main thread, with no other of Python's threads at work,
    and while it uses no GPU."""
    torch = sys.modules.get("torch")
    return (
        sys.platform == "linux"
        and threading.current_thread() is threading.main_thread()
        and threading.active_count() == 1
        and not (torch is not None and torch.cuda.is_initialized())
    )


class Forked:
    """What ``subprocess.Popen`` is of a process that was started, of one that was forked."""

    def __init__(self, forkserver: ForkServer, pid: int) -> None:
        self._forkserver = forkserver
        self.pid = pid

    def poll(self) -> int | None:
        """Its exit status, as ``subprocess`` has it; None while it runs."""
        return self._forkserver.status_of(self.pid, wait=False)

    def wait(self) -> int:
        status = self._forkserver.status_of(self.pid, wait=True)
        assert status is not None
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal, if it still runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class ForkServer:
    """The launcher's side: ``prepare`` imports what workers need. On leaving the context nothing of it is left.

    Raises ``OSError`` where this process cannot be copied: workers can still be started.

    ``thresholds`` are those of Python's collector of garbage in workers.
    """

    def __init__(self, prepare: Callable[[], None], thresholds: tuple[int, int, int]) -> None:
        prepare()
        if not can_fork():
            raise OSError(errno.EAGAIN, "what was imported has begun threads, or uses a GPU")
        launcher = os.getpid()
        self._socket, theirs = socket.socketpair()
        self._unread = b""
        self._ended: dict[int, int] = {}
        try:
            self._pid = os.fork()
        except OSError:
            self._socket.close()
            theirs.close()
            raise
        if self._pid == 0:
            self._socket.close()
            _serve(theirs, launcher, thresholds)
        theirs.close()

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()  # which ends it, and with it what it forked that still runs
        with contextlib.suppress(ChildProcessError):  # where SIGCHLD is ignored, as a parent may hand it on
            os.waitpid(self._pid, 0)

    def fork(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        *,
        output: int,
        keep_open: Sequence[int] = (),
        directory: Path | None = None,
    ) -> Forked:
        """Have ``main`` of a module called in a process of its own; what that returns is its exit status.

        ``output`` is the descriptor of what it prints into; those of ``keep_open`` stay open in it.

        Raises:
            WorkerFailed: somebody has killed the forkserver.
            OSError: the system has no room for another process.
        """
        request = {
            "module": module,
            "arguments": list(arguments),
            "environment": dict(environment),
            "directory": None if directory is None else str(directory),
        }
        content = json.dumps(request).encode()
        try:
            socket.send_fds(self._socket, [LENGTH.pack(len(content))], [output, *keep_open])
            self._socket.sendall(content)
            while "ended" in (message := self._hear()):
                self._ended[message["ended"]] = message["status"]
        except ConnectionError as error:
            raise WorkerFailed("the process that forks workers is gone: something killed it") from error
        if "refused" in message:
            raise OSError(message["refused"], os.strerror(message["refused"]))
        return Forked(self, message["pid"])

    def status_of(self, pid: int, *, wait: bool) -> int | None:
        """How a process has ended; None while it runs and nobody waits for its end."""
        while pid not in self._ended and (wait or b"\n" in self._unread or select.select([self._socket], [], [], 0)[0]):
            try:
                message = self._hear()
            except ConnectionError:  # somebody killed the forkserver, and the system its workers
                return self._ended.setdefault(pid, -signal.SIGKILL)
            self._ended[message["ended"]] = message["status"]
        return self._ended.get(pid)

    def _hear(self) -> dict[str, int]:
        while b"\n" not in self._unread:
            heard = self._socket.recv(1 << 16)
            if not heard:
                raise ConnectionResetError("the process that forks workers has ended")
            self._unread += heard
        line, _, self._unread = self._unread.partition(b"\n")
        message: dict[str, int] = json.loads(line)
        return message


def _serve(requests: socket.socket, launcher: int, thresholds: tuple[int, int, int]) -> NoReturn:
    """What the forkserver does: fork whom it is asked for, until nobody can ask any more."""
    try:
        os.setsid()
        end_with(launcher)
        control(PR_SET_NAME, b"tonnage forker")
        forkserver = os.getpid()
        ignored = [number for number in STOP_SIGNALS if signal.getsignal(number) is signal.SIG_IGN]  # as by nohup
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # pending for a child until it has its own handlers
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(nothing, number)
        gc.freeze()  # so that looking for garbage copies no page in every worker
        heard, rang = os.pipe()
        os.set_blocking(rang, False)
        signal.set_wakeup_fd(rang, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        children: set[int] = set()
        while True:
            ready = select.select([requests.fileno(), heard], [], [])[0]
            if heard in ready:
                os.read(heard, 1 << 12)
                for child in list(children):
                    if (ended := _end_of(child)) is not None:
                        _tell(requests, ended)
                        os.waitpid(child, 0)
                        children.discard(child)
            if requests.fileno() in ready:
                head, descriptors, _, _ = socket.recv_fds(requests, LENGTH.size, MOST_DESCRIPTORS)
                if not head:
                    break
                (length,) = LENGTH.unpack(head)
                request = json.loads(_exactly(requests, length))
                try:
                    child = os.fork()
                except OSError as error:  # no room for another process
                    _tell(requests, {"refused": error.errno or 0})
                else:
                    if child == 0:
                        end_with(forkserver)
                        _begin(request, descriptors, ignored, [requests.fileno(), heard, rang], thresholds)
                    with contextlib.suppress(OSError):  # the child has done so
                        os.setpgid(child, child)
                    children.add(child)
                    _tell(requests, {"pid": child})
                for descriptor in descriptors:
                    os.close(descriptor)
        for child in children:
            for kill in (os.killpg, os.kill):
                with contextlib.suppress(ProcessLookupError):
                    kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    except BaseException:  # the launcher sees the socket close, and the system ends the workers
        os._exit(1)
    os._exit(0)


def _written_at_once(number: int) -> io.TextIOWrapper:
    """A text stream that writes to a descriptor at once, so that nothing is lost when the process dies."""
    return io.TextIOWrapper(io.FileIO(number, "w", closefd=False), errors="backslashreplace", write_through=True)


def _end_of(child: int) -> dict[str, int] | None:
    """The message that a child has ended, or None; the system keeps its process id until we wait for it."""
    result = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if result is None:
        return None
    return {"ended": child, "status": result.si_status if result.si_code == os.CLD_EXITED else -result.si_status}


def _tell(connection: socket.socket, message: Mapping[str, int]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _exactly(connection: socket.socket, length: int) -> bytes:
    content = b""
    while len(content) < length:
        more = connection.recv(length - len(content))
        if not more:
            raise ConnectionResetError
        content += more
    return content


def _begin(
    request: dict[str, Any],
    descriptors: Sequence[int],
    ignored: Sequence[int],
    not_ours: Sequence[int],
    thresholds: tuple[int, int, int],
) -> NoReturn:
    """Become the process that was asked for, as if Python had just started it."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for headed in STOP_SIGNALS:
            signal.signal(headed, signal.SIG_IGN if headed in ignored else signal.SIG_DFL)
        if signal.SIGINT not in ignored:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        with contextlib.suppress(OSError):  # the forkserver has done so, or does it now
            os.setpgid(0, 0)
        for descriptor in not_ours:
            os.close(descriptor)
        for number in (1, 2):
            os.dup2(descriptors[0], number)
        os.close(descriptors[0])
        sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.FileIO(0, closefd=False))  # type: ignore[misc]
        sys.stdout = sys.__stdout__ = _written_at_once(1)  # type: ignore[misc]
        sys.stderr = sys.__stderr__ = _written_at_once(2)  # type: ignore[misc]
        logging.setLogRecordFactory(logging.LogRecord)
        faulthandler.enable()
        gc.set_threshold(*thresholds)
        environment, module, arguments = request["environment"], request["module"], request["arguments"]
        os.environ.clear()
        os.environ.update(environment, **{LAUNCHER_PROCESS: str(os.getppid())})
        control(PR_SET_NAME, f"tonnage rank {environment.get('RANK', '')}".encode())
        if request["directory"] is not None:
            os.chdir(request["directory"])
        sys.argv = [module, *arguments]
        status = importlib.import_module(module).main(*arguments)
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        with contextlib.suppress(OSError, ValueError):
            traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
