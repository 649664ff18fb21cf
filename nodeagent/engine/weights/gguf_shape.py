"""A GGUF file's metadata as a model's shape: what each architecture calls its numbers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from nodeagent.engine.model.shape import CheckpointError, ModelShape
from nodeagent.engine.weights.gguf_header import GgufHeader
from nodeagent.engine.weights.rope_scaling import RopeConfig, scaling_of

_FAMILIES: Final = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
}


def shape_of(path: Path, header: GgufHeader) -> ModelShape:
    """Return the shape that the metadata tells, or refuse what would be computed wrongly."""
    facts = _Facts(path, header.metadata)
    architecture = facts.text("general.architecture")
    family = _FAMILIES.get(architecture)
    if family is None:
        raise CheckpointError(
            f"cannot load {path}: architecture {architecture!r}, {', '.join(_FAMILIES)} are"
            " supported"
        )
    facts.prefix = f"{architecture}."
    experts = facts.count("expert_count", 0)
    if family == "llama" and experts:
        # The files of Mixtral say that they are a Llama with experts.
        family = "mixtral"
    heads = facts.count("attention.head_count")
    hidden = facts.count("embedding_length")
    embedding = header.tensors.get("token_embd.weight")
    if heads < 1 or embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"cannot load {path}: no heads or no token embedding")
    head_dim = facts.count("attention.key_length", hidden // heads)
    if facts.count("attention.value_length", head_dim) != head_dim:
        raise CheckpointError(f"cannot load {path}: values of another length than keys")
    if facts.count("rope.dimension_count", head_dim) != head_dim:
        raise CheckpointError(f"cannot load {path}: partial rotation is unsupported")
    theta = facts.number("rope.freq_base", 10_000.0)
    context_tokens = facts.count("context_length")
    scaling, context_tokens = scaling_of(path, _rope(facts), theta, context_tokens)
    biases = {name.split(".")[-2] for name in header.tensors if name.endswith(".bias")}
    if family == "qwen2":
        biases -= {"attn_q", "attn_k", "attn_v"}
    if biases:
        raise CheckpointError(f"cannot load {path}: a bias of {min(biases)} is unsupported")
    wide = facts.count("feed_forward_length")
    return ModelShape(
        layers=facts.count("block_count"),
        hidden=hidden,
        intermediate=facts.count("expert_feed_forward_length", wide) if experts else wide,
        heads=heads,
        kv_heads=facts.count("attention.head_count_kv", heads),
        head_dim=head_dim,
        vocabulary=embedding.shape[0],
        context_tokens=context_tokens,
        rms_epsilon=facts.number("attention.layer_norm_rms_epsilon"),
        rope_theta=theta,
        rope_scaling=scaling,
        tied_embeddings="output.weight" not in header.tensors,
        family=family,
        window_tokens=facts.count("attention.sliding_window", 0) or None,
        experts=experts,
        experts_per_token=facts.count("expert_used_count") if experts else 0,
    )


def _rope(facts: "_Facts") -> RopeConfig:
    """Return what config.json said of it; llama.cpp writes more of that than it reads."""
    factor = facts.number("rope.scaling.factor", facts.number("rope.scale_linear", 0.0)) or 1.0
    # Where the kind is not said, it is linear.
    kind = facts.text("rope.scaling.type", "none" if factor == 1 else "linear")
    rope = RopeConfig(rope_type="default" if kind == "none" else kind, factor=factor)
    if kind == "yarn":
        rope.original_max_position_embeddings = facts.count(
            "rope.scaling.original_context_length", 0
        )
        rope.beta_fast = facts.number("rope.scaling.yarn_beta_fast", 0.0)
        rope.beta_slow = facts.number("rope.scaling.yarn_beta_slow", 0.0)
        rope.attention_factor = facts.number("rope.scaling.yarn_attn_factor", 0.0) or None
    return rope


class _Facts:
    """The metadata, typed: each value asked for is of its kind or refused."""

    def __init__(self, path: Path, metadata: Mapping[str, Any]) -> None:
        self._path = path
        self._metadata = metadata
        self.prefix = ""

    def text(self, key: str, default: str | None = None) -> str:
        return str(self._need(key, str, default))

    def count(self, key: str, default: int | None = None) -> int:
        return int(self._need(key, int, default))

    def number(self, key: str, default: float | None = None) -> float:
        return float(self._need(key, float, default))

    def _need(self, key: str, kind: type, default: Any) -> Any:
        value = self._metadata.get(self.prefix + key, default)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise CheckpointError(f"cannot load {self._path}: {self.prefix}{key} is {value!r:.200}")
        return value
