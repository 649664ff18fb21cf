"""The functions of the C files here on tensors. They check nothing: their callers in `layers` do.

Each takes fp32 tensors on the CPU that lie row behind row. A library is used only once its products
have been held against torch's.
"""

import ctypes
import functools
import logging
import time
from collections.abc import Callable, Sequence
from ctypes import c_float, c_int64, c_void_p
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from nodeagent.engine.cuda.kernels import DeviceKernels, device_kernels
from nodeagent.engine.native.building import NoKernels, built
from nodeagent.engine.native.memory import Room

log = logging.getLogger(__name__)

TILE_ROWS: Final = 16
GROUP_WEIGHTS: Final = 32
LANES: Final = 16
"""Heads are whole numbers of these."""
HEAD_DIM_MAX: Final = 256
PIECE_TOKENS: Final = 32
"""Attention goes through the keys once for so many neighbouring tokens, and all heads of each."""
_ERROR_MAX: Final = 1e-3
_TYPES: Final = {"p": c_void_p, "n": c_int64, "f": c_float}
_ARGUMENTS: Final = {
    "can_multiply": "",
    "normalise": "pppfnnnp",
    "gate": "pnnnp",
    "turn": "pnnnppnn",
    "keep": "pnnppnn",
    "attend": "pnpnnnpnpnnnp",
}
_OF_PRODUCTS: Final = {
    "pack": "pppnnnnp",
    "pack_blocks": "pnnnnp",
    "fetch_blocks": "nnnnnnnp",
    "read_rows": "pnnnpnp",
    "multiply": "pnnnpnnp",
    "pack_floats": "pnnnnp",
    "read_floats": "pnnnpnp",
    "multiply_floats": "pnnnpnnp",
}
"""What each function takes: pointers, numbers (int64), a float."""
BLOCK_LAYOUTS: Final = ("Q4_0", "Q4_1", "Q8_0")
"""GGUF's names of the blocks that are packed as they are."""
_KINDS: Final = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}


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


class Matrix(Protocol):
    """What a matrix in our own layout can do."""

    arguments: tuple[int, int, int, int]
    """Where it lies, which kind it is, its rows and its columns."""

    def multiply(self, x: Tensor) -> Tensor:
        """Return `x` [count, columns] times the matrix."""
        ...

    def read(self, rows: Tensor) -> Tensor:
        """Return these rows of the matrix as numbers: [count, columns]."""
        ...


