"""A GGUF file, or its parts, as a source of fp32 weights under their Hugging Face names.

GGUF files of the Llama family keep the rows of query and key so that neighbours are rotated as a
pair; the model here rotates halves as Hugging Face's does. The rows are put back on reading.
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

from nodeagent.engine.distributed.shards import Cut
from nodeagent.engine.kernels.cpu.file_reads import InFile
from nodeagent.engine.kernels.cpu.matrix_layouts import TILE_ROWS
from nodeagent.engine.model.layers.linear import Filed
from nodeagent.engine.model.shape import CheckpointError
from nodeagent.engine.tokenizer.gguf_tokenizer import vocabulary_of_gguf
from nodeagent.engine.tokenizer.vocabulary import Vocabulary
from nodeagent.engine.weights.gguf_header import TensorEntry
from nodeagent.engine.weights.gguf_parts import read_whole
from nodeagent.engine.weights.gguf_shape import shape_of
from nodeagent.engine.weights.gguf_unpacking import BITS, FLOATS, IN_GROUPS, filed, unpack
from nodeagent.engine.weights.stored_tensor import Stored, read_into
from nodeagent.engine.weights.weight_loading import WeightSource

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
_TURNED_AS_NEIGHBOURS: Final = frozenset({"llama", "mixtral"})


class GgufFile(WeightSource):
    """One GGUF file, or all its parts where it is the first of several."""

    def __init__(self, path: Path) -> None:
        self._path = path
        header = read_whole(path)
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

    def vocabulary(self) -> Vocabulary:
        """Build the vocabulary that the metadata describes."""
        return vocabulary_of_gguf(self._path, self.metadata)

    def filed_bits(self) -> Counter[int]:
        """Return how many weights there are of so many bits: see `layers.linear.bytes_kept`."""
        counts: Counter[int] = Counter()
        for entry in self._tensors.values():
            bits = BITS.get(GGMLQuantizationType(entry.kind), 32)
            counts[bits] += math.prod(entry.shape)
        return counts

    def has(self, name: str) -> bool:
        """True where the files hold `name` (a Hugging Face name)."""
        return _place(name)[0] in self._tensors

    def check(self, name: str, shape: tuple[int, ...], cut: Cut | None = None) -> None:
        """Raise CheckpointError where `name` is missing, of another shape, or cannot be cut so."""
        entry, _ = self._entry(name, shape)
        if cut is not None:
            self._span(entry, cut)

    def tensor(self, name: str, shape: tuple[int, ...], cut: Cut | None = None) -> Tensor:
        """Read and dequantise one weight, or a part of it."""
        entry, first_row = self._entry(name, shape)
        kind = GGMLQuantizationType(entry.kind)
        try:
            weights = unpack(self._packed(entry, first_row, shape, cut), kind)
        except NotImplementedError as error:
            raise CheckpointError(
                f"cannot read {entry.path}: {entry.name} is {kind.name}, which has no reader"
            ) from error
        return self._turned(name, weights.view(cut.shape if cut else shape))

    def groups(self, name: str, shape: tuple[int, ...], cut: Cut | None = None) -> Filed | None:
        """Read one matrix as the file quantises it; None where that is not of these kinds."""
        entry, first_row = self._entry(name, shape)
        kind = GGMLQuantizationType(entry.kind)
        if kind not in IN_GROUPS:
            return None

        def read() -> Tensor:
            packed = torch.from_numpy(self._packed(entry, first_row, shape, cut))
            return self._turned(name, packed)

        columns = cut.shape[-1] if cut else shape[-1]
        if not self._is_whole(name, shape, cut):
            return filed(read(), columns, kind)
        start, rows, _ = self._place_of(entry, first_row, shape, cut)
        head_rows = self._head_rows(name)
        place = InFile(entry.path, start, (rows, columns), kind.name, head_rows, read)
        return filed(place, columns, kind)

    def stored(self, name: str, shape: tuple[int, ...], cut: Cut | None = None) -> Stored | None:
        """Return where a weight of floats lies, or a part; None where that is not in one piece."""
        entry, first_row = self._entry(name, shape)
        kind = GGMLQuantizationType(entry.kind)
        if kind not in FLOATS or not self._is_whole(name, shape, cut):
            return None
        start, _, _ = self._place_of(entry, first_row, shape, cut)
        part = cut.shape if cut else shape
        return Stored(entry.path, start, part, kind.name, self._head_rows(name))

    def _is_whole(self, name: str, shape: tuple[int, ...], cut: Cut | None) -> bool:
        """True where it lies in one piece, as whole tiles of rows where those are turned."""
        by_columns = cut is not None and cut.axis == len(shape) - 1
        return not by_columns and self._head_rows(name) % TILE_ROWS == 0

    def _head_rows(self, name: str) -> int:
        """Return how many rows are turned together: those of a head; 0 where none are."""
        queries_or_keys = name.endswith(("q_proj.weight", "k_proj.weight"))
        turned = queries_or_keys and self.shape.family in _TURNED_AS_NEIGHBOURS
        return self.shape.head_dim if turned else 0

    def _turned(self, name: str, rows: Tensor) -> Tensor:
        """Put the rows of queries and keys back into the order of Hugging Face's."""
        head_rows = self._head_rows(name)
        return _halves(rows, len(rows) // head_rows) if head_rows else rows

    def _entry(self, name: str, shape: tuple[int, ...]) -> tuple[TensorEntry, int]:
        """Return the tensor that holds `name` and at which of its rows that begins."""
        place, expert = _place(name)
        entry = self._tensors.get(place)
        if entry is None:
            raise CheckpointError(f"cannot read {self._path}: it lacks {place}")
        found = entry.shape
        if expert is not None:
            # All experts lie in one tensor, one below the other.
            found = found[1:] if len(found) == 3 and expert < found[0] else ()
        if found != shape:
            raise CheckpointError(
                f"cannot read {entry.path}: {entry.name} is {entry.shape}, {shape} is expected"
            )
        return entry, (expert or 0) * (shape[0] if len(shape) > 1 else 0)

    def _packed(
        self, entry: TensorEntry, first_row: int, shape: tuple[int, ...], cut: Cut | None
    ) -> np.ndarray:
        """Return the bytes of the rows asked for, or of a part of them: [rows, bytes of a row]."""
        span = slice(None)
        if cut is not None and cut.axis == len(shape) - 1:
            span = self._span(entry, cut)
        start, rows, row_bytes = self._place_of(entry, first_row, shape, cut)
        # Read, not mapped: a page at a time takes longer.
        packed = np.empty((rows, row_bytes), np.uint8)
        read_into(packed.data.cast("B"), self._files[entry.path], start, entry.path)
        return np.ascontiguousarray(packed[:, span])

    def _place_of(
        self, entry: TensorEntry, first_row: int, shape: tuple[int, ...], cut: Cut | None
    ) -> tuple[int, int, int]:
        """Return where in their file these rows begin, how many they are, and the bytes of each."""
        rows = math.prod(shape[:-1])
        if cut is not None and cut.axis != len(shape) - 1:
            first_row, rows = first_row + cut.start, cut.end - cut.start
        row_bytes = entry.size_bytes // math.prod(entry.shape[:-1])
        return entry.start + first_row * row_bytes, rows, row_bytes

    def _span(self, entry: TensorEntry, cut: Cut) -> slice:
        """Return which bytes of a row are the columns of `cut`; all of them where it cuts rows."""
        if cut.axis != len(cut.whole) - 1:
            return slice(None)
        weights, size = GGML_QUANT_SIZES[GGMLQuantizationType(entry.kind)]
        if cut.start % weights or cut.end % weights:
            raise CheckpointError(
                f"cannot split {entry.name} of {entry.path}: columns {cut.start} to {cut.end} do"
                f" not fall between its blocks of {weights}; use fewer ranks in tensor_parallel"
            )
        return slice(cut.start // weights * size, cut.end // weights * size)


def _place(name: str) -> tuple[str, int | None]:
    """Return what the file calls `name`, and which expert's part of that it is."""
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return _NAMES.get(name, name), None
    number, part, kind = layer.groups()
    expert = _EXPERT.fullmatch(part)
    if expert is not None:
        return f"blk.{number}.{_EXPERT_NAMES[expert[2]]}.{kind}", int(expert[1])
    return f"blk.{number}.{_LAYER_NAMES[part]}.{kind}", None


def _halves(weights: Tensor, heads: int) -> Tensor:
    """Put rows kept as rotated neighbours back into rotated halves."""
    rows, columns = weights.shape
    return weights.view(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
