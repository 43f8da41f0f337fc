"""Whether documents keep to themselves, and recompute changes nothing: a model is asked, not believed.

Documents of a step may lie in one row, one after another (*packed*), or each in a row of its own, padded at the right
(*padded*). Which of them is exact depends on what a family does between its tokens: attention can be told where
documents end, a convolution or a recurrence mostly cannot, and nothing that is causal looks at what stands to the
right. No list of families says so. A tiny model of the very architecture (``model.tiny``) computes documents one by
one in plain transformers, and then laid out in each way as training lays them out; losses and gradients must be equal:
off from those in fp64 by no more than some times what plain transformers in fp32 is.
Its weights are so large that documents in one row without borders differ: where they do not, nothing is shown, and the
family is refused. How a block may recompute is asked in the same way: gradients must be those of one that keeps all.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tonnage.data import Pack
from tonnage.data.packs.prefixes import Prefix
from tonnage.errors import Problem, UserError, user_error
from tonnage.host.cachedir import default_directory, remembered
from tonnage.model import attention
from tonnage.model.anatomy import dissect
from tonnage.model.build import allocate, build_on_meta
from tonnage.model.quietly import quietly
from tonnage.model.scorer import as_causal
from tonnage.model.tiny import draw, shorten, shrink
from tonnage.parallel.recompute import recompute_blocks
from tonnage.planning.layout import Arrangement, Recompute
from tonnage.training.batch import MicroBatch, PackedDocument
from tonnage.training.loss import LossModel
from tonnage.training.slices_trial import why_undivided
from tonnage.training.vocabulary import Vocabulary

LENGTHS = (40, 1, 9, 6, 11, 23, 27, 19, 21, 17)
"""Of the documents of a trial: longer and shorter than the tiny model's windows and chunks. The longest comes first,
as it does in padded rows."""
DRAWS = 3
"""Of weights and documents: what chooses some tokens by their scores is wrong only where scores are equal."""
KINDS = 12
"""Tokens that documents are made of: few, so that they come again, as they do in texts."""
COMMON = 2
"""Tokens that two documents begin with, which end within the shortest window: longer ones no window allows to share."""
GAINS = (1.0, 2.0, 4.0)
SHOWS = 1e-2
"""By how much documents in one row without borders must change the loss of a token, for a trial to show anything."""
TIMES, FLOOR = 8.0, 2e-6
"""By how much more than plain transformers in fp32 a result may be off; and what is always allowed, relative to the
largest loss or gradient, where that happens to be off by nothing."""
FLOOR_IN_FP32 = 5e-5
"""The same for a family whose code cannot compute in fp64 (xglm's): rounding of a tiny model."""
RECOMPUTES: tuple[Recompute, ...] = ("selective", "full")
MOST_PARAMETERS = 300_000_000
"""Of a model whose widths cannot be shrunk."""
FORMAT = 5
"""Of what is kept, and of how it is found."""


@dataclass(frozen=True)
class Isolation:
    """How documents of a model are laid out so that they keep to themselves."""

    arrangement: Arrangement
    attention: str
    """Name of the attention function in transformers' registry: ours, or one of its own."""
    shares_prefixes: bool
    """Whether documents of a row may have what they begin with in common."""
    why_not_packed: str = ""
    """What was found where documents lay in one row; empty if they may."""
    asked_on: str = "cpu"
    """Type of the device that the trial ran on."""
    inexact_recompute: Mapping[Recompute, str] = field(default_factory=dict)
    """Ways to recompute that change a gradient, and what was found."""
    why_undivided: str = ""
    """What connects tokens of a row beside attention, so that workers cannot divide it; empty if nothing does."""


@dataclass(frozen=True)
class _Computed:
    losses: Tensor
    """Of every supervised token, fp32 on the CPU."""
    gradients: Mapping[str, Tensor]


@dataclass(frozen=True)
class _Truth:
    """What plain transformers computes of each document by itself."""

    exact: _Computed
    """In fp64; in fp32 where the family's code computes in nothing else."""
    rounded: _Computed
    """In fp32."""
    floor: float = FLOOR
    """By how much a result may always be off."""


class _Differs(Exception):
    """What a layout computes is not what each document is alone."""


def isolation_of(
    config: PreTrainedConfig, *, device: torch.device, long_documents: bool = True, cache: Path | None = None
) -> Isolation:
    """Ask a tiny model of the architecture that ``config`` describes how its documents are kept apart on ``device``.

    ``long_documents``: whether any is longer than what the model's positions were first trained for. The answer is kept
    in ``isolation`` of ``cache``, by the configuration without its sizes, versions and the type of the device. A scorer
    is asked as the model of logits that has its backbone.

    Raises:
        UserError: neither layout is exact, or nothing can be shown.
    """
    config = as_causal(config)
    try:
        small = shrink(config, long_documents=long_documents)
        described = small.to_dict()
    except Exception:  # the family's class does not take such sizes
        small, described = None, config.to_dict()
    if not described.get("auto_map"):  # else its code lies where it was read from
        described.pop("_name_or_path", None)
    described.pop("use_cache", None)  # which whoever builds a model for training sets, before or after
    versions = [version(name) for name in ("tonnage", "torch", "transformers")]
    inputs = [described, device.type, long_documents, FORMAT, versions]

    def ask() -> Isolation:
        with quietly(), warnings.catch_warnings(action="ignore"):
            return _ask(config, small, device)

    place = None if cache is None else (cache, "isolation", "")
    return remembered(place, inputs, Isolation, ask, "models are asked again every time")


def isolation_for(config: PreTrainedConfig, device: torch.device, max_length: int) -> Isolation:
    """As ``isolation_of``, for documents of up to ``max_length`` tokens; the answer is kept in this user's cache."""
    is_long = outgrows(config, max_length)
    return isolation_of(config, device=device, long_documents=is_long, cache=default_directory())


def inexact_recompute(where: str, mode: Recompute, config: PreTrainedConfig, isolation: Isolation) -> Problem:
    """What is said of a way to recompute that changes gradients."""
    exact = [other for other in ("selective", "full", "none") if other not in isolation.inexact_recompute]
    return Problem(
        where=where,
        found=f"blocks of a {config.model_type} that compute other gradients with {mode} recompute than without, in a "
        f"tiny model of it ({isolation.inexact_recompute[mode]})",
        needed="the same gradients",
        change=" or ".join(f"memory.recompute={other}" for other in exact),
    )


def outgrows(config: PreTrainedConfig, max_length: int) -> bool:
    """Whether documents of ``max_length`` tokens are longer than what positions of a model were first trained for, in a
    family that computes positions of longer ones in another way."""
    lengths = [getattr(config, "original_max_position_embeddings", None)]
    for key in ("rope_parameters", "rope_scaling"):
        rope = getattr(config, key, None)
        for parameters in [rope, *rope.values()] if isinstance(rope, Mapping) else []:
            if isinstance(parameters, Mapping):
                lengths.append(parameters.get("original_max_position_embeddings"))
                if parameters.get("rope_type") == "dynamic":
                    lengths.append(int(getattr(config, "max_position_embeddings", 0)))
    return any(max_length > length for length in lengths if isinstance(length, int))


def _ask(config: PreTrainedConfig, small: PreTrainedConfig | None, device: torch.device) -> Isolation:
    draws = [(documents := _documents(seed), *_alone(config, small, documents, device, seed)) for seed in range(DRAWS)]
    refusals: list[str] = []
    ways: list[tuple[Arrangement, str]] = [("packed", attention.NAME), ("padded", attention.NAME)]
    ways += [("padded", name) for name in ("sdpa", "eager")]
    for arrangement, name in ways:
        lay_out = packed_rows if arrangement == "packed" else padded_rows
        try:
            for documents, plain, alone in draws:
                _compare(_computed(plain, lay_out(documents), name, device), alone)
        except Exception as error:  # whatever a family's code says to a layout that it was not made for
            refusals.append(f"{arrangement} ({name}): {_reason_of(error)}")
            continue
        shares = arrangement == "packed" and device.type == "cpu" and _shares(draws[0][1], draws[0][0], device)
        why = "" if arrangement == "packed" else refusals[0].partition(": ")[2]
        documents, plain, alone = draws[0]
        inexact = _inexact_recompute(plain, lay_out(documents), name, device, alone)
        undivided = _why_undivided(plain, documents, device) if arrangement == "packed" else f"rows are padded: {why}"
        return Isolation(arrangement, name, shares, why, device.type, inexact, undivided)
    observed = f"documents that are not computed as each is alone: {refusals[0]}; {refusals[-1]}"
    needed = "a causal model whose tokens look at nothing but what stands before them in their document"
    raise user_error(observed, needed, "choose another model family", f"model type {config.model_type}")


def _why_undivided(plain: PreTrainedModel, documents: Sequence[Tensor], device: torch.device) -> str:
    try:
        return why_undivided(partial(_as_trained, plain, attention.NAME, device), packed_rows(documents))
    except Exception as error:  # whatever a family's code says to a part of a row
        return _reason_of(error)


def _inexact_recompute(
    plain: PreTrainedModel, batch: MicroBatch, name: str, device: torch.device, alone: _Truth
) -> dict[Recompute, str]:
    reasons: dict[Recompute, str] = {}
    for mode in RECOMPUTES:
        try:
            _compare(_computed(plain, batch, name, device, mode), alone)
        except Exception as error:  # whatever a family's code says to a second forward pass
            reasons[mode] = _reason_of(error)
    return reasons


def _documents(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    documents = [torch.randint(3, 3 + KINDS, (length,), generator=generator) for length in LENGTHS]
    documents[2][:COMMON] = documents[0][:COMMON]
    return documents


def _alone(
    config: PreTrainedConfig,
    small: PreTrainedConfig | None,
    documents: Sequence[Tensor],
    device: torch.device,
    seed: int,
) -> tuple[PreTrainedModel, _Truth]:
    """The tiny model in plain transformers, and what it computes of each document by itself.

    Raises:
        UserError: it cannot be built, or its tokens have nothing to say to each other.
    """
    reason = ""
    for candidate in (small, _shortened(config)):
        if candidate is None:
            continue
        for gain in GAINS:
            try:
                plain = _plain(candidate, gain, device, seed)
                alone = _truth(plain, documents)
                together = _compute(plain, [list(documents)])
            except Exception as error:
                reason = reason or _reason_of(error)
                break
            if not bool(alone.rounded.losses.isfinite().all()):
                reason = "losses that are not finite"
                continue
            if float((alone.rounded.losses - together.losses).abs().max()) >= SHOWS:
                return plain, alone
            reason = "documents whose tokens change nothing in what comes after them"
    observed = f"no tiny model of the family that would show whether documents keep to themselves ({reason})"
    needed = "a causal language model of transformers"
    raise user_error(observed, needed, "choose another model family", f"model type {config.model_type}")


def _shortened(config: PreTrainedConfig) -> PreTrainedConfig | None:
    """A configuration of few layers with its own widths, where that is no large model."""
    try:
        small = shorten(config)
        with torch.device("meta"):
            number = sum(one.numel() for one in AutoModelForCausalLM.from_config(small).parameters())
    except Exception:
        return None
    return small if number <= MOST_PARAMETERS else None


def _plain(config: PreTrainedConfig, gain: float, device: torch.device, seed: int) -> PreTrainedModel:
    """The model as transformers builds it."""
    config = copy.deepcopy(config)
    config.use_cache = False
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        )
    draw(model, gain, seed)
    plain: PreTrainedModel = model.to(device).eval()
    return plain


def _truth(plain: PreTrainedModel, documents: Sequence[Tensor]) -> _Truth:
    rows = [[one] for one in documents]
    rounded, device = _compute(plain, rows), plain.device
    wide = copy.deepcopy(plain.cpu()).double()  # on the CPU, as not every device computes in fp64
    nn.Module.to(plain, device)
    try:
        with InDouble():
            return _Truth(_compute(wide, rows), rounded)
    except (RuntimeError, ValueError, TypeError):  # its code holds numbers that are made for fp32
        return _Truth(rounded, rounded, FLOOR_IN_FP32)


class InDouble(TorchFunctionMode):
    """Within it, what classes compute in fp32 whatever they are given (norms, softmax, angles) is computed in fp64, and
    so is what they make without naming a type (XGLM fills with the smallest number of what it is given)."""

    def __enter__(self) -> InDouble:
        self._default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        torch.set_default_dtype(self._default)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.float:
            function = Tensor.double
        args, kwargs = tree_map(lambda one: torch.float64 if one is torch.float32 else one, (args, kwargs or {}))
        return function(*args, **kwargs)


def _compute(plain: PreTrainedModel, rows: Sequence[Sequence[Tensor]]) -> _Computed:
    """Losses and gradients of documents that stand in rows, where nothing tells them apart."""
    device = next(plain.parameters()).device
    plain.zero_grad(set_to_none=True)
    losses = []
    for row in rows:
        ids = torch.cat(list(row)).to(device)
        logits = plain(ids.unsqueeze(0), use_cache=False).logits[0].float()
        of_row = F.cross_entropy(logits[:-1], ids[1:], reduction="none")
        starts = torch.tensor([len(document) for document in row]).cumsum(0)[:-1] - 1
        counts = torch.ones(len(of_row), dtype=torch.bool)
        counts[starts] = False  # first tokens are no targets
        losses.append(of_row[counts.to(device)])
    of_all = torch.cat(losses)
    of_all.mean().backward()
    return _Computed(of_all.detach().cpu(), _gradients(plain))


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: torch.zeros(parameter.shape) if parameter.grad is None else parameter.grad.detach().float().cpu()
        for name, parameter in model.named_parameters()
    }


