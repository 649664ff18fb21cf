"""The row operations by torch's own kernels."""

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu


class TorchRowOps:
    """Implements `kernels.row_ops.RowOps` on any device and in any dtype."""

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Divide each row of `x` by its root mean square, and scale it by `weight`."""
        return rms_norm(x, weight.shape, weight, epsilon)

    def add_rms_norm(
        self, x: Tensor, added: Tensor, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        """Return `x + added`, and its `rms_norm`."""
        x = x + added
        return x, self.rms_norm(x, weight, epsilon)

    def silu_gate(self, x: Tensor) -> Tensor:
        """Return silu of the first half of each row of `x`, times the second half."""
        gate, up = x.chunk(2, dim=-1)
        return silu(gate).mul_(up)

    def rotate_(self, x: Tensor, heads: int, cos: Tensor, sin: Tensor) -> None:
        """Rotate the first `heads` of `x` [tokens, heads, head_dim] in place."""
        x = x[:, :heads]
        torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin, out=x)
