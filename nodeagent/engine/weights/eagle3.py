"""The folder of an EAGLE-3 head, as its authors and others publish it: `LlamaForCausalLMEagle3`.

One layer (`midlayer.`, or `layers.0.`), `fc` over three hidden states of the served model, `norm`,
and `lm_head` over a vocabulary of its own: `d2t` is what to add to its tokens to get the model's.
vLLM's speculators (`Eagle3Speculator`) have the same, the layer's numbers in a config of its own.
"""

from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from nodeagent.engine.model.shape import CheckpointError, ModelShape
from nodeagent.engine.weights.hf_config import DecoderConfig, read_json, shape_of
from nodeagent.engine.weights.safetensors import SafetensorsFiles

_ARCHITECTURES: Final = frozenset(
    {"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel"}
)
_HIDDEN_STATES: Final = 3


class _Kind(msgspec.Struct):
    architectures: list[str] = []


class EagleConfig(msgspec.Struct):
    """Which hidden states a head was trained on, where it says so."""

    eagle_aux_hidden_state_layer_ids: list[int] | None = None


class HeadConfig(DecoderConfig):
    """What config.json of a head adds to that of a decoder."""

    draft_vocab_size: int | None = None
    target_hidden_size: int | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool | None = None
    norm_output: bool | None = None
    fc_norm: bool | None = None
    eagle_aux_hidden_state_layer_ids: list[int] | None = None
    eagle_config: EagleConfig | None = None


def is_head(folder: Path) -> bool:
    """True where `folder` holds an EAGLE-3 head."""
    path = folder / "config.json"
    if not path.exists():
        return False
    kind: _Kind = read_json(path, _Kind)
    return not _ARCHITECTURES.isdisjoint(kind.architectures)


class HeadFolder(SafetensorsFiles):
    """A head's weights and numbers."""

    def __init__(self, folder: Path) -> None:
        self.config = _read(folder / "config.json")
        self.shape: ModelShape = shape_of(folder, self.config)
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
        """Weights in all."""
        shape = self.shape
        attention = shape.hidden * shape.head_dim * (3 * shape.heads + 4 * shape.kv_heads)
        mlp = 3 * shape.hidden * shape.intermediate
        fused = _HIDDEN_STATES * self.target_hidden * shape.hidden
        own = self.has("embed_tokens.weight")
        tables = (self.choices + (shape.vocabulary if own else 0)) * shape.hidden
        return attention + mlp + fused + tables

    def layers_heard(self, layers: int) -> tuple[int, ...]:
        """Return before which of the served model's `layers` its hidden states are taken."""
        said = (
            self.config.eagle_config and self.config.eagle_config.eagle_aux_hidden_state_layer_ids
        )
        # vLLM's name layers by what goes into them; others by what comes out, and into the next.
        heard = self.config.eagle_aux_hidden_state_layer_ids
        heard = heard or [one + 1 for one in said or ()] or [2, layers // 2, layers - 3]
        if len(heard) != _HIDDEN_STATES or not all(0 <= one < layers for one in heard):
            raise CheckpointError(
                f"cannot draft with {self._folder}: hidden states before layers {heard} of a model"
                f" of {layers}: three within it are needed"
            )
        return tuple(heard)

    def targets(self) -> torch.Tensor:
        """Return the served model's token for each of the head's own."""
        own = torch.arange(self.choices)
        if not self.has("d2t"):
            if self.choices == self.shape.vocabulary:
                return own
            raise CheckpointError(f"cannot read {self._folder}: it lacks d2t")
        added = self.integers("d2t", (self.choices,))
        targets = own + added
        if int(targets.min()) < 0 or int(targets.max()) >= self.shape.vocabulary:
            raise CheckpointError(
                f"cannot read {self._folder}: d2t leads out of {self.shape.vocabulary} tokens"
            )
        return targets


def _read(path: Path) -> HeadConfig:
    said: dict[str, Any] = read_json(path, dict[str, Any])
    layer = said.get("transformer_layer_config")
    try:
        config = msgspec.convert({**(layer or {}), **said}, HeadConfig)
    except (msgspec.ValidationError, TypeError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    if config.norm_before_fc or config.norm_output or config.fc_norm:
        raise CheckpointError(
            f"cannot draft with {path.parent}: more norms than one are unsupported"
        )
    return config
