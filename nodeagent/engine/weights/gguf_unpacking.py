"""Unpacks the quantised rows of a GGUF file, all rows at once.

The `gguf` package unpacks 16 rows at a time; for the most frequent types, unpacking a whole matrix
at once takes a third of the time. Layouts: the block structs of ggml-common.h.
"""

from functools import partial
from typing import Final

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from nodeagent.engine.kernels.matrix_formats import (
    GROUP_WEIGHTS,
    GgufBlocks,
    QuantisedGroups,
    RowsInFile,
)

IN_GROUPS: Final = (
    GGMLQuantizationType.Q4_0,
    GGMLQuantizationType.Q4_1,
    GGMLQuantizationType.Q8_0,
)
BITS_OF: Final = {
    GGMLQuantizationType.Q4_0: 4,
    GGMLQuantizationType.Q4_1: 4,
    GGMLQuantizationType.Q8_0: 8,
    GGMLQuantizationType.F16: 16,
    GGMLQuantizationType.BF16: 16,
}
FLOATS: Final = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}


def unpack(packed: np.ndarray, kind: GGMLQuantizationType) -> Tensor:
    """Return the weights of `packed` [rows, bytes] in fp32; floats in their own dtype.

    Raises NotImplementedError for a type that has no reader.
    """
    if kind in FLOATS:
        return torch.from_numpy(packed).view(FLOATS[kind])
    if kind is GGMLQuantizationType.Q8_0:
        return _dequantise_q8(packed)
    if kind in IN_GROUPS:
        return groups_of(torch.from_numpy(packed), kind).dequantise()
    weights: np.ndarray = dequantize(packed, kind)
    return torch.from_numpy(weights.astype(np.float32, copy=False))


def blocks_of(packed: Tensor | RowsInFile, columns: int, kind: GGMLQuantizationType) -> GgufBlocks:
    """Return the matrix of `packed` [rows, bytes] as blocks, without unpacking it."""
    return GgufBlocks((packed,), columns, kind.name, partial(groups_of, kind=kind))


def groups_of(packed: Tensor, kind: GGMLQuantizationType) -> QuantisedGroups:
    """Unpack `packed` [rows, bytes] into numbers, scales and offsets."""
    if kind is GGMLQuantizationType.Q8_0:
        blocks = packed.view(len(packed), -1, GROUP_WEIGHTS + 2)
        scales = _fp16(blocks, 0)
        # int8 to uint8: add 128, which the offset subtracts.
        numbers = blocks[..., 2:].bitwise_xor(128).view(len(packed), -1)
        return QuantisedGroups(numbers, scales, -128 * scales, bits=8)
    blocks = packed.view(len(packed), -1, GGML_QUANT_SIZES[kind][1])
    nibbles = blocks[..., -GROUP_WEIGHTS // 2 :]
    # The low nibbles of a group are its first 16 numbers, the high nibbles the others.
    numbers = torch.empty(*blocks.shape[:2], GROUP_WEIGHTS, dtype=torch.uint8)
    torch.bitwise_and(nibbles, 15, out=numbers[..., : GROUP_WEIGHTS // 2])
    torch.bitwise_right_shift(nibbles, 4, out=numbers[..., GROUP_WEIGHTS // 2 :])
    numbers = numbers.view(len(packed), -1)
    scales = _fp16(blocks, 0)
    if kind is GGMLQuantizationType.Q4_1:
        return QuantisedGroups(numbers, scales, _fp16(blocks, 2))
    return QuantisedGroups(numbers, scales, -8 * scales)


def _dequantise_q8(packed: np.ndarray) -> Tensor:
    blocks = torch.from_numpy(packed).view(len(packed), -1, GROUP_WEIGHTS + 2)
    numbers = blocks[..., 2:].view(torch.int8).float()
    return numbers.mul_(_fp16(blocks, 0)[..., None]).view(len(packed), -1)


def _fp16(blocks: Tensor, at: int) -> Tensor:
    return blocks[..., at : at + 2].contiguous().view(torch.float16)[..., 0].float()
