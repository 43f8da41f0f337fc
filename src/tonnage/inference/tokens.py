"""An answer token by token, with what was likely in each place: for those who must stop it, or show how sure it was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tonnage.inference.generate import Decoding, EncodedPrompt, Loaded, call_generate, drawn_from, stop_when

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Token:
    id: int
    logprob: float | None = None
    """Natural logarithm of its probability, at temperature 1; ``None`` where nobody asked."""
    likeliest: tuple[tuple[int, float], ...] = ()
    """Tokens that were the likeliest there, with the logarithms of their probabilities."""


def write_tokens(
    loaded: Loaded,
    prompt: EncodedPrompt,
    decoding: Decoding,
    on_token: Callable[[Token], bool],
    *,
    seed: int,
    num_likeliest: int | None = None,
) -> None:
    """Go on from ``prompt``. ``on_token`` is called with every token as it is drawn, stop tokens among them, and
    returns whether to stop.

    Draws depend on ``seed`` alone; the random numbers of the program's own are left as they are. ``num_likeliest`` asks
    for probabilities, and for so many of the likeliest tokens in each place. The tokens are those of ``generate`` for
    the same prompt alone.
    """
    import torch
    from transformers import LogitsProcessor, LogitsProcessorList
    from transformers.generation.streamers import BaseStreamer

    latest: list[Tensor] = []
    enough = False

    class Remember(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            latest[:] = [scores[0].float().log_softmax(-1)]
            return scores

    class Tell(BaseStreamer):
        is_prompt = True

        def put(self, value: Tensor) -> None:
            nonlocal enough
            if self.is_prompt:  # which comes first, as one
                self.is_prompt = False
                return
            for token in value.flatten().tolist():
                enough = on_token(_with_probability(token, latest, num_likeliest)) or enough

        def end(self) -> None:
            pass

    more: dict[str, Any] = {"streamer": Tell(), "stopping_criteria": stop_when(lambda: enough)}
    if num_likeliest is not None:
        more["logits_processor"] = LogitsProcessorList([Remember()])
    ids = torch.tensor([prompt.ids])
    with drawn_from(seed, loaded), torch.inference_mode():
        call_generate(loaded, ids, torch.ones_like(ids), decoding, images=[prompt.images], **more)


def _with_probability(token: int, latest: Sequence[Tensor], num_likeliest: int | None) -> Token:
    if num_likeliest is None or not latest:
        return Token(token)
    (logprobs,) = latest
    best = logprobs.topk(min(num_likeliest, len(logprobs)))
    likeliest = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return Token(token, float(logprobs[token]), likeliest)
