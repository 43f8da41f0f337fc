"""Two layers that compute the same."""

import torch
from torch import Tensor, nn


def assert_computes_alike(ours: nn.Module, theirs: nn.Module, inputs: Tensor, slopes: Tensor) -> None:
    """Outputs and gradients of ``inputs`` are alike, where the gradient of the output is ``slopes``. Parameters have
    their gradients then."""

    def computed(layer: nn.Module) -> tuple[Tensor, Tensor]:
        rows = inputs.clone().requires_grad_()
        output = layer(rows)
        output.backward(slopes)
        assert rows.grad is not None
        return output.detach(), rows.grad

    for mine, other in zip(computed(ours), computed(theirs), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=2e-5)
