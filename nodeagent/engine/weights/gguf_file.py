"""Reads weights from a GGUF file, or from its parts, by their Hugging Face names.

GGUF files of the Llama family interleave the rows of queries and keys: neighbouring rows are
rotated as a pair. The models here rotate halves, as Hugging Face's do, so that rows are
de-interleaved when they are read.
"""

import math
import os
import re
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from nodeagent.engine.architecture.errors import CheckpointError
from nodeagent.engine.distributed.shards import WeightSlice
from nodeagent.engine.kernels.matrix_formats import PANEL_ROWS, GgufBlocks, RowsInFile
from nodeagent.engine.weights.gguf_header import KnownHeader, TensorEntry
from nodeagent.engine.weights.gguf_parts import read_all_headers
from nodeagent.engine.weights.gguf_shape import shape_of
from nodeagent.engine.weights.gguf_unpacking import BITS_OF, FLOATS, IN_GROUPS, blocks_of, unpack
from nodeagent.engine.weights.stored_tensor import StoredTensor, read_into
from nodeagent.engine.weights.weight_source import WeightSource

_LAYER_NAMES: Final = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
_EXPERT_NAMES: Final = {
    "gate_proj": "ffn_gate_exps",
    "up_proj": "ffn_up_exps",
    "down_proj": "ffn_down_exps",
    "w1": "ffn_gate_exps",
    "w3": "ffn_up_exps",
    "w2": "ffn_down_exps",
}
_NAMES: Final = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "rope_freqs.weight": "rope_freqs.weight",
}
_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_EXPERT: Final = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)")
_INTERLEAVED_FAMILIES: Final = frozenset({"llama", "mixtral"})


