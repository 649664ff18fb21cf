"""The dimensions in a GGUF file's metadata, from which the planner estimates rates and memory."""

from typing import Any

import pytest

from isochrone.wire.models.gguf_shape import gguf_shape

LLAMA_8B: dict[str, Any] = {
    "general.architecture": "llama",
    "general.file_type": 15,
    "llama.block_count": 32,
    "llama.embedding_length": 4096,
    "llama.feed_forward_length": 14336,
    "llama.attention.head_count": 32,
    "llama.attention.head_count_kv": 8,
}
MIXTRAL: dict[str, Any] = {**LLAMA_8B, "llama.expert_count": 8, "llama.expert_used_count": 2}
DEEPSEEK: dict[str, Any] = {
    "general.architecture": "deepseek2",
    "general.file_type": 7,
    "deepseek2.block_count": 27,
    "deepseek2.leading_dense_block_count": 1,
    "deepseek2.embedding_length": 2048,
    "deepseek2.expert_feed_forward_length": 1408,
    "deepseek2.expert_count": 64,
    "deepseek2.expert_used_count": 6,
    "deepseek2.attention.head_count": 16,
    "deepseek2.attention.head_count_kv": 1,
    "deepseek2.attention.kv_lora_rank": 512,
    "deepseek2.rope.dimension_count": 64,
}


def test_a_dense_model() -> None:
    shape = gguf_shape(LLAMA_8B)
    assert shape is not None
    assert (shape.layers, shape.hidden_size, shape.heads, shape.kv_heads) == (32, 4096, 32, 8)
    assert (shape.head_size, shape.weight_bits, shape.kv_bits) == (128, 4.85, 16)
    assert (shape.parameters, shape.experts) == (0, 0)


def test_a_model_of_experts() -> None:
    shape = gguf_shape(MIXTRAL)
    assert shape is not None
    assert (shape.experts, shape.experts_active) == (8, 2)
    assert shape.expert_parameters == 32 * 8 * 3 * 4096 * 14336


def test_latent_attention() -> None:
    shape = gguf_shape(DEEPSEEK)
    assert shape is not None
    assert (shape.latent_size, shape.heads, shape.kv_heads) == (576, 16, 16)
    assert (shape.experts_active, shape.weight_bits) == (6, 8.5)
    assert shape.expert_parameters == 26 * 64 * 3 * 2048 * 1408


@pytest.mark.parametrize(
    "changed",
    [
        {"llama.block_count": None},
        {"llama.block_count": "many"},
        {"llama.block_count": 2**40},
        {"llama.attention.head_count_kv": [8, 4] * 16},
        {"llama.attention.head_count_kv": 5},
        {"llama.attention.head_count": True},
        {"general.architecture": "other"},
        {"general.architecture": 7},
    ],
)
def test_metadata_that_states_no_dimensions_gives_none(changed: dict[str, Any]) -> None:
    assert gguf_shape({**LLAMA_8B, **changed}) is None
