"""Where a mixture of experts sends its tokens: how evenly, and the loss that makes it more even.

Routers and experts are heard while a forward pass runs, and what they said is worked on after it, outside of what is
computed again. Routers are those that transformers records (``_can_record_outputs``), experts those that it lets
compute by a function from outside; no family is known by name.

The router's loss (Switch Transformers, Fedus et al. 2021, equations 4 to 6) is ``experts x sum over experts of f x p``:
``f`` is the share of choices that fall on an expert, ``p`` its mean probability, over tokens and layers. It is no sum
over tokens, so it depends on what it is taken over. transformers takes a whole batch, whatever that is; here it is
taken over each document, and documents are weighted by their tokens. So it is the same in every pack, micro-batch and
on every rank, and of one document it is what transformers computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from tonnage.errors import user_error
from tonnage.host.locked import sent
from tonnage.parallel.world import World
from tonnage.training.batch import MicroBatch

PATIENCE = 20
"""Steps in a row without a token after which an expert starves."""


class Routing:
    """Hears the routers and experts of a model, or of a stage of one, and sums up what they do in a step."""

    def __init__(
        self, model: PreTrainedModel, blocks: Sequence[nn.Module], num_experts: int, weight: float = 0.0
    ) -> None:
        """``blocks`` are those of the whole model, ``num_experts`` the most of one of them; ``weight`` is of the
        router's loss, 0 leaves it out."""
        self.num_blocks, self.num_experts = len(blocks), num_experts
        self.weight = weight
        self.counts = torch.zeros(self.num_blocks, self.num_experts + 1, dtype=torch.int64)
        """Choices of each expert in each block since the last ``clear``; the last column is of no expert."""
        self.loss = torch.zeros(())
        """The router's loss since then."""
        self._listens = False
        self._chosen: list[tuple[int, Tensor]] = []
        self._logits: list[Tensor] = []
        number = {id(part): at for at, block in enumerate(blocks) for part in block.modules()}
        for experts in _experts(model):
            experts.register_forward_pre_hook(partial(self._hear_experts, number[id(experts)]))
        if weight:
            for router, index in routers_of(model):
                router.register_forward_hook(partial(self._hear_router, index))
        self._k = _experts_of_a_token(model)

    def clear(self) -> None:
        """Begin a step."""
        self.counts.zero_()
        self.loss = torch.zeros(())

    @contextmanager
    def hearing(self) -> Iterator[None]:
        """Listen to the forward pass inside, if it trains; not when parts of it are computed again."""
        self._chosen, self._logits = [], []
        self._listens = torch.is_grad_enabled()
        try:
            yield
        finally:
            self._listens = False

    def work_out(self, batch: MicroBatch, tokens: float) -> Tensor | None:
        """Count what was heard of a micro-batch; its part of the weighted loss of a step of so many ``tokens``.

        ``tokens`` are those of all documents of the step, on all ranks.
        """
        chosen, logits = self._chosen, self._logits
        self._chosen, self._logits = [], []
        if not chosen and not logits:
            return None
        heard = chosen[0][1] if chosen else logits[0]
        members = sent(members_of(batch), heard.device)
        self.counts = self.counts.to(heard.device)
        times = members.sum(0).long()
        for block, index in chosen:
            self.counts[block].scatter_add_(0, index.reshape(-1), times.repeat_interleave(index.shape[-1]))
        if not logits or not self.weight or not tokens:
            return None
        loss = balance(logits, self._k, members, shares_of(batch, members)) / tokens
        self.loss = self.loss.to(loss.device) + loss.detach()
        return self.weight * loss

    def _hear_experts(self, block: int, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        if self._listens and len(arguments) > 1:
            self._chosen.append((block, arguments[1].detach()))

    def _hear_router(self, index: int, module: nn.Module, _: Any, output: Any) -> None:
        if self._listens:
            self._logits.append(output[index] if isinstance(output, tuple) else output)


def balance(logits: Sequence[Tensor], k: int, members: Tensor, shares: Tensor) -> Tensor:
    """The router's loss of every document times its tokens, summed; an fp32 scalar.

    Shapes: ``logits`` (tokens, experts) of each layer; ``members`` fp32 (documents, tokens): 1 where a token
    belongs to a document; ``shares`` fp32 (documents,): tokens that each counts for. Sums are fp32. No documents give
    zero.
    """
    num_experts = logits[0].shape[-1]
    probabilities = choices = torch.zeros(len(members), num_experts, device=members.device)
    for of_layer in logits:
        probability = of_layer.float().softmax(-1)
        chosen = torch.zeros_like(probability).scatter_(1, probability.detach().topk(k, -1).indices, 1.0)
        probabilities = probabilities + members @ probability
        choices = choices + members @ chosen
    rows = members.sum(1) * len(logits)
    losses = num_experts * (choices * probabilities).sum(1) / rows.square()
    return (losses * shares).sum()


def shares_of(batch: MicroBatch, members: Tensor) -> Tensor:
    """How many of a step's tokens each document of a micro-batch counts for, fp32 (documents,): of an answer its own,
    and half of the prompt that it shares with the other answer of its pair."""
    shares = members.sum(1)
    return shares - sent(torch.tensor(batch.prompts), shares.device) / 2 if batch.prompts else shares


def members_of(batch: MicroBatch) -> Tensor:
    """Which tokens of a row belong to which document, fp32 (documents, tokens): what documents share belongs to all of
    these, and what fills up a row to none."""
    members, start = torch.zeros(len(batch.documents), batch.num_tokens), 0
    for length, owners in zip(batch.own_lengths, batch.owners, strict=True):
        members[owners.start : owners.stop, start : start + length] = 1.0
        start += batch.input_ids.shape[1] if batch.is_padded else length
    return members


def num_experts(model: PreTrainedModel) -> int:
    """Most experts of a block of ``model``, on the meta device; 0 if transformers lets none compute by a function."""
    return max((len(next(experts.parameters())) for experts in _experts(model)), default=0)


def _experts(model: PreTrainedModel) -> list[nn.Module]:
    return [module for module in model.modules() if hasattr(module, "is_concatenated")]


def routers_of(model: PreTrainedModel) -> list[tuple[nn.Module, int]]:
    """The modules in whose output transformers finds the logits of routers, and where in it."""
    specs = (getattr(model.base_model, "_can_record_outputs", None) or {}).get("router_logits", [])
    recorders = [
        spec if isinstance(spec, OutputRecorder) else OutputRecorder(spec, index=1)
        for spec in (specs if isinstance(specs, list) else [specs])
    ]
    return [
        (module, recorder.index)
        for path, module in model.base_model.named_modules()
        for recorder in recorders
        if (isinstance(recorder.target_class, type) and isinstance(module, recorder.target_class))
        or (recorder.class_name is not None and path.endswith(recorder.class_name))
        if recorder.layer_name is None or f".{recorder.layer_name.strip('.')}." in f".{path}."
    ]


def _experts_of_a_token(model: PreTrainedModel) -> int:
    for name in ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts"):
        number = getattr(model, name, getattr(model.config, name, None))
        if isinstance(number, int):
            return number
    return 1


def weight_of_router_loss(
    setting: float | str, model: PreTrainedModel, *, pipeline: int = 1, context: int = 1
) -> float:
    """The weight of the router's loss: ``setting`` itself, with ``model`` the one in the model's configuration, or with
    ``auto`` that one if the configuration also asks for the loss.

    Raises:
        UserError: a weight is asked for, and nobody knows the model's routers, a pipeline has them apart, or workers
            divide documents.
    """
    if setting == "auto":
        own: Any = getattr(model, "router_aux_loss_coef", 0.0)
        weight = float(own) if getattr(model.config, "output_router_logits", False) else 0.0
    elif setting == "model":
        text_config = model.config.get_text_config()
        has_loss = hasattr(text_config, "output_router_logits")
        weight = float(getattr(text_config, "router_aux_loss_coef", 0.0)) if has_loss else 0.0
    else:
        weight = float(setting)
    if not weight:
        return 0.0
    where = {
        "auto": "router_loss: auto, and output_router_logits in config.json",
        "model": "router_loss: model, and router_aux_loss_coef in config.json",
    }.get(str(setting), "router_loss")
    if not routers_of(model):
        observed = f"{weight:g}, and a {model.config.model_type} model without routers that transformers records"
        needed = "a mixture of experts whose routers' logits transformers can give out"
        raise user_error(observed, needed, "router_loss=0", where)
    if pipeline > 1:
        observed = f"{weight:g} with parallel.pipeline={pipeline}"
        needed = "all blocks on one worker: the loss is taken over the routers of all of them"
        raise user_error(observed, needed, "router_loss=0, or parallel.pipeline=1", where)
    if context > 1:
        observed = f"{weight:g} with parallel.context={context}"
        needed = "all tokens of a document on one worker: the loss is taken over them together"
        raise user_error(observed, needed, "router_loss=0, or parallel.context=1", where)
    return weight


class ExpertLoad:
    """How even the experts' shares of the tokens are over the steps of a run, on all ranks."""

    def __init__(self, routings: Sequence[Routing], world: World, log: Callable[[str], None]) -> None:
        self._routings, self._world, self._log = list(routings), world, log
        shape = (self._routings[0].num_blocks, self._routings[0].num_experts)
        self._total, self._idle = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.int64)
        self._warned_of = 0

    def after_step(self, scale: float) -> dict[str, Any]:
        """Sum up a step for the metrics: the largest and smallest share of an expert in its block, in multiples of an
        even one; how many starve; the router's loss. ``scale`` is what losses were multiplied by."""
        shape = self._total.shape
        local = torch.stack([routing.counts[:, :-1].cpu() for routing in self._routings]).sum(0).flatten().tolist()
        local_loss = sum(float(routing.loss) for routing in self._routings)
        *counted, loss = self._world.sum(*local, *self._world.once(local_loss))
        counts = torch.tensor(counted, dtype=torch.float64).view(shape)
        for routing in self._routings:
            routing.clear()
        used = counts.sum(1) > 0
        if not used.any():
            return {}
        self._total += counts
        self._idle = torch.where(counts > 0, 0, self._idle + 1)
        starving = (self._idle >= PATIENCE) & used[:, None]
        self._warn(starving)
        loads = (counts[used] / counts[used].sum(1, keepdim=True)) * shape[1]
        load = {"most": float(loads.max()), "least": float(loads.min()), "starving": int(starving.sum())}
        weighs = any(routing.weight for routing in self._routings)
        return {"experts": load, **({"router_loss": loss / scale} if weighs else {})}

    def shares(self) -> list[list[float]]:
        """Each expert's share of its block's tokens over all steps so far; of blocks without experts none."""
        return [[round(float(share), 5) for share in row / row.sum()] if row.sum() else [] for row in self._total]

    def _warn(self, starving: Tensor) -> None:
        number = int(starving.sum())
        if number > self._warned_of:
            block, expert = starving.nonzero()[0].tolist()
            some = f"expert {expert} of block {block}" + (f" and {number - 1} more" if number > 1 else "")
            self._log(
                f"experts starve: no token in the last {PATIENCE} steps went to {some}; "
                "router_loss=0.001 or more makes routers more even"
            )
        self._warned_of = number
