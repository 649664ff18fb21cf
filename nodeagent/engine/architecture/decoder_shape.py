"""The shape of a decoder-only model, whatever file format it was read from."""

from dataclasses import dataclass

import torch

from nodeagent.engine.architecture.errors import CheckpointError
from nodeagent.engine.architecture.rope_scaling import RopeScaling

_DIMENSION_MAX = 2**40
_ROPE_THETA_MAX = 1e15


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """The numbers that determine the shape of every weight and how the model uses it."""

    layers: int
    hidden: int
    intermediate: int
    """Width of the MLP; of one expert where the model has `experts`."""
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context_tokens: int
    rms_epsilon: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    tied_embeddings: bool = False
    family: str = "llama"
    """A key of `model.families.FAMILIES`."""
    window_tokens: int | None = None
    """Sliding window: a token attends to this many tokens, itself included. None: to all."""
    experts: int = 0
    experts_per_token: int = 0
    shares_normalised: bool = True
    """Whether the router weights of the chosen experts are scaled to sum to one."""

    def __post_init__(self) -> None:
        numbers = [self.layers, self.hidden, self.intermediate, self.heads, self.kv_heads]
        numbers += [self.head_dim, self.vocabulary, self.context_tokens]
        if self.window_tokens is not None:
            numbers.append(self.window_tokens)
        # The comparisons are written so that NaN fails them.
        is_sound = 0 < self.rms_epsilon < 1 and 0 < self.rope_theta < _ROPE_THETA_MAX
        if min(numbers) < 1 or max(numbers) > _DIMENSION_MAX or not is_sound:
            raise CheckpointError(f"cannot use a model of this shape: {self}")
        if self.heads % self.kv_heads or self.head_dim % 2:
            raise CheckpointError(
                f"cannot share {self.kv_heads} KV heads among {self.heads} heads of"
                f" {self.head_dim} dimensions"
            )
        if self.experts and not 1 <= self.experts_per_token <= self.experts:
            raise CheckpointError(
                f"cannot route each token to {self.experts_per_token} of {self.experts} experts"
            )

    def parameters(self) -> int:
        """Return the number of weights, without biases and per-head norms (a negligible part)."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        mlp = 3 * self.hidden * self.intermediate
        if self.experts:
            mlp = self.experts * (mlp + self.hidden)
        layer = attention + mlp + 2 * self.hidden
        embeddings = self.vocabulary * self.hidden * (1 if self.tied_embeddings else 2)
        return self.layers * layer + embeddings + self.hidden

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return the size of one token's keys and values in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * dtype.itemsize
