"""Linear backends by torch's own kernels: plain rows, oneDNN, and packed weights.

ops/bench/linear.md compares their costs, measured side by side.
"""

from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import linear

from nodeagent.engine.kernels.linear_backend import EmbeddingTable, Linear, LinearBackend
from nodeagent.engine.kernels.matrix_formats import (
    GROUP_WEIGHTS,
    GgufBlocks,
    QuantisedGroups,
    QuantisedMatrix,
)

_INT4_ROWS_MAX: Final = 4
"""With more rows of input, reading a bf16 copy costs less than unpacking four bits for each row."""
_INT4_ROW_MULTIPLE: Final = 16
_ONEDNN_ROWS: Final = 8
"""oneDNN chooses its layout for this many rows of input; it serves one row and hundreds alike."""
_ONEDNN_BYTES_MIN: Final = 64 * 1024
"""A smaller matrix is multiplied as it is: a layout of its own would gain nothing."""


class PlainLinear:
    """A matrix as it is."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply."""
        return linear(x, self._weight)


class OneDnnLinear:
    """A matrix in oneDNN's blocked layout and its own dtype; `x` is converted to that and back.

    torch would otherwise rearrange the matrix in every step.
    """

    def __init__(self, weight: Tensor) -> None:
        self._weight: Any = torch.ops.mkldnn._reorder_linear_weight(weight, _ONEDNN_ROWS)
        self._multiply: Any = torch.ops.mkldnn._linear_pointwise.default
        self._dtype = weight.dtype

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply."""
        product: Tensor = self._multiply(x.to(self._dtype), self._weight, None, "none", [], "")
        return product.to(x.dtype)


class Fp16Linear:
    """A matrix in fp16, multiplied in fp32 by FBGEMM: half the bytes of fp32, error 2^-11."""

    def __init__(self, weight: Tensor) -> None:
        self._packed: Any = torch.ops.quantized.linear_prepack_fp16(weight.float(), None)
        self._multiply: Any = torch.ops.quantized.linear_dynamic_fp16.default

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply."""
        product: Tensor = self._multiply(x, self._packed)
        return product


class Int4Linear:
    """Groups of four bits by torch's int4 kernel, with a bf16 copy for more than a few rows."""

    def __init__(self, groups: QuantisedGroups) -> None:
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(groups.numbers.int(), 1)
        # The kernel takes number 8 of the sixteen as zero, so its offsets are those of number 8.
        middles = groups.offsets + 8 * groups.scales
        parameters = torch.stack((groups.scales, middles), dim=-1).transpose(0, 1)
        self._parameters = parameters.bfloat16().contiguous()
        self._multiply: Any = torch.ops.aten._weight_int4pack_mm_for_cpu.default
        self._bf16 = OneDnnLinear(groups.dequantise().bfloat16())

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply."""
        if x.shape[0] > _INT4_ROWS_MAX:
            return self._bf16(x)
        product: Tensor = self._multiply(
            x.bfloat16(), self._packed, GROUP_WEIGHTS, self._parameters
        )
        return product.to(x.dtype)


class PlainBackend(LinearBackend):
    """Keeps matrices as they are: for devices other than the CPU, and for small models."""

    name = "plain"

    def bytes_per_weight(self, dtype: torch.dtype, file_bits: int) -> float:
        """Return the size of a number of the model's dtype."""
        return dtype.itemsize

    def from_tensor(self, weight: Tensor) -> Linear:
        """Keep `weight` as it is."""
        return PlainLinear(weight)

    def head(self, table: EmbeddingTable) -> Linear:
        """Multiply by the embeddings as they are."""
        assert isinstance(table, Tensor)
        return PlainLinear(table)


class OneDnnBackend(PlainBackend):
    """Keeps matrices in oneDNN's layout, in the model's dtype."""

    name = "onednn"

    def from_tensor(self, weight: Tensor) -> Linear:
        """Keep `weight` in oneDNN's layout, unless it is small."""
        return PlainLinear(weight) if weight.nbytes < _ONEDNN_BYTES_MIN else OneDnnLinear(weight)


class PackedBackend(LinearBackend):
    """Keeps four bits as torch's int4 kernel wants them, other matrices in bf16 or fp16."""

    name = "packed"
    takes_quantised = True

    def bytes_per_weight(self, dtype: torch.dtype, file_bits: int) -> float:
        """Return the size of four bits with a bf16 copy, or of bf16 alone."""
        return 2 + 1 / 2 + 4 / GROUP_WEIGHTS if file_bits == 4 else 2

    def from_tensor(self, weight: Tensor) -> Linear:
        """Keep `weight` in bf16, unless it is small."""
        if weight.nbytes < _ONEDNN_BYTES_MIN:
            return PlainLinear(weight)
        return OneDnnLinear(weight.bfloat16())

    def from_quantised(self, matrix: QuantisedMatrix) -> Linear:
        """Keep four bits as they are where torch's kernel fits, else the weights in bf16."""
        groups = matrix.groups() if isinstance(matrix, GgufBlocks) else matrix
        if groups.bits != 4 or groups.numbers.shape[0] % _INT4_ROW_MULTIPLE:
            return self.from_tensor(groups.dequantise())
        return Int4Linear(groups)

    def table(self, weight: Tensor) -> EmbeddingTable:
        """Keep embeddings in fp16."""
        return weight.half()

    def head(self, table: EmbeddingTable) -> Linear:
        """Multiply by fp16."""
        assert isinstance(table, Tensor)
        return Fp16Linear(table)
