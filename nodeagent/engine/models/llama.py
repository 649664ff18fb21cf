"""The Llama family: Llama 2 and 3, SmolLM2, and whatever else has their weights' names."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from nodeagent.engine.layers.attention import LayerKV, Layout, attend
from nodeagent.engine.layers.norm import rms_norm
from nodeagent.engine.layers.rope import Rope, inverse_frequencies, rotate
from nodeagent.engine.models.shape import ModelShape, WeightSource


@dataclass(frozen=True, slots=True)
class LlamaLayer:
    """One layer's weights; what is multiplied by the same input is kept as one matrix."""

    attention_norm: Tensor
    query_key_value: Tensor
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class Llama:
    """The weights and the forward pass over a flat batch of tokens."""

    def __init__(
        self,
        shape: ModelShape,
        source: WeightSource,
        device: str,
        dtype: torch.dtype,
        context_tokens: int,
    ) -> None:
        self.shape = shape
        reader = _Reader(source, device, dtype)
        embedding = (shape.vocabulary, shape.hidden)
        self._embedding = reader.read("model.embed_tokens.weight", embedding)
        self._layers = [_read_layer(reader, shape, index) for index in range(shape.layers)]
        self._norm = reader.read("model.norm.weight", (shape.hidden,))
        self._head = (
            self._embedding if shape.tied_embeddings else reader.read("lm_head.weight", embedding)
        )
        factors = (
            source.tensor("rope_freqs.weight", (shape.head_dim // 2,))
            if source.has("rope_freqs.weight")
            else None
        )
        inverse = inverse_frequencies(shape.head_dim, shape.rope_theta, shape.rope_scaling, factors)
        self._rope = Rope(inverse, context_tokens, device, dtype)

    def forward(
        self, tokens: Tensor, positions: Tensor, kv: list[LayerKV], layout: Layout, rows: Tensor
    ) -> Tensor:
        """Run the flat batch; return logits [rows, vocabulary] in fp32 for the `rows` given."""
        x = self._embedding[tokens]
        cos, sin = self._rope.at(positions)
        for layer, layer_kv in zip(self._layers, kv, strict=True):
            x = x + self._attention(x, layer, layer_kv, cos, sin, layout)
            x = x + self._mlp(x, layer)
        x = rms_norm(x[rows], self._norm, self.shape.rms_epsilon)
        return linear(x, self._head).float()

    def _attention(
        self, x: Tensor, layer: LlamaLayer, kv: LayerKV, cos: Tensor, sin: Tensor, layout: Layout
    ) -> Tensor:
        shape = self.shape
        normed = rms_norm(x, layer.attention_norm, shape.rms_epsilon)
        mixed = linear(normed, layer.query_key_value).view(x.shape[0], -1, shape.head_dim)
        # Queries and keys turn alike, so they turn together.
        turned = rotate(mixed[:, : shape.heads + shape.kv_heads], cos, sin)
        query, key = turned[:, : shape.heads], turned[:, shape.heads :]
        value = mixed[:, shape.heads + shape.kv_heads :]
        answer = attend(query, key, value, kv, layout)
        return linear(answer.view(x.shape[0], -1), layer.output)

    def _mlp(self, x: Tensor, layer: LlamaLayer) -> Tensor:
        normed = rms_norm(x, layer.mlp_norm, self.shape.rms_epsilon)
        gate, up = linear(normed, layer.gate_up).chunk(2, dim=-1)
        return linear(silu(gate) * up, layer.down)


class _Reader:
    def __init__(self, source: WeightSource, device: str, dtype: torch.dtype) -> None:
        self._source = source
        self._device = device
        self._dtype = dtype

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._source.tensor(name, shape).to(self._device, self._dtype)

    def fuse(self, prefix: str, parts: dict[str, int], columns: int) -> Tensor:
        """Read the matrices `parts` (name: rows) one below the other, with no second copy."""
        fused = torch.empty(sum(parts.values()), columns, device=self._device, dtype=self._dtype)
        at = 0
        for name, rows in parts.items():
            fused[at : at + rows] = self._source.tensor(f"{prefix}{name}.weight", (rows, columns))
            at += rows
        return fused


def _read_layer(reader: _Reader, shape: ModelShape, index: int) -> LlamaLayer:
    prefix = f"model.layers.{index}."
    wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return LlamaLayer(
        attention_norm=reader.read(f"{prefix}input_layernorm.weight", (shape.hidden,)),
        query_key_value=reader.fuse(
            f"{prefix}self_attn.",
            {"q_proj": wide, "k_proj": narrow, "v_proj": narrow},
            shape.hidden,
        ),
        output=reader.read(f"{prefix}self_attn.o_proj.weight", (shape.hidden, wide)),
        mlp_norm=reader.read(f"{prefix}post_attention_layernorm.weight", (shape.hidden,)),
        gate_up=reader.fuse(
            f"{prefix}mlp.",
            {"gate_proj": shape.intermediate, "up_proj": shape.intermediate},
            shape.hidden,
        ),
        down=reader.read(f"{prefix}mlp.down_proj.weight", (shape.hidden, shape.intermediate)),
    )
