"""Rules that stretch rotary position embeddings beyond the context a model was trained on.

Each rule changes the angles per position ("inverse frequencies") of the rotated pairs.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Position interpolation: every pair rotates `factor` times more slowly."""

    factor: float
    attention_factor: ClassVar[float] = 1.0

    def stretch(self, inverse: Tensor, theta: float) -> Tensor:
        """Return the scaled angle per position of each pair."""
        return inverse / self.factor


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """The rule of Llama 3.1 and later: only low frequencies are stretched."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int
    attention_factor: ClassVar[float] = 1.0

    def stretch(self, inverse: Tensor, theta: float) -> Tensor:
        """Return the scaled angle per position of each pair.

        Long wavelengths are divided by `factor`, short ones are kept, and those between the two
        limits are interpolated.
        """
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
    """YaRN (https://arxiv.org/abs/2309.00071), applied whatever the length of the prompt."""

    factor: float
    original_context: int
    beta_fast: float
    """Pairs with more rotations than this over the original context are not scaled."""
    beta_slow: float
    """Pairs with fewer rotations than this are scaled by the whole `factor`."""
    attention_factor: float
    """Cosines and sines are multiplied by this."""
    truncate: bool
    """Whether the two limits are rounded to whole pairs."""

    @property
    def context_tokens(self) -> int:
        """The stretched context."""
        return int(self.factor * self.original_context)

    def stretch(self, inverse: Tensor, theta: float) -> Tensor:
        """Return the scaled angle per position of each pair."""
        low = self._pair_of_rotations(len(inverse), theta, self.beta_fast)
        high = self._pair_of_rotations(len(inverse), theta, self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * len(inverse) - 1)
        pairs = torch.arange(len(inverse), dtype=torch.float32)
        # 0.001 avoids a division by zero where both limits are the same pair.
        slow = ((pairs - low) / (high - low or 0.001)).clamp(0, 1)
        return inverse / self.factor * slow + inverse * (1 - slow)

    def _pair_of_rotations(self, pairs: int, theta: float, rotations: float) -> float:
        """Return the (fractional) pair that rotates this often over the original context."""
        wavelength = self.original_context / (rotations * 2 * math.pi)
        return pairs * math.log(wavelength) / math.log(theta)


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling
