"""What a Llama-family model is, in numbers, whichever file says so; how its weights are read."""

from dataclasses import dataclass
from typing import Protocol

import torch

from nodeagent.engine.layers.rope import Llama3Scaling


class CheckpointError(Exception):
    """A model file cannot be used; the message says which and why."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The numbers that fix every weight's shape."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context_tokens: int
    rms_epsilon: float
    rope_theta: float
    rope_scaling: Llama3Scaling | None = None
    tied_embeddings: bool = False

    def __post_init__(self) -> None:
        numbers = [self.layers, self.hidden, self.intermediate, self.heads, self.kv_heads]
        numbers += [self.head_dim, self.vocabulary, self.context_tokens]
        if min(numbers) < 1 or self.rms_epsilon <= 0 or self.rope_theta <= 0:
            raise CheckpointError(f"cannot use a model of this shape: {self}")
        if self.heads % self.kv_heads or self.head_dim % 2:
            raise CheckpointError(
                f"cannot share {self.kv_heads} KV heads among {self.heads} heads of"
                f" {self.head_dim} dimensions"
            )

    def parameters(self) -> int:
        """Weights in all."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        embeddings = self.vocabulary * self.hidden * (1 if self.tied_embeddings else 2)
        return self.layers * layer + embeddings + self.hidden

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * dtype.itemsize


class WeightSource(Protocol):
    """Weights by their Hugging Face name, checked against the shape that the model expects."""

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Read one weight in the dtype it is stored in, or fp32 where it is stored quantised."""
        ...

    def has(self, name: str) -> bool:
        """True where the files hold `name`."""
        ...
