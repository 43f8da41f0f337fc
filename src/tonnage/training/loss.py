"""The loss: summed over supervised tokens, divided once by their global number, full logits never in memory.

Most tokens of an instruction are context: nothing is learned from predicting them. The vocabulary projection, the
largest product of a small model, therefore runs only at positions whose next token is supervised, and in chunks
(``head``).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tonnage.host.locked import sent
from tonnage.kernels.embedding import HeadsGradient, use_fast_embedding
from tonnage.kernels.fake_quantized import FakeQuantizers
from tonnage.model.anatomy import Anatomy
from tonnage.model.attention import cached_arguments, looking_ahead, packing_arguments
from tonnage.model.dropout import Drawn
from tonnage.model.vision import behind_blocks, beside_embeddings
from tonnage.parallel.stages import Doors
from tonnage.parallel.tensor import Ranks, pick_tokens
from tonnage.training.batch import MicroBatch
from tonnage.training.head import Head, LogitsMemory, scores
from tonnage.training.preferences import RewardLoss
from tonnage.training.routing import Routing
from tonnage.training.sight import Sight
from tonnage.training.tiled_vocabulary import TiledHead
from tonnage.training.token_losses import Factors
from tonnage.training.vocabulary import Soft


class LikelihoodLoss(Protocol):
    """A loss that is made of the log-probabilities of targets."""

    def value_and_slopes(self, logprobs: Tensor, batch: MicroBatch, denominator: float) -> tuple[Tensor, Tensor]:
        """The loss of a micro-batch over ``denominator``, an fp32 scalar, and its derivative with respect to each of
        ``logprobs``, fp32 (supervised,)."""
        ...


def soft_targets(batch: MicroBatch, device: torch.device, *, share: float, temperature: float) -> Soft | None:
    """What a teacher expects in the place of every target of a micro-batch, its probabilities renormalised over the
    tokens that are kept; None where it was not asked. ``share`` is that of the targets' own loss."""
    if batch.teacher_tokens is None or batch.teacher_logprobs is None:
        return None
    logprobs = (sent(batch.teacher_logprobs, device) / temperature).log_softmax(1)
    return Soft(sent(batch.teacher_tokens, device).long(), logprobs, share, temperature)


