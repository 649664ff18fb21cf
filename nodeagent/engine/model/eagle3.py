"""An EAGLE-3 draft head: one layer that reads hidden states of the served model and drafts tokens.

At each position it reads three hidden states of the served model, reduced to one vector by `fc`,
beside the embedding of the next token. When it continues from its own draft, its own last hidden
state takes the place of the served model's. Paper: https://arxiv.org/abs/2503.01840.
"""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import linear

from nodeagent.engine.kernels.attention_backend import AttentionLayout, LayerKV
from nodeagent.engine.kernels.step_interrupt import StepInterrupt
from nodeagent.engine.model.llama import LlamaAttention, LlamaMlp
from nodeagent.engine.model.lora import ActiveAdapters
from nodeagent.engine.model.rotary import RotaryTable, inverse_frequencies
from nodeagent.engine.model.weight_loader import WeightLoader
from nodeagent.engine.weights.eagle3_folder import EagleFolder
from nodeagent.engine.weights.weight_source import WeightSource

_FC: Final = "fc.weight"


class HiddenStateFeatures:
    """The head's inputs from the served model: one vector per token, in the slots of the KV cache.

    `fc` is linear, so its product is summed up layer by layer while the served model runs.
    """

    def __init__(self, source: WeightSource, head: EagleFolder, layers: tuple[int, ...]) -> None:
        """Record the inputs of `layers` of the served model."""
        self._layers = layers
        self.has_remote_states = False
        """Whether other ranks send states of each step later, for `add_remote`."""
        hidden, width = head.shape.hidden, head.target_hidden
        fc = source.tensor(_FC, (hidden, len(layers) * width))
        columns = range(0, fc.shape[1], width)
        self._fc_parts = tuple(fc[:, first : first + width] for first in columns)
        self._step_sum: Tensor | None = None
        self._slots = torch.empty(0)
        self._awaiting_remote: deque[Tensor] = deque()
        """The slots of steps whose remote states have not arrived."""

    def allocate(self, slots: int, device: str, dtype: torch.dtype) -> None:
        """Allocate a vector for each KV slot."""
        self._fc_parts = tuple(part.to(device, dtype).contiguous() for part in self._fc_parts)
        width = self._fc_parts[0].shape[0]
        self._slots = torch.zeros(slots, width, device=device, dtype=dtype)

    def record(self, layer: int, x: Tensor) -> None:
        """Add the input `x` of `layer`, for the rows of the current step."""
        for recorded_layer, part in zip(self._layers, self._fc_parts, strict=True):
            if recorded_layer == layer:
                product = linear(x, part)
                self._step_sum = product if self._step_sum is None else self._step_sum + product

    def store(self, slots: Tensor) -> None:
        """Store the vectors of the current step, row by row in `slots`."""
        if self._step_sum is None:
            self._slots.index_fill_(0, slots, 0)
        else:
            self._slots.index_copy_(0, slots, self._step_sum)
        self._step_sum = None
        if self.has_remote_states:
            self._awaiting_remote.append(slots)

    def add_remote(self, states: Mapping[int, Tensor]) -> None:
        """Add the layer inputs that other ranks recorded, in the oldest step that awaits them."""
        slots = self._awaiting_remote.popleft()
        for layer, x in states.items():
            self.record(layer, x)
        if self._step_sum is not None:
            self._slots.index_add_(0, slots, self._step_sum)
        self._step_sum = None

    def clear_blocks(self, blocks: Tensor, block_tokens: int) -> None:
        """Zero `blocks`: their KV was copied from elsewhere, so their hidden states are unknown."""
        self._slots.view(-1, block_tokens, self._slots.shape[-1]).index_fill_(0, blocks, 0)

    def read(self, slots: Tensor) -> Tensor:
        """Return the vectors in `slots`."""
        return self._slots[slots]


class EagleAttention(LlamaAttention):
    """Attention over the embedding and the hidden state side by side."""

    inputs = 2


class Eagle3:
    """The head's weights and its forward pass."""

    def __init__(
        self,
        source: WeightSource,
        head: EagleFolder,
        features: HiddenStateFeatures,
        embed: Callable[[Tensor], Tensor],
        device: str,
        dtype: torch.dtype,
        context_tokens: int,
    ) -> None:
        """Read the head. `embed` is the served model's, used unless the head has its own."""
        shape = self.shape = head.shape
        self.adapters = ActiveAdapters()
        self.interrupt: StepInterrupt | None = None
        """Not read: a head is one layer, which is computed to its end."""
        self._uses_own_states = False
        self._features = features
        self._norm_first = head.config.norm_before_residual
        weights = WeightLoader(source, device, dtype).without_adapters()
        self._row_ops = weights.row_ops
        self._embed = embed
        if source.has("embed_tokens.weight"):
            table = weights.read("embed_tokens.weight", shape.vocabulary, shape.hidden)
            self._embed = table.__getitem__
        prefix = head.layer
        self._input_norm = weights.read(f"{prefix}input_layernorm.weight", shape.hidden)
        self._hidden_norm = weights.read(f"{prefix}hidden_norm.weight", shape.hidden)
        self._attention = EagleAttention(weights, shape, prefix)
        self._mlp_norm = weights.read(f"{prefix}post_attention_layernorm.weight", shape.hidden)
        self._mlp = LlamaMlp(weights, shape, prefix)
        self._norm = weights.read("norm.weight", shape.hidden)
        self._head = weights.linear("lm_head.weight", head.choices, shape.hidden)
        inverse = inverse_frequencies(shape.head_dim, shape.rope_theta, shape.rope_scaling, None)
        self._rotary = RotaryTable(inverse, context_tokens, device, dtype, shape.rope_scaling)
        self._own_states = torch.empty(0)
        weights.start_reads()()

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        kv: list[LayerKV],
        layout: AttentionLayout,
        rows: Tensor,
    ) -> Tensor:
        """Run the flat batch; return the logits of `rows`, fp32 [rows, choices]."""
        ops, epsilon = self._row_ops, self.shape.rms_epsilon
        states = (
            self._own_states if self._uses_own_states else self._features.read(layout.write_slots)
        )
        normed = ops.rms_norm(states, self._hidden_norm, epsilon)
        embedded = ops.rms_norm(self._embed(tokens), self._input_norm, epsilon)
        cos, sin = self._rotary.at(positions)
        x = normed if self._norm_first else states
        x = x + self._attention(torch.cat((embedded, normed), -1), kv[0], cos, sin, layout)
        x = x + self._mlp(ops.rms_norm(x, self._mlp_norm, epsilon))
        self._own_states = x[rows]
        return self._head(ops.rms_norm(self._own_states, self._norm, epsilon)).float()

    def use_own_states(self, uses_own_states: bool) -> None:
        """Choose whether the next pass reads the hidden states of this head's last pass."""
        self._uses_own_states = uses_own_states
