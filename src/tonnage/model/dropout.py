"""Which micro-batch adapted layers draw the masks of their dropout for.

A mask depends on its tokens (``kernels.dropout``), and a layer is given hidden states that do not say whose they are.
So a model's layers share one ``Drawn``, which has the keys of the tokens of the micro-batch that runs. Whoever runs a
pass, forward or backward, says so around it; a block that is computed again in a backward pass then draws the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from tonnage.errors import user_error
from tonnage.kernels.dropout import Mask, salt_of, threshold_of


class Drawn:
    """Keys of the tokens of the micro-batch that runs, int64 (tokens,), row after row; None drops nothing."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None

    @contextmanager
    def for_tokens(self, keys: Tensor | None) -> Iterator[None]:
        """Let layers that run inside draw for tokens of these ``keys``."""
        before, self.keys = self.keys, keys
        try:
            yield
        finally:
            self.keys = before


class LayerDropout:
    """Dropout of the inputs of the addition to a layer, by its name in the model."""

    def __init__(self, layer: str, probability: float, drawn: Drawn) -> None:
        self._layer, self._drawn = layer, drawn
        self._salt, self._threshold = salt_of(layer), threshold_of(probability)

    def mask(self, inputs: Tensor, first: int = 0) -> Mask | None:
        """Of ``inputs``, (..., channels), which begin with the ``first`` of the layer's channels; None drops nothing.

        Raises:
            UserError: they are not a row for each token.
        """
        keys = self._drawn.keys
        if keys is None:
            return None
        rows = inputs.numel() // inputs.shape[-1]
        if rows != len(keys):
            raise user_error(
                where="adapter.dropout",
                found=f"{self._layer} is given {rows:,} rows for {len(keys):,} tokens",
                needed="one row for each token, in their order: a mask is drawn from what a token is",
                change="adapter.dropout=0, or adapter.targets without this layer",
            )
        return Mask(keys, self._salt, first, self._threshold)
