"""Reads a model's dimensions from the metadata of its GGUF file.

Names of keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from collections.abc import Mapping
from typing import Final

import msgspec

from isochrone.wire.models.model import ModelDimensions

BITS: Final[Mapping[int, float]] = {
    **{0: 32.0, 1: 16.0, 32: 16.0},  # F32, F16, BF16
    **{2: 4.5, 3: 5.0, 7: 8.5, 8: 5.5, 9: 6.0},  # Q4_0, Q4_1, Q8_0, Q5_0, Q5_1
    **{
        10: 2.6,
        11: 3.4,
        12: 3.9,
        13: 4.3,
        14: 4.6,
        15: 4.85,
        16: 5.5,
        17: 5.7,
        18: 6.6,
    },  # K-quants
    **{25: 4.5, 30: 4.25, 38: 4.25},  # IQ4_NL, IQ4_XS, MXFP4
}
"""Bits per weight by `general.file_type`."""

MIXED_BITS: Final = 4.85
"""Assumed for other file types: those of Q4_K_M, the most usual one."""

Metadata = Mapping[str, object]


def gguf_shape(metadata: Metadata) -> ModelDimensions | None:
    """Return the dimensions of a decoder; None if the metadata lacks some, or layers differ."""
    architecture = metadata.get("general.architecture", "")

    def number(name: str, default: int = 0) -> int:
        value = metadata.get(f"{architecture}.{name}", default)
        return value if isinstance(value, int) and not isinstance(value, bool) else 0

    layers, hidden = number("block_count"), number("embedding_length")
    heads = number("attention.head_count")
    kv_heads = number("attention.head_count_kv", heads)
    latent = number("attention.kv_lora_rank")
    experts = number("expert_count")
    if latent:
        latent += number("rope.dimension_count")
        kv_heads = heads
    if min(layers, hidden, heads, kv_heads) < 1 or heads % kv_heads or hidden < heads:
        return None
    sparse = max(0, layers - number("leading_dense_block_count"))
    inner = number("expert_feed_forward_length", number("feed_forward_length"))
    try:
        return msgspec.convert(
            {
                "layers": layers,
                "hidden_size": hidden,
                "heads": heads,
                "kv_heads": kv_heads,
                "head_size": number("attention.key_length", hidden // heads),
                "latent_size": latent,
                "experts": experts,
                "experts_active": number("expert_used_count", experts) if experts else 0,
                # Their number follows from the size of the weights.
                "parameters": 0,
                "expert_parameters": sparse * experts * 3 * hidden * inner,
                "weight_bits": _bits(metadata.get("general.file_type")),
            },
            ModelDimensions,
        )
    except msgspec.ValidationError:
        return None


def _bits(file_type: object) -> float:
    return BITS.get(file_type, MIXED_BITS) if isinstance(file_type, int) else MIXED_BITS
