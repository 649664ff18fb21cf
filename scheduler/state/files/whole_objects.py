"""Parts of an object of a store that sends no ranges: a stream from the object's start."""

from collections.abc import Callable, Iterator
from typing import Final

OpenStream = Callable[[], Iterator[bytes]]
"""Returns the chunks of an object from its start."""

_END: Final = memoryview(b"")


class WholeObject:
    """Reads on from the last part; a part before that begins a new stream."""

    def __init__(self, open_stream: OpenStream) -> None:
        self._open_stream = open_stream
        self._chunks: Iterator[bytes] = iter(())
        self._chunk = _END
        self._position: int | None = None

    def read(self, start: int, length: int) -> bytes:
        """Return `length` bytes from `start`, fewer at the end of the object."""
        if self._position is None or start < self._position:
            self._chunks, self._chunk, self._position = self._open_stream(), _END, 0
        self._take(start - self._position, None)
        part = bytearray()
        self._take(length, part)
        return bytes(part)

    def _take(self, count: int, taken: bytearray | None) -> None:
        """Move on by `count` bytes and append them to `taken`, if there is one."""
        while count > 0:
            if not self._chunk:
                self._chunk = memoryview(next(self._chunks, b""))
                if not self._chunk:
                    return
            piece, self._chunk = self._chunk[:count], self._chunk[count:]
            if taken is not None:
                taken += piece
            count -= len(piece)
            self._position = (self._position or 0) + len(piece)