class GgufFile(WeightSource):
    """One GGUF file, or all parts of a split one."""

    def __init__(self, path: Path, known: KnownHeader | None = None) -> None:
        """Open `path`. With a `known` header of it, `metadata` lacks the vocabulary."""
        self._path = path
        is_known = known is not None and known.path == path and known.is_current()
        header = known.header if known is not None and is_known else read_all_headers(path)
        self.known = known if is_known else KnownHeader(path, header)
        self._tensors, self.metadata = header.tensors, header.metadata
        self.shape = shape_of(path, header)
        self._files: dict[Path, int] = {}
        with ExitStack() as opened:
            for part in {path, *(entry.path for entry in self._tensors.values())}:
                self._files[part] = os.open(part, os.O_RDONLY)
                opened.callback(os.close, self._files[part])
            self._opened = opened.pop_all()

    def close(self) -> None:
        """Close the files."""
        self._opened.close()

    @property
    def path(self) -> Path:
        """The file, or the first of its parts."""
        return self._path

    def filed_bits(self) -> Counter[int]:
        """Return the number of weights by their size in the file; see `LinearBackend`."""
        counts: Counter[int] = Counter()
        for entry in self._tensors.values():
            bits = BITS_OF.get(GGMLQuantizationType(entry.kind), 32)
            counts[bits] += math.prod(entry.shape)
        return counts

    def has(self, name: str) -> bool:
        """Return whether the files hold `name` (a Hugging Face name)."""
        return _gguf_name(name)[0] in self._tensors

    def check(self, name: str, shape: tuple[int, ...], cut: WeightSlice | None = None) -> None:
        """Raise CheckpointError where `name` is missing, misshapen, or cannot be sliced so."""
        entry, _ = self._entry(name, shape)
        if cut is not None:
            self._column_bytes(entry, cut)

    def tensor(self, name: str, shape: tuple[int, ...], cut: WeightSlice | None = None) -> Tensor:
        """Read and dequantise one weight, or a slice of it."""
        entry, first_row = self._entry(name, shape)
        kind = GGMLQuantizationType(entry.kind)
        try:
            weights = unpack(self._packed(entry, first_row, shape, cut), kind)
        except NotImplementedError as error:
            raise CheckpointError(
                f"cannot read {entry.path}: {entry.name} is {kind.name}, which has no reader"
            ) from error
        return self._deinterleave(name, weights.view(cut.shape if cut else shape))

    def groups(
        self, name: str, shape: tuple[int, ...], cut: WeightSlice | None = None
    ) -> GgufBlocks | None:
        """Return one matrix as quantised blocks; None unless its type has groups of 32."""
        entry, first_row = self._entry(name, shape)
        kind = GGMLQuantizationType(entry.kind)
        if kind not in IN_GROUPS:
            return None

        def read() -> Tensor:
            packed = torch.from_numpy(self._packed(entry, first_row, shape, cut))
            return self._deinterleave(name, packed)

        columns = cut.shape[-1] if cut else shape[-1]
        if not self._is_contiguous(name, shape, cut):
            return blocks_of(read(), columns, kind)
        start, rows, _ = self._rows_of(entry, first_row, shape, cut)
        head_rows = self._head_rows(name)
        place = RowsInFile(entry.path, start, (rows, columns), kind.name, head_rows, read)
        return blocks_of(place, columns, kind)

    def stored(
        self, name: str, shape: tuple[int, ...], cut: WeightSlice | None = None
    ) -> StoredTensor | None:
        """Return where a float weight, or a slice of it, lies; None unless it is contiguous."""
        entry, first_row = self._entry(name, shape)
        kind = GGMLQuantizationType(entry.kind)
        if kind not in FLOATS or not self._is_contiguous(name, shape, cut):
            return None
        start, _, _ = self._rows_of(entry, first_row, shape, cut)
        part = cut.shape if cut else shape
        return StoredTensor(entry.path, start, part, kind.name, self._head_rows(name))

    def _is_contiguous(self, name: str, shape: tuple[int, ...], cut: WeightSlice | None) -> bool:
        """Return whether the slice lies in one piece; interleaved heads must be whole panels."""
        slices_columns = cut is not None and cut.axis == len(shape) - 1
        return not slices_columns and self._head_rows(name) % PANEL_ROWS == 0

    def _head_rows(self, name: str) -> int:
        """Return the rows of one interleaved head; 0 where the rows of `name` are in order."""
        queries_or_keys = name.endswith(("q_proj.weight", "k_proj.weight"))
        is_interleaved = queries_or_keys and self.shape.family in _INTERLEAVED_FAMILIES
        return self.shape.head_dim if is_interleaved else 0

    def _deinterleave(self, name: str, rows: Tensor) -> Tensor:
        """Return rows of queries or keys in Hugging Face's order."""
        head_rows = self._head_rows(name)
        return _split_halves(rows, len(rows) // head_rows) if head_rows else rows

    def _entry(self, name: str, shape: tuple[int, ...]) -> tuple[TensorEntry, int]:
        """Return the tensor that holds `name`, and the first of its rows that belongs to it."""
        gguf_name, expert = _gguf_name(name)
        entry = self._tensors.get(gguf_name)
        if entry is None:
            raise CheckpointError(f"cannot read {self._path}: it lacks {gguf_name}")
        found = entry.shape
        if expert is not None:
            # One tensor holds all experts, stacked.
            found = found[1:] if len(found) == 3 and expert < found[0] else ()
        if found != shape:
            raise CheckpointError(
                f"cannot read {entry.path}: {entry.name} is {entry.shape}, {shape} is expected"
            )
        return entry, (expert or 0) * (shape[0] if len(shape) > 1 else 0)

    def _packed(
        self, entry: TensorEntry, first_row: int, shape: tuple[int, ...], cut: WeightSlice | None
    ) -> np.ndarray:
        """Read the bytes of the rows, or of a slice of them: [rows, bytes of a row]."""
        span = slice(None)
        if cut is not None and cut.axis == len(shape) - 1:
            span = self._column_bytes(entry, cut)
        start, rows, row_bytes = self._rows_of(entry, first_row, shape, cut)
        # Read, not mapped: page faults take longer.
        packed = np.empty((rows, row_bytes), np.uint8)
        read_into(packed.data.cast("B"), self._files[entry.path], start, entry.path)
        return np.ascontiguousarray(packed[:, span])

    def _rows_of(
        self, entry: TensorEntry, first_row: int, shape: tuple[int, ...], cut: WeightSlice | None
    ) -> tuple[int, int, int]:
        """Return the offset of the rows in the file, their number, and the bytes of each."""
        rows = math.prod(shape[:-1])
        if cut is not None and cut.axis != len(shape) - 1:
            first_row, rows = first_row + cut.start, cut.end - cut.start
        row_bytes = entry.size_bytes // math.prod(entry.shape[:-1])
        return entry.start + first_row * row_bytes, rows, row_bytes

    def _column_bytes(self, entry: TensorEntry, cut: WeightSlice) -> slice:
        """Return the bytes of a row that hold the columns of `cut`; all where it slices rows."""
        if cut.axis != len(cut.whole) - 1:
            return slice(None)
        weights, size = GGML_QUANT_SIZES[GGMLQuantizationType(entry.kind)]
        if cut.start % weights or cut.end % weights:
            raise CheckpointError(
                f"cannot split {entry.name} of {entry.path}: columns {cut.start} to {cut.end} do"
                f" not fall between its blocks of {weights}; use fewer ranks in tensor_parallel"
            )
        return slice(cut.start // weights * size, cut.end // weights * size)


def _gguf_name(name: str) -> tuple[str, int | None]:
    """Return the GGUF name of `name`, and the expert whose part of that tensor it is."""
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return _NAMES.get(name, name), None
    number, part, kind = layer.groups()
    expert = _EXPERT.fullmatch(part)
    if expert is not None:
        return f"blk.{number}.{_EXPERT_NAMES[expert[2]]}.{kind}", int(expert[1])
    return f"blk.{number}.{_LAYER_NAMES[part]}.{kind}", None


def _split_halves(weights: Tensor, heads: int) -> Tensor:
    """De-interleave rows: those of the first halves of each head, then those of the second."""
    rows, columns = weights.shape
    return weights.view(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
