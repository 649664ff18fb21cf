"""Qwen3: a Llama that normalises each head of queries and keys before it turns them."""

import torch
from torch import Tensor

from nodeagent.engine.model.layers.norm import rms_norm
from nodeagent.engine.model.llama import Llama, LlamaAttention
from nodeagent.engine.model.shape import ModelShape
from nodeagent.engine.weights.weight_loading import Weights


class Qwen3Attention(LlamaAttention):
    """Normalises queries and keys."""

    def __init__(self, weights: Weights, shape: ModelShape, prefix: str) -> None:
        super().__init__(weights, shape, prefix)
        prefix = f"{prefix}self_attn."
        query = weights.read(f"{prefix}q_norm.weight", shape.head_dim)
        key = weights.read(f"{prefix}k_norm.weight", shape.head_dim)
        # A row for each head, so that one pass normalises queries and keys together.
        rows = (query.expand(shape.heads, -1), key.expand(shape.kv_heads, -1))
        self.head_norms = torch.cat(rows)

    def project(self, x: Tensor) -> Tensor:
        """Return the queries, keys and values of `x`."""
        mixed, norms = super().project(x), self.head_norms
        assert norms is not None
        normed = mixed[:, : len(norms)]
        normed.copy_(rms_norm(normed, norms, self.shape.rms_epsilon))
        return mixed


class Qwen3(Llama):
    """Qwen3, dense."""

    attention = Qwen3Attention
