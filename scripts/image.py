"""The container images of ``docker/``, built and tried.

    python scripts/image.py [cpu cuda] [--output benchmarks/results/image.json]
    python scripts/image.py cpu --debian BASE [--mount SOURCE:TARGET ...]

Each is built by docker, podman or buildah, whichever works here, and its command is carried out in it, by the image's
own user: help, the doctor, and the demo's run, shortened, planned, trained, asked and verified.

``--debian`` is for machines that reach no registry of images: a Debian with the same Python, made by debootstrap in the
folder ``BASE`` and kept there, stands for the one that the file begins with, and buildah works in a chroot (as root).
All lines of the file are carried out. ``--mount`` lends the steps files of this machine, such as pip's configuration.

What is written is dated, for each image; results for others are left as they are. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from release import FOLDER, SHORT

ROOT = Path(__file__).resolve().parent.parent
KINDS = ("cpu", "cuda")
BUILDERS = ("docker", "podman", "buildah")
STAND_IN = "localhost/tonnage-base"
PACKAGES = "python3,python3-dev,python3-pip,python3-venv,ca-certificates"
"""Of Debian, in the place of what the image for Python has."""
COMMANDS = (
    ["--version"],
    ["--help"],
    ["doctor"],
    ["plan", "runs/demo/config.yaml"],
    ["train", "runs/demo/config.yaml", *SHORT],
    ["generate", "runs/demo/run", "--prompt", "Sort these numbers: 9 4 7", "--max-new-tokens", "4"],
    ["verify", "runs/demo/run"],
    ["report", "runs/demo/run"],
)
LOOPS = """
from numba import njit, prange, threading_layer
@njit(parallel=True)
def total(n):
    s = 0
    for i in prange(n):
        s += i
    return s
assert total(10) == 45 and threading_layer() == "omp", threading_layer()
"""


def builder() -> str:
    """The first that works here."""
    for name in BUILDERS:
        words = [name, "info"]
        if shutil.which(name) and subprocess.run(words, capture_output=True, check=False).returncode == 0:
            return name
    raise SystemExit(f"error: none of {', '.join(BUILDERS)} works here; install one (apt-get install buildah)")


def sh(*words: str) -> str:
    """What a command prints; ends this program if it fails."""
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"error: {' '.join(words)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout.strip()


def make_stand_in(folder: Path) -> None:
    """An image of a Debian whose pip may install for all, as that of Python's own image does."""
    if not folder.exists():
        sh("debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(folder))
        for mark in folder.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
            mark.unlink()
    container = sh("buildah", "from", "scratch")
    sh("buildah", "add", container, str(folder), "/")
    sh("buildah", "commit", "--rm", container, STAND_IN)


def build(tool: str, kind: str, *, debian: bool, mounts: list[str]) -> str:
    """The image's name."""
    image, how = f"localhost/tonnage:{kind}", ["--from", STAND_IN, "--isolation", "chroot"] if debian else []
    lent = [word for mount in mounts for word in ("--volume", f"{mount}:ro")]
    cached = ["--layers"] if tool == "buildah" else []
    sh(tool, "build", *cached, *how, *lent, "-f", f"docker/{kind}.Dockerfile", "-t", image, ".")
    return image


class Container:
    """Of an image, in which commands are carried out one after the other, in its own folder and by its own user."""

    def __init__(self, tool: str, image: str, *, debian: bool) -> None:
        self.tool, self.seconds = tool, dict[str, float]()
        if tool == "buildah":
            self.name = sh("buildah", "from", image)
            self.words = ["buildah", "run", *(["--isolation", "chroot"] if debian else []), self.name, "--"]
        else:
            self.name = sh(tool, "run", "--detach", "--entrypoint", "sleep", image, "infinity")
            self.words = [tool, "exec", self.name]

    def run(self, name: str, *words: str) -> str:
        """What it prints, timed."""
        began = time.monotonic()
        output = sh(*self.words, *words)
        self.seconds[name] = round(time.monotonic() - began, 1)
        print(f"{name}: {self.seconds[name]} s", flush=True)
        return output

    def remove(self) -> None:
        """Let it go."""
        sh(self.tool, "rm", *([] if self.tool == "buildah" else ["--force"]), self.name)


def tried(tool: str, kind: str, *, debian: bool, mounts: list[str]) -> dict[str, Any]:
    """The result for an image, for the record."""
    began = time.monotonic()
    image = build(tool, kind, debian=debian, mounts=mounts)
    seconds = {"build": round(time.monotonic() - began, 1)}
    print(f"{kind}: built in {seconds['build']} s", flush=True)
    container = Container(tool, image, debian=debian)
    try:
        user = container.run("user", "id", "-u")
        if user != "1000":
            raise SystemExit(f"error: the image's user is {user}, not 1000")
        container.run("loops", "python3", "-c", LOOPS)
        container.run("folder", "python3", "-c", FOLDER)
        for words in COMMANDS:
            container.run(f"tonnage {words[0]}", "tonnage", *words)
        about = "import platform, torch; print(platform.python_version(), torch.__version__)"
        python, torch = container.run("versions", "python3", "-c", about).split()
    finally:
        container.remove()
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": sh("git", "rev-parse", "HEAD"),
        "builder": sh(tool, "--version"),
        "base": f"a Debian with {PACKAGES}, in the place of the file's own" if debian else "the file's own",
        "python": python,
        "torch": torch,
        "seconds": seconds | container.seconds,
    }


def main() -> None:
    """Build and try images."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", default=KINDS, choices=KINDS)
    parser.add_argument("--debian", type=Path, metavar="BASE", help="a folder for a Debian of debootstrap")
    parser.add_argument("--mount", action="append", default=[], metavar="SOURCE:TARGET")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    tool = "buildah" if options.debian else builder()
    if options.debian:
        os.environ.setdefault("STORAGE_DRIVER", "vfs")
        make_stand_in(options.debian)
    for kind in options.kinds:
        result = tried(tool, kind, debian=bool(options.debian), mounts=options.mount)
        if options.output is not None:
            before = json.loads(options.output.read_text()) if options.output.exists() else {}
            options.output.write_text(json.dumps(dict(sorted((before | {kind: result}).items())), indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
