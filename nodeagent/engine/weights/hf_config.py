"""Derives a decoder's shape from config.json of a Hugging Face folder."""

from pathlib import Path
from typing import Any, Final

import msgspec

from nodeagent.engine.architecture.decoder_shape import DecoderShape
from nodeagent.engine.architecture.errors import CheckpointError
from nodeagent.engine.weights.rope_scaling import RopeConfig, scaling_of
from nodeagent.engine.weights.stored_tensor import check_regular_file

MODEL_TYPES: Final = frozenset({"llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"})
"""The supported values of `model_type`: the keys of `model.families.FAMILIES`."""
_JSON_BYTES_MAX: Final = 64 * 1024 * 1024
_WINDOWED: Final = frozenset({"mistral", "mixtral"})
"""Families whose `sliding_window` applies without `use_sliding_window`."""
_WINDOWED_FROM: Final = frozenset({"qwen2", "qwen3"})
"""Families whose first `max_window_layers` layers have no window."""


class DecoderConfig(msgspec.Struct):
    """The fields of config.json that determine a decoder's shape."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    max_position_embeddings: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float | None = None
    rope_scaling: RopeConfig | None = None
    rope_parameters: RopeConfig | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    sliding_window: int | None = None
    use_sliding_window: bool = False
    max_window_layers: int = 28
    layer_types: list[str] | None = None
    num_experts: int | None = None
    num_local_experts: int | None = None
    num_experts_per_tok: int = 0
    moe_intermediate_size: int | None = None
    norm_topk_prob: bool | None = None
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = None
    eos_token_id: int | list[int] | None = None


def read_json(path: Path, kind: Any) -> Any:
    """Read a JSON file into `kind`, or raise CheckpointError."""
    try:
        check_regular_file(path)
        if path.stat().st_size > _JSON_BYTES_MAX:
            raise CheckpointError(f"cannot read {path}: larger than {_JSON_BYTES_MAX} bytes")
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


def read_optional_json(path: Path, kind: type[Any]) -> Any:
    """Read a JSON file that may be missing; return the defaults of `kind` if it is."""
    return read_json(path, kind) if path.exists() else kind()


def shape_of(folder: Path, config: DecoderConfig) -> DecoderShape:
    """Return the shape of the model.

    Raises CheckpointError for anything that the engine would compute wrongly.
    """
    if config.model_type not in MODEL_TYPES:
        raise CheckpointError(
            f"cannot load {folder}: model_type {config.model_type!r};"
            f" {', '.join(sorted(MODEL_TYPES))} are supported"
        )
    if config.attention_bias or config.mlp_bias or config.hidden_act != "silu":
        raise CheckpointError(
            f"cannot load {folder}: biases or activation {config.hidden_act!r} are unsupported"
        )
    if config.num_attention_heads < 1:
        raise CheckpointError(f"cannot load {folder}: no attention heads")
    # `rope_scaling` comes first: it is what users add to stretch a model.
    rope = config.rope_scaling or config.rope_parameters or RopeConfig()
    sources = (rope, config, config.rope_parameters)
    thetas = [source.rope_theta for source in sources if source]
    theta = next(filter(None, thetas), 10_000.0)
    scaling, context_tokens = scaling_of(folder, rope, theta, config.max_position_embeddings)
    experts = _experts(folder, config)
    per_expert = config.moe_intermediate_size if experts else None
    return DecoderShape(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size if per_expert is None else per_expert,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=config.head_dim or config.hidden_size // config.num_attention_heads,
        vocabulary=config.vocab_size,
        context_tokens=context_tokens,
        rms_epsilon=config.rms_norm_eps,
        rope_theta=theta,
        rope_scaling=scaling,
        tied_embeddings=config.tie_word_embeddings,
        family=config.model_type,
        window_tokens=_window(folder, config),
        experts=experts,
        experts_per_token=config.num_experts_per_tok if experts else 0,
        # Mixtral always normalises, Qwen3-MoE where its config says so.
        shares_normalised=config.model_type == "mixtral" or bool(config.norm_topk_prob),
    )


def _experts(folder: Path, config: DecoderConfig) -> int:
    if config.model_type not in ("qwen3_moe", "mixtral"):
        return 0
    experts = config.num_experts or config.num_local_experts or 0
    if experts < 1:
        raise CheckpointError(f"cannot load {folder}: a {config.model_type} of {experts} experts")
    if config.mlp_only_layers or config.decoder_sparse_step != 1:
        raise CheckpointError(f"cannot load {folder}: layers without experts are unsupported")
    return experts


def _window(folder: Path, config: DecoderConfig) -> int | None:
    is_windowed = config.model_type in _WINDOWED or config.use_sliding_window
    if not is_windowed or config.sliding_window is None:
        return None
    kinds = set(config.layer_types or ())
    if config.model_type in _WINDOWED_FROM and not kinds:
        # Older files give the first layer with a window instead of a type for each layer.
        first = min(max(config.max_window_layers, 0), config.num_hidden_layers)
        kinds = {"sliding_attention"} if first < config.num_hidden_layers else set()
        kinds |= {"full_attention"} if first else set()
    if kinds <= {"sliding_attention"}:
        return config.sliding_window
    if kinds == {"full_attention"}:
        return None
    raise CheckpointError(f"cannot load {folder}: layers with and without a window are unsupported")
