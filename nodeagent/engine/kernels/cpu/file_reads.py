"""Reads matrices from files in the background and packs them, on all threads, each byte once.

A file that is not in the page cache is read with O_DIRECT: the kernel then neither clears pages for
it nor copies from them.
"""

import fcntl
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from ctypes import Structure, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from nodeagent.engine.kernels.cpu.native_matrix import FORMAT_CODES, NativeMatrix
from nodeagent.engine.kernels.matrix_formats import RowsInFile

_CACHE_PROBES: Final = 16
"""Bytes that are probed to decide whether a file is in the page cache."""


@dataclass(frozen=True, slots=True)
class RowFetch:
    """Rows to read from a file and pack into `matrix`, from `first_row` on."""

    matrix: NativeMatrix
    first_row: int
    rows: RowsInFile


class _FetchStruct(Structure):
    """`struct fetch` of file_reads.c."""

    _fields_ = (
        *((name, c_int64) for name in ("file", "start", "format", "kind", "rows", "columns")),
        ("head_rows", c_int64),
        ("out", c_void_p),
    )


def start_fetching(fetches: Sequence[RowFetch]) -> Future[None]:
    """Start to read all `fetches`, each file from front to end.

    One C call reads everything, so that the interpreter is free for other threads meanwhile.
    """
    # Twice as many readers as cores: one packs what it has read while another waits for the disk.
    readers = 2 * torch.get_num_threads()
    ordered = sorted(fetches, key=lambda fetch: (fetch.rows.path, fetch.rows.start))

    def read_all() -> None:
        with ExitStack() as opened, suppress(OSError):
            paths = {fetch.rows.path for fetch in ordered}
            files = {path: _open(path, opened) for path in paths}
            structs = (_fetch_struct(files[fetch.rows.path], fetch) for fetch in ordered)
            table = (_FetchStruct * len(ordered))(*structs)
            library = ordered[0].matrix.library
            if library.read_and_pack(table, len(ordered), readers) == 0:
                return
        # Something could not be read. Read again by Python, which says what it was.
        for fetch in ordered:
            fetch.matrix.fill_rows(fetch.first_row, fetch.rows.read(), fetch.rows.layout)

    executor = ThreadPoolExecutor(1, "weights")
    try:
        return executor.submit(read_all)
    finally:
        executor.shutdown(wait=False)


def _fetch_struct(file: int, fetch: RowFetch) -> _FetchStruct:
    rows, matrix = fetch.rows, fetch.matrix
    return _FetchStruct(
        file=file,
        start=rows.start,
        format=FORMAT_CODES[rows.layout],
        kind=matrix.kind,
        rows=rows.shape[0],
        columns=rows.shape[1],
        head_rows=rows.head_rows,
        out=matrix.panel_address(fetch.first_row),
    )


def _open(path: Path, opened: ExitStack) -> int:
    file = os.open(path, os.O_RDONLY)
    opened.callback(os.close, file)
    # Some file systems do not support O_DIRECT; those are read through the page cache.
    with suppress(OSError):
        if not _is_cached(file):
            fcntl.fcntl(file, fcntl.F_SETFL, os.O_DIRECT)
    return file


def _is_cached(file: int) -> bool:
    """Return whether bytes spread over the file can be read without waiting for the disk."""
    step, byte = os.fstat(file).st_size // (_CACHE_PROBES + 1), bytearray(1)
    try:
        return all(
            os.preadv(file, [byte], probe * step, os.RWF_NOWAIT)
            for probe in range(1, _CACHE_PROBES + 1)
        )
    except BlockingIOError:
        return False
