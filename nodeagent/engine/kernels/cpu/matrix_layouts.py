"""Matrices in the layouts that the C files here multiply by: quantised, or of floats.

They check nothing: their callers in `layers` do.
"""

import ctypes
from typing import Final

import torch
from torch import Tensor

from nodeagent.engine.kernels.cpu.huge_pages import Room

TILE_ROWS: Final = 16
GROUP_WEIGHTS: Final = 32
FLOATS: Final = (torch.float16, torch.bfloat16, torch.float32)
Layout = torch.dtype | str
"""How a file keeps rows: as floats, or as blocks that GGUF calls so."""
_LAYOUTS: Final[tuple[Layout, ...]] = (*FLOATS, "Q4_0", "Q4_1", "Q8_0")
LAYOUTS: Final = {layout: number for number, layout in enumerate(_LAYOUTS)}
"""The numbers by which the C files know them; matrices of floats are of the same kinds."""
ROUNDED: Final = 16
"""The kind of a matrix of floats rounded to so many bits; that of blocks are their bits."""


class Native:
    """A matrix in a layout of our own: rows are multiplied by it, or it is read as a table.

    It is filled by whole tiles of rows.
    """

    def __init__(
        self, library: ctypes.CDLL, room: Room, kind: int, rows: int, columns: int
    ) -> None:
        self.library = library
        self._tile_bytes: int = library.tile_bytes(kind, columns)
        self.packed = room.take(rows // TILE_ROWS * self._tile_bytes)
        self.arguments = (self.packed.data_ptr(), kind, rows, columns)
        """Where it lies, which kind it is, its rows and its columns."""

    def fill_groups(self, numbers: Tensor, scales: Tensor, offsets: Tensor) -> None:
        """Take the numbers, scales and offsets of all rows."""
        parts = (numbers.contiguous(), scales.contiguous(), offsets.contiguous())
        address, *kind = self.arguments
        threads = torch.get_num_threads()
        self.library.pack(*(part.data_ptr() for part in parts), *kind, threads, address)

    def fill(self, at: int, rows: Tensor, layout: Layout) -> None:
        """Take the rows from `at` on, as a file keeps them."""
        rows = rows.contiguous()
        _, kind, _, columns = self.arguments
        threads = torch.get_num_threads()
        self.library.pack_filed(
            *(rows.data_ptr(), LAYOUTS[layout], kind, len(rows), columns, threads),
            self.place_of(at),
        )

    def place_of(self, row: int) -> int:
        """Return the address of the tile that begins with `row`."""
        return self.arguments[0] + row // TILE_ROWS * self._tile_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """Return `x` [count, columns] times the matrix."""
        x = x.contiguous()
        count = x.shape[0]
        answer = torch.empty(count, self.arguments[2])
        threads = torch.get_num_threads()
        if self.library.multiply(*self.arguments, x.data_ptr(), count, threads, answer.data_ptr()):
            raise MemoryError(f"cannot multiply {count} rows: no memory to round them in")
        return answer

    def __getitem__(self, rows: Tensor) -> Tensor:
        """Return these rows of the matrix as numbers: [count, columns]."""
        rows, answer = rows.contiguous(), torch.empty(len(rows), self.arguments[3])
        if self.library.read_rows(*self.arguments, rows.data_ptr(), len(rows), answer.data_ptr()):
            raise IndexError(f"cannot read rows {rows.tolist()}: there are {self.arguments[2]}")
        return answer
