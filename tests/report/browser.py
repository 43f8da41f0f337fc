"""Chromium without a window, asked over a pipe in the words of its DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

SECONDS = 60.0
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--remote-debugging-pipe",
)


def chromium() -> str | None:
    """Where it is, if it is installed."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    """One page. What it says on its console, whom it asks, and which requests fail, is kept."""

    def __init__(self) -> None:
        program = chromium()
        assert program is not None
        self.console: list[str] = []
        self.requests: list[str] = []
        self.failed: list[str] = []
        self._number, self._rest, self._loaded = 0, b"", False
        self._profile = tempfile.mkdtemp(prefix="chromium-")
        to_read, self._asks = os.pipe()
        self._hears, to_write = os.pipe()

        def as_it_expects() -> None:  # it reads from descriptor 3 and writes to 4
            first, second = os.dup(to_read), os.dup(to_write)
            os.dup2(first, 3)
            os.dup2(second, 4)

        self._process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={self._profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=as_it_expects,
            start_new_session=True,
        )
        os.close(to_read)
        os.close(to_write)
        target = next(one for one in self.ask("Target.getTargets")["targetInfos"] if one["type"] == "page")
        attached = self.ask("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session: str | None = attached["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._asks)
        os.close(self._hears)
        shutil.rmtree(self._profile, ignore_errors=True)

    def ask(self, method: str, **given: Any) -> dict[str, Any]:
        """Have it do something; what it answers."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": given}
        if getattr(self, "_session", None):
            message["sessionId"] = self._session
        os.write(self._asks, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self._hear(answer)
        assert "error" not in answer, answer["error"]
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, path: Path | str) -> float:
        """Open a file or an address, and wait until it is drawn; how many seconds that took."""
        self._loaded, began = False, time.perf_counter()
        self.ask("Page.navigate", url=path.absolute().as_uri() if isinstance(path, Path) else path)
        while not self._loaded:
            self._hear(self._next())
        self.run("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
        return time.perf_counter() - began

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, script: str, seconds: float = SECONDS) -> Any:
        """The value of an expression, as soon as it is true."""
        deadline = time.monotonic() + seconds
        shown = (
            f"(() => {{ try {{ const value = {script}; return value instanceof Node ? true : value; }} "
            f"catch {{ return false; }} }})()"
        )
        while not (value := self.run(shown)):
            assert time.monotonic() < deadline, f"never true: {script}; {self.console} {self.failed}"
            time.sleep(0.05)
        return value

    def point(self, x: float, y: float) -> None:
        """Move the pointer to a place of the window."""
        self.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def resize(self, width: int, height: int) -> None:
        """Make the window so large, in pixels."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def prefer(self, scheme: str) -> None:
        """Prefer ``light`` or ``dark``."""
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """Write a PNG of the window, or of the whole page."""
        shot = self.ask("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + SECONDS
        while b"\0" not in self._rest:
            ready = select.select([self._hears], [], [], max(0.0, deadline - time.monotonic()))[0]
            assert ready, f"the browser said nothing for {SECONDS:.0f} s"
            piece = os.read(self._hears, 1 << 20)
            assert piece, "the browser has ended"
            self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def _hear(self, message: dict[str, Any]) -> None:
        match message.get("method"):
            case "Page.loadEventFired":
                self._loaded = True
            case "Runtime.consoleAPICalled" | "Runtime.exceptionThrown" | "Log.entryAdded":
                self.console.append(json.dumps(message["params"])[:500])
            case "Network.requestWillBeSent":
                self.requests.append(message["params"]["request"]["url"])
            case "Network.responseReceived" if message["params"]["response"]["status"] >= 400:
                self.failed.append(f"{message['params']['response']['status']} {message['params']['response']['url']}")
            case "Network.loadingFailed" if not message["params"].get("canceled"):
                self.failed.append(json.dumps(message["params"])[:500])
