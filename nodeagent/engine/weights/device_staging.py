"""Copies weights from files to a device through a few pinned host buffers.

Rule 1: host memory is bounded by one buffer for each reader thread, whatever the model's size.
Rule 2: a buffer is filled again only after the device has copied its contents.
Rule 3: code that computes with a weight first waits for its pieces, or with `finish` for all.
"""

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from nodeagent.engine.architecture.errors import CheckpointError
from nodeagent.engine.weights.stored_tensor import StoredTensor, read_into

_READERS: Final = 8
_PIECE_BYTES: Final = 16 * 1024 * 1024
"""Read and copied at a time: the size of a reader's buffer."""


@dataclass(slots=True)
class _ReaderState:
    """The buffer and the CUDA stream of one reader thread."""

    buffer: Tensor
    stream: Any
    """None on the CPU."""


@dataclass(slots=True)
class WeightStaging:
    """Reader threads, each with a buffer, and the pieces they have been given."""

    device: str
    piece_bytes: int = _PIECE_BYTES
    readers: int = _READERS
    _thread: threading.local = field(default_factory=threading.local)
    _pool: ThreadPoolExecutor | None = None
    _files: dict[Path, int] = field(default_factory=dict)
    _pieces: list[Future[None]] = field(default_factory=list)

    def start(self, target: Tensor, stored: StoredTensor) -> list[Future[None]]:
        """Start to fill the contiguous `target` with a stored tensor; it is complete when all the
        returned pieces are.
        """
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.readers, "staging")
        flat, descriptor, pool = target.view(-1), self._file(stored.path), self._pool
        # The device may still compute with a tensor that had this memory before.
        free: Any = None
        if self._on_gpu:
            free = torch.cuda.Event()  # type: ignore[no-untyped-call]
            free.record(torch.cuda.current_stream(self.device))
        piece_numbers = self.piece_bytes // stored.dtype.itemsize
        pieces = [
            pool.submit(
                self._copy_piece, flat[at : at + piece_numbers], at, stored, descriptor, free
            )
            for at in range(0, len(flat), piece_numbers)
        ]
        self._pieces += pieces
        return pieces

    def finish(self) -> None:
        """Wait for all pieces, then release buffers, threads and files.

        Raises the first error of a piece.
        """
        try:
            for piece in self._pieces:
                piece.result()
        finally:
            self._pieces.clear()
            if self._pool is not None:
                self._pool.shutdown(cancel_futures=True)
                self._pool = None
            for descriptor in self._files.values():
                os.close(descriptor)
            self._files.clear()
            self._thread = threading.local()

    @property
    def _on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    def _file(self, path: Path) -> int:
        if path not in self._files:
            try:
                self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
        return self._files[path]

    def _copy_piece(
        self, target: Tensor, at: int, stored: StoredTensor, file: int, free: Any
    ) -> None:
        """Read the piece that begins with number `at`, and copy it to the device; on a reader."""
        reader, size = self._reader(), stored.dtype.itemsize
        buffer = reader.buffer[: len(target) * size]
        read_into(buffer.numpy().data, file, stored.start + at * size, stored.path)
        stream: Any = nullcontext() if reader.stream is None else torch.cuda.stream(reader.stream)
        with stream:
            if reader.stream is not None:
                reader.stream.wait_event(free)
            # Converted while copied: a second copy of the model would not fit into device memory.
            target.copy_(buffer.view(stored.dtype), non_blocking=True)
        if reader.stream is not None:
            reader.stream.synchronize()

    def _reader(self) -> _ReaderState:
        state: _ReaderState | None = getattr(self._thread, "state", None)
        if state is None:
            if self._on_gpu:
                torch.cuda.set_device(self.device)
            buffer = torch.empty(self.piece_bytes, dtype=torch.uint8, pin_memory=self._on_gpu)
            stream: Any = None
            if self._on_gpu:
                stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            state = _ReaderState(buffer, stream)
            self._thread.state = state
        return state


def staging_for(device: str) -> WeightStaging | None:
    """Return what copies weights to `device`; None where they are used in host memory."""
    return WeightStaging(device) if device.startswith("cuda") else None
