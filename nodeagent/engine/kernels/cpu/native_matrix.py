"""A matrix in the packed layout of the C kernels; `packing.c` describes it.

Nothing here checks its arguments: the linear backends do.
"""

import ctypes
from typing import Final

import torch
from torch import Tensor

from nodeagent.engine.kernels.huge_pages import HugePageArena
from nodeagent.engine.kernels.matrix_formats import FLOATS, PANEL_ROWS, QuantisedGroups, RowFormat

_ROW_FORMATS: Final[tuple[RowFormat, ...]] = (*FLOATS, "Q4_0", "Q4_1", "Q8_0")
FORMAT_CODES: Final = {name: number for number, name in enumerate(_ROW_FORMATS)}
"""The numbers of row formats in the C files. A float matrix has its format as its kind."""
ROUNDED_KIND: Final = 16
"""The kind of a float matrix rounded to groups of this many bits. The kind of a quantised matrix is
its bits, 4 or 8."""
BY_BYTES: Final = 32
"""Added to the kind of a quantised matrix by which rows are multiplied as bytes."""


class NativeMatrix:
    """A packed matrix: a `Linear`, and a table of embeddings.

    The matrix is filled panel by panel; panels not filled yet are zero.
    """

    def __init__(
        self, library: ctypes.CDLL, arena: HugePageArena, kind: int, rows: int, columns: int
    ) -> None:
        self.library = library
        self.kind = kind
        self.rows = rows
        self.columns = columns
        self._panel_bytes: int = library.panel_bytes(kind, columns)
        self.packed = arena.take(rows // PANEL_ROWS * self._panel_bytes)
        self.c_arguments = (self.packed.data_ptr(), kind, rows, columns)
        """Address, kind, rows and columns, as every C function takes them."""

    def fill_groups(self, groups: QuantisedGroups) -> None:
        """Pack all rows."""
        parts = (groups.numbers, groups.scales, groups.offsets)
        # The name keeps copies alive during the call.
        contiguous = [part.contiguous() for part in parts]
        pointers = (part.data_ptr() for part in contiguous)
        address, *matrix = self.c_arguments
        self.library.pack_groups(*pointers, *matrix, torch.get_num_threads(), address)

    def fill_rows(self, first_row: int, rows: Tensor, row_format: RowFormat) -> None:
        """Pack `rows`, in the form that a file stores, from the panel of `first_row` on."""
        rows = rows.contiguous()
        self.library.pack_rows(
            rows.data_ptr(),
            FORMAT_CODES[row_format],
            self.kind,
            len(rows),
            self.columns,
            torch.get_num_threads(),
            self.panel_address(first_row),
        )

    def panel_address(self, row: int) -> int:
        """Return the address of the panel that begins with `row`."""
        return self.c_arguments[0] + row // PANEL_ROWS * self._panel_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """Return `x` [count, columns] times the matrix: [count, rows]."""
        x = x.contiguous()
        count = x.shape[0]
        product = torch.empty(count, self.rows)
        threads = torch.get_num_threads()
        failed = self.library.multiply(
            *self.c_arguments, x.data_ptr(), count, threads, product.data_ptr()
        )
        if failed:
            raise MemoryError(f"cannot multiply {count} rows: no memory for their rounded copy")
        return product

    def __getitem__(self, rows: Tensor) -> Tensor:
        """Return these rows of the matrix in fp32: [count, columns]."""
        rows, unpacked = rows.contiguous(), torch.empty(len(rows), self.columns)
        failed = self.library.unpack_rows(
            *self.c_arguments, rows.data_ptr(), len(rows), unpacked.data_ptr()
        )
        if failed:
            raise IndexError(f"cannot read rows {rows.tolist()}: there are {self.rows}")
        return unpacked
