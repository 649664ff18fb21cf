"""Matrices from open files, each read once, on all threads, beside whatever else is done.

What is not in the page cache is read past it: no page is cleared to hold it, and none copied.
"""

import fcntl
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from ctypes import Structure, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from nodeagent.engine.kernels.cpu.matrix_layouts import LAYOUTS, Layout, Native

_PROBES: Final = 16
"""Places looked at to say whether a file is in the page cache."""


@dataclass(frozen=True, slots=True)
class InFile:
    """Rows where they lie in a file, one behind another."""

    path: Path
    start: int
    shape: tuple[int, int]
    """Rows and columns."""
    layout: Layout
    head_rows: int
    """Of so many rows, the first half and the second are filed as neighbours; 0 where none are."""
    read: Callable[[], Tensor]
    """Reads them in the order that is wanted; says in words why it cannot."""

    def __len__(self) -> int:
        return self.shape[0]


@dataclass(frozen=True, slots=True)
class Fetch:
    """What is to be the rows of `matrix` from `at` on."""

    matrix: Native
    at: int
    rows: InFile


class _Fetch(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("file", "start", "layout", "kind", "rows", "columns")),
        ("head_rows", c_int64),
        ("out", c_void_p),
    )


def fetch(wanted: Sequence[Fetch]) -> Future[None]:
    """Begin to bring all that is `wanted`, from the front of each file to its end.

    In one call, for which the interpreter is free for others: a call for each matrix would wait
    for it after each.
    """
    # Twice as many as compute: while one packs what it read, another waits for the disk.
    readers = 2 * torch.get_num_threads()
    ordered = sorted(wanted, key=lambda one: (one.rows.path, one.rows.start))

    def work() -> None:
        with ExitStack() as opened, suppress(OSError):
            files = {path: _open(path, opened) for path in {one.rows.path for one in ordered}}
            table = (_Fetch * len(ordered))(*(_told(files[one.rows.path], one) for one in ordered))
            if wanted[0].matrix.library.fetch_rows(table, len(ordered), readers) == 0:
                return
        for one in ordered:
            # Says in words what it was.
            one.matrix.fill(one.at, one.rows.read(), one.rows.layout)

    reader = ThreadPoolExecutor(1, "weights")
    try:
        return reader.submit(work)
    finally:
        reader.shutdown(wait=False)


def _told(file: int, one: Fetch) -> _Fetch:
    rows, kind = one.rows, one.matrix.arguments[1]
    place = one.matrix.place_of(one.at)
    layout = LAYOUTS[rows.layout]
    return _Fetch(file, rows.start, layout, kind, *rows.shape, rows.head_rows, place)


def _open(path: Path, opened: ExitStack) -> int:
    file = os.open(path, os.O_RDONLY)
    opened.callback(os.close, file)
    # Some file systems have no other way than through the page cache.
    with suppress(OSError):
        if not _is_cached(file):
            fcntl.fcntl(file, fcntl.F_SETFL, os.O_DIRECT)
    return file


def _is_cached(file: int) -> bool:
    step, byte = os.fstat(file).st_size // (_PROBES + 1), bytearray(1)
    try:
        return all(
            os.preadv(file, [byte], at * step, os.RWF_NOWAIT) for at in range(1, _PROBES + 1)
        )
    except BlockingIOError:
        return False
