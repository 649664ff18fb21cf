"""The row-wise operations of a layer, between its matrix products and attention."""

from typing import Protocol

from torch import Tensor


class RowOps(Protocol):
    """Normalisation, the gate of the MLP and rotary embedding, on one device."""

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Divide each row of `x` by its root mean square, in fp32, and scale it by `weight`."""
        ...

    def add_rms_norm(
        self, x: Tensor, added: Tensor, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        """Return `x + added`, and its `rms_norm`."""
        ...

    def silu_gate(self, x: Tensor) -> Tensor:
        """Return silu of the first half of each row of `x`, times the second half."""
        ...

    def rotate_(self, x: Tensor, heads: int, cos: Tensor, sin: Tensor) -> None:
        """Rotate the first `heads` of `x` [tokens, heads, head_dim] in place.

        `cos` and `sin` are [tokens, 1, head_dim]; the first half of `sin` has its sign inverted.
        """
        ...
