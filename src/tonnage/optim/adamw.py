"""AdamW over sharded parameters, with its state as named tensors.

The optimizer owns, for each trainable parameter, the two moments of the local shard (``moments``) and, where the
parameter is bf16, the low 16 bits of its fp32 master (``kernels``). Nothing is allocated lazily: what it will ever
hold, it holds from the start, so the memory of the first step is the memory of every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from tonnage.optim import kernels
from tonnage.optim.moments import Codec, Moments, noise_key, row_length


@dataclass(frozen=True)
class _State:
    parameter: nn.Parameter
    decay: float
    first: int
    """Index of the shard's first element in the whole parameter."""
    low: Tensor | None
    moments: Moments

    def named(self) -> dict[str, Tensor]:
        """Its tensors by the last part of their names."""
        return self.moments.named() | ({} if self.low is None else {"low": self.low})


class AdamW:
    """AdamW (decoupled decay) with exact fp32 masters for fp32 and bf16 parameters.

    ``parameters`` maps names to parameters, whole or sharded along rows (``DTensor``). ``decay`` is applied to
    parameters with two or more dimensions only: not to norms and biases. ``moments`` is how the moments rest; ``seed``
    that of the random bits which round bf16 moments.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        betas: tuple[float, float],
        eps: float,
        decay: float,
        moments: Codec = "fp32",
        seed: int = 0,
    ) -> None:
        self.betas, self.eps, self.seed = betas, eps, seed
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
                first=first_row(parameter) * row_length(parameter.shape),
                low=torch.zeros_like(shard, dtype=torch.int16) if shard.dtype == torch.bfloat16 else None,
                moments=Moments.zeros(moments, shard.shape, shard.device),
            )

    def step(self, lr: float, scale: float = 1.0) -> None:
        """One update of every parameter that has a gradient; gradients are multiplied by ``scale`` on the way."""
        self.num_steps += 1
        for name, state in self._states.items():
            gradient = state.parameter.grad
            if gradient is None:
                continue
            hyper = kernels.Hyper(
                lr,
                *self.betas,
                self.eps,
                decay=state.decay,
                step=self.num_steps,
                scale=scale,
                key=noise_key(self.seed, self.num_steps, name),
                first=state.first,
            )
            weight = local(state.parameter)
            if weight.numel():
                kernels.update(weight, state.low, state.moments, local(gradient).contiguous(), hyper)

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
        """All state by name, sharded as the parameters are; not copies.

        ``NAME.m`` and ``NAME.v``, with int8 moments ``NAME.m_scale`` and ``NAME.v_scale``, for a bf16 parameter
        ``NAME.low``.
        """
        return {
            f"{name}.{part}": _like(state.parameter, value)
            for name, state in self._states.items()
            for part, value in state.named().items()
        }

    @property
    def state_bytes(self) -> int:
        """Bytes of state on this rank."""
        return sum(tensor.nbytes for state in self._states.values() for tensor in state.named().values())


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor: the shard of a ``DTensor``, else the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def first_row(parameter: Tensor) -> int:
    """Index of the first row of dimension 0 that this rank holds.

    Raises:
        NotImplementedError: the parameter is sharded in another way than along dimension 0.
    """
    if not isinstance(parameter, DTensor):
        return 0
    coordinate = parameter.device_mesh.get_coordinate()
    sharded = [axis for axis, placement in enumerate(parameter.placements) if not placement.is_replicate()]
    if not sharded:
        return 0
    if len(sharded) > 1 or parameter.placements[sharded[0]] != Shard(0) or coordinate is None:
        raise NotImplementedError(f"an optimizer state sharded as {parameter.placements}; it must be by rows, once")
    rows, shards = parameter.shape[0], parameter.device_mesh.size(sharded[0])
    return min(rows, coordinate[sharded[0]] * -(-rows // shards))


def _like(parameter: Tensor, shard: Tensor) -> Tensor:
    """``shard`` as a tensor distributed in the same way as ``parameter``, whose rows it shares."""
    if not isinstance(parameter, DTensor):
        return shard
    shape = torch.Size((*parameter.shape[:1], *shard.shape[1:]))
    return DTensor.from_local(
        shard,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
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
