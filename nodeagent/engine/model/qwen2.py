"""Qwen2 and Qwen2.5: a Llama with a bias on queries, keys and values."""

from torch import Tensor

from nodeagent.engine.architecture.decoder_shape import DecoderShape
from nodeagent.engine.model.llama import Llama, LlamaAttention
from nodeagent.engine.model.weight_loader import WeightLoader


class Qwen2Attention(LlamaAttention):
    """Adds the bias."""

    def __init__(self, weights: WeightLoader, shape: DecoderShape, prefix: str) -> None:
        super().__init__(weights, shape, prefix)
        part_rows = {f"{name}.bias": rows for name, rows in self.projection_rows.items()}
        stacked = weights.stack(f"{prefix}self_attn.", part_rows)
        self.bias = stacked.view(-1, shape.head_dim)

    def project(self, x: Tensor) -> Tensor:
        """Return the queries, keys and values of `x`."""
        assert self.bias is not None
        return super().project(x) + self.bias


class Qwen2(Llama):
    """Qwen2 and Qwen2.5, dense."""

    attention = Qwen2Attention
