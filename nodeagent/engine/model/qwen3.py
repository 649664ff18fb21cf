"""Qwen3: a Llama that normalises each query and key head before the rotary embedding."""

from torch import Tensor
from torch.nn.functional import rms_norm

from nodeagent.engine.architecture.decoder_shape import DecoderShape
from nodeagent.engine.model.llama import Llama, LlamaAttention
from nodeagent.engine.model.weight_loader import WeightLoader


class Qwen3Attention(LlamaAttention):
    """Normalises query and key heads."""

    def __init__(self, weights: WeightLoader, shape: DecoderShape, prefix: str) -> None:
        super().__init__(weights, shape, prefix)
        prefix = f"{prefix}self_attn."
        query = weights.read(f"{prefix}q_norm.weight", shape.head_dim)
        key = weights.read(f"{prefix}k_norm.weight", shape.head_dim)
        # A row for each head, so that one call normalises queries and keys together.
        # Not torch.cat: to check weights without reading them it would import torch's compiler.
        norms = query.new_empty(shape.heads + shape.kv_heads, shape.head_dim)
        norms[: shape.heads], norms[shape.heads :] = query, key
        self.head_norms = norms

    def project(self, x: Tensor) -> Tensor:
        """Return the queries, keys and values of `x`."""
        mixed, norms = super().project(x), self.head_norms
        assert norms is not None
        heads = mixed[:, : len(norms)]
        # Computed by torch on every device: `RowOps.rms_norm` has one weight for all rows.
        heads.copy_(rms_norm(heads, heads.shape[-1:], None, self.shape.rms_epsilon) * norms)
        return mixed


class Qwen3(Llama):
    """Qwen3, dense."""

    attention = Qwen3Attention
