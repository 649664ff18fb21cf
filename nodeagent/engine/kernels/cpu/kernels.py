"""The functions of the C files here on tensors. They check nothing: their callers in `layers` do.

Each takes fp32 tensors on the CPU that lie row behind row. A library is used only once its products
have been held against torch's.
"""

import ctypes
import functools
import logging
import time
from collections.abc import Sequence
from ctypes import c_float, c_int64, c_void_p
from typing import Final

import torch
from torch import Tensor

from nodeagent.engine.kernels.cpu.build import NoKernels, built
from nodeagent.engine.kernels.cpu.file_reads import Fetch, InFile
from nodeagent.engine.kernels.cpu.huge_pages import Room
from nodeagent.engine.kernels.cpu.matrix_layouts import (
    FLOATS,
    GROUP_WEIGHTS,
    LAYOUTS,
    ROUNDED,
    TILE_ROWS,
    Layout,
    Native,
)
from nodeagent.engine.kernels.cuda.kernels import DeviceKernels, device_kernels

log = logging.getLogger(__name__)

LANES: Final = 16
"""Heads are whole numbers of these."""
HEAD_DIM_MAX: Final = 256
PIECE_TOKENS: Final = 64
"""Attention goes through the keys once for so many neighbouring tokens, and all heads of each."""
_ERROR_MAX: Final = 1e-3
_TRIED_ROWS: Final = 61
"""Of each kind, so many are multiplied another way than few."""
_TYPES: Final = {"p": c_void_p, "n": c_int64, "f": c_float}
_ARGUMENTS: Final = {
    "normalise": "pppfnnnp",
    "gate": "pnnnp",
    "turn": "pnnnppnn",
    "keep": "pnnppnn",
    "attend": "pnpnnnpnpnnnnp",
    "pack": "pppnnnnp",
    "pack_filed": "pnnnnnp",
    "tile_bytes": "nn",
    "fetch_rows": "pnn",
    "read_rows": "pnnnpnp",
    "multiply": "pnnnpnnp",
    "allow_tiles": "n",
}
"""What each function takes: pointers, numbers (int64), a float."""
_ANSWERING: Final = ("tile_bytes", "allow_tiles", "fetch_rows", "multiply", "read_rows")
"""The first returns bytes, the second whether it is so, the others 0 unless they fail; all else
returns nothing."""


