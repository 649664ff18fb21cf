"""Weights from files to a device, through a few buffers that the device can read by itself.

Rule 1: host memory is bounded by a buffer for each reader, whatever the size of the model.
Rule 2: a buffer is filled again only once the device has what was in it.
Rule 3: who computes with a weight has waited for its pieces, or by `finish` for all.
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

from nodeagent.engine.model.shape import CheckpointError
from nodeagent.engine.weights.stored_tensor import Stored, read_into

_READERS: Final = 8
_PIECE_BYTES: Final = 16 * 1024 * 1024


@dataclass(slots=True)
class _Own:
    """What one reader has for itself."""

    buffer: Tensor
    stream: Any


@dataclass(slots=True)
class Staging:
    """Readers, each with a buffer of its own, and what they have been told to bring."""

    device: str
    piece_bytes: int = _PIECE_BYTES
    readers: int = _READERS
    _own: threading.local = field(default_factory=threading.local)
    _pool: ThreadPoolExecutor | None = None
    _files: dict[Path, int] = field(default_factory=dict)
    _pieces: list[Future[None]] = field(default_factory=list)

    def bring(self, target: Tensor, stored: Stored) -> list[Future[None]]:
        """Begin to fill `target`, whose numbers lie one behind another, with what is stored.

        It is there once all the pieces are.
        """
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.readers, "staging")
        flat, descriptor, pool = target.view(-1), self._file(stored.path), self._pool
        # The memory may have been another tensor's, with which the device is not done yet.
        free: Any = None
        if self._on_gpu:
            free = torch.cuda.Event()  # type: ignore[no-untyped-call]
            free.record(torch.cuda.current_stream(self.device))
        each = self.piece_bytes // stored.dtype.itemsize
        pieces = [
            pool.submit(self._carry, flat[at : at + each], at, stored, descriptor, free)
            for at in range(0, len(flat), each)
        ]
        self._pieces += pieces
        return pieces

    def finish(self) -> None:
        """Wait for all; let go of buffers, readers and files. Raises what kept one from coming."""
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
            self._own = threading.local()

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

    def _carry(self, target: Tensor, at: int, stored: Stored, file: int, free: Any) -> None:
        """Read one piece, the numbers from `at` on, and send it; on a reader's thread."""
        own, size = self._reader(), stored.dtype.itemsize
        buffer = own.buffer[: len(target) * size]
        read_into(buffer.numpy().data, file, stored.start + at * size, stored.path)
        beside: Any = nullcontext() if own.stream is None else torch.cuda.stream(own.stream)
        with beside:
            if own.stream is not None:
                own.stream.wait_event(free)
            # In the target's kind of numbers: a second copy of a model would have no room there.
            target.copy_(buffer.view(stored.dtype), non_blocking=True)
        if own.stream is not None:
            own.stream.synchronize()

    def _reader(self) -> _Own:
        found: _Own | None = getattr(self._own, "own", None)
        if found is None:
            if self._on_gpu:
                torch.cuda.set_device(self.device)
            buffer = torch.empty(self.piece_bytes, dtype=torch.uint8, pin_memory=self._on_gpu)
            stream: Any = None
            if self._on_gpu:
                stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            found = _Own(buffer, stream)
            self._own.own = found
        return found


def staging_for(device: str) -> Staging | None:
    """Return what brings weights to `device`; None where they are read where they are used."""
    return Staging(device) if device.startswith("cuda") else None
