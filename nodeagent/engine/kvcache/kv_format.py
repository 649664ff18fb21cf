"""The number format in which keys and values are stored.

In fp8 (e4m3) each head of each token has a scale of its own, chosen so that its largest number
becomes the largest fp8 number. The error of a number is at most 1/16 of itself, or 2^-18 of the
largest. The scale (fp32) lies behind the numbers of its head, and is moved with them.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from nodeagent.engine.architecture.decoder_shape import DecoderShape

DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The dtypes in which a model can compute, by their names in EngineConfig."""
KV_DTYPES: Final = {**DTYPES, "fp8": torch.uint8}
"""The dtypes in which the KV cache can be stored, by their names in EngineConfig."""

_FP8: Final = torch.float8_e4m3fn
_FP8_MAX: Final = torch.finfo(_FP8).max
_SCALE_BYTES: Final = torch.float32.itemsize


@dataclass(frozen=True, slots=True)
class KvFormat:
    """The stored form of one head of one token."""

    dtype: torch.dtype
    """A float dtype; `torch.uint8` stands for fp8 with a scale."""

    def width(self, head_dim: int) -> int:
        """Return how many elements of `dtype` one head of one token takes."""
        return head_dim + _SCALE_BYTES if self.dtype is torch.uint8 else head_dim

    def bytes_per_token(self, shape: DecoderShape) -> int:
        """Return the size of one token's keys and values in all layers."""
        heads = 2 * shape.layers * shape.kv_heads
        return heads * self.width(shape.head_dim) * self.dtype.itemsize

    def encode(self, x: Tensor) -> Tensor:
        """Return heads [..., head_dim] in the stored form: [..., width]."""
        if self.dtype is not torch.uint8:
            return x.to(self.dtype)
        numbers = x.float()
        # NaN and infinity pass through: a request that has them fails, and gets no wrong answer.
        scales = (numbers.abs().amax(-1, keepdim=True) / _FP8_MAX).clamp_min(torch.finfo().tiny)
        scaled = (numbers / scales).to(_FP8)
        return torch.cat((scaled.view(torch.uint8), scales.view(torch.uint8)), -1)

    def decode(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """Return stored heads [..., width] as numbers of `dtype`: [..., head_dim]."""
        if self.dtype is not torch.uint8:
            return stored.to(dtype)
        numbers = stored[..., :-_SCALE_BYTES].view(_FP8).to(dtype)
        return numbers.mul_(stored[..., -_SCALE_BYTES:].view(torch.float32).to(dtype))
