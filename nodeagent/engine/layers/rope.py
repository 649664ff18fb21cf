"""Rotary position embedding, with Llama 3's stretching of long wavelengths."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nodeagent.engine.native.kernels import kernels_for


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """How Llama 3.1 and later stretch positions beyond the context they were first trained on."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


def inverse_frequencies(
    head_dim: int, theta: float, scaling: Llama3Scaling | None, factors: Tensor | None
) -> Tensor:
    """Return the angle per position of each rotated pair."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    inverse = 1.0 / (theta**exponents)
    if factors is not None:
        return inverse / factors
    if scaling is None:
        return inverse
    wavelength = 2 * math.pi / inverse
    low = scaling.original_context / scaling.low_freq_factor
    high = scaling.original_context / scaling.high_freq_factor
    share = (scaling.original_context / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - share) * inverse / scaling.factor + share * inverse
    stretched = torch.where(wavelength > low, inverse / scaling.factor, inverse)
    return torch.where((wavelength <= low) & (wavelength >= high), blended, stretched)


class Rope:
    """The table of cosines and sines for every position of the context.

    The first half of each row of sines has its sign turned, so that `rotate_` need not.
    """

    def __init__(self, inverse: Tensor, positions: int, device: str, dtype: torch.dtype) -> None:
        angles = torch.outer(torch.arange(positions, dtype=torch.float32), inverse)
        angles = torch.cat((angles, angles), dim=-1)
        self._cos = angles.cos().to(device, dtype)
        sines = angles.sin()
        sines[:, : inverse.shape[0]].neg_()
        self._sin = sines.to(device, dtype)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [tokens, 1, head_dim] for `positions`."""
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)


def rotate_(x: Tensor, heads: int, cos: Tensor, sin: Tensor) -> None:
    """Turn the first `heads` of `x` [tokens, heads, head_dim] to their positions, in place."""
    own = kernels_for(x)
    if own is not None:
        own.turn(x, heads, cos, sin)
        return
    x = x[:, :heads]
    torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin, out=x)
