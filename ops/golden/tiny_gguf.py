"""Writes the tiny models as GGUF files with the `gguf` package and its tensor names."""

from pathlib import Path
from typing import Any, Final

import torch
from gguf import GGUFWriter, get_tensor_name_map
from gguf.constants import MODEL_ARCH
from torch import Tensor

from nodeagent.engine.architecture.rope_scaling import Llama3Scaling
from nodeagent.engine.model.rotary import inverse_frequencies
from ops.golden import tiny

ARCHITECTURES: Final = {
    "llama": MODEL_ARCH.LLAMA,
    "mistral": MODEL_ARCH.LLAMA,
    "mixtral": MODEL_ARCH.LLAMA,
    "qwen2": MODEL_ARCH.QWEN2,
    "qwen3": MODEL_ARCH.QWEN3,
    "qwen3_moe": MODEL_ARCH.QWEN3MOE,
}
NAMES: Final = {MODEL_ARCH.LLAMA: "llama", MODEL_ARCH.QWEN2: "qwen2", MODEL_ARCH.QWEN3: "qwen3"}


def _interleaved_rows(weight: Tensor, heads: int) -> Tensor:
    """Order the rows of queries or keys as GGUF files of the Llama architecture do."""
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(
    path: Path,
    family: str,
    metadata: dict[str, Any] | None = None,
    vectors: dict[str, int] | None = None,
    part_tensors_max: int = 0,
) -> None:
    """Write the tiny model, with additional `metadata` (for example of a tokenizer).

    `vectors` adds tensors of ones by name and length. With `part_tensors_max` the file is split
    into parts, whose names derive from `path`.
    """
    config = tiny.config_of(family)
    kind = ARCHITECTURES[family]
    name = NAMES.get(kind, "qwen3moe")
    writer = GGUFWriter(path, name, split_max_tensors=part_tensors_max)
    writer.add_context_length(256)
    writer.add_embedding_length(tiny.HIDDEN)
    writer.add_block_count(tiny.LAYERS)
    writer.add_feed_forward_length(tiny.WIDE)
    writer.add_head_count(tiny.HEADS)
    writer.add_head_count_kv(tiny.KV_HEADS)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if "head_dim" in config:
        writer.add_key_length(tiny.HEAD_DIM)
        writer.add_value_length(tiny.HEAD_DIM)
    if family == "mistral":
        writer.add_sliding_window(config["sliding_window"])
    if "num_experts_per_tok" in config:
        writer.add_expert_count(tiny.EXPERTS)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if family == "qwen3_moe":
        writer.add_expert_feed_forward_length(tiny.EXPERT_WIDE)
    if family == "llama":
        writer.add_tensor("rope_freqs.weight", _rope_factors().numpy())
    for name, length in (vectors or {}).items():
        writer.add_tensor(name, torch.ones(length).numpy())
    for key, value in (metadata or {}).items():
        _add_metadata(writer, key, value)
    names = get_tensor_name_map(kind, tiny.LAYERS)
    experts: dict[str, list[Tensor]] = {}
    for name, weight in tiny.weights_of(family).items():
        if NAMES.get(kind) == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = tiny.HEADS if "q_proj" in name else tiny.KV_HEADS
            weight = _interleaved_rows(weight, heads)
        if ".experts." in name:
            block, _, part = name.partition(".experts.")
            experts.setdefault(f"{block}.experts.{part.partition('.')[2]}", []).append(weight)
            continue
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, name
        writer.add_tensor(gguf_name, weight.numpy())
    for name, parts in experts.items():
        gguf_name = names.get_name(name, try_suffixes=(".weight",))
        assert gguf_name is not None, name
        writer.add_tensor(gguf_name, torch.stack(parts).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _rope_factors() -> Tensor:
    """Return Llama 3's RoPE scaling as GGUF stores it: the divisor of each frequency."""
    scaling = Llama3Scaling(8.0, 1.0, 4.0, 16)
    plain = inverse_frequencies(tiny.HEAD_DIM, 10_000.0, None, None)
    return plain / inverse_frequencies(tiny.HEAD_DIM, 10_000.0, scaling, None)


def _add_metadata(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)
