"""The Llama architecture: Llama 2 and 3, SmolLM2, and models with the same weight names.

Other families differ in their attention or their MLP; each has a module here with the difference.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from nodeagent.engine.architecture.decoder_shape import DecoderShape
from nodeagent.engine.distributed.collectives import SINGLE_RANK, Communicator
from nodeagent.engine.distributed.shards import ModelShard
from nodeagent.engine.kernels.attention_backend import AttentionLayout, LayerKV
from nodeagent.engine.kernels.layer_count import count_layer
from nodeagent.engine.kernels.linear_backend import (
    DenseLayer,
    EmbeddingTable,
    Linear,
    LinearBackend,
)
from nodeagent.engine.kernels.step_interrupt import StepInterrupt
from nodeagent.engine.model.lora import ActiveAdapters, LoraLinear
from nodeagent.engine.model.rotary import RotaryTable, inverse_frequencies
from nodeagent.engine.model.weight_loader import WeightLoader
from nodeagent.engine.weights.weight_source import WeightSource


class LlamaAttention:
    """Grouped-query attention with rotary embedding; one product gives queries, keys and values."""

    inputs = 1
    """The input of a row is this many vectors of `hidden`, side by side."""
    bias: Tensor | None = None
    """Added to queries, keys and values: [heads + 2 * kv_heads, head_dim]."""
    head_norms: Tensor | None = None
    """Norm weights of each query and key head: [heads + kv_heads, head_dim]."""

    def __init__(self, weights: WeightLoader, shape: DecoderShape, prefix: str) -> None:
        self.shape = shape
        self.row_ops = weights.row_ops
        self.projection_rows = {
            "q_proj": shape.heads * shape.head_dim,
            "k_proj": shape.kv_heads * shape.head_dim,
            "v_proj": shape.kv_heads * shape.head_dim,
        }
        prefix = f"{prefix}self_attn."
        part_rows = {f"{name}.weight": rows for name, rows in self.projection_rows.items()}
        self.query_key_value = weights.linear_stack(prefix, part_rows, self.inputs * shape.hidden)
        self.output = weights.linear(
            f"{prefix}o_proj.weight", shape.hidden, self.projection_rows["q_proj"]
        )

    def project(self, x: Tensor) -> Tensor:
        """Return queries, keys and values of `x`: [tokens, heads + 2 * kv_heads, head_dim]."""
        return self.query_key_value(x).view(x.shape[0], -1, self.shape.head_dim)

    def __call__(
        self, x: Tensor, kv: LayerKV, cos: Tensor, sin: Tensor, layout: AttentionLayout
    ) -> Tensor:
        """Attend from each row of `x` to the tokens that `layout` lets it see."""
        heads = self.shape.heads
        mixed = self.project(x)
        # Queries and keys lie side by side, so they are rotated together.
        self.row_ops.rotate_(mixed, heads + self.shape.kv_heads, cos, sin)
        output = kv.attend(mixed, heads, layout)
        return self.output(output.view(x.shape[0], -1))


class LlamaMlp:
    """The gated MLP (SwiGLU)."""

    def __init__(self, weights: WeightLoader, shape: DecoderShape, prefix: str) -> None:
        prefix = f"{prefix}mlp."
        part_rows = {f"{name}_proj.weight": shape.intermediate for name in ("gate", "up")}
        self.row_ops = weights.row_ops
        self.gate_up = weights.linear_stack(prefix, part_rows, shape.hidden)
        self.down = weights.linear(f"{prefix}down_proj.weight", shape.hidden, shape.intermediate)

    def __call__(self, x: Tensor) -> Tensor:
        """Transform each row of `x`."""
        return self.down(self.row_ops.silu_gate(self.gate_up(x)))


class LlamaLayer:
    """Attention and MLP, each behind an RMS norm."""

    def __init__(
        self, model: type["Llama"], weights: WeightLoader, shape: DecoderShape, index: int
    ) -> None:
        prefix = f"model.layers.{index}."
        self.attention_norm = weights.read(f"{prefix}input_layernorm.weight", shape.hidden)
        self.attention = model.attention(weights, shape, prefix)
        self.mlp_norm = weights.read(f"{prefix}post_attention_layernorm.weight", shape.hidden)
        self.mlp = model.mlp(weights, shape, prefix)

    def dense_layer(self) -> DenseLayer | None:
        """Return the weights of the layer; None where its MLP is not a plain one."""
        attention, mlp = self.attention, self.mlp
        if type(mlp) is not LlamaMlp:
            return None
        return DenseLayer(
            self.attention_norm,
            self.mlp_norm,
            attention.bias,
            attention.head_norms,
            _without_adapters(attention.query_key_value),
            _without_adapters(attention.output),
            _without_adapters(mlp.gate_up),
            _without_adapters(mlp.down),
        )


class Llama:
    """The weights of one rank's layers, and the forward pass over a flat batch of tokens."""

    attention: type[LlamaAttention] = LlamaAttention
    mlp: type[LlamaMlp] = LlamaMlp

    def __init__(
        self,
        shape: DecoderShape,
        source: WeightSource,
        device: str,
        dtype: torch.dtype,
        context_tokens: int,
        linear_backend: LinearBackend | None = None,
        communicator: Communicator = SINGLE_RANK,
    ) -> None:
        """Start to read the weights; `wait_for_weights` ends it."""
        self._communicator = communicator
        self._shard = shard = ModelShard(shape, communicator.split, communicator.rank)
        self.shape = shape = shard.shape
        weights = WeightLoader(source, device, dtype, linear_backend, shard, communicator)
        self.record_states: Callable[[int, Tensor], None] | None = None
        """Called with the index of each layer and its input, if set."""
        self.interrupt: StepInterrupt | None = None
        """Ends a step between two layers, if set: then `forward` raises StepInterrupted."""
        self.adapters = weights.adapters or ActiveAdapters()
        embedding_shape = (shape.vocabulary, shape.hidden)
        table: EmbeddingTable = torch.empty(0)
        if shard.is_first_stage or (shard.is_last_stage and shape.tied_embeddings):
            table = weights.embedding("model.embed_tokens.weight", *embedding_shape)
        self._embedding = table
        self._layers = [LlamaLayer(type(self), weights, shape, n) for n in shard.layers]
        self._fused = weights.linear_backend.fuse(
            [layer.dense_layer() for layer in self._layers], shape
        )
        self._norm = weights.read("model.norm.weight", shape.hidden)
        self._row_ops = weights.row_ops
        if shard.is_last_stage and not shape.tied_embeddings:
            table = weights.embedding("lm_head.weight", *embedding_shape)
        self._head: Linear | None = weights.head(table) if shard.is_last_stage else None
        self._rotary = _rotary_table(shape, source, context_tokens, device, dtype)
        self.wait_for_weights = weights.start_reads()
        """Waits for the matrices: call it before the first step and before closing the files."""

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the embeddings of `tokens`; the ranks of a stage each have a part of the table."""
        if self._communicator.split.tensor == 1:
            return self._embedding[tokens].to(self._norm.dtype)
        local = tokens - self._shard.tokens.start
        elsewhere = (local < 0) | (local >= len(self._shard.tokens))
        x = self._embedding[local.masked_fill(elsewhere, 0)].to(self._norm.dtype)
        return self._communicator.all_reduce(x.masked_fill_(elsewhere[:, None], 0))

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        kv: list[LayerKV],
        layout: AttentionLayout,
        rows: Tensor,
    ) -> Tensor:
        """Run the flat batch; return the logits of `rows`, fp32 [rows, vocabulary].

        Of several ranks, only rank 0 gets the logits.
        """
        if self._shard.is_first_stage:
            x = self.embed(tokens)
        else:
            x = self._communicator.receive_rows(len(tokens), self.shape.hidden, self._norm)
        cos, sin = self._rotary.at(positions)
        # The next stage needs all rows, the output embeddings only the sampled ones.
        is_last = self._shard.is_last_stage
        is_plain_step = self._state_recorder is None and not self.adapters.current
        if self._fused is not None and is_plain_step and self._fused.can_run(layout):
            wanted = rows if is_last else torch.arange(len(x))
            x = self._fused.run(x, kv, cos, sin, layout, wanted, self.interrupt)
        else:
            x = self._run_layers(x, kv, cos, sin, layout)
            x = x[rows] if is_last else x
        if self.interrupt is not None:
            self.interrupt.check()
        logits = None
        if self._head is not None:
            normed = self._row_ops.rms_norm(x, self._norm, self.shape.rms_epsilon)
            logits = self._head(normed).float()
        else:
            self._communicator.send_rows(x)
        return self._communicator.gather_logits(logits, len(rows), self._shard, x)

    @property
    def _state_recorder(self) -> Callable[[int, Tensor], None] | None:
        """The recorder of the inputs of layers: a draft head of this rank, or rank 0's."""
        return self.record_states or self._communicator.send_layer_input

    def _run_layers(
        self, x: Tensor, kv: list[LayerKV], cos: Tensor, sin: Tensor, layout: AttentionLayout
    ) -> Tensor:
        ops, epsilon, record = self._row_ops, self.shape.rms_epsilon, self._state_recorder
        for index, layer, layer_kv in zip(self._shard.layers, self._layers, kv, strict=True):
            if self.interrupt is not None:
                self.interrupt.check()
            if record is not None:
                record(index, x)
            normed = ops.rms_norm(x, layer.attention_norm, epsilon)
            output = layer.attention(normed, layer_kv, cos, sin, layout)
            x, normed = ops.add_rms_norm(x, output, layer.mlp_norm, epsilon)
            x = x + layer.mlp(normed)
            count_layer()
        return x


def _without_adapters(linear: Linear) -> Linear:
    while isinstance(linear, LoraLinear):
        linear = linear.base
    return linear


def _rotary_table(
    shape: DecoderShape, source: WeightSource, context_tokens: int, device: str, dtype: torch.dtype
) -> RotaryTable:
    name = "rope_freqs.weight"
    factors = source.tensor(name, (shape.head_dim // 2,)) if source.has(name) else None
    inverse = inverse_frequencies(shape.head_dim, shape.rope_theta, shape.rope_scaling, factors)
    return RotaryTable(inverse, context_tokens, device, dtype, shape.rope_scaling)
