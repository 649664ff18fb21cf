"""Rotary position embedding, and how models stretch it to contexts longer than they were taught."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from nodeagent.engine.kernels.cpu.kernels import kernels_for


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """All pairs turn `factor` times as slowly."""

    factor: float
    attention_factor: ClassVar[float] = 1.0

    def stretch(self, inverse: Tensor, theta: float) -> Tensor:
        """Return the angles per position."""
        return inverse / self.factor


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """How Llama 3.1 and later stretch positions beyond the context they were first trained on."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int
    attention_factor: ClassVar[float] = 1.0

    def stretch(self, inverse: Tensor, theta: float) -> Tensor:
        """Turn long wavelengths `factor` times as slowly, middling ones by a share of that."""
        wavelength = 2 * math.pi / inverse
        low = self.original_context / self.low_freq_factor
        high = self.original_context / self.high_freq_factor
        share = (self.original_context / wavelength - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        blended = (1 - share) * inverse / self.factor + share * inverse
        stretched = torch.where(wavelength > low, inverse / self.factor, inverse)
        return torch.where((wavelength <= low) & (wavelength >= high), blended, stretched)


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN, whatever a prompt's length: https://arxiv.org/abs/2309.00071."""

    factor: float
    original_context: int
    beta_fast: float
    beta_slow: float
    """Pairs that turn more often than the one over the original context stay as they are; those
    that turn less often than the other turn `factor` times as slowly."""
    attention_factor: float
    """By how much cosines and sines are multiplied."""
    truncate: bool
    """Whether the two ends lie at whole pairs."""

    @property
    def context_tokens(self) -> int:
        """How far it reaches."""
        return int(self.factor * self.original_context)

    def stretch(self, inverse: Tensor, theta: float) -> Tensor:
        """Turn the slow pairs `factor` times as slowly, those between the two ends in part."""
        low = self._pair(len(inverse), theta, self.beta_fast)
        high = self._pair(len(inverse), theta, self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * len(inverse) - 1)
        pairs = torch.arange(len(inverse), dtype=torch.float32)
        # Ends that meet would divide by nought.
        slow = ((pairs - low) / (high - low or 0.001)).clamp(0, 1)
        return inverse / self.factor * slow + inverse * (1 - slow)

    def _pair(self, pairs: int, theta: float, turns: float) -> float:
        """Return which of the pairs turns so often over the original context."""
        wavelength = self.original_context / (turns * 2 * math.pi)
        return pairs * math.log(wavelength) / math.log(theta)


Scaling = LinearScaling | Llama3Scaling | YarnScaling


def inverse_frequencies(
    head_dim: int, theta: float, scaling: Scaling | None, factors: Tensor | None
) -> Tensor:
    """Return the angle per position of each rotated pair."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    inverse = 1.0 / (theta**exponents)
    if factors is not None:
        inverse = inverse / factors
    return inverse if scaling is None else scaling.stretch(inverse, theta)


class Rope:
    """The table of cosines and sines for every position of the context.

    The first half of each row of sines has its sign turned, so that `rotate_` need not. All are
    multiplied by the `attention_factor` of `scaling`.
    """

    def __init__(
        self,
        inverse: Tensor,
        positions: int,
        device: str,
        dtype: torch.dtype,
        scaling: Scaling | None = None,
    ) -> None:
        factor = 1.0 if scaling is None else scaling.attention_factor
        angles = torch.outer(torch.arange(positions, dtype=torch.float32), inverse)
        angles = torch.cat((angles, angles), dim=-1)
        self._cos = (angles.cos() * factor).to(device, dtype)
        sines = angles.sin() * factor
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
