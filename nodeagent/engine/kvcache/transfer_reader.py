"""Reads the stream of KV blocks of one transfer (`isochrone/wire/kv/transfer_frames.py`).

Rule 1: the reader knows the digests to come from its own tokens. It raises WrongTransfer at the
first byte that does not fit, so that it never stores more than it requested.
Rule 2: only an end frame makes a transfer complete.
Rule 3: a content is copied once, from the piece that was received to its place in a part of several
blocks, where the device can take it from. From a window the device takes it directly.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from isochrone.wire.kv.transfer_frames import (
    BLOCK,
    BLOCK_IN_WINDOW,
    DIGEST_BYTES,
    END,
    FRAME_HEAD_BYTES,
    HEAD,
    NAMES_BYTES,
    PLACE_BYTES,
    SMALL_FRAME_BYTES_MAX,
    TransferEnd,
    TransferHead,
    WrongTransfer,
    block_checksum,
)


class ReceivedBlock(NamedTuple):
    """One block that has arrived, by its number in the prompt.

    Blocks that follow each other mostly lie side by side in one part (TransferReader).
    """

    number: int
    content: memoryview


NewPart = Callable[[int], np.ndarray]
"""Returns memory of a size in bytes, with any content."""


def new_part(size_bytes: int) -> np.ndarray:
    """Return new memory, not zeroed: each byte is received before it is read."""
    return np.empty(size_bytes, np.uint8)


class TransferReader:
    """Reads one transfer, of the blocks with these digests; `first_block` is the first to come."""

    def __init__(
        self,
        fingerprint: bytes,
        block_bytes: int,
        digests: Sequence[bytes],
        first_block: int,
        *,
        may_be_shorter: bool = False,
        part_blocks: int = 1,
        new_part: NewPart = new_part,
        window: memoryview | None = None,
    ) -> None:
        """With `may_be_shorter`, the sender may have no more than the first of the blocks.

        Up to `part_blocks` contents lie side by side, in memory of `new_part`. With a `window`,
        contents may lie there.
        """
        self._window = window
        self._new_part = new_part
        self._expected = TransferHead(
            fingerprint=fingerprint,
            block_bytes=block_bytes,
            first_block=first_block,
            blocks=len(digests) - first_block,
        )
        self._digests = digests
        self._may_be_shorter = may_be_shorter
        self._has_head = False
        self._next = first_block
        self._part_blocks = max(1, part_blocks)
        self._part = memoryview(b"")
        self._part_used = 0
        self._frame = bytearray()
        """The beginning of the next frame: all of it but the content of a block."""
        self._content: memoryview | None = None
        """The destination of the content that is arriving, and how much of it has come."""
        self._filled = 0
        self.end: TransferEnd | None = None

    @property
    def lacks_blocks(self) -> bool:
        """Whether the head has arrived, and blocks have yet to."""
        return self._has_head and self._next < len(self._digests)

    @property
    def next_block(self) -> int:
        """The number of the block that has not arrived yet."""
        return self._next

    def feed(self, data: bytes) -> list[ReceivedBlock]:
        """Take received bytes; return the blocks that are complete. Raises WrongTransfer."""
        view, blocks, at = memoryview(data), list[ReceivedBlock](), 0
        while True:
            if self._content is not None:
                piece = view[at : at + len(self._content) - self._filled]
                self._content[self._filled : self._filled + len(piece)] = piece
                self._filled += len(piece)
                at += len(piece)
                if self._filled < len(self._content):
                    return blocks
                blocks.append(self._end_block(self._content))
                continue
            wanted = self._frame_bytes()
            lacking = wanted - len(self._frame)
            self._frame += view[at : at + lacking]
            at += lacking
            if len(self._frame) < wanted:
                return blocks
            if wanted == FRAME_HEAD_BYTES:
                continue
            kind, payload = self._frame[0], bytes(self._frame[FRAME_HEAD_BYTES:])
            if kind == BLOCK_IN_WINDOW:
                blocks.append(self._take_from_window(payload))
            else:
                self._take_frame(kind, payload)

    def _frame_bytes(self) -> int:
        """Return how many bytes of the frame must be there to go on. Raises WrongTransfer."""
        if len(self._frame) < FRAME_HEAD_BYTES:
            return FRAME_HEAD_BYTES
        kind = self._frame[0]
        length = int.from_bytes(self._frame[1:FRAME_HEAD_BYTES], "little")
        self._check_frame(kind, length)
        names = NAMES_BYTES if kind == BLOCK else length
        return FRAME_HEAD_BYTES + names

    def _check_frame(self, kind: int, length: int) -> None:
        """Raise WrongTransfer if no such frame may come now."""
        if self.end is not None:
            raise WrongTransfer("bytes after the end")
        if not self._has_head and kind != HEAD:
            raise WrongTransfer("no head")
        if kind == BLOCK:
            if self._next >= len(self._digests):
                raise WrongTransfer("more blocks than the prompt has")
            if length != NAMES_BYTES + self._expected.block_bytes:
                raise WrongTransfer(f"a block of {length} bytes")
        elif kind == BLOCK_IN_WINDOW:
            if self._next >= len(self._digests):
                raise WrongTransfer("more blocks than the prompt has")
            if self._window is None or length != NAMES_BYTES + PLACE_BYTES:
                raise WrongTransfer(f"a block in a window, in {length} bytes")
        elif kind not in (HEAD, END) or not 0 < length <= SMALL_FRAME_BYTES_MAX:
            raise WrongTransfer(f"a frame of kind {kind} with {length} bytes")

    def _take_frame(self, kind: int, payload: bytes) -> None:
        """Take a frame, of a block all but its content."""
        try:
            if kind == BLOCK:
                self._begin_block(payload)
                return
            self._frame.clear()
            if kind == HEAD:
                self._take_head(msgspec.msgpack.decode(payload, type=TransferHead))
            else:
                end = msgspec.msgpack.decode(payload, type=TransferEnd)
                if self._next < len(self._digests):
                    missing = len(self._digests) - self._next
                    raise WrongTransfer(f"an end with {missing} blocks missing")
                self.end = msgspec.structs.replace(end, padding=b"")
        except msgspec.DecodeError as error:
            raise WrongTransfer(f"a malformed frame: {error}") from error

    def _take_head(self, head: TransferHead) -> None:
        if self._has_head:
            raise WrongTransfer("a second head")
        if head.fingerprint != self._expected.fingerprint:
            raise WrongTransfer("blocks of another model or KV format")
        if self._may_be_shorter and 0 < head.blocks < self._expected.blocks:
            self._expected = msgspec.structs.replace(self._expected, blocks=head.blocks)
            self._digests = self._digests[: self._expected.first_block + head.blocks]
        if head != self._expected:
            raise WrongTransfer(f"{head.blocks} blocks from number {head.first_block} on")
        self._has_head = True

    def _begin_block(self, names: bytes) -> None:
        """Check the digest of a block, and prepare the place of its content."""
        number = self._next
        self._check_digest(names)
        size = self._expected.block_bytes
        if self._part_used == len(self._part):
            blocks = min(self._part_blocks, len(self._digests) - number)
            self._part, self._part_used = self._new_part(blocks * size).data, 0
        self._content = self._part[self._part_used : self._part_used + size]
        self._part_used += size
        self._filled = 0

    def _end_block(self, content: memoryview) -> ReceivedBlock:
        names = bytes(self._frame[FRAME_HEAD_BYTES:])
        self._content = None
        return self._take_block(names, content)

    def _take_from_window(self, names: bytes) -> ReceivedBlock:
        """Take a block where it lies."""
        assert self._window is not None
        self._check_digest(names)
        place = int.from_bytes(names[-PLACE_BYTES:], "little")
        size = self._expected.block_bytes
        if place + size > len(self._window):
            raise WrongTransfer(f"block {self._next} at byte {place}, outside of the window")
        return self._take_block(names[:-PLACE_BYTES], self._window[place : place + size])

    def _take_block(self, names: bytes, content: memoryview) -> ReceivedBlock:
        """Check a content; it is the next block."""
        number = self._next
        if names[DIGEST_BYTES:] != block_checksum(self._digests[number], content):
            raise WrongTransfer(f"block {number} with a wrong checksum")
        self._frame.clear()
        self._next += 1
        return ReceivedBlock(number, content)

    def _check_digest(self, names: bytes) -> None:
        if names[:DIGEST_BYTES] != self._digests[self._next]:
            raise WrongTransfer(f"block {self._next} of another prompt")
