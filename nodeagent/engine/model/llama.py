"""The Llama family: Llama 2 and 3, SmolLM2, and whatever else has their weights' names.

Other families differ from it in their attention or in their MLP; each is a file beside this one
that names what differs.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from nodeagent.engine.distributed.collectives import ALONE, Ranks
from nodeagent.engine.distributed.shards import Share
from nodeagent.engine.model.layers.attention import LayerKV, Layout, attend
from nodeagent.engine.model.layers.fused_layers import Dense, whole
from nodeagent.engine.model.layers.gated_mlp import gated
from nodeagent.engine.model.layers.linear import Keeping, Plain
from nodeagent.engine.model.layers.lora import Adding
from nodeagent.engine.model.layers.norm import add_and_norm, rms_norm
from nodeagent.engine.model.layers.rope import Rope, inverse_frequencies, rotate_
from nodeagent.engine.model.shape import ModelShape
from nodeagent.engine.weights.weight_loading import Table, Weights, WeightSource


class LlamaAttention:
    """Queries, keys and values by one product, turned to their positions; then the answer."""

    inputs = 1
    """How many rows of `hidden` side by side are its input."""
    bias: Tensor | None = None
    """Added to queries, keys and values, where the family has one."""
    head_norms: Tensor | None = None
    """By which each head of queries and keys is normalised, where the family does so."""

    def __init__(self, weights: Weights, shape: ModelShape, prefix: str) -> None:
        self.shape = shape
        self.rows = {
            "q_proj": shape.heads * shape.head_dim,
            "k_proj": shape.kv_heads * shape.head_dim,
            "v_proj": shape.kv_heads * shape.head_dim,
        }
        prefix = f"{prefix}self_attn."
        parts = {f"{name}.weight": rows for name, rows in self.rows.items()}
        columns = self.inputs * shape.hidden
        self.query_key_value = weights.linear_stack(prefix, parts, columns)
        self.output = weights.linear(f"{prefix}o_proj.weight", shape.hidden, self.rows["q_proj"])

    def project(self, x: Tensor) -> Tensor:
        """Return the queries, keys and values of `x` [tokens, heads of all three, head_dim]."""
        return self.query_key_value(x).view(x.shape[0], -1, self.shape.head_dim)

    def __call__(self, x: Tensor, kv: LayerKV, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
        """Attend from each row of `x` to what it may see."""
        heads, turning = self.shape.heads, self.shape.heads + self.shape.kv_heads
        mixed = self.project(x)
        # Queries and keys turn alike, so they turn together.
        rotate_(mixed, turning, cos, sin)
        answer = attend(mixed, heads, kv, layout)
        return self.output(answer.view(x.shape[0], -1))


class LlamaMlp:
    """The gated MLP."""

    def __init__(self, weights: Weights, shape: ModelShape, prefix: str) -> None:
        prefix = f"{prefix}mlp."
        parts = {f"{name}_proj.weight": shape.intermediate for name in ("gate", "up")}
        self.gate_up = weights.linear_stack(prefix, parts, shape.hidden)
        self.down = weights.linear(f"{prefix}down_proj.weight", shape.hidden, shape.intermediate)

    def __call__(self, x: Tensor) -> Tensor:
        """Transform each row of `x` by itself."""
        return self.down(gated(self.gate_up(x)))


class LlamaLayer:
    """Attention and MLP, each behind its norm."""

    def __init__(self, model: type["Llama"], weights: Weights, shape: ModelShape, index: int):
        prefix = f"model.layers.{index}."
        self.attention_norm = weights.read(f"{prefix}input_layernorm.weight", shape.hidden)
        self.attention = model.attention(weights, shape, prefix)
        self.mlp_norm = weights.read(f"{prefix}post_attention_layernorm.weight", shape.hidden)
        self.mlp = model.mlp(weights, shape, prefix)

    def dense(self) -> Dense | None:
        """Return its parts; None where its MLP is another."""
        attention, mlp = self.attention, self.mlp
        if type(mlp) is not LlamaMlp:
            return None
        return Dense(
            self.attention_norm,
            self.mlp_norm,
            attention.bias,
            attention.head_norms,
            attention.query_key_value,
            attention.output,
            mlp.gate_up,
            mlp.down,
        )


class Llama:
    """The weights and the forward pass over a flat batch of tokens."""

    attention: type[LlamaAttention] = LlamaAttention
    mlp: type[LlamaMlp] = LlamaMlp

    def __init__(
        self,
        shape: ModelShape,
        source: WeightSource,
        device: str,
        dtype: torch.dtype,
        context_tokens: int,
        keeping: Keeping = Keeping.PLAIN,
        ranks: Ranks = ALONE,
    ) -> None:
        self._ranks = ranks
        self._share = share = Share(shape, ranks.split, ranks.rank)
        self.shape = shape = share.shape
        weights = Weights(source, device, dtype, keeping, share, ranks)
        self.heard: Callable[[int, Tensor], None] | None = None
        """Told what goes into each layer, where anybody listens."""
        self.adding = weights.adding or Adding()
        embedding = (shape.vocabulary, shape.hidden)
        table: Table = torch.empty(0)
        if share.first or (share.last and shape.tied_embeddings):
            table = weights.embedding("model.embed_tokens.weight", *embedding)
        self._embedding = table
        self._layers = [LlamaLayer(type(self), weights, shape, n) for n in share.layers]
        self._whole = whole([layer.dense() for layer in self._layers], shape)
        self._norm = weights.read("model.norm.weight", shape.hidden)
        if share.last and not shape.tied_embeddings:
            table = weights.embedding("lm_head.weight", *embedding)
        self._head = weights.head(table) if share.last else Plain(torch.empty(0))
        factors = (
            source.tensor("rope_freqs.weight", (shape.head_dim // 2,))
            if source.has("rope_freqs.weight")
            else None
        )
        inverse = inverse_frequencies(shape.head_dim, shape.rope_theta, shape.rope_scaling, factors)
        self._rope = Rope(inverse, context_tokens, device, dtype, shape.rope_scaling)
        self.arrived = weights.begin()
        """Waits for its matrices: before the first product, and before the files are closed."""

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the embeddings of `tokens`; ranks of a stage put them together."""
        if self._ranks.split.tensor == 1:
            return self._embedding[tokens].to(self._norm.dtype)
        here = tokens - self._share.tokens.start
        elsewhere = (here < 0) | (here >= len(self._share.tokens))
        x = self._embedding[here.masked_fill(elsewhere, 0)].to(self._norm.dtype)
        return self._ranks.sum(x.masked_fill_(elsewhere[:, None], 0))

    def forward(
        self, tokens: Tensor, positions: Tensor, kv: list[LayerKV], layout: Layout, rows: Tensor
    ) -> Tensor:
        """Run the flat batch; return logits [rows, vocabulary] in fp32 for the `rows` given.

        Of several ranks the first alone has them all.
        """
        epsilon = self.shape.rms_epsilon
        if self._share.first:
            x = self.embed(tokens)
        else:
            x = self._ranks.receive(len(tokens), self.shape.hidden, self._norm)
        cos, sin = self._rope.at(positions)
        alone = self._hears is None and not self.adding.current
        if self._whole is not None and alone and kv[0].kernels is not None:
            # Who hands on, hands on all rows.
            wanted = rows if self._share.last else torch.arange(len(x))
            x = self._whole.run(x, kv, cos, sin, layout, wanted)
        else:
            x = self._one_by_one(x, kv, cos, sin, layout)
            x = x[rows] if self._share.last else x
        logits = None
        if self._share.last:
            logits = self._head(rms_norm(x, self._norm, epsilon)).float()
        else:
            self._ranks.hand_on(x)
        return self._ranks.answer(logits, len(rows), self._share, x)

    @property
    def _hears(self) -> Callable[[int, Tensor], None] | None:
        """Who listens: somebody here, or the front of several ranks."""
        return self.heard or self._ranks.hearing

    def _one_by_one(
        self, x: Tensor, kv: list[LayerKV], cos: Tensor, sin: Tensor, layout: Layout
    ) -> Tensor:
        epsilon, hears = self.shape.rms_epsilon, self._hears
        for number, layer, layer_kv in zip(self._share.layers, self._layers, kv, strict=True):
            if hears is not None:
                hears(number, x)
            normed = rms_norm(x, layer.attention_norm, epsilon)
            answer = layer.attention(normed, layer_kv, cos, sin, layout)
            x, normed = add_and_norm(x, answer, layer.mlp_norm, epsilon)
            x = x + layer.mlp(normed)
        return x
