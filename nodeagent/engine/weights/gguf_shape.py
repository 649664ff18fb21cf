"""Derives a decoder's shape from the metadata of a GGUF file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from nodeagent.engine.architecture.decoder_shape import DecoderShape
from nodeagent.engine.architecture.errors import CheckpointError
from nodeagent.engine.weights.gguf_header import GgufHeader
from nodeagent.engine.weights.rope_scaling import RopeConfig, scaling_of

_FAMILIES: Final = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
}


def shape_of(path: Path, header: GgufHeader) -> DecoderShape:
    """Return the shape of the model.

    Raises CheckpointError for anything that the engine would compute wrongly.
    """
    metadata = _TypedMetadata(path, header.metadata)
    architecture = metadata.text("general.architecture")
    family = _FAMILIES.get(architecture)
    if family is None:
        raise CheckpointError(
            f"cannot load {path}: architecture {architecture!r}; {', '.join(_FAMILIES)} are"
            " supported"
        )
    metadata.prefix = f"{architecture}."
    experts = metadata.count("expert_count", 0)
    if family == "llama" and experts:
        # Files of Mixtral have the architecture "llama", with experts.
        family = "mixtral"
    heads = metadata.count("attention.head_count")
    hidden = metadata.count("embedding_length")
    embedding = header.tensors.get("token_embd.weight")
    if heads < 1 or embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"cannot load {path}: no heads or no token embedding")
    head_dim = metadata.count("attention.key_length", hidden // heads)
    if metadata.count("attention.value_length", head_dim) != head_dim:
        raise CheckpointError(
            f"cannot load {path}: values and keys of different length are unsupported"
        )
    if metadata.count("rope.dimension_count", head_dim) != head_dim:
        raise CheckpointError(f"cannot load {path}: partial rotation is unsupported")
    theta = metadata.number("rope.freq_base", 10_000.0)
    context_tokens = metadata.count("context_length")
    scaling, context_tokens = scaling_of(path, _rope(metadata), theta, context_tokens)
    biases = {name.split(".")[-2] for name in header.tensors if name.endswith(".bias")}
    if family == "qwen2":
        biases -= {"attn_q", "attn_k", "attn_v"}
    if biases:
        raise CheckpointError(f"cannot load {path}: a bias of {min(biases)} is unsupported")
    mlp_width = metadata.count("feed_forward_length")
    return DecoderShape(
        layers=metadata.count("block_count"),
        hidden=hidden,
        intermediate=metadata.count("expert_feed_forward_length", mlp_width)
        if experts
        else mlp_width,
        heads=heads,
        kv_heads=metadata.count("attention.head_count_kv", heads),
        head_dim=head_dim,
        vocabulary=embedding.shape[0],
        context_tokens=context_tokens,
        rms_epsilon=metadata.number("attention.layer_norm_rms_epsilon"),
        rope_theta=theta,
        rope_scaling=scaling,
        tied_embeddings="output.weight" not in header.tensors,
        family=family,
        window_tokens=metadata.count("attention.sliding_window", 0) or None,
        experts=experts,
        experts_per_token=metadata.count("expert_used_count") if experts else 0,
    )


def _rope(metadata: "_TypedMetadata") -> RopeConfig:
    """Return the RoPE scaling as config.json would have it."""
    factor = (
        metadata.number("rope.scaling.factor", metadata.number("rope.scale_linear", 0.0)) or 1.0
    )
    # llama.cpp's default kind is linear.
    kind = metadata.text("rope.scaling.type", "none" if factor == 1 else "linear")
    rope = RopeConfig(rope_type="default" if kind == "none" else kind, factor=factor)
    if kind == "yarn":
        rope.original_max_position_embeddings = metadata.count(
            "rope.scaling.original_context_length", 0
        )
        rope.beta_fast = metadata.number("rope.scaling.yarn_beta_fast", 0.0)
        rope.beta_slow = metadata.number("rope.scaling.yarn_beta_slow", 0.0)
        rope.attention_factor = metadata.number("rope.scaling.yarn_attn_factor", 0.0) or None
    return rope


class _TypedMetadata:
    """Reads metadata values of a given type, or raises CheckpointError."""

    def __init__(self, path: Path, metadata: Mapping[str, Any]) -> None:
        self._path = path
        self._metadata = metadata
        self.prefix = ""

    def text(self, key: str, default: str | None = None) -> str:
        return str(self._value(key, str, default))

    def count(self, key: str, default: int | None = None) -> int:
        return int(self._value(key, int, default))

    def number(self, key: str, default: float | None = None) -> float:
        return float(self._value(key, float, default))

    def _value(self, key: str, kind: type, default: Any) -> Any:
        value = self._metadata.get(self.prefix + key, default)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise CheckpointError(f"cannot load {self._path}: {self.prefix}{key} is {value!r:.200}")
        return value