class LossModel(nn.Module):
    """A causal language model that ends in its loss instead of its logits, or a model of scores that ends in its.

    It owns no parameter: it calls the backbone, picks the supervised positions, and hands them to its ``Head``. As the
    root of the module tree it is also the root unit
    of sharding, so embedding, final norm and head are gathered together when it runs.

    A stage of a pipeline (``doors``) ends in hidden states instead, or begins with them.

    ``routing`` counts which experts the tokens of a mixture go to; the router's loss, if it is wanted, is added.

    It stays in evaluation mode: dropout as torch has it would make the loss depend on how packs are dealt to ranks and
    micro-batches, and no current model is fine-tuned with it. That of an adapter's additions does not: it is drawn for
    the tokens of a micro-batch (``drawn``, which the layers look at), wherever these are.
    """

    def __init__(
        self,
        model: nn.Module,
        anatomy: Anatomy,
        doors: Doors | None = None,
        routing: Routing | None = None,
        drawn: Drawn | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.anatomy = anatomy
        self.routing = routing
        self.drawn = drawn
        self.doors = doors or Doors(first=True, last=True, hidden_size=anatomy.head.in_features)
        tied = self.doors.first and self.doors.last and anatomy.tied
        self.to_embedding = HeadsGradient() if tied else None
        self.logits: LogitsMemory | None = LogitsMemory()
        self.tiled: TiledHead | None = None
        """The head, where its weight comes in tiles."""
        self.quantizers: FakeQuantizers | None = None
        """By which the model's layers round what they multiply, where they do."""
        self.own: LikelihoodLoss | RewardLoss | None = None
        """The loss, where it is not cross-entropy."""
        self.factors: Factors | None = None
        """What the weights of tokens are multiplied by, where they do not count alike."""
        self.distillation: Callable[[MicroBatch, torch.device], Soft | None] | None = None
        """What a teacher expects (``soft_targets``), where there is one."""
        self.token_ranks: Ranks | None = None
        """The ranks of the tensor axis, where they divide the tokens of its hidden states."""
        self.sight: Sight | None = None
        """What looks at images, where the model does so itself."""
        if self.doors.first:
            use_fast_embedding(anatomy.embedding, self.to_embedding)
        self.eval()

    def give_memory_back(self) -> None:
        """Keep none from one micro-batch to the next."""
        self.logits = None
        if self.to_embedding is not None:
            self.to_embedding.keeps = False

    def forward(
        self, batch: MicroBatch, denominator: float, received: Tensor | None = None, tokens: float = 0.0
    ) -> Tensor:
        """Loss of a micro-batch: sum of weight x negative log-likelihood over ``denominator``; a fp32 scalar.

        Of a micro-batch that ``asks``: the likeliest tokens instead, int64 (positions,). Of one that ``judges``: fp32
        (2, supervised), the cross-entropy of every target, and 1 where that is the likeliest token; with a teacher
        (3, supervised), the divergence from it too. Of one that wants the ``top``: as ``Head.top``.

        Of a stage that is not the last: its hidden states, (1, tokens, hidden). ``received`` are those of the stage
        before.

        ``denominator`` is the sum of the weights over the whole step, on all ranks, so that the losses of all
        micro-batches of all ranks add up to the loss of the step. So is ``tokens`` the number of its documents' tokens,
        by which the router's loss is divided; 0 leaves that out.
        """
        with self.routing.hearing() if self.routing is not None else nullcontext(), self.drawing(batch):
            hidden = self.states(batch, received)
        evenness = self.routing.work_out(batch, tokens) if self.routing is not None else None
        if not self.doors.last:
            return hidden
        result = self._result(hidden, batch, denominator)
        return result if evenness is None or not batch.wants_loss else result + evenness

    def _result(self, hidden: Tensor, batch: MicroBatch, denominator: float) -> Tensor:
        """What ``forward`` returns of hidden states, without the router's loss."""
        own = self.own
        if isinstance(own, RewardLoss):
            ends = sent(torch.tensor(batch.ends, dtype=torch.int64), hidden.device)
            head, answers = self.anatomy.head, hidden.flatten(0, 1).index_select(0, ends)
            return own.value(scores(answers, head.weight, head.bias), batch, denominator)
        assert not self.anatomy.scores, "a model of scores has no logits"
        return self._of_logits(hidden, batch, denominator, own)

    def _of_logits(self, hidden: Tensor, batch: MicroBatch, denominator: float, own: LikelihoodLoss | None) -> Tensor:
        """As ``_result``, with a head that projects to the vocabulary."""
        head, device = self.tiled or self._head(), hidden.device
        if batch.asks:
            return head.likeliest(self.picked(hidden, batch))
        picked, targets = self.picked(hidden, batch), sent(batch.targets, device)
        if batch.top is not None:
            assert isinstance(head, Head)
            return head.top(picked, *batch.top)
        soft = None if self.distillation is None else self.distillation(batch, device)
        if batch.judges:
            right: list[Tensor] = []
            logprobs = head.log_probabilities(picked, targets, likeliest_of=right)
            likeliest = torch.cat(right) if right else targets
            judgement = [-logprobs, (likeliest == targets).float()]
            if soft is not None:
                assert isinstance(head, Head)
                judgement.append(head.divergences(picked, soft))
            return torch.stack(judgement)
        value, weights = None, sent(batch.weights, device) / denominator
        if self.factors is not None:
            weights = weights * self.factors(head, picked, targets)
        if own is not None:
            value, slopes = own.value_and_slopes(head.log_probabilities(picked, targets), batch, denominator)
            if not torch.is_grad_enabled():
                return value
            weights = -slopes
        if soft is None:
            loss = head.loss(picked, targets, weights)
        else:
            assert isinstance(head, Head)
            loss = head.loss(picked, targets, weights, soft)
        if value is not None:
            loss = _Instead.apply(loss, value)  # type: ignore[no-untyped-call]
        return loss

    def _head(self) -> Head:
        """The projection to the vocabulary with a weight that is in memory."""
        anatomy = self.anatomy
        return Head(
            anatomy.head.weight,
            anatomy.head.bias,
            anatomy.logit_scale,
            anatomy.logit_softcap,
            to_embedding=self.to_embedding,
            memory=self.logits,
        )

    def drawing(self, batch: MicroBatch) -> AbstractContextManager[None]:
        """Let layers with dropout draw for the tokens of ``batch``; around a backward pass too, in which blocks may be
        computed again."""
        if self.drawn is None:
            return nullcontext()
        keys = batch.keys()
        return self.drawn.for_tokens(None if keys is None else sent(keys, self._device()))

    def _device(self) -> torch.device:
        """Where it is computed: where some parameters are, whatever else rests in the host's memory."""
        devices = (one.device for one in self.model.parameters())
        return next((one for one in devices if one.type != "cpu"), torch.device("cpu"))

    def states(self, batch: MicroBatch, received: Tensor | None = None) -> Tensor:
        """Hidden states that leave the backbone, or a stage of it: (rows, tokens, hidden)."""
        device = self._device()
        packing: dict[str, Any] = {}
        if batch.cached is not None:
            packing = cached_arguments(batch.lengths, device, batch.cached)
        elif not batch.is_padded:
            packing = packing_arguments(batch.lengths, device, batch.shared, batch.context)
        if batch.images is not None:
            packing = looking_ahead(packing, batch.images, batch.look_ahead, device)
        ids, embedded = sent(batch.input_ids, device), None
        features, positions = self._seen(batch, device)
        if positions is not None:
            packing["position_ids"] = sent(positions, device)
        if features is not None:
            hidden, before, places = self.doors.hidden_size, self.doors.blocks_before, batch.feature_places
            # of a blank image, there are none
            places, own = torch.zeros(0, dtype=torch.int64) if places is None else places, ids
            if self.token_ranks is not None:
                own = ids.chunk(self.token_ranks.size, 1)[self.token_ranks.rank]
                first = self.token_ranks.rank * own.shape[1]
                mine = ((places >= first) & (places < first + own.shape[1])).nonzero()[:, 0]
                features, places = features.index_select(0, sent(mine, device)), places[mine] - first
            places = sent(places, device)
            if self.doors.first:
                embedded = self._with_features(ids, features[:, :hidden], places)
                packing |= beside_embeddings(self.anatomy.backbone, ids, places)
            packing |= behind_blocks(features[:, hidden:], hidden, places, own, before)
        return self.doors.run(self.anatomy.backbone, ids, received, embedded, **packing)

    def _seen(self, batch: MicroBatch, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        """Features of a micro-batch's images that this stage takes, (image tokens, width), and positions of tokens
        where they have three each, int64 (3, rows, tokens)."""
        if self.sight is not None:
            return self.sight.look(batch)
        width = batch.features[0].shape[1] if batch.features else 0
        if not (width and self.doors.first) and width <= self.doors.hidden_size * (1 + self.doors.blocks_before):
            return None, batch.token_positions
        return sent(batch.feature_rows(), device), batch.token_positions

    def _with_features(self, ids: Tensor, features: Tensor, places: Tensor) -> Tensor:
        """Embeddings of tokens, (rows, tokens, hidden), with features in some places."""
        embedded: Tensor = self.anatomy.embedding(ids)
        flat = embedded.flatten(0, 1).index_copy(0, places, features.to(embedded.dtype))
        return flat.view_as(embedded)

    def shape_of(self, batch: MicroBatch) -> tuple[int, int]:
        """Rows and tokens of hidden states that a stage has of a micro-batch."""
        rows, tokens = batch.input_ids.shape
        return rows, tokens if self.token_ranks is None else tokens // self.token_ranks.size

    def picked(self, states: Tensor, batch: MicroBatch) -> Tensor:
        """Those at supervised positions, (supervised, hidden); of a row that ranks divide, of this rank's targets."""
        states, positions = states.flatten(0, 1), sent(batch.positions, states.device)
        if self.token_ranks is None:
            picked = states.index_select(0, positions)
        else:
            picked = pick_tokens(states, positions, self.token_ranks)
        if batch.context is None:
            return picked
        picked = batch.context.moved(picked, *batch.moves)
        return F.pad(picked, (0, 0, 0, len(batch.targets) - len(picked)))


class _Instead(torch.autograd.Function):
    """Another value with the gradient of a loss.

    A function of log-probabilities has that of a sum of these, each times its slope: cross-entropy whose weights are
    the slopes with the other sign. So a loss of one's own needs no logits of its own, and every way in which the head
    is computed is there for it.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        return upstream, None
