"""Reads a model's dimensions from its Hugging Face `config.json`.

A missing value gets the default of its model family. An impossible value is refused, because a
model placed with wrong dimensions fails on every node.
"""

from collections.abc import Mapping
from typing import Final

from isochrone.wire.models.model import CatalogModel, ModelDimensions

QUANTISED_BITS: Final = {
    "fp8": 8.0,
    "awq": 4.5,
    "gptq": 4.5,
    "compressed-tensors": 8.0,
    "mxfp4": 4.25,
}
"""Bits per weight by method, group scales included."""

FAMILIES: Final[Mapping[str, Mapping[str, object]]] = {
    "gemma2": {"head_dim": 256, "sliding_window_pattern": 2, "tie_word_embeddings": True},
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262_208,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
    },
}
"""Per family, the values that its configs omit and whose defaults differ from other families'."""

Config = Mapping[str, object]

PARAMETER_BITS_UNKNOWN: Final = 16.0


class BadConfig(ValueError):
    """The config is invalid; the message says why."""


def shape_of(config: Config) -> ModelDimensions:
    """Return the dimensions in a config. Raises BadConfig."""
    nested = config.get("text_config")
    quantised = config.get("quantization_config")
    if not isinstance(quantised, Mapping):
        quantised = {}
    if isinstance(nested, Mapping):
        config = {**config, **nested}
    config = {**FAMILIES.get(str(config.get("model_type")), {}), **config}
    layers = _size(config, "num_hidden_layers")
    hidden = _size(config, "hidden_size")
    heads = _size(config, "num_attention_heads")
    if hidden < heads:
        raise BadConfig(f"cannot read the config: hidden_size {hidden} over {heads} heads")
    kv_heads = _size(config, "num_key_value_heads", heads)
    head_size = _size(config, "head_dim", hidden // heads)
    if kv_heads > heads or heads % kv_heads:
        raise BadConfig(f"cannot read the config: {heads} heads over {kv_heads} KV heads")
    latent = _size(config, "kv_lora_rank", 0)
    if latent:
        latent += _size(config, "qk_rope_head_dim", 0)
    experts, expert_parameters = _experts(config, layers, hidden)
    return ModelDimensions(
        layers=layers,
        hidden_size=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        latent_size=latent,
        sliding_window=_size(config, "sliding_window", 0),
        sliding_layers=_sliding_layers(config, layers),
        experts=experts,
        experts_active=_size(config, "num_experts_per_tok", experts) if experts else 0,
        parameters=_dense_parameters(
            config, layers, hidden, heads * head_size, kv_heads * head_size
        )
        + expert_parameters,
        expert_parameters=expert_parameters,
        weight_bits=_weight_bits(quantised),
        kv_bits=8.0 if quantised.get("kv_cache_scheme") else 16.0,
    )


def kv_bytes_per_token(shape: ModelDimensions, context_tokens: int = 1) -> float:
    """Return the KV cache bytes of a token over all layers, averaged over a full context."""
    # A latent is cached once; a head caches a key and a value.
    values = shape.latent_size or 2 * shape.kv_heads * shape.head_size
    window = min(1.0, shape.sliding_window / context_tokens) if shape.sliding_window else 1.0
    layers = shape.layers - shape.sliding_layers + shape.sliding_layers * window
    return layers * values * shape.kv_bits / 8


def parameters_of(model: CatalogModel) -> float:
    """Return a model's number of parameters, from the size of its weights if it is not known."""
    bits = model.shape.weight_bits if model.shape else PARAMETER_BITS_UNKNOWN
    return (model.shape.parameters if model.shape else 0) or model.weights_bytes * 8 / bits


def sparse_share(model: CatalogModel) -> float:
    """Return the share of the parameters that are in experts."""
    if model.shape is None:
        return 0.0
    return min(1.0, model.shape.expert_parameters / max(1.0, parameters_of(model)))


def active_experts_share(shape: ModelDimensions | None) -> float:
    """Return the share of the experts that a token uses; 1 if there are none."""
    return shape.experts_active / shape.experts if shape and shape.experts else 1.0


def active_parameters(model: CatalogModel) -> float:
    """Return how many parameters a token uses."""
    inactive = sparse_share(model) * (1 - active_experts_share(model.shape))
    return parameters_of(model) * (1 - inactive)


def depth_cost_per_token(model: CatalogModel) -> float:
    """Return how much longer a prompt's token takes to read for each token before it, as a share
    of the first one's time; 0 if the model's dimensions are unknown.

    The share is a ratio of operations. For each earlier token and layer, attention takes 4 per head
    and value: a product for the score and one for the sum, two operations each. The weights take 2
    per active parameter. Layers with a sliding window do not count. Attention reaches at most the
    rate of the weights' products, so the real cost is seldom lower.
    """
    shape = model.shape
    if shape is None:
        return 0.0
    layers = max(0, shape.layers - shape.sliding_layers)
    return 4.0 * layers * shape.heads * shape.head_size / max(1.0, 2.0 * active_parameters(model))


def _size(config: Config, name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise BadConfig(f"cannot read the config: {name} is {value!r}, expected a whole number")
    if value == 0 and default != 0:
        raise BadConfig(f"cannot read the config: {name} is 0")
    return value


def _sliding_layers(config: Config, layers: int) -> int:
    """Count the layers with a sliding window; each family writes this in its own way."""
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return 0
    kinds = config.get("layer_types")
    if isinstance(kinds, list | tuple):
        return sum(kind == "sliding_attention" for kind in kinds)
    pattern = _size(config, "sliding_window_pattern", 0)
    if pattern > 1:  # every pattern-th layer attends to all tokens
        return layers - layers // pattern
    return max(0, layers - _size(config, "max_window_layers", 0))


def _experts(config: Config, layers: int, hidden: int) -> tuple[int, int]:
    """Return (experts per layer, parameters of all experts)."""
    names = ("n_routed_experts", "num_local_experts", "num_experts")
    experts = next((_size(config, name) for name in names if config.get(name)), 0)
    if not experts:
        return 0, 0
    inner = _size(config, "moe_intermediate_size", _size(config, "intermediate_size", 0))
    sparse = layers - _size(config, "first_k_dense_replace", 0)
    return experts, max(0, sparse) * experts * 3 * hidden * inner


def _dense_parameters(config: Config, layers: int, hidden: int, q: int, kv: int) -> int:
    """Return the parameters outside the routed experts: attention, dense layers, shared experts
    and embeddings. `q` and `kv` are the sizes of queries and of keys per token.
    """
    latent = _size(config, "kv_lora_rank", 0)
    if latent:
        heads = _size(config, "num_attention_heads")
        value = _size(config, "v_head_dim", 128)
        nope = _size(config, "qk_nope_head_dim", 128)
        rope = _size(config, "qk_rope_head_dim", 64)
        rank = _size(config, "q_lora_rank", 0)
        query = (
            hidden * rank + rank * heads * (nope + rope) if rank else hidden * heads * (nope + rope)
        )
        key_value = hidden * (latent + rope) + latent * heads * (nope + value)
        attention = query + key_value + heads * value * hidden
    else:
        attention = 2 * hidden * q + 2 * hidden * kv
    inner = _size(config, "intermediate_size", 4 * hidden)
    experts = any(config.get(n) for n in ("n_routed_experts", "num_local_experts", "num_experts"))
    dense = _size(config, "first_k_dense_replace", 0) if experts else layers
    shared = _size(config, "n_shared_experts", 0) * _size(config, "moe_intermediate_size", 0)
    embeddings = (
        _size(config, "vocab_size", 0) * hidden * (1 if config.get("tie_word_embeddings") else 2)
    )
    feed_forward = 3 * hidden * (dense * inner + (layers - dense) * shared)
    return layers * attention + feed_forward + embeddings


def _weight_bits(quantised: Config) -> float:
    method = str(quantised.get("quant_method", ""))
    bits = quantised.get("bits") or quantised.get("w_bit")
    groups = quantised.get("config_groups")
    if isinstance(groups, Mapping):
        weights = [group.get("weights") for group in groups.values() if isinstance(group, Mapping)]
        group_bits = [w.get("num_bits") for w in weights if isinstance(w, Mapping)]
        bits = max((b for b in group_bits if isinstance(b, int)), default=bits)
    if isinstance(bits, int) and 1 <= bits <= 16:
        return bits + (0.5 if bits < 8 else 0.0)
    return QUANTISED_BITS.get(method, 16.0)
