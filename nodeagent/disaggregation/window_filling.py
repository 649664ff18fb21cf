"""Puts blocks that arrive from another node into a window, from which an engine takes them.

The stream that goes on to the engine has only the head and the end. Digests and checksums of blocks
stay as the sending engine made them: the receiving engine checks what lies in the window.

Rule 1: kinds and sizes of frames are checked before anything is written, and the number of blocks
that the head says. The engine checks all the rest.
Rule 2: a wrong frame is passed on where the engine expects the next one, which then refuses the
transfer. Nothing after it is read.
Rule 3: the end is passed on after the stream has ended, and once the engine has the window: blocks
that it is told of after the end are lost.
"""

from collections.abc import AsyncIterator
from typing import Final

from isochrone.service.windows.window_pool import SenderWindow
from isochrone.wire.kv.transfer_frames import (
    BLOCK,
    BLOCK_HEAD_BYTES,
    END,
    FRAME_HEAD_BYTES,
    HEAD,
    NAMES_BYTES,
    SMALL_FRAME_BYTES_MAX,
    WrongTransfer,
    decode_head,
    payload_bytes,
    place_in_window,
)

_NO_HEAD: Final = -1


class WindowFiller:
    """One stream of blocks, on its way into a window."""

    def __init__(self, window: SenderWindow) -> None:
        self._window = window
        self._blocks_left = _NO_HEAD
        self._frame = bytearray()
        """The beginning of the next frame: all of it but the content of a block."""
        self._place = 0
        self._content_left = 0
        self._end = b""

    async def fill(self, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield the head and the end of a stream. Raises WindowLost or TimeoutError if the engine
        does not take the blocks, and what `pieces` raises."""
        try:
            async for piece in self._move_blocks(pieces):
                yield piece
        except WrongTransfer:
            if self._blocks_left > 0:
                self._window.send(bytes(self._frame))
                await self._window.wait_connected()
            else:
                yield self._end + self._frame
            return
        if self._end:
            await self._window.wait_connected()
            yield self._end

    async def _move_blocks(self, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Put blocks into the window, and yield the head before them. Raises WrongTransfer."""
        async for piece in pieces:
            left = memoryview(piece)
            while left:
                if self._content_left:
                    left = self._take_content(left)
                    continue
                left, is_whole = self._take_frame(left)
                if not is_whole:
                    continue
                if self._frame[0] == BLOCK:
                    self._place = await self._window.take_slot()
                    self._content_left = self._window.block_bytes
                    continue
                frame = bytes(self._frame)
                if frame[0] == HEAD and self._blocks_left == _NO_HEAD:
                    self._blocks_left = max(0, decode_head(frame).blocks)
                    yield frame
                elif frame[0] == END and not self._blocks_left:
                    self._end = frame
                else:
                    raise WrongTransfer(f"a frame of kind {frame[0]} in the wrong place")
                self._frame.clear()

    def _take_content(self, data: memoryview) -> memoryview:
        """Write content to the window, and name a block that is whole. Returns the rest of it."""
        size = self._window.block_bytes
        part = data[: self._content_left]
        self._window.write(self._place + size - self._content_left, part)
        self._content_left -= len(part)
        if not self._content_left:
            self._blocks_left -= 1
            self._window.send(place_in_window(self._frame, self._place))
            self._frame.clear()
        return data[len(part) :]

    def _take_frame(self, data: memoryview) -> tuple[memoryview, bool]:
        """Add to the next frame; return the rest of the data, and whether it is whole, but for the
        content of a block."""
        lacking = self._frame_bytes() - len(self._frame)
        self._frame += data[:lacking]
        return data[lacking:], len(self._frame) == self._frame_bytes()

    def _frame_bytes(self) -> int:
        """Return how many bytes of the frame must be there to go on. Raises WrongTransfer."""
        if len(self._frame) < FRAME_HEAD_BYTES:
            return FRAME_HEAD_BYTES
        kind, length = self._frame[0], payload_bytes(self._frame)
        if not self._may_follow(kind, length):
            raise WrongTransfer(f"a frame of kind {kind} with {length} bytes")
        return BLOCK_HEAD_BYTES if kind == BLOCK else FRAME_HEAD_BYTES + length

    def _may_follow(self, kind: int, length: int) -> bool:
        """Return whether such a frame may come now."""
        if kind == BLOCK:
            return self._blocks_left > 0 and length == NAMES_BYTES + self._window.block_bytes
        is_small = kind in (HEAD, END) and 0 < length <= SMALL_FRAME_BYTES_MAX
        return is_small and not self._end
