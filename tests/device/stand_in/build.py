"""Build the stand-in: the libraries of ``source/``, with gcc and the headers that come with a CUDA build of torch.

Standard library only.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from device.stand_in.environments import FOLDER, HERE, VERSIONS

BUILT = HERE / ".built"
LIBRARY = BUILT / "stand_in.so"
"""Loaded before a program: the runtime, cuBLAS, NCCL."""
COMPILER = BUILT / "libnvrtc.so.13"
"""Loaded before it, under the name by which torch looks for its functions."""
PARTS = {
    LIBRARY: ["settings.c", "memory.c", "runtime.c", "products.c", "collectives.c"],
    COMPILER: ["compiling.c"],
    BUILT / "libcuda.so.1": ["driver.c"],
    BUILT / "libnvidia-ml.so.1": ["management.c"],
}


def build() -> None:
    """Build what is older than its sources.

    Raises ``CalledProcessError`` where gcc refuses, and ``SystemExit`` where there are no headers.
    """
    headers = [folder for version in VERSIONS for folder in _headers(FOLDER / version)]
    if not headers:
        raise SystemExit(f"no CUDA headers under {FOLDER}: python -m tests.device.stand_in environments")
    BUILT.mkdir(exist_ok=True)
    newest = max(path.stat().st_mtime for path in (HERE / "source").iterdir())
    for library, sources in PARTS.items():
        if library.exists() and library.stat().st_mtime > newest:
            continue
        command = ["gcc", "-O1", "-fPIC", "-shared", "-std=gnu17", "-Wall", f"-I{headers[0]}"]
        if library == COMPILER:  # whose functions have its name for a version
            command.append("-Wl,--default-symver")
        command += [f"-Wl,-soname,{library.name}", "-o", str(library), *(f"source/{name}" for name in sources)]
        subprocess.run([*command, "-lpthread", "-ldl"], check=True, cwd=HERE)
    (BUILT / "libcuda.so").unlink(missing_ok=True)
    (BUILT / "libcuda.so").symlink_to("libcuda.so.1")


def _headers(environment: Path) -> list[Path]:
    found = environment.glob("lib/python*/site-packages/nvidia/cu13/include")
    return [folder for folder in found if (folder / "crt" / "host_defines.h").exists()]
