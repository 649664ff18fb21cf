"""From a GGUF file's packed rows to numbers, all rows at once.

The `gguf` package unpacks every kind sixteen rows at a time; for the kinds that most files hold,
whole matrices at once take a third of its time. Layouts from ggml's block structs.
"""

from functools import partial
from typing import Final

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from nodeagent.engine.kernels.cpu.file_reads import InFile
from nodeagent.engine.kernels.cpu.matrix_layouts import GROUP_WEIGHTS
from nodeagent.engine.model.layers.linear import Filed, Groups

IN_GROUPS: Final = (
    GGMLQuantizationType.Q4_0,
    GGMLQuantizationType.Q4_1,
    GGMLQuantizationType.Q8_0,
)
BITS: Final = {
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
    """Return the weights of `packed` [rows, bytes] in fp32; floats as they are."""
    if kind in FLOATS:
        return torch.from_numpy(packed).view(FLOATS[kind])
    if kind is GGMLQuantizationType.Q8_0:
        return _eight_bits(packed)
    if kind in IN_GROUPS:
        return groups_of(torch.from_numpy(packed), kind).wide()
    weights: np.ndarray = dequantize(packed, kind)
    return torch.from_numpy(weights.astype(np.float32, copy=False))


def filed(packed: Tensor | InFile, columns: int, kind: GGMLQuantizationType) -> Filed:
    """Return the matrix of `packed` [rows, bytes] as it is."""
    return Filed((packed,), columns, kind.name, partial(groups_of, kind=kind))


def groups_of(packed: Tensor, kind: GGMLQuantizationType) -> Groups:
    """Return the numbers of `packed` [rows, bytes] with their scales and offsets."""
    if kind is GGMLQuantizationType.Q8_0:
        blocks = packed.view(len(packed), -1, GROUP_WEIGHTS + 2)
        scales = _fp16(blocks, 0)
        # Counted from the least: 128 more, as bytes without a sign.
        numbers = blocks[..., 2:].bitwise_xor(128).view(len(packed), -1)
        return Groups(numbers, scales, -128 * scales, bits=8)
    blocks = packed.view(len(packed), -1, GGML_QUANT_SIZES[kind][1])
    halves = blocks[..., -GROUP_WEIGHTS // 2 :]
    # The first sixteen of a group are the low halves of its bytes, the others the high ones.
    numbers = torch.empty(*blocks.shape[:2], GROUP_WEIGHTS, dtype=torch.uint8)
    torch.bitwise_and(halves, 15, out=numbers[..., : GROUP_WEIGHTS // 2])
    torch.bitwise_right_shift(halves, 4, out=numbers[..., GROUP_WEIGHTS // 2 :])
    numbers = numbers.view(len(packed), -1)
    scales = _fp16(blocks, 0)
    if kind is GGMLQuantizationType.Q4_1:
        return Groups(numbers, scales, _fp16(blocks, 2))
    return Groups(numbers, scales, -8 * scales)


def _eight_bits(packed: np.ndarray) -> Tensor:
    blocks = torch.from_numpy(packed).view(len(packed), -1, GROUP_WEIGHTS + 2)
    numbers = blocks[..., 2:].view(torch.int8).float()
    return numbers.mul_(_fp16(blocks, 0)[..., None]).view(len(packed), -1)


def _fp16(blocks: Tensor, at: int) -> Tensor:
    return blocks[..., at : at + 2].contiguous().view(torch.float16)[..., 0].float()