def _computed(
    plain: PreTrainedModel, batch: MicroBatch, name: str, device: torch.device, recompute: Recompute = "none"
) -> _Computed:
    """What training computes of documents that are laid out so."""
    loss_model = _as_trained(plain, name, device)
    model = loss_model.model
    recompute_blocks(loss_model.anatomy.blocks, recompute)
    losses = _losses(loss_model, batch)
    model.zero_grad(set_to_none=True)
    loss_model(batch, float(len(batch.targets))).backward()
    return _Computed(losses.cpu(), _gradients(model))


def _as_trained(plain: PreTrainedModel, name: str, device: torch.device) -> LossModel:
    """The model of ``plain`` as training has it, with the attention of that ``name``."""
    model = build_on_meta(copy.deepcopy(plain.config), torch.float32, attention_name=name)
    allocate(model, device)
    model.load_state_dict(plain.state_dict())
    return LossModel(model, dissect(model))


@torch.no_grad()
def _losses(loss_model: LossModel, batch: MicroBatch) -> Tensor:
    """The loss of every supervised token."""
    hidden, anatomy = loss_model.picked(loss_model.states(batch), batch), loss_model.anatomy
    vocabulary = Vocabulary(scale=anatomy.logit_scale, softcap=anatomy.logit_softcap)
    losses = []
    for row, target in zip(hidden, batch.targets.to(hidden.device), strict=True):
        logits = F.linear(row, anatomy.head.weight, anatomy.head.bias).float()
        losses.append(F.cross_entropy(vocabulary.scale_and_cap(logits), target))
    return torch.stack(losses)


