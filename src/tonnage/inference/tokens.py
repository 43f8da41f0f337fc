"""An answer token by token, with what was likely in each place: for those who must stop it, or show how sure it was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tonnage.inference.generate import (
    Decoding,
    EncodedPrompt,
    Loaded,
    call_generate,
    drawn_from,
    stop_when,
    streamer_to,
)
from tonnage.inference.pieces import Token

if TYPE_CHECKING:
    from torch import Tensor


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

    latest: list[Tensor] = []
    enough = False

    class Remember(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            latest[:] = [scores[0].float().log_softmax(-1)]
            return scores

    def take(token: int) -> None:
        nonlocal enough
        enough = on_token(_with_probability(token, latest, num_likeliest)) or enough

    more: dict[str, Any] = {"streamer": streamer_to(take), "stopping_criteria": stop_when(lambda: enough)}
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
