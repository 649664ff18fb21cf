"""Linear backends by the C kernels: matrices as their file has them, read beside other work.

Quantised groups are multiplied with an error of 2^-16 and no second copy, in a third of the time
of torch's int4 kernel. Floats are multiplied exactly as their file has them. Beside quantised
groups they may be rounded to 14 bits in groups instead: products are twice as fast then, with an
error of 2^-14. With all rows of x rounded to bytes, and floats to 8 bits, products are faster
again, with an error of about 2^-8.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from nodeagent.engine.architecture.decoder_shape import DecoderShape
from nodeagent.engine.kernels.cpu.file_reads import RowFetch, start_fetching
from nodeagent.engine.kernels.cpu.fused_layers import CpuFusedLayers, fuse_layers
from nodeagent.engine.kernels.cpu.library import CpuKernels
from nodeagent.engine.kernels.cpu.native_matrix import NativeMatrix
from nodeagent.engine.kernels.linear_backend import (
    DenseLayer,
    EmbeddingTable,
    Linear,
    LinearBackend,
)
from nodeagent.engine.kernels.matrix_formats import (
    GROUP_WEIGHTS,
    PANEL_ROWS,
    GgufBlocks,
    QuantisedMatrix,
    RowsInFile,
)
from nodeagent.engine.kernels.torch.linear import OneDnnBackend, PackedBackend


class _NativeMatrices(LinearBackend):
    """The common part of both backends of the C kernels: packed floats, and reads from files."""

    _rounds_floats: ClassVar[bool]

    def __init__(self, kernels: CpuKernels) -> None:
        self._kernels = kernels
        self._fetches: list[RowFetch] = []

    def from_rows(self, parts: Sequence[Tensor | RowsInFile]) -> NativeMatrix:
        """Keep float matrices, stacked vertically."""
        return self._kernels.pack_floats(parts, self._rounds_floats, self._fetches)

    def rows_table(self, part: Tensor | RowsInFile) -> EmbeddingTable:
        """Keep float embeddings packed."""
        return self.from_rows([part])

    def head(self, table: EmbeddingTable) -> Linear:
        """Multiply by the packed embeddings themselves."""
        return table if isinstance(table, NativeMatrix) else super().head(table)  # type: ignore[safe-super]

    def start_reads(self) -> Callable[[], None]:
        """Start to read all rows that are still in files; return the wait."""
        if not self._fetches:
            return lambda: None
        reading = start_fetching(tuple(self._fetches))
        self._fetches.clear()
        return reading.result

    def weight_regions(self) -> list[Tensor]:
        """Return the memory of all packed matrices."""
        return self._kernels.weight_regions()

    def fuse(
        self, layers: Sequence[DenseLayer | None], shape: DecoderShape
    ) -> CpuFusedLayers | None:
        """Return all layers as one call, where the C kernels hold all their matrices."""
        return fuse_layers(self._kernels, layers, shape)


class NativeFloatBackend(_NativeMatrices, OneDnnBackend):
    """Keeps floats exactly as their file has them; matrices without whole panels go to oneDNN."""

    name = "native-floats"
    _rounds_floats = False

    def bytes_per_weight(self, dtype: torch.dtype, file_bits: int) -> float:
        """Return the size of a 16-bit float where the file has those, else of fp32."""
        return 2 if file_bits == 16 else 4

    def takes_rows(self, part_rows: Iterable[int], columns: int) -> bool:
        """Return whether all parts are whole panels."""
        return not any(rows % PANEL_ROWS for rows in part_rows)


class NativeQuantisedBackend(_NativeMatrices, PackedBackend):
    """Keeps quantised groups as their file has them, and floats rounded or exactly."""

    name = "native-quantised"
    _rounds_floats = True
    _by_bytes: ClassVar[bool] = False

    def bytes_per_weight(self, dtype: torch.dtype, file_bits: int) -> float:
        """Return the size of a weight with its share of the group's scale and offset (4 bytes)."""
        return min(file_bits, 16) / 8 + 4 / GROUP_WEIGHTS

    def takes_rows(self, part_rows: Iterable[int], columns: int) -> bool:
        """Return whether all parts are whole panels of whole groups."""
        return columns % GROUP_WEIGHTS == 0 and not any(rows % PANEL_ROWS for rows in part_rows)

    def from_quantised(self, matrix: QuantisedMatrix) -> Linear:
        """Keep a quantised matrix as it is; one without whole panels goes to torch."""
        native = self.quantised_table(matrix)
        return super().from_quantised(matrix) if native is None else native

    def quantised_table(self, matrix: QuantisedMatrix) -> NativeMatrix | None:
        """Keep a quantised matrix as it is; None where it has no whole panels."""
        if isinstance(matrix, GgufBlocks):
            if any(len(part) % PANEL_ROWS for part in matrix.parts):
                return None
            return self._kernels.pack_blocks(matrix, self._fetches, self._by_bytes)
        if matrix.numbers.shape[0] % PANEL_ROWS:
            return None
        return self._kernels.pack_groups(matrix, self._by_bytes)


class NativeBytesBackend(NativeQuantisedBackend):
    """Keeps quantised groups as their file has them and floats in 8 bits; multiplies by bytes."""

    name = "native-bytes"
    _by_bytes = True

    def bytes_per_weight(self, dtype: torch.dtype, file_bits: int) -> float:
        """Return the size of a weight with its share of the group's scale and offset (4 bytes)."""
        return min(file_bits, 8) / 8 + 4 / GROUP_WEIGHTS

    def from_rows(self, parts: Sequence[Tensor | RowsInFile]) -> NativeMatrix:
        """Keep float matrices, stacked vertically, in 8 bits."""
        return self._kernels.pack_floats_as_bytes(parts, self._fetches)
