"""Matrices in the layouts that the C files here multiply by: quantised, or of floats.

They check nothing: their callers in `layers` do.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from nodeagent.engine.native.memory import Room

TILE_ROWS: Final = 16
GROUP_WEIGHTS: Final = 32
BLOCK_LAYOUTS: Final = ("Q4_0", "Q4_1", "Q8_0")
"""GGUF's names of the blocks that are packed as they are."""
FLOATS: Final = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
"""The numbers by which `floats.c` knows them."""


@dataclass(frozen=True, slots=True)
class InFile:
    """Rows where they lie in an open file."""

    file: int
    """Its descriptor."""
    start: int
    rows: int
    head_rows: int
    """Of so many rows, the first half and the second are filed as neighbours; 0 where none are."""
    read: Callable[[], Tensor]
    """Reads them, [rows, bytes], in the order that is wanted; says in words why it cannot."""

    def __len__(self) -> int:
        return self.rows


class Native:
    """A matrix in a layout of our own: rows are multiplied by it, or it is read as a table."""

    def __init__(
        self, library: ctypes.CDLL, packed: Tensor, kind: int, rows: int, columns: int
    ) -> None:
        self._library = library
        self.packed = packed
        self.arguments = (packed.data_ptr(), kind, rows, columns)
        """Where it lies, which kind it is, its rows and its columns."""
        layout = "floats" if kind in FLOATS.values() else "packed"
        self._multiply = getattr(library, f"multiply_{layout}")
        self._read = getattr(library, f"read_{layout}")

    def __call__(self, x: Tensor) -> Tensor:
        """Return `x` [count, columns] times the matrix."""
        x = x.contiguous()
        count = x.shape[0]
        answer = torch.empty(count, self.arguments[2])
        threads = torch.get_num_threads()
        if self._multiply(*self.arguments, x.data_ptr(), count, threads, answer.data_ptr()):
            raise MemoryError(f"cannot multiply {count} rows: no memory to round them in")
        return answer

    def __getitem__(self, rows: Tensor) -> Tensor:
        """Return these rows of the matrix as numbers: [count, columns]."""
        rows, answer = rows.contiguous(), torch.empty(len(rows), self.arguments[3])
        if self._read(*self.arguments, rows.data_ptr(), len(rows), answer.data_ptr()):
            raise IndexError(f"cannot read rows {rows.tolist()}: there are {self.arguments[2]}")
        return answer


class PackedMatrix(Native):
    """A matrix of numbers of 4, 8 or 16 bits in groups of 32; filled by whole tiles of rows."""

    def __init__(
        self, library: ctypes.CDLL, room: Room, bits: int, rows: int, columns: int
    ) -> None:
        group_bytes = GROUP_WEIGHTS * TILE_ROWS * bits // 8 + 4 * TILE_ROWS
        self._tile_bytes = columns // GROUP_WEIGHTS * group_bytes
        packed = room.take(rows // TILE_ROWS * self._tile_bytes)
        super().__init__(library, packed, bits, rows, columns)

    def fill(self, numbers: Tensor, scales: Tensor, offsets: Tensor) -> None:
        """Take the numbers, scales and offsets of all rows."""
        parts = (numbers.contiguous(), scales.contiguous(), offsets.contiguous())
        address, *kind = self.arguments
        threads = torch.get_num_threads()
        self._library.pack(*(part.data_ptr() for part in parts), *kind, threads, address)

    def fill_floats(self, at: int, weights: Tensor) -> None:
        """Take the rows from `at` on as floats, rounded to as many bits as products bear."""
        weights = (weights if weights.dtype in FLOATS else weights.float()).contiguous()
        self._library.pack_rounded(
            weights.data_ptr(),
            FLOATS[weights.dtype],
            *weights.shape,
            torch.get_num_threads(),
            self.place_of(at),
        )

    def fill_blocks(self, at: int, blocks: Tensor, layout: str) -> None:
        """Take the rows from `at` on as the blocks of a GGUF file: [rows, bytes]."""
        blocks = blocks.contiguous()
        self._library.pack_blocks(
            blocks.data_ptr(),
            BLOCK_LAYOUTS.index(layout),
            len(blocks),
            self.arguments[3],
            torch.get_num_threads(),
            self.place_of(at),
        )

    def place_of(self, row: int) -> int:
        """Return the address of the tile that begins with `row`."""
        return self.arguments[0] + row // TILE_ROWS * self._tile_bytes


class FloatMatrix(Native):
    """A matrix of floats in tiles of 16 rows: in the dtype of all its parts, or in fp32."""

    def __init__(self, library: ctypes.CDLL, room: Room, parts: Sequence[Tensor]) -> None:
        dtypes = {part.dtype for part in parts}
        dtype = dtypes.pop() if len(dtypes) == 1 and dtypes <= FLOATS.keys() else torch.float32
        rows, columns = sum(len(part) for part in parts), parts[0].shape[1]
        packed = room.take(rows * columns * dtype.itemsize)
        super().__init__(library, packed, FLOATS[dtype], rows, columns)
        at = packed.data_ptr()
        for part in parts:
            whole = part.to(dtype).contiguous()
            threads = torch.get_num_threads()
            library.pack_floats(whole.data_ptr(), dtype.itemsize, *whole.shape, threads, at)
            at += whole.nbytes


@dataclass(frozen=True, slots=True)
class Fetch:
    """Blocks of an open file that are to be the rows of `matrix` from `at` on."""

    matrix: PackedMatrix
    at: int
    blocks: InFile
    layout: str
