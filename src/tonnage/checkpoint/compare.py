"""Do the files that were written give the logits of the run? Computed by both, in fp32, on fixed prompts.

The run's are those of the parameters as its checkpoint holds them, put into transformers' class one by one; the others
are those of the directory as a stranger loads it: ``from_pretrained`` and nothing else. In between lie what an export
does: names, ties, merged and split tensors, types, files, and a configuration that must describe them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from tonnage.errors import UserError, user_error
from tonnage.host.control_groups import free_memory
from tonnage.model.build import allocate, on_meta
from tonnage.model.scorer import auto_class

NUM_PROMPTS, PROMPT_TOKENS = 3, 24
SAME = 1e-5
"""By how much two logits may differ that fp32 computes from the same weights."""
MORE_BYTES = 2 * 10**9
"""What is needed beside one copy of the model in fp32."""


@dataclass(frozen=True)
class RunParameters:
    """The parameters of a run, to be asked for one by one in the type in which they are written."""

    model: PreTrainedModel
    """Of the family, on the meta device."""
    names: Sequence[str]
    read: Callable[[str], Tensor]

    def enough_memory(self) -> str:
        """What is missing for a comparison; empty if nothing is."""
        num_bytes = 4 * sum(parameter.numel() for parameter in self.model.parameters())
        needed, free = num_bytes + MORE_BYTES, free_memory()
        if free is None or free >= needed:
            return ""
        return f"not compared with the run's: that takes {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} are free"


def prompts(vocab_size: int) -> list[list[int]]:
    """Token ids that any model of such a vocabulary knows: the first, the last, and some in between."""
    return [
        [0, vocab_size - 1, *(((number + 1) * 7919 * at * at + 13) % vocab_size for at in range(2, PROMPT_TOKENS))]
        for number in range(NUM_PROMPTS)
    ]


@torch.inference_mode()
def logits_of(model: Any, token_ids: Iterable[Sequence[int]]) -> list[Tensor]:
    """Logits, fp32 (tokens, vocabulary), for each prompt."""
    return [model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0].float() for ids in token_ids]


def load_plainly(directory: Path, auto: Any = transformers.AutoModelForCausalLM, **how: Any) -> Any:
    """A directory as anybody loads it, by one of transformers' ``auto`` classes, computing in fp32.

    Raises:
        UserError: transformers cannot.
    """
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        return auto.from_pretrained(directory, dtype=torch.float32, **how).eval()
    except Exception as error:  # whatever stands in the way of a stranger
        lines = str(error).strip().split("\n")
        raise user_error(
            where=str(directory),
            found=f"transformers cannot load what was written ({type(error).__name__}: {lines[0][:300]})",
            needed="a model that transformers loads",
            change="report this: it is a defect; with --no-compare it is written all the same",
        ) from error
    finally:
        if shown:
            logging.enable_progress_bar()


def logits_of_run(
    trained: RunParameters, buffers: Mapping[str, Tensor], token_rows: Iterable[Sequence[int]]
) -> list[Tensor]:
    """Logits of the parameters of a run; ``buffers`` are what it never trains, by name."""
    config = copy.deepcopy(trained.model.config)
    model = on_meta(config, torch.float32)
    allocate(model, torch.device("cpu"))
    parameters = dict(model.named_parameters())
    model_buffers = dict(model.named_buffers())
    with torch.no_grad():
        for name in trained.names:
            parameters[name].copy_(trained.read(name))
        for name, value in buffers.items():
            if name in model_buffers:
                model_buffers[name].copy_(value)
    return logits_of(model.eval(), token_rows)


def compare(trained: RunParameters, directory: Path) -> str:
    """Compare what lies in ``directory`` with the run's; says how far they are apart.

    Raises:
        UserError: transformers cannot load the directory, or computes other logits.
    """
    if missing := trained.enough_memory():
        return f"logits: {missing}"
    config = trained.model.config
    plain = load_plainly(directory, auto_class(config), trust_remote_code=hasattr(config, "auto_map"))
    token_ids = prompts(plain.get_input_embeddings().weight.shape[0])
    logits = logits_of(plain, token_ids)
    buffers = dict(plain.named_buffers())
    del plain
    return told(logits, logits_of_run(trained, buffers, token_ids), directory, "transformers")


def told(logits: Sequence[Tensor], expected: Sequence[Tensor], where: Path, reader: str, most: float = SAME) -> str:
    """How far logits are from those of the run, in units of the largest of these where that is above one.

    Raises:
        UserError: further than ``most``, or not finite where the run's are.
    """
    worst = 0.0
    for ours, other in zip(logits, expected, strict=True):
        if ours.shape != other.shape:
            raise _differs(where, f"logits of shape {tuple(ours.shape)} in {reader}", f"{tuple(other.shape)}")
        if not torch.equal(ours.isfinite(), other.isfinite()):
            raise _differs(where, f"logits that are not finite in {reader}", "those of the run, which are")
        finite = other.isfinite()
        if finite.any():
            scale = max(1.0, float(other[finite].abs().max()))
            worst = max(worst, float((ours - other)[finite].abs().max()) / scale)
    if worst > most:
        raise _differs(where, f"logits in {reader} that are {worst:.2g} from the run's", f"{most:g} at most")
    return f"logits: in {reader} those of the run, {worst:.1g} apart at most, on {len(logits)} prompts"


def _differs(where: Path, observed: str, needed: str) -> UserError:
    return user_error(
        where=str(where),
        found=observed,
        needed=needed,
        change="report this: it is a defect; with --no-compare it is written all the same",
    )
