"""How keys and values are kept: in a float of their own, or in eight bits with a scale.

In fp8 (e4m3) each head of each token has a scale of its own, so that its largest number is the
largest that eight bits know: the others err by a sixteenth of themselves at most, or by 2^-18 of
the largest. The scale lies behind the numbers it belongs to, and so goes wherever they go.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from nodeagent.engine.model.shape import ModelShape

_EIGHT: Final = torch.float8_e4m3fn
_LARGEST: Final = torch.finfo(_EIGHT).max
_SCALE_BYTES: Final = torch.float32.itemsize


@dataclass(frozen=True, slots=True)
class KvFormat:
    """The form in which one head of one token is kept."""

    dtype: torch.dtype
    """A float; `torch.uint8` for eight bits and their scale."""

    def width(self, head_dim: int) -> int:
        """How many of `dtype` one head of one token takes."""
        return head_dim + _SCALE_BYTES if self.dtype is torch.uint8 else head_dim

    def bytes_per_token(self, shape: ModelShape) -> int:
        """Keys and values of one token in all layers."""
        heads = 2 * shape.layers * shape.kv_heads
        return heads * self.width(shape.head_dim) * self.dtype.itemsize

    def kept(self, x: Tensor) -> Tensor:
        """Return heads [..., head_dim] as they are kept: [..., width]."""
        if self.dtype is not torch.uint8:
            return x.to(self.dtype)
        wide = x.float()
        # What is not finite stays so: the answer to it is an error, not a number.
        scales = (wide.abs().amax(-1, keepdim=True) / _LARGEST).clamp_min(torch.finfo().tiny)
        numbers = (wide / scales).to(_EIGHT)
        return torch.cat((numbers.view(torch.uint8), scales.view(torch.uint8)), -1)

    def wide(self, kept: Tensor, dtype: torch.dtype) -> Tensor:
        """Return what is kept as numbers of `dtype`."""
        if self.dtype is not torch.uint8:
            return kept.to(dtype)
        numbers = kept[..., :-_SCALE_BYTES].view(_EIGHT).to(dtype)
        return numbers.mul_(kept[..., -_SCALE_BYTES:].view(torch.float32).to(dtype))


DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""What is computed in, by the names of EngineConfig; and what KV is kept in."""
KV_DTYPES: Final = {**DTYPES, "fp8": torch.uint8}
