"""Writes a model of a given size with random weights and the vocabulary of a real model.

The model has the layers of a Llama 1B, as many as fit into the size.
"""

from pathlib import Path
from typing import Final

import numpy as np
import torch
from gguf import GGUFWriter
from gguf.constants import GGMLQuantizationType

from nodeagent.engine.tokenizer.loading import read_vocabulary
from nodeagent.engine.weights.gguf_file import GgufFile
from nodeagent.engine.weights.gguf_header import PackedStrings
from ops.bench.engine_gpu_model import LlamaSizes, write_model

_HIDDEN: Final = 2048
_WIDE: Final = 8192
_HEADS: Final = 32
_KV_HEADS: Final = 8
_HEAD_DIM: Final = _HIDDEN // _HEADS
_KV_ROWS: Final = _HEAD_DIM * _KV_HEADS
_LAYER: Final = {
    "attn_q": (_HIDDEN, _HIDDEN),
    "attn_k": (_KV_ROWS, _HIDDEN),
    "attn_v": (_KV_ROWS, _HIDDEN),
    "attn_output": (_HIDDEN, _HIDDEN),
    "ffn_gate": (_WIDE, _HIDDEN),
    "ffn_up": (_WIDE, _HIDDEN),
    "ffn_down": (_HIDDEN, _WIDE),
}
_BYTES_PER_WEIGHT: Final = 20 / 32
_SHARD_BYTES: Final = 400_000_000


def write_made_up(path: Path, like: Path, size_bytes: int) -> None:
    """Write a model of about `size_bytes` with the vocabulary of the GGUF file `like`.

    `path` ends in .gguf for a GGUF file; anything else becomes a Hugging Face folder in bf16.
    """
    source = GgufFile(like)
    try:
        metadata, vocabulary = source.metadata, read_vocabulary(source)
    finally:
        source.close()
    if path.suffix != ".gguf":
        # The output head and the embeddings are separate matrices.
        layers = _layers(size_bytes / 2 - 2 * vocabulary.size * _HIDDEN)
        plan = LlamaSizes(
            layers, _HIDDEN, _WIDE, _HEADS, _KV_HEADS, _HEAD_DIM, vocabulary.size, 8192
        )
        write_model(path, plan, "cpu", torch.bfloat16, vocabulary.tokenizer, _SHARD_BYTES)
        return
    table = (vocabulary.size, _HIDDEN)
    layers = _layers(size_bytes / _BYTES_PER_WEIGHT - table[0] * table[1])
    writer = GGUFWriter(path, "llama")
    for add, number in (
        (writer.add_context_length, 8192),
        (writer.add_embedding_length, _HIDDEN),
        (writer.add_block_count, layers),
        (writer.add_feed_forward_length, _WIDE),
        (writer.add_head_count, _HEADS),
        (writer.add_head_count_kv, _KV_HEADS),
    ):
        add(number)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in metadata.items():
        if key.startswith("tokenizer.ggml."):
            _add(writer, key, value)
    chance = np.random.default_rng(1)
    _add_matrix(writer, "token_embd", table, chance)
    for layer in range(layers):
        for name, shape in _LAYER.items():
            _add_matrix(writer, f"blk.{layer}.{name}", shape, chance)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(_HIDDEN, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(_HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _layers(weights: float) -> int:
    return max(1, round(weights / sum(rows * columns for rows, columns in _LAYER.values())))


def _add(writer: GGUFWriter, key: str, value: object) -> None:
    if isinstance(value, PackedStrings):
        writer.add_array(key, value.read())
    elif isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    else:
        writer.add_string(key, str(value))


def _add_matrix(
    writer: GGUFWriter, name: str, shape: tuple[int, int], chance: np.random.Generator
) -> None:
    rows, columns = shape
    blocks = chance.integers(0, 256, (rows, columns // 32, 20), np.uint8)
    # A scale and an offset that centre the four-bit numbers around zero.
    blocks[..., :4] = np.array([0.002, -0.015], np.float16).view(np.uint8)
    kind = GGMLQuantizationType.Q4_1
    writer.add_tensor(f"{name}.weight", blocks.reshape(rows, -1), raw_dtype=kind)