def _compare(ours: _Computed, alone: _Truth) -> None:
    exact, rounded = alone.exact, alone.rounded
    off, noise = (float((one.losses - exact.losses).abs().max()) for one in (ours, rounded))
    if not off <= max(TIMES * noise, alone.floor * max(1.0, float(exact.losses.abs().max()))):
        raise _Differs(f"the loss of a token is off by {off:.2g}, where plain fp32 is off by {noise:.2g}")
    missing = exact.gradients.keys() ^ ours.gradients.keys()
    if missing:
        raise _Differs(f"parameters that are only in one of both: {', '.join(sorted(missing)[:3])}")
    largest = max(float(gradient.abs().max()) for gradient in exact.gradients.values() if gradient.numel())
    for name, expected in exact.gradients.items():
        if not expected.numel():
            continue
        off, noise = (float((one.gradients[name] - expected).abs().max()) for one in (ours, rounded))
        if not off <= max(TIMES * noise, alone.floor * largest):
            share, of_noise = (one / max(float(expected.abs().max()), 1e-30) for one in (off, noise))
            raise _Differs(f"the gradient of {name} is off by {share:.2g} of it, where plain fp32 is by {of_noise:.2g}")


def _shares(plain: PreTrainedModel, documents: Sequence[Tensor], device: torch.device) -> bool:
    """Whether documents of a row may have in common what they begin with: two of them do."""
    some = [documents[0][: COMMON + 2], documents[2][: COMMON + 1]]
    batch = MicroBatch.of([_pack(some, prefix=0)], (Prefix(COMMON, -1),))
    try:
        ours = _computed(plain, batch, attention.NAME, device)
        _compare(ours, _truth(plain, some))
    except Exception:  # it cannot, for whatever reason
        return False
    return True


def packed_rows(documents: Sequence[Tensor]) -> MicroBatch:
    return MicroBatch.of([_pack(documents)])


def _pack(documents: Sequence[Tensor], prefix: int = -1) -> Pack:
    """All that can be a target is one; every document begins with a common ``prefix``."""
    return Pack(
        input_ids=torch.cat(list(documents)).numpy(),
        weights=np.concatenate([_weights(one) for one in documents]),
        lengths=np.array([len(one) for one in documents]),
        documents=np.arange(len(documents)),
        prefixes=np.full(len(documents), prefix),
        starts=np.zeros(len(documents), dtype=np.int32),
    )


def padded_rows(documents: Sequence[Tensor]) -> MicroBatch:
    return MicroBatch.padded([PackedDocument(one.numpy(), _weights(one), at, -1) for at, one in enumerate(documents)])


def _weights(document: Tensor) -> np.ndarray:
    return (np.arange(len(document)) > 0).astype(np.float32)


def _reason_of(error: Exception) -> str:
    if isinstance(error, UserError):
        return error.problems[0].found
    if isinstance(error, _Differs):
        return str(error)
    return f"{type(error).__name__}: {str(error).strip().split(chr(10))[0][:150]}"
