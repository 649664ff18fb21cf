"""The table of rotary position embeddings."""

import torch
from torch import Tensor

from nodeagent.engine.architecture.rope_scaling import RopeScaling


def inverse_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None, factors: Tensor | None
) -> Tensor:
    """Return the angle per position of each rotated pair: [head_dim / 2].

    `factors` are divisors that some GGUF files carry instead of a scaling rule.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    inverse = 1.0 / (theta**exponents)
    if factors is not None:
        inverse = inverse / factors
    return inverse if scaling is None else scaling.stretch(inverse, theta)


class RotaryTable:
    """Cosines and sines for every position, multiplied by the scaling's `attention_factor`.

    The first half of each row of sines has its sign inverted, as `RowOps.rotate_` expects.
    """

    def __init__(
        self,
        inverse: Tensor,
        positions: int,
        device: str,
        dtype: torch.dtype,
        scaling: RopeScaling | None = None,
    ) -> None:
        factor = 1.0 if scaling is None else scaling.attention_factor
        angles = torch.outer(torch.arange(positions, dtype=torch.float32), inverse)
        angles = torch.cat((angles, angles), dim=-1)
        self._cos = (angles.cos() * factor).to(device, dtype)
        sines = angles.sin() * factor
        sines[:, : inverse.shape[0]].neg_()
        self._sin = sines.to(device, dtype)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, each [tokens, 1, head_dim], for `positions`."""
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)
