"""A GGUF file as a source of fp32 weights under their Hugging Face names.

GGUF files of the Llama family keep the rows of query and key so that neighbours are rotated as a
pair; the model here rotates halves as Hugging Face's does. The rows are put back on reading.
"""

import math
import mmap
import os
import re
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from nodeagent.engine.checkpoint.gguf_header import GgufHeader, TensorEntry, read_header
from nodeagent.engine.checkpoint.gguf_shape import shape_of
from nodeagent.engine.checkpoint.unpacking import BITS, IN_GROUPS, filed, unpack
from nodeagent.engine.gguf_tokenizer import vocabulary_of_gguf
from nodeagent.engine.layers.linear import Filed
from nodeagent.engine.models.shape import CheckpointError
from nodeagent.engine.models.weights import WeightSource
from nodeagent.engine.native.matrices import TILE_ROWS, InFile
from nodeagent.engine.parallel.share import Cut
from nodeagent.engine.vocabulary import Vocabulary

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
_PROBES: Final = 16
"""Places looked at to say whether a file is in the page cache."""


class GgufFile(WeightSource):
    """One mapped GGUF file. `close` after the last tensor is read, so that its pages can go."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with ExitStack() as opened:
            self._file = opened.enter_context(path.open("rb"))
            if path.stat().st_size == 0:
                raise CheckpointError(f"cannot read {path}: the file is empty")
            self._blocks = _open_for_blocks(path, self._file.fileno())
            opened.callback(os.close, self._blocks)
            self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
            opened.callback(self._map.close)
            # The header's pages come in one go, not each when it is asked for.
            self._map.madvise(mmap.MADV_WILLNEED)
            self._header: GgufHeader = read_header(path, self._map)
            self.metadata: dict[str, Any] = self._header.metadata
            self.shape = shape_of(path, self._header)
            self._opened = opened.pop_all()

    def close(self) -> None:
        """Close the file."""
        self._opened.close()

    def vocabulary(self) -> Vocabulary:
        """Build the vocabulary that the metadata describes."""
        return vocabulary_of_gguf(self._path, self.metadata)

    def filed_bits(self) -> Counter[int]:
        """Return how many weights there are of so many bits: see `layers.linear.bytes_kept`."""
        counts: Counter[int] = Counter()
        for entry in self._header.tensors.values():
            bits = BITS.get(GGMLQuantizationType(entry.kind), 32)
            counts[bits] += math.prod(entry.shape)
        return counts

    def has(self, name: str) -> bool:
        """True where the file holds `name` (a Hugging Face name)."""
        return _place(name)[0] in self._header.tensors

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
                f"cannot read {self._path}: {entry.name} is {kind.name}, which has no reader"
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
        head_rows = self.shape.head_dim if self._is_turned(name) else 0
        if columns != shape[-1] or head_rows % TILE_ROWS:
            return filed(read(), columns, kind)
        start, rows, _ = self._place_of(entry, first_row, shape, cut)
        return filed(InFile(self._blocks, start, rows, head_rows, read), columns, kind)

    def _is_turned(self, name: str) -> bool:
        queries_or_keys = name.endswith(("q_proj.weight", "k_proj.weight"))
        return queries_or_keys and self.shape.family in _TURNED_AS_NEIGHBOURS

    def _turned(self, name: str, rows: Tensor) -> Tensor:
        """Put the rows of queries and keys back into the order of Hugging Face's."""
        if self._is_turned(name):
            return _halves(rows, len(rows) // self.shape.head_dim)
        return rows

    def _entry(self, name: str, shape: tuple[int, ...]) -> tuple[TensorEntry, int]:
        """Return the tensor that holds `name` and at which of its rows that begins."""
        place, expert = _place(name)
        entry = self._header.tensors.get(place)
        if entry is None:
            raise CheckpointError(f"cannot read {self._path}: it lacks {place}")
        found = entry.shape
        if expert is not None:
            # All experts lie in one tensor, one below the other.
            found = found[1:] if len(found) == 3 and expert < found[0] else ()
        if found != shape:
            raise CheckpointError(
                f"cannot read {self._path}: {entry.name} is {entry.shape}, {shape} is expected"
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
        # Read, not mapped: a page at a time takes longer, and no array may point into a closed map.
        packed = np.empty((rows, row_bytes), np.uint8)
        self._read(packed.data.cast("B"), start, entry.name)
        return np.ascontiguousarray(packed[:, span])

    def _place_of(
        self, entry: TensorEntry, first_row: int, shape: tuple[int, ...], cut: Cut | None
    ) -> tuple[int, int, int]:
        """Return where in the file these rows begin, how many they are, and the bytes of each."""
        rows = math.prod(shape[:-1])
        if cut is not None and cut.axis != len(shape) - 1:
            first_row, rows = first_row + cut.start, cut.end - cut.start
        row_bytes = entry.size_bytes(self._path) // math.prod(entry.shape[:-1])
        return self._header.data_start + entry.offset + first_row * row_bytes, rows, row_bytes

    def _read(self, left: memoryview, start: int, what: str) -> None:
        """Fill `left` from `start` on; the system gives two GiB at a time at most."""
        while left:
            taken = os.preadv(self._file.fileno(), [left], start)
            if taken == 0:
                raise CheckpointError(f"cannot read {self._path}: it ends within {what}")
            left, start = left[taken:], start + taken

    def _span(self, entry: TensorEntry, cut: Cut) -> slice:
        """Return which bytes of a row are the columns of `cut`; all of them where it cuts rows."""
        if cut.axis != len(cut.whole) - 1:
            return slice(None)
        weights, size = GGML_QUANT_SIZES[GGMLQuantizationType(entry.kind)]
        if cut.start % weights or cut.end % weights:
            raise CheckpointError(
                f"cannot split {entry.name} of {self._path}: columns {cut.start} to {cut.end} do"
                f" not fall between its blocks of {weights}; use fewer ranks in tensor_parallel"
            )
        return slice(cut.start // weights * size, cut.end // weights * size)


def _open_for_blocks(path: Path, file: int) -> int:
    """Open what is open as `file` again: past the page cache, unless it is there already.

    From a disk they come in half the time so: no page is cleared to hold them, and none copied.
    """
    with suppress(OSError):
        if not _is_cached(file):
            return os.open(path, os.O_RDONLY | os.O_DIRECT)
    # It is cached, or its file system has no other way.
    return os.open(path, os.O_RDONLY)


def _is_cached(file: int) -> bool:
    step, byte = os.fstat(file).st_size // (_PROBES + 1), bytearray(1)
    try:
        return all(
            os.preadv(file, [byte], at * step, os.RWF_NOWAIT) for at in range(1, _PROBES + 1)
        )
    except BlockingIOError:
        return False


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
