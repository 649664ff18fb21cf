"""An EAGLE-3 head: one layer that reads what the served model thought, and guesses what follows.

At each place it reads three hidden states of the served model, made one by `fc`, beside the
embedding of the token that came next. Where it goes on from its own guess, its own last hidden
state stands for the model's.
"""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import linear

from nodeagent.engine.model.layers.attention import LayerKV, Layout
from nodeagent.engine.model.layers.linear import Keeping
from nodeagent.engine.model.layers.lora import Adding
from nodeagent.engine.model.layers.norm import rms_norm
from nodeagent.engine.model.layers.rope import Rope, inverse_frequencies
from nodeagent.engine.model.llama import LlamaAttention, LlamaMlp
from nodeagent.engine.weights.eagle3 import HeadFolder
from nodeagent.engine.weights.weight_loading import Weights, WeightSource

_FC: Final = "fc.weight"


class Features:
    """What the head reads of the served model: one vector a token, in the slots of its KV."""

    def __init__(self, source: WeightSource, head: HeadFolder, layers: tuple[int, ...]) -> None:
        self._layers = layers
        self.afar = False
        """Whether it is told of each step what other ranks heard."""
        hidden, width = head.shape.hidden, head.target_hidden
        fc = source.tensor(_FC, (hidden, len(layers) * width))
        self._parts = tuple(fc[:, at : at + width] for at in range(0, fc.shape[1], width))
        self._fused: Tensor | None = None
        self._slots = torch.empty(0)
        self._begun: deque[Tensor] = deque()
        """The slots of steps of which other ranks are still to tell."""

    def place(self, slots: int, device: str, dtype: torch.dtype) -> None:
        """Take memory for so many slots."""
        self._parts = tuple(part.to(device, dtype).contiguous() for part in self._parts)
        self._slots = torch.zeros(slots, self._parts[0].shape[0], device=device, dtype=dtype)

    def hear(self, layer: int, x: Tensor) -> None:
        """Take the hidden states that go into `layer`, for the flat batch."""
        for heard, part in zip(self._layers, self._parts, strict=True):
            if heard == layer:
                answer = linear(x, part)
                self._fused = answer if self._fused is None else self._fused + answer

    def keep(self, slots: Tensor) -> None:
        """Keep what was heard in this step, row by row in `slots`."""
        if self._fused is None:
            self._slots.index_fill_(0, slots, 0)
        else:
            self._slots.index_copy_(0, slots, self._fused)
        self._fused = None
        if self.afar:
            self._begun.append(slots)

    def arrive(self, heard: Mapping[int, Tensor]) -> None:
        """Add what other ranks heard in the oldest step of which they had not told."""
        slots = self._begun.popleft()
        for layer, x in heard.items():
            self.hear(layer, x)
        if self._fused is not None:
            self._slots.index_add_(0, slots, self._fused)
        self._fused = None

    def forget(self, blocks: Tensor, block_tokens: int) -> None:
        """Zero `blocks`, whose KV came from elsewhere: what was thought there is not known."""
        self._slots.view(-1, block_tokens, self._slots.shape[-1]).index_fill_(0, blocks, 0)

    def at(self, slots: Tensor) -> Tensor:
        """Return what was kept in `slots`."""
        return self._slots[slots]


class HeadAttention(LlamaAttention):
    """Attention over the embedding and the hidden state side by side."""

    inputs = 2


class Eagle3:
    """The head's weights and its forward pass."""

    def __init__(
        self,
        source: WeightSource,
        head: HeadFolder,
        features: Features,
        embed: Callable[[Tensor], Tensor],
        device: str,
        dtype: torch.dtype,
        context_tokens: int,
    ) -> None:
        shape = self.shape = head.shape
        self.adding = Adding()
        self.going_on = False
        """Whether the next pass reads the hidden states that the last one made."""
        self._features = features
        self._norm_first = head.config.norm_before_residual
        weights = Weights(source, device, dtype, Keeping.PLAIN).bare()
        self._embed = embed
        if source.has("embed_tokens.weight"):
            table = weights.read("embed_tokens.weight", shape.vocabulary, shape.hidden)
            self._embed = table.__getitem__
        at = head.layer
        self._input_norm = weights.read(f"{at}input_layernorm.weight", shape.hidden)
        self._hidden_norm = weights.read(f"{at}hidden_norm.weight", shape.hidden)
        self._attention = HeadAttention(weights, shape, at)
        self._mlp_norm = weights.read(f"{at}post_attention_layernorm.weight", shape.hidden)
        self._mlp = LlamaMlp(weights, shape, at)
        self._norm = weights.read("norm.weight", shape.hidden)
        self._head = weights.linear("lm_head.weight", head.choices, shape.hidden)
        inverse = inverse_frequencies(shape.head_dim, shape.rope_theta, shape.rope_scaling, None)
        self._rope = Rope(inverse, context_tokens, device, dtype, shape.rope_scaling)
        self._made = torch.empty(0)
        weights.begin()()

    def forward(
        self, tokens: Tensor, positions: Tensor, kv: list[LayerKV], layout: Layout, rows: Tensor
    ) -> Tensor:
        """Run the flat batch; return logits [rows, choices] in fp32 for the `rows` given."""
        epsilon = self.shape.rms_epsilon
        given = self._made if self.going_on else self._features.at(layout.write_slots)
        normed = rms_norm(given, self._hidden_norm, epsilon)
        read = torch.cat((rms_norm(self._embed(tokens), self._input_norm, epsilon), normed), -1)
        cos, sin = self._rope.at(positions)
        x = normed if self._norm_first else given
        x = x + self._attention(read, kv[0], cos, sin, layout)
        x = x + self._mlp(rms_norm(x, self._mlp_norm, epsilon))
        self._made = x[rows]
        return self._head(rms_norm(self._made, self._norm, epsilon)).float()

    def chain(self, going_on: bool) -> None:
        """Say whether the next pass goes on from this one's own hidden states."""
        self.going_on = going_on