class Kernels:
    """The library, tried."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self._room = Room()
        for name, kinds in _ARGUMENTS.items():
            function = getattr(library, name)
            function.argtypes = [_TYPES[kind] for kind in kinds]
            function.restype = c_int64 if name in _ANSWERING else None
        self.tiles = bool(library.allow_tiles(1))
        """Whether the processor's matrix unit multiplies where there are many rows."""
        self._try()

    def pack(self, bits: int, numbers: Tensor, scales: Tensor, offsets: Tensor) -> Native:
        """Return the matrix of `numbers` [rows, columns], a scale and an offset for each group."""
        matrix = Native(self.library, self._room, bits, *numbers.shape)
        matrix.fill_groups(numbers, scales, offsets)
        return matrix

    def pack_blocks(
        self,
        parts: Sequence[Tensor | InFile],
        layout: str,
        columns: int,
        later: list[Fetch] | None = None,
    ) -> Native:
        """Return the matrix of a GGUF file's blocks: [whole tiles of rows, bytes] each part.

        What is to be read from the file is put on `later`, where there is such a list.
        """
        filed = [(part, layout) for part in parts]
        return self._filled(8 if layout == "Q8_0" else 4, filed, columns, later)

    def tile(
        self, parts: Sequence[Tensor | InFile], rounded: bool, later: list[Fetch] | None = None
    ) -> Native:
        """Return the matrix of `parts` [whole tiles of rows, columns], one below the other.

        In the dtype of all of them, in fp32 where they differ or it is another; or rounded to 14
        bits in groups of 32, by which products are twice as fast. Columns then are whole groups.
        By tiles, products are faster still by 16 bits as they are.
        """
        filed = [_floats(part) for part in parts]
        one, *others = {layout for _, layout in filed}
        layout = torch.float32 if others else one
        rounded = rounded and not (self.tiles and layout is not torch.float32)
        kind = ROUNDED if rounded else LAYOUTS[layout]
        return self._filled(kind, filed, parts[0].shape[1], later)

    def _filled(
        self,
        kind: int,
        parts: Sequence[tuple[Tensor | InFile, Layout]],
        columns: int,
        later: list[Fetch] | None,
    ) -> Native:
        rows, at = sum(len(part) for part, _ in parts), 0
        matrix = Native(self.library, self._room, kind, rows, columns)
        for part, layout in parts:
            if not isinstance(part, InFile):
                matrix.fill(at, part, layout)
            elif later is None:
                matrix.fill(at, part.read(), layout)
            else:
                later.append(Fetch(matrix, at, part))
            at += len(part)
        return matrix

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
        self,
        mixed: Tensor,
        heads: int,
        pages: Tensor,
        tables: Tensor,
        pieces: Tensor,
        window: int,
        by_tiles: bool = False,
    ) -> Tensor:
        """Answer the queries of `mixed`; `layers.attention.Listed` tells what the pieces are.

        Not `by_tiles`, a row's answer is the same bit for bit whatever it is computed with.
        """
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
            by_tiles,
            torch.get_num_threads(),
            answer.data_ptr(),
        )
        return answer

    def _try(self) -> None:
        chance = torch.Generator().manual_seed(1)
        x = torch.randn(_TRIED_ROWS, 64, generator=chance)
        for bits in (4, 8):
            numbers = torch.randint(
                0, 2**bits, (2 * TILE_ROWS, 64), generator=chance, dtype=torch.uint8
            )
            scales, offsets = torch.rand(2, 2 * TILE_ROWS, 2, generator=chance).half().float()
            groups = numbers.view(len(numbers), -1, GROUP_WEIGHTS)
            wide = (groups * scales[..., None] + offsets[..., None]).view(numbers.shape)
            _compare(f"{bits} bits", self.pack(bits, numbers, scales, offsets), x, wide)
        for dtype in FLOATS:
            weight = torch.randn(3 * TILE_ROWS, 64, generator=chance).to(dtype)
            _compare(str(dtype), self.tile([weight], rounded=False), x, weight.float())
            _compare(f"rounded {dtype}", self.tile([weight], rounded=True), x, weight.float())


def _floats(part: Tensor | InFile) -> tuple[Tensor | InFile, Layout]:
    """Return rows of floats, and how they are kept."""
    if isinstance(part, InFile):
        return part, part.layout
    part = part if part.dtype in FLOATS else part.float()
    return part, part.dtype


def _compare(what: str, matrix: Native, x: Tensor, weight: Tensor) -> None:
    """Raise NoKernels where the product is not torch's."""
    wanted = x @ weight.T
    for rows in (11, _TRIED_ROWS):
        error = float((matrix(x[:rows]) - wanted[:rows]).norm() / wanted[:rows].norm())
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
    except (NoKernels, OSError, AttributeError) as error:
        log.info("no kernels of our own", extra={"fields": {"because": str(error)}})
        return None
    took_s = round(time.monotonic() - started_s, 3)
    fields = {"library": path.name, "tiles": found.tiles, "took_s": took_s}
    log.info("kernels", extra={"fields": fields})
    return found


def host_kernels(x: Tensor) -> Kernels | None:
    """Return the kernels where they compute on what `x` is: fp32 numbers on the CPU."""
    return kernels() if x.dtype is torch.float32 and x.is_cpu else None


def kernels_for(x: Tensor) -> Kernels | DeviceKernels | None:
    """Return the kernels that compute on what `x` is: fp32 numbers on the CPU, or a device's."""
    return device_kernels(x) or host_kernels(x)
