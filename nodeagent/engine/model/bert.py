"""BERT encoders: each token of a text attends to all others; the output is a vector or scores.

The texts of a batch are padded to the longest. Padding is masked, so that the output for a text
does not depend on the texts it is batched with.
"""

import torch
from torch import Tensor
from torch.nn.functional import (
    embedding,
    gelu,
    layer_norm,
    linear,
    normalize,
    scaled_dot_product_attention,
)

from nodeagent.engine.architecture.bert_shape import BertShape
from nodeagent.engine.kernels.layer_count import count_layer
from nodeagent.engine.model.weight_loader import WeightLoader
from nodeagent.engine.weights.weight_source import HeaderOnlySource, WeightSource


class _BertLinear:
    """A linear layer with a bias; several with the same input are stacked into one product."""

    def __init__(
        self, weights: WeightLoader, prefix: str, parts: dict[str, int], columns: int
    ) -> None:
        named = {f"{name}.weight": rows for name, rows in parts.items()}
        self.weight = weights.stack(prefix, named, columns)
        self.bias = weights.stack(prefix, {f"{n}.bias": rows for n, rows in parts.items()})

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class _BertNorm:
    def __init__(self, weights: WeightLoader, prefix: str, shape: BertShape) -> None:
        self._weight = weights.read(f"{prefix}.weight", shape.hidden)
        self._bias = weights.read(f"{prefix}.bias", shape.hidden)
        self._epsilon = shape.epsilon

    def __call__(self, x: Tensor) -> Tensor:
        return layer_norm(x, x.shape[-1:], self._weight, self._bias, self._epsilon)


class _BertLayer:
    def __init__(self, weights: WeightLoader, prefix: str, shape: BertShape) -> None:
        hidden, intermediate = shape.hidden, shape.intermediate
        parts = dict.fromkeys(("query", "key", "value"), hidden)
        self._heads = shape.heads
        self._query_key_value = _BertLinear(weights, f"{prefix}attention.self.", parts, hidden)
        self._output = _BertLinear(weights, f"{prefix}attention.output.", {"dense": hidden}, hidden)
        self._output_norm = _BertNorm(weights, f"{prefix}attention.output.LayerNorm", shape)
        self._up = _BertLinear(weights, f"{prefix}intermediate.", {"dense": intermediate}, hidden)
        self._down = _BertLinear(weights, f"{prefix}output.", {"dense": hidden}, intermediate)
        self._norm = _BertNorm(weights, f"{prefix}output.LayerNorm", shape)

    def __call__(self, x: Tensor, visible: Tensor) -> Tensor:
        texts, length, _ = x.shape
        mixed = (
            self._query_key_value(x).view(texts, length, 3, self._heads, -1).permute(2, 0, 3, 1, 4)
        )
        query, key, value = mixed.unbind(0)
        output = scaled_dot_product_attention(query, key, value, attn_mask=visible)
        x = self._output_norm(x + self._output(output.transpose(1, 2).reshape(x.shape)))
        return self._norm(x + self._down(gelu(self._up(x))))


class Bert:
    """The weights, and the forward pass over a padded batch of texts."""

    def __init__(
        self, shape: BertShape, source: WeightSource, device: str, dtype: torch.dtype
    ) -> None:
        self.shape = shape
        self.device = device
        weights = WeightLoader(source, device, dtype)
        # Classifiers prefix the names of the encoder's weights, bare encoders do not.
        prefix = "bert." if source.has("bert.embeddings.word_embeddings.weight") else ""
        tables = f"{prefix}embeddings."
        self._tokens = weights.read(
            f"{tables}word_embeddings.weight", shape.vocabulary, shape.hidden
        )
        self._positions = weights.read(
            f"{tables}position_embeddings.weight", shape.positions, shape.hidden
        )
        self._token_types = weights.read(
            f"{tables}token_type_embeddings.weight", shape.kinds, shape.hidden
        )
        self._norm = _BertNorm(weights, f"{tables}LayerNorm", shape)
        self._layers = [
            _BertLayer(weights, f"{prefix}encoder.layer.{n}.", shape) for n in range(shape.layers)
        ]
        if shape.labels:
            hidden = shape.hidden
            self._pooler = _BertLinear(weights, f"{prefix}pooler.", {"dense": hidden}, hidden)
            self._head = _BertLinear(weights, "", {"classifier": shape.labels}, hidden)
        weights.start_reads()()

    @torch.inference_mode()
    def run(self, tokens: Tensor, kinds: Tensor, lengths: Tensor) -> Tensor:
        """Return fp32 [texts, width] for padded [texts, longest] tokens and segment kinds."""
        longest = tokens.shape[1]
        is_token = torch.arange(longest, device=tokens.device) < lengths[:, None]
        x = embedding(tokens, self._tokens) + embedding(kinds, self._token_types)
        x = self._norm(x + self._positions[:longest])
        visible = is_token[:, None, None, :]
        for layer in self._layers:
            x = layer(x, visible)
            count_layer()
        if self.shape.labels:
            return self._head(self._pooler(x[:, 0]).tanh()).float()
        if self.shape.pooling == "cls":
            pooled = x[:, 0].float()
        else:
            # Filled, not multiplied by zero: padding may hold NaN.
            summed = x.float().masked_fill(~is_token[:, :, None], 0).sum(1)
            pooled = summed / lengths[:, None]
        return normalize(pooled, dim=-1) if self.shape.normalised else pooled


def check_bert_weights(shape: BertShape, source: WeightSource) -> None:
    """Raise CheckpointError where a weight is missing or misshapen; reads only headers."""
    Bert(shape, HeaderOnlySource(source), "meta", torch.float32)
