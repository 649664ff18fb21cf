"""Reads the folder of an EAGLE-3 draft head (`LlamaForCausalLMEagle3`).

The head has one layer (`midlayer.` or `layers.0.`), `fc` over three hidden states of the served
model, `norm`, and `lm_head` over a smaller draft vocabulary: `d2t` + draft token is the served
model's token. vLLM's speculators (`Eagle3Speculator`) are the same, with the shape in a nested
config.
"""

from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from nodeagent.engine.architecture.decoder_shape import DecoderShape
from nodeagent.engine.architecture.errors import CheckpointError
from nodeagent.engine.weights.hf_config import DecoderConfig, read_json, shape_of
from nodeagent.engine.weights.safetensors_folder import SafetensorsFiles

_ARCHITECTURES: Final = frozenset(
    {"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel"}
)
_HIDDEN_STATES: Final = 3


class _ArchitecturesConfig(msgspec.Struct):
    architectures: list[str] = []


class EagleConfig(msgspec.Struct):
    """The nested part of config.json that may name the hidden states the head was trained on."""

    eagle_aux_hidden_state_layer_ids: list[int] | None = None


class EagleHeadConfig(DecoderConfig):
    """config.json of a head: that of a decoder and more."""

    draft_vocab_size: int | None = None
    target_hidden_size: int | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool | None = None
    norm_output: bool | None = None
    fc_norm: bool | None = None
    eagle_aux_hidden_state_layer_ids: list[int] | None = None
    eagle_config: EagleConfig | None = None


def is_eagle_head(folder: Path) -> bool:
    """Return whether `folder` holds an EAGLE-3 head."""
    path = folder / "config.json"
    if not path.exists():
        return False
    kind: _ArchitecturesConfig = read_json(path, _ArchitecturesConfig)
    return not _ARCHITECTURES.isdisjoint(kind.architectures)


class EagleFolder(SafetensorsFiles):
    """The weights, the shape and the config of a head."""

    def __init__(self, folder: Path) -> None:
        self.config = _read(folder / "config.json")
        self.shape: DecoderShape = shape_of(folder, self.config)
        if self.shape.layers != 1:
            raise CheckpointError(
                f"cannot draft with {folder}: {self.shape.layers} layers, one is supported"
            )
        self.choices = self.config.draft_vocab_size or self.shape.vocabulary
        if not 1 <= self.choices <= self.shape.vocabulary:
            raise CheckpointError(
                f"cannot draft with {folder}: {self.choices} tokens of {self.shape.vocabulary}"
            )
        super().__init__(folder)
        self.layer = "midlayer." if self.has("midlayer.hidden_norm.weight") else "layers.0."
        self.target_hidden = self.config.target_hidden_size or self.shape.hidden

    def parameters(self) -> int:
        """Return the number of weights."""
        shape = self.shape
        attention = shape.hidden * shape.head_dim * (3 * shape.heads + 4 * shape.kv_heads)
        mlp = 3 * shape.hidden * shape.intermediate
        fused = _HIDDEN_STATES * self.target_hidden * shape.hidden
        has_embeddings = self.has("embed_tokens.weight")
        tables = (self.choices + (shape.vocabulary if has_embeddings else 0)) * shape.hidden
        return attention + mlp + fused + tables

    def layers_heard(self, layers: int) -> tuple[int, ...]:
        """Return the layers of the served model (of `layers`) whose inputs the head reads."""
        # vLLM's speculators name the layers that a state is the input of, others the layers that it
        # is the output of.
        config = self.config.eagle_config
        outputs = (config.eagle_aux_hidden_state_layer_ids if config else None) or ()
        recorded = self.config.eagle_aux_hidden_state_layer_ids
        recorded = recorded or [layer + 1 for layer in outputs] or [2, layers // 2, layers - 3]
        if len(recorded) != _HIDDEN_STATES or not all(0 <= layer < layers for layer in recorded):
            raise CheckpointError(
                f"cannot draft with {self._folder}: hidden states before layers {recorded} of a"
                f" model of {layers}: three within it are needed"
            )
        return tuple(recorded)

    def targets(self) -> torch.Tensor:
        """Return the served model's token of each draft token."""
        draft_tokens = torch.arange(self.choices)
        if not self.has("d2t"):
            if self.choices == self.shape.vocabulary:
                return draft_tokens
            raise CheckpointError(f"cannot read {self._folder}: it lacks d2t")
        offsets = self.integers("d2t", (self.choices,))
        targets = draft_tokens + offsets
        if int(targets.min()) < 0 or int(targets.max()) >= self.shape.vocabulary:
            raise CheckpointError(
                f"cannot read {self._folder}: d2t gives tokens outside the vocabulary of"
                f" {self.shape.vocabulary}"
            )
        return targets


def _read(path: Path) -> EagleHeadConfig:
    content: dict[str, Any] = read_json(path, dict[str, Any])
    layer = content.get("transformer_layer_config")
    try:
        config = msgspec.convert({**(layer or {}), **content}, EagleHeadConfig)
    except (msgspec.ValidationError, TypeError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    if config.norm_before_fc or config.norm_output or config.fc_norm:
        raise CheckpointError(f"cannot draft with {path.parent}: more than one norm is unsupported")
    return config