class PackedMatrix:
    """A matrix of four-bit or eight-bit numbers in groups of 32, as `multiply` reads it."""

    def __init__(
        self, library: ctypes.CDLL, room: Room, bits: int, rows: int, columns: int
    ) -> None:
        group_bytes = GROUP_WEIGHTS * TILE_ROWS * bits // 8 + 4 * TILE_ROWS
        self.rows = rows
        self._library = library
        self._tile_bytes = columns // GROUP_WEIGHTS * group_bytes
        self.packed = room.take(rows // TILE_ROWS * self._tile_bytes)
        self.arguments = (self.packed.data_ptr(), bits, rows, columns)

    def fill(self, numbers: Tensor, scales: Tensor, offsets: Tensor) -> None:
        """Take the numbers, scales and offsets of all rows."""
        parts = (numbers.contiguous(), scales.contiguous(), offsets.contiguous())
        _, bits, rows, columns = self.arguments
        self._library.pack(
            *(part.data_ptr() for part in parts),
            bits,
            rows,
            columns,
            torch.get_num_threads(),
            self.packed.data_ptr(),
        )

    def fill_blocks(self, at: int, blocks: Tensor, layout: str) -> None:
        """Take the rows from `at` on as the blocks of a GGUF file: [rows, bytes]."""
        place, _, _, columns = self.arguments
        blocks = blocks.contiguous()
        self._library.pack_blocks(
            blocks.data_ptr(),
            BLOCK_LAYOUTS.index(layout),
            len(blocks),
            columns,
            torch.get_num_threads(),
            place + at // TILE_ROWS * self._tile_bytes,
        )

    def fetch_blocks(self, at: int, blocks: InFile, layout: str) -> None:
        """Take the rows from `at` on as the blocks of an open file."""
        place, _, _, columns = self.arguments
        if self._library.fetch_blocks(
            blocks.file,
            blocks.start,
            BLOCK_LAYOUTS.index(layout),
            blocks.rows,
            columns,
            blocks.head_rows,
            torch.get_num_threads(),
            place + at // TILE_ROWS * self._tile_bytes,
        ):
            self.fill_blocks(at, blocks.read(), layout)

    def multiply(self, x: Tensor) -> Tensor:
        """Return `x` [count, columns] times the matrix."""
        x = x.contiguous()
        count = x.shape[0]
        answer = torch.empty(count, self.rows)
        if self._library.multiply(
            *self.arguments, x.data_ptr(), count, torch.get_num_threads(), answer.data_ptr()
        ):
            raise MemoryError(f"cannot multiply {count} rows: no memory to round them in")
        return answer

    def read(self, rows: Tensor) -> Tensor:
        """Return these rows of the matrix as numbers: [count, columns]."""
        answer = torch.empty(len(rows), self.arguments[3])
        if self._library.read_rows(
            *self.arguments, rows.contiguous().data_ptr(), len(rows), answer.data_ptr()
        ):
            raise IndexError(f"cannot read rows {rows.tolist()}: there are {self.rows}")
        return answer


class FloatMatrix:
    """A matrix of floats in tiles of 16 rows, as `multiply_floats` reads it."""

    def __init__(self, library: ctypes.CDLL, room: Room, parts: Sequence[Tensor]) -> None:
        dtypes = {part.dtype for part in parts}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
        self._kind = _KINDS.get(dtype, _KINDS[torch.float32])
        dtype = dtype if dtype in _KINDS else torch.float32
        self._rows, self._columns = sum(len(part) for part in parts), parts[0].shape[1]
        self._library = library
        self._packed = room.take(self._rows * self._columns * dtype.itemsize)
        self.arguments = (self._packed.data_ptr(), self._kind, self._rows, self._columns)
        at = 0
        for part in parts:
            whole = part.to(dtype).contiguous()
            library.pack_floats(
                whole.data_ptr(),
                dtype.itemsize,
                *whole.shape,
                torch.get_num_threads(),
                self._packed.data_ptr() + at,
            )
            at += whole.nbytes

    def multiply(self, x: Tensor) -> Tensor:
        """Return `x` [count, columns] times the matrix."""
        x = x.contiguous()
        count = x.shape[0]
        answer = torch.empty(count, self._rows)
        threads = torch.get_num_threads()
        arguments = (*self.arguments, x.data_ptr(), count, threads, answer.data_ptr())
        self._library.multiply_floats(*arguments)
        return answer

    def read(self, rows: Tensor) -> Tensor:
        """Return these rows of the matrix as numbers: [count, columns]."""
        rows, answer = rows.contiguous(), torch.empty(len(rows), self._columns)
        arguments = (*self.arguments, rows.data_ptr(), len(rows), answer.data_ptr())
        if self._library.read_floats(*arguments):
            raise IndexError(f"cannot read rows {rows.tolist()}: there are {self._rows}")
        return answer


class Kernels:
    """The library, and whether its products are of use on this processor."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self._room = Room()
        for name, kinds in _ARGUMENTS.items():
            function = getattr(library, name)
            function.argtypes = [_TYPES[kind] for kind in kinds]
            function.restype = None
        library.can_multiply.restype = c_int64
        self.multiplies = bool(library.can_multiply())
        if self.multiplies:
            for name, kinds in _OF_PRODUCTS.items():
                getattr(library, name).argtypes = [_TYPES[kind] for kind in kinds]
            for name in ("fetch_blocks", "multiply", "read_rows", "read_floats"):
                getattr(library, name).restype = c_int64
            library.pack_floats.restype = library.multiply_floats.restype = None
            self._try()

    def pack(self, bits: int, numbers: Tensor, scales: Tensor, offsets: Tensor) -> PackedMatrix:
        """Return the matrix of `numbers` [rows, columns], a scale and an offset for each group."""
        matrix = PackedMatrix(self.library, self._room, bits, *numbers.shape)
        matrix.fill(numbers, scales, offsets)
        return matrix

    def pack_blocks(
        self, parts: Sequence[Tensor | InFile], layout: str, columns: int
    ) -> PackedMatrix:
        """Return the matrix of a GGUF file's blocks [whole tiles of rows, bytes], one part below
        the other."""
        bits, rows = 8 if layout == "Q8_0" else 4, sum(len(part) for part in parts)
        matrix = PackedMatrix(self.library, self._room, bits, rows, columns)
        at = 0
        for part in parts:
            if isinstance(part, InFile):
                matrix.fetch_blocks(at, part, layout)
            else:
                matrix.fill_blocks(at, part, layout)
            at += len(part)
        return matrix

    def tile(self, parts: Sequence[Tensor]) -> FloatMatrix:
        """Return the matrix of `parts` [whole tiles of rows, columns], one below the other.

        In the dtype of all of them; in fp32 where they differ, or it is another.
        """
        return FloatMatrix(self.library, self._room, parts)

    def normalise(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Return the rows of `x` by their root mean square, scaled by `weight`."""
        x = x.contiguous()
        answer = torch.empty_like(x)
        rows, columns = x.shape
        self.library.normalise(
            x.data_ptr(),
            None,
            weight.data_ptr(),
            epsilon,
            rows,
            columns,
            torch.get_num_threads(),
            answer.data_ptr(),
        )
        return answer

    def gate(self, x: Tensor) -> Tensor:
        """Return silu of the first half of each row of `x`, times the second half."""
        rows, columns = x.shape
        answer = torch.empty(rows, columns // 2)
        threads = torch.get_num_threads()
        self.library.gate(x.data_ptr(), rows, columns // 2, threads, answer.data_ptr())
        return answer

    def turn(self, mixed: Tensor, heads: int, cos: Tensor, sin: Tensor) -> None:
        """Turn the first `heads` of `mixed` [tokens, all heads, dim] in place."""
        rows, stride, dim = mixed.shape[0], mixed.stride(0), mixed.shape[2]
        threads = torch.get_num_threads()
        self.library.turn(
            mixed.data_ptr(), stride, heads, dim, cos.data_ptr(), sin.data_ptr(), rows, threads
        )

    def keep(self, mixed: Tensor, heads: int, slots: Tensor, pages: Tensor) -> None:
        """Put keys and values, which follow the `heads` of queries, into `slots` of `pages`."""
        rows, kv_heads, dim = mixed.shape[0], pages.shape[2] // 2, pages.shape[3]
        self.library.keep(
            mixed.data_ptr(), rows, heads, slots.data_ptr(), pages.data_ptr(), kv_heads, dim
        )

    def attend(
        self, mixed: Tensor, heads: int, pages: Tensor, tables: Tensor, pieces: Tensor, window: int
    ) -> Tensor:
        """Answer the queries of `mixed`; `layers.attention.Listed` tells what the pieces are."""
        _, block_tokens, both, dim = pages.shape
        answer = torch.empty(len(mixed), heads, dim)
        self.library.attend(
            mixed.data_ptr(),
            heads,
            pages.data_ptr(),
            block_tokens,
            both // 2,
            dim,
            tables.data_ptr(),
            tables.shape[1],
            pieces.data_ptr(),
            len(pieces),
            window,
            torch.get_num_threads(),
            answer.data_ptr(),
        )
        return answer

    def _try(self) -> None:
        chance = torch.Generator().manual_seed(1)
        x = torch.randn(11, 64, generator=chance)
        for bits in (4, 8):
            numbers = torch.randint(
                0, 2**bits, (2 * TILE_ROWS, 64), generator=chance, dtype=torch.uint8
            )
            scales, offsets = torch.rand(2, 2 * TILE_ROWS, 2, generator=chance).half().float()
            groups = numbers.view(len(numbers), -1, GROUP_WEIGHTS)
            wide = (groups * scales[..., None] + offsets[..., None]).view(numbers.shape)
            _compare(f"{bits} bits", self.pack(bits, numbers, scales, offsets), x, wide)
        for dtype in _KINDS:
            weight = torch.randn(3 * TILE_ROWS, 64, generator=chance).to(dtype)
            _compare(str(dtype), self.tile([weight]), x, weight.float())


def _compare(what: str, matrix: Matrix, x: Tensor, weight: Tensor) -> None:
    """Raise NoKernels where the product is not torch's."""
    wanted = x @ weight.T
    error = float((matrix.multiply(x) - wanted).norm() / wanted.norm())
    if not error < _ERROR_MAX:
        raise NoKernels(f"cannot use the kernels: {what} are wrong by {error:.2g}")


@functools.cache
def kernels() -> Kernels | None:
    """Return this process's kernels, built and tried at the first call; None where there are none.

    Which it is, and why, is logged.
    """
    started_s = time.monotonic()
    try:
        path = built()
        # torch's OpenMP was loaded with it: by its name the library finds the same one.
        found = Kernels(ctypes.CDLL(str(path)))
        if not found.multiplies:
            # Sixteen numbers at once are then done one by one: thirty times slower than torch.
            raise NoKernels("this processor has no AVX-512 with VNNI; torch's own are faster")
    except (NoKernels, OSError, AttributeError) as error:
        log.info("no kernels of our own", extra={"fields": {"because": str(error)}})
        return None
    took_s = round(time.monotonic() - started_s, 3)
    fields = {"library": path.name, "products": found.multiplies, "took_s": took_s}
    log.info("kernels", extra={"fields": fields})
    return found


def host_kernels(x: Tensor) -> Kernels | None:
    """Return the kernels where they compute on what `x` is: fp32 numbers on the CPU."""
    return kernels() if x.dtype is torch.float32 and x.is_cpu else None


def kernels_for(x: Tensor) -> Kernels | DeviceKernels | None:
    """Return the kernels that compute on what `x` is: fp32 numbers on the CPU, or a device's."""
    return device_kernels(x) or host_kernels(x)
