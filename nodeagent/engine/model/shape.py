"""What a decoder is, in numbers, whichever file says so."""

from dataclasses import dataclass

import torch

from nodeagent.engine.model.layers.rope import Scaling


class CheckpointError(Exception):
    """A model file cannot be used; the message says which and why."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The numbers that fix every weight's shape.

    `family` names the class in `models.families`. `intermediate` is one expert's where there are
    `experts`. A token sees `window_tokens` tokens back, itself included; all where it is None.
    """

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
    rope_scaling: Scaling | None = None
    tied_embeddings: bool = False
    family: str = "llama"
    window_tokens: int | None = None
    experts: int = 0
    experts_per_token: int = 0
    shares_normalised: bool = True
    """Whether the chosen experts' shares are made to add up to one."""

    def __post_init__(self) -> None:
        numbers = [self.layers, self.hidden, self.intermediate, self.heads, self.kv_heads]
        numbers += [self.head_dim, self.vocabulary, self.context_tokens]
        if self.window_tokens is not None:
            numbers.append(self.window_tokens)
        # Written so that NaN fails too.
        sound = 0 < self.rms_epsilon < 1 and 0 < self.rope_theta < 1e15
        if min(numbers) < 1 or max(numbers) > 2**40 or not sound:
            raise CheckpointError(f"cannot use a model of this shape: {self}")
        if self.heads % self.kv_heads or self.head_dim % 2:
            raise CheckpointError(
                f"cannot share {self.kv_heads} KV heads among {self.heads} heads of"
                f" {self.head_dim} dimensions"
            )
        if self.experts and not 1 <= self.experts_per_token <= self.experts:
            raise CheckpointError(
                f"cannot ask {self.experts_per_token} of {self.experts} experts for each token"
            )

    def parameters(self) -> int:
        """Weights in all; the few of biases and of norms within attention are left out."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        mlp = 3 * self.hidden * self.intermediate
        if self.experts:
            mlp = self.experts * (mlp + self.hidden)
        layer = attention + mlp + 2 * self.hidden
        embeddings = self.vocabulary * self.hidden * (1 if self.tied_embeddings else 2)
        return self.layers * layer + embeddings + self.hidden

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * dtype.itemsize
