"""AdamW over sharded parameters, with its state as named tensors.

The optimizer owns, for each trainable parameter, the two fp32 moments of the local shard and, where the parameter is
bf16, the low 16 bits of its fp32 master (``kernels``). Nothing is allocated lazily: what it will ever hold, it holds
from the start, so the memory of the first step is the memory of every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tonnage.optim import kernels


@dataclass(frozen=True)
class _State:
    parameter: nn.Parameter
    decay: float
    low: Tensor | None
    m: Tensor
    v: Tensor


class AdamW:
    """AdamW (decoupled decay) with exact fp32 masters for fp32 and bf16 parameters.

    ``parameters`` maps names to parameters, whole or sharded (``DTensor``). ``decay`` is applied to parameters with
    two or more dimensions only: not to norms and biases.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        betas: tuple[float, float],
        eps: float,
        decay: float,
    ) -> None:
        self.betas, self.eps = betas, eps
        self.num_steps = 0
        """Updates made so far."""
        self._states: dict[str, _State] = {}
        for name, parameter in parameters.items():
            if not parameter.requires_grad:
                continue
            shard = local(parameter)
            self._states[name] = _State(
                parameter=parameter,
                decay=decay if parameter.dim() >= 2 else 0.0,
                low=torch.zeros_like(shard, dtype=torch.int16) if shard.dtype == torch.bfloat16 else None,
                m=torch.zeros_like(shard, dtype=torch.float32),
                v=torch.zeros_like(shard, dtype=torch.float32),
            )

    def step(self, lr: float, scale: float = 1.0) -> None:
        """One update of every parameter that has a gradient; gradients are multiplied by ``scale`` on the way."""
        self.num_steps += 1
        for state in self._states.values():
            gradient = state.parameter.grad
            if gradient is None:
                continue
            hyper = kernels.Hyper(lr, *self.betas, self.eps, decay=state.decay, step=self.num_steps, scale=scale)
            weight = local(state.parameter)
            if weight.numel():
                kernels.update(weight, state.low, state.m, state.v, local(gradient).contiguous(), hyper)

    def zero_grad(self, *, keep: bool = False) -> None:
        """Forget the gradients: free their memory, or ``keep`` it, set to zero, for the next step to add to."""
        for state in self._states.values():
            if keep and state.parameter.grad is not None:
                local(state.parameter.grad).zero_()
            else:
                state.parameter.grad = None

    def gradients(self) -> Iterator[Tensor]:
        """The gradients there are, in the order of the parameters."""
        return (s.parameter.grad for s in self._states.values() if s.parameter.grad is not None)

    def tensors(self) -> dict[str, Tensor]:
        """All state by name (``NAME.m``, ``NAME.v``, ``NAME.low``), sharded as the parameters are; not copies."""
        named = {}
        for name, state in self._states.items():
            for part, value in (("m", state.m), ("v", state.v), ("low", state.low)):
                if value is not None:
                    named[f"{name}.{part}"] = _like(state.parameter, value)
        return named

    @property
    def state_bytes(self) -> int:
        """Bytes of state on this rank."""
        tensors = (t for s in self._states.values() for t in (s.m, s.v, s.low) if t is not None)
        return sum(t.numel() * t.element_size() for t in tensors)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor: the shard of a ``DTensor``, else the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _like(parameter: Tensor, shard: Tensor) -> Tensor:
    """``shard`` as a tensor distributed in the same way as ``parameter``."""
    if not isinstance(parameter, DTensor):
        return shard
    return DTensor.from_local(
        shard,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def squared_norm(gradients: Iterable[Tensor]) -> Tensor:
    """Sum of squares of this rank's parts of ``gradients``, as an fp64 scalar.

    Over the ranks that hold different parts the sums add up to the squared global norm.
    """
    norms = [
        torch.linalg.vector_norm(shard, dtype=torch.float32)
        for gradient in gradients
        if (shard := local(gradient)).numel()
    ]
    if not norms:
        return torch.zeros((), dtype=torch.float64)
    return torch.stack(norms).double().square().sum()
