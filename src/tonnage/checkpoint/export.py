"""Turn a checkpoint into a Hugging Face model directory, without a gather and without the ranks that wrote it.

Tensors are put together from the shards one output file at a time, so no more than one output file is in memory.
The directory is written under a temporary name, read back, and renamed.
"""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from tonnage.errors import Problem, UserError

MAX_FILE_BYTES = 4 * 10**9
DCP_KEY = "DCP_SHARDING_INFO"


@dataclass(frozen=True)
class _Piece:
    file: Path
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def end(self) -> tuple[int, ...]:
        return tuple(o + n for o, n in zip(self.offset, self.shape, strict=True))


def export(
    checkpoint: Path,
    directory: Path,
    *,
    config: PreTrainedConfig,
    tokenizer: Path,
    stop_tokens: Sequence[int],
    dtype: torch.dtype,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write ``checkpoint`` as a model directory that plain transformers loads.

    ``tokenizer`` is a directory whose files are copied. ``stop_tokens`` end a turn and go into the generation
    configuration. ``progress`` is told bytes written and bytes in all.

    Raises:
        UserError: ``directory`` exists and is not empty.
    """
    if directory.exists() and any(directory.iterdir()):
        raise UserError(
            Problem(
                where=str(directory),
                found="a directory that is not empty",
                needed="a new or empty directory",
                change="choose another directory, or remove this one",
            )
        )
    pieces = _pieces(checkpoint)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    temporary = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    _write_weights(pieces, model, temporary, dtype, progress)

    config.architectures = [type(model).__name__]
    config.dtype = dtype
    config.use_cache = True
    config.save_pretrained(temporary)
    generation = GenerationConfig.from_model_config(config)
    if stop_tokens:
        generation.eos_token_id = list(stop_tokens)
    generation.save_pretrained(temporary)
    for file in tokenizer.iterdir():
        if file.is_file():
            shutil.copy2(file, temporary / file.name)

    if directory.exists():
        directory.rmdir()
    temporary.rename(directory)


def _pieces(checkpoint: Path) -> dict[str, list[_Piece]]:
    """Where the parts of every parameter lie; keys without the ``model.`` prefix."""
    pieces: dict[str, list[_Piece]] = defaultdict(list)
    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, framework="pt") as source:
            sharding = json.loads((source.metadata() or {}).get(DCP_KEY, "{}"))
            for key in source.keys():  # noqa: SIM118  (a safetensors handle is no dict)
                if not key.startswith("model."):
                    continue
                shape = tuple(source.get_slice(key).get_shape())
                offset = tuple(sharding[key]["saved_offsets"]) if key in sharding else (0,) * len(shape)
                pieces[key.removeprefix("model.")].append(_Piece(file, offset, shape))
    return pieces


def _write_weights(
    pieces: dict[str, list[_Piece]],
    model: PreTrainedModel,
    directory: Path,
    dtype: torch.dtype,
    progress: Callable[[int, int], None],
) -> None:
    """Write the weights under the names that checkpoints of this family have (transformers renames some on loading)."""
    shapes = {
        name: tuple(max(ends) for ends in zip(*(part.end for part in parts), strict=True))
        for name, parts in pieces.items()
    }
    sizes = {name: torch.Size(shape).numel() * dtype.itemsize for name, shape in shapes.items()}
    groups: list[list[str]] = [[]]
    filled = 0
    for name in sorted(shapes):
        if groups[-1] and filled + sizes[name] > MAX_FILE_BYTES:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += sizes[name]

    total, done = sum(sizes.values()), 0
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, start=1):
        file = "model.safetensors" if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        tensors = {name: _assemble(pieces[name], name, shapes[name], dtype) for name in group}
        tensors = revert_weight_conversion(model, tensors)
        save_file(tensors, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
        done += sum(sizes[name] for name in group)
        progress(done, total)
    if len(groups) > 1:
        index: dict[str, Any] = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _assemble(parts: list[_Piece], name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    whole = torch.empty(shape, dtype=dtype)
    covered = 0
    for part in parts:
        with safe_open(part.file, framework="pt") as source:
            region = tuple(slice(start, stop) for start, stop in zip(part.offset, part.end, strict=True))
            whole[region] = source.get_tensor(f"model.{name}").to(dtype)
            covered += torch.Size(part.shape).numel()
    if covered != whole.numel():
        raise UserError(
            Problem(
                where=str(parts[0].file.parent),
                found=f"{covered} of {whole.numel()} values of {name}",
                needed="every shard of the checkpoint",
                change="restore the missing files, or export an earlier checkpoint",
            )
        )
    return whole
