"""A GGUF file as a source of fp32 weights under their Hugging Face names.

GGUF files of the Llama family keep the rows of query and key so that neighbours are rotated as a
pair; the model here rotates halves as Hugging Face's does. The rows are put back on reading.
"""

import mmap
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from nodeagent.engine.checkpoint.gguf_header import GgufHeader, TensorEntry, read_header
from nodeagent.engine.models.shape import CheckpointError, ModelShape

_LAYER_NAMES: Final = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_NAMES: Final = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "rope_freqs.weight": "rope_freqs.weight",
}


class GgufFile:
    """One mapped GGUF file. `close` after the last tensor is read, so that its pages can go."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                raise CheckpointError(f"cannot read {path}: the file is empty")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._header: GgufHeader = read_header(path, self._map)
        self.metadata: dict[str, Any] = self._header.metadata
        self.shape = self._read_shape()

    def close(self) -> None:
        """Unmap the file."""
        self._map.close()

    def has(self, name: str) -> bool:
        """True where the file holds `name` (a Hugging Face name)."""
        return _gguf_name(name) in self._header.tensors

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Read and dequantise one weight."""
        entry = self._header.tensors.get(_gguf_name(name))
        if entry is None:
            raise CheckpointError(f"cannot read {self._path}: it lacks {_gguf_name(name)}")
        if entry.shape != shape:
            raise CheckpointError(
                f"cannot read {self._path}: {entry.name} is {entry.shape}, {shape} is expected"
            )
        weights = self._dequantise(entry)
        if name.endswith("q_proj.weight"):
            weights = _halves(weights, self.shape.heads)
        elif name.endswith("k_proj.weight"):
            weights = _halves(weights, self.shape.kv_heads)
        return torch.from_numpy(weights)

    def _dequantise(self, entry: TensorEntry) -> np.ndarray:
        try:
            kind = GGMLQuantizationType(entry.kind)
            group, group_bytes = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError) as error:
            raise CheckpointError(
                f"cannot read {self._path}: {entry.name} has unknown type {entry.kind}"
            ) from error
        if entry.shape[-1] % group:
            raise CheckpointError(
                f"cannot read {self._path}: {entry.name}'s rows of {entry.shape[-1]} are no"
                f" multiple of {group}"
            )
        rows = int(np.prod(entry.shape[:-1], dtype=np.int64))
        row_bytes = entry.shape[-1] // group * group_bytes
        start = self._header.data_start + entry.offset
        if start + rows * row_bytes > len(self._map):
            raise CheckpointError(f"cannot read {self._path}: {entry.name} lies past its end")
        # A copy of the packed bytes: no array may point into the map once it is closed.
        packed = np.frombuffer(self._map, np.uint8, rows * row_bytes, start).copy()
        try:
            weights: np.ndarray = dequantize(packed.reshape(rows, row_bytes), kind)
        except NotImplementedError as error:
            raise CheckpointError(
                f"cannot read {self._path}: {entry.name} is {kind.name}, which has no reader"
            ) from error
        wide: np.ndarray = weights.astype(np.float32, copy=False).reshape(entry.shape)
        return wide

    def _read_shape(self) -> ModelShape:
        architecture = self._need("general.architecture", str)
        if architecture != "llama":
            raise CheckpointError(
                f"cannot load {self._path}: architecture {architecture!r}, llama is supported"
            )
        if self.metadata.get("llama.expert_count"):
            raise CheckpointError(f"cannot load {self._path}: mixtures of experts are unsupported")
        heads = self._need("llama.attention.head_count", int)
        hidden = self._need("llama.embedding_length", int)
        embedding = self._header.tensors.get("token_embd.weight")
        if heads < 1 or embedding is None or len(embedding.shape) != 2:
            raise CheckpointError(f"cannot load {self._path}: no heads or no token embedding")
        head_dim = self._need("llama.attention.key_length", int, hidden // heads)
        if self._need("llama.rope.dimension_count", int, head_dim) != head_dim:
            raise CheckpointError(f"cannot load {self._path}: partial rotation is unsupported")
        rope_scaling = self.metadata.get("llama.rope.scaling.type", "none")
        if rope_scaling != "none":
            raise CheckpointError(
                f"cannot load {self._path}: rope scaling {rope_scaling!r} is unsupported"
            )
        return ModelShape(
            layers=self._need("llama.block_count", int),
            hidden=hidden,
            intermediate=self._need("llama.feed_forward_length", int),
            heads=heads,
            kv_heads=self._need("llama.attention.head_count_kv", int, heads),
            head_dim=head_dim,
            vocabulary=embedding.shape[0],
            context_tokens=self._need("llama.context_length", int),
            rms_epsilon=self._need("llama.attention.layer_norm_rms_epsilon", float),
            rope_theta=self._need("llama.rope.freq_base", float, 10_000.0),
            tied_embeddings="output.weight" not in self._header.tensors,
        )

    def _need(self, key: str, kind: type, default: Any = None) -> Any:
        value = self.metadata.get(key, default)
        if not isinstance(value, kind):
            raise CheckpointError(f"cannot load {self._path}: {key} is {value!r}")
        return value


def _gguf_name(name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    layer, _, part = name.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_LAYER_NAMES[part.removesuffix('.weight')]}.weight"


def _halves(weights: np.ndarray, heads: int) -> np.ndarray:
    """Put rows kept as rotated neighbours back into rotated halves."""
    rows, columns = weights.shape
    pairs = weights.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)
