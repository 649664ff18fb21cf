"""BERT: reads whole texts, each token seeing all others; answers with a vector or with scores.

Texts of a batch are padded to the longest; what is padding is masked, so that a text's answer
does not depend on its company.
"""

from dataclasses import dataclass
from typing import Literal

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

from nodeagent.engine.model.layers.linear import Keeping
from nodeagent.engine.model.shape import CheckpointError
from nodeagent.engine.weights.weight_loading import Survey, Weights, WeightSource

Pooling = Literal["mean", "cls"]


@dataclass(frozen=True, slots=True)
class BertShape:
    """The numbers that fix every weight's shape, and what is made of the last layer.

    With `labels` it scores (a pooled first token, then a linear head); else it embeds.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    vocabulary: int
    positions: int
    kinds: int
    """Kinds of segments: first text, second text."""
    epsilon: float
    labels: int = 0
    pooling: Pooling = "mean"
    normalised: bool = True

    def __post_init__(self) -> None:
        numbers = [self.layers, self.hidden, self.intermediate, self.heads]
        numbers += [self.vocabulary, self.positions, self.kinds]
        sound = 0 <= self.epsilon < 1 and self.labels >= 0
        if min(numbers) < 1 or max(numbers) > 2**40 or not sound or self.hidden % self.heads:
            raise CheckpointError(f"cannot use a model of this shape: {self}")

    @property
    def width(self) -> int:
        """Numbers in one answer."""
        return self.labels or self.hidden

    def parameters(self) -> int:
        """Weights in all."""
        layer = 4 * self.hidden * (self.hidden + 1) + 4 * self.hidden
        layer += 2 * self.hidden * self.intermediate + self.intermediate + self.hidden
        embeddings = (self.vocabulary + self.positions + self.kinds + 2) * self.hidden
        head = (self.hidden + 1) * (self.hidden + self.labels) if self.labels else 0
        return self.layers * layer + embeddings + head


class _Dense:
    """A product with a bias; several of the same input can be read as one."""

    def __init__(self, weights: Weights, prefix: str, parts: dict[str, int], columns: int) -> None:
        named = {f"{name}.weight": rows for name, rows in parts.items()}
        self.weight = weights.stack(prefix, named, columns)
        self.bias = weights.stack(prefix, {f"{n}.bias": rows for n, rows in parts.items()})

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class _Norm:
    def __init__(self, weights: Weights, prefix: str, shape: BertShape) -> None:
        self._weight = weights.read(f"{prefix}.weight", shape.hidden)
        self._bias = weights.read(f"{prefix}.bias", shape.hidden)
        self._epsilon = shape.epsilon

    def __call__(self, x: Tensor) -> Tensor:
        return layer_norm(x, x.shape[-1:], self._weight, self._bias, self._epsilon)


class _Layer:
    def __init__(self, weights: Weights, prefix: str, shape: BertShape) -> None:
        hidden, wide = shape.hidden, shape.intermediate
        parts = dict.fromkeys(("query", "key", "value"), hidden)
        self._heads = shape.heads
        self._mixed = _Dense(weights, f"{prefix}attention.self.", parts, hidden)
        self._answer = _Dense(weights, f"{prefix}attention.output.", {"dense": hidden}, hidden)
        self._answer_norm = _Norm(weights, f"{prefix}attention.output.LayerNorm", shape)
        self._up = _Dense(weights, f"{prefix}intermediate.", {"dense": wide}, hidden)
        self._down = _Dense(weights, f"{prefix}output.", {"dense": hidden}, wide)
        self._norm = _Norm(weights, f"{prefix}output.LayerNorm", shape)

    def __call__(self, x: Tensor, seen: Tensor) -> Tensor:
        texts, length, _ = x.shape
        mixed = self._mixed(x).view(texts, length, 3, self._heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = mixed.unbind(0)
        answer = scaled_dot_product_attention(query, key, value, attn_mask=seen)
        x = self._answer_norm(x + self._answer(answer.transpose(1, 2).reshape(x.shape)))
        return self._norm(x + self._down(gelu(self._up(x))))


class Bert:
    """The weights and the forward pass over a padded batch of texts."""

    def __init__(
        self, shape: BertShape, source: WeightSource, device: str, dtype: torch.dtype
    ) -> None:
        self.shape = shape
        self.device = device
        weights = Weights(source, device, dtype, Keeping.PLAIN)
        # Classifiers keep the encoder below their own name, bare encoders do not.
        at = "bert." if source.has("bert.embeddings.word_embeddings.weight") else ""
        tables = f"{at}embeddings."
        self._words = weights.read(
            f"{tables}word_embeddings.weight", shape.vocabulary, shape.hidden
        )
        self._places = weights.read(
            f"{tables}position_embeddings.weight", shape.positions, shape.hidden
        )
        self._kinds = weights.read(
            f"{tables}token_type_embeddings.weight", shape.kinds, shape.hidden
        )
        self._norm = _Norm(weights, f"{tables}LayerNorm", shape)
        self._layers = [
            _Layer(weights, f"{at}encoder.layer.{n}.", shape) for n in range(shape.layers)
        ]
        if shape.labels:
            hidden = shape.hidden
            self._pooler = _Dense(weights, f"{at}pooler.", {"dense": hidden}, hidden)
            self._head = _Dense(weights, "", {"classifier": shape.labels}, hidden)
        weights.begin()()

    @torch.inference_mode()
    def answer(self, tokens: Tensor, kinds: Tensor, lengths: Tensor) -> Tensor:
        """Return fp32 [texts, width] for padded [texts, longest] tokens and segment kinds."""
        longest = tokens.shape[1]
        real = torch.arange(longest, device=tokens.device) < lengths[:, None]
        x = embedding(tokens, self._words) + embedding(kinds, self._kinds)
        x = self._norm(x + self._places[:longest])
        seen = real[:, None, None, :]
        for layer in self._layers:
            x = layer(x, seen)
        if self.shape.labels:
            return self._head(self._pooler(x[:, 0]).tanh()).float()
        if self.shape.pooling == "cls":
            pooled = x[:, 0].float()
        else:
            # Not a product with nought: padding may hold what is no number.
            summed = x.float().masked_fill(~real[:, :, None], 0).sum(1)
            pooled = summed / lengths[:, None]
        return normalize(pooled, dim=-1) if self.shape.normalised else pooled


def survey_bert(shape: BertShape, source: WeightSource) -> None:
    """Raise CheckpointError where a weight is missing or of another shape; reads none."""
    Bert(shape, Survey(source), "meta", torch.float32)
