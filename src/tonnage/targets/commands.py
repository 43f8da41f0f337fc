"""The exact command that serves an export with each program."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

PROGRAMS: Mapping[str, str] = {
    "transformers": "transformers",
    "vllm": "vLLM",
    "ollama": "Ollama",
    "gguf": "llama.cpp",
    "mlx": "MLX",
}
"""What an export can be for -> how the program is called."""
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Largest ranks that vLLM can be told of."""


@dataclass(frozen=True)
class Servable:
    """What there is to serve."""

    directory: str
    """As somebody would type it."""
    dtype: str
    base: str = ""
    """Of an adapter, the model that it belongs to."""
    rank: int = 0
    """Of an adapter."""
    gguf: str = ""
    """Name of the first GGUF file, if there is one."""
    revision: str = ""
    """Of an adapter's base on the hub."""

    @property
    def name(self) -> str:
        """A name for the model, of letters that every program takes."""
        last = self.directory.rstrip("/").rpartition("/")[2]
        return re.sub(r"[^a-z0-9._-]+", "-", last.lower()).strip("-._") or "model"


def commands(target: str, exported: Servable) -> list[str]:
    """Lines of a shell that serve an export with the program that it is for."""
    place = shlex.quote(exported.directory)
    inside = f"{exported.directory.rstrip('/')}/"
    match target:
        case "transformers":
            return [f"tonnage serve {place}"]
        case "vllm" if exported.base:
            rank = next((rank for rank in RANKS if rank >= exported.rank), RANKS[-1])
            lora = f"--enable-lora --max-lora-rank {rank} --lora-modules {exported.name}={place}"
            revision = f"--revision {shlex.quote(exported.revision)} " if exported.revision else ""
            return [f"vllm serve {shlex.quote(exported.base)} {revision}{lora}"]
        case "vllm":
            exact = " --dtype float32" if exported.dtype == "fp32" else ""  # which it would halve by itself
            return [f"vllm serve {place} --served-model-name {exported.name}{exact}"]
        case "ollama":
            return [
                f"ollama create {exported.name} -f {shlex.quote(inside + 'Modelfile')}",
                f"ollama run {exported.name}",
            ]
        case "gguf":
            return [f"llama-server -m {shlex.quote(inside + exported.gguf)} --jinja"]
        case "mlx":
            return [f"mlx_lm.server --model {place}"]
    raise AssertionError(target)
