"""The stream of KV blocks between two engines: a head, the blocks in order, and an end.

A frame is its kind (one byte), its length (four bytes, little endian) and its payload. A block's
payload is its digest, a checksum of digest and content, and the content as the engine stores it, so
that FP8 stays FP8. The digests form a chain over the prompt's tokens that begins with the id of the
transfer: blocks of another prompt, tenant or transfer are recognised.

Rule 1: the reader knows the digests to come from its own tokens. It raises WrongTransfer at the
first byte that does not fit, so that it never stores more than it asked for.
Rule 2: only an end frame makes a transfer complete.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec
import xxhash

DIGEST_BYTES: Final = 32
CHECKSUM_BYTES: Final = 16
_FRAME_HEAD_BYTES: Final = 5
_SMALL_FRAME_BYTES_MAX: Final = 1024
_HEAD, _BLOCK, _END = 1, 2, 3


class WrongTransfer(Exception):
    """The peer sent something other than the blocks of this prompt."""


class TransferHead(msgspec.Struct, frozen=True, kw_only=True):
    """What follows: `blocks` blocks from number `first_block` on, of the model `fingerprint`."""

    fingerprint: bytes
    block_bytes: int
    first_block: int
    blocks: int


class TransferEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a complete transfer, so long after the prompt was computed.

    `cached_tokens` were in the sender's prefix cache.
    """

    cached_tokens: int
    after_prefill_ms: float = 0.0


class ReceivedBlock(NamedTuple):
    """One block that has arrived, by its number in the prompt."""

    number: int
    content: bytes


def encode_head(head: TransferHead) -> bytes:
    """Return the first frame."""
    return _frame(_HEAD, msgspec.msgpack.encode(head))


def encode_end(end: TransferEnd) -> bytes:
    """Return the last frame."""
    return _frame(_END, msgspec.msgpack.encode(end))


def encode_block(digest: bytes, content: bytes | memoryview) -> list[bytes | memoryview]:
    """Return the frame of one block in two pieces, so that the content is not copied."""
    length = DIGEST_BYTES + CHECKSUM_BYTES + len(content)
    head = bytes((_BLOCK,)) + length.to_bytes(4, "little") + digest + _checksum(digest, content)
    return [head, content]


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
    ) -> None:
        """With `may_be_shorter`, the sender may have no more than the first of the blocks."""
        self._expected = TransferHead(
            fingerprint=fingerprint,
            block_bytes=block_bytes,
            first_block=first_block,
            blocks=len(digests) - first_block,
        )
        self._digests = digests
        self._may_be_shorter = may_be_shorter
        self._buffer = bytearray()
        self._has_head = False
        self._next = first_block
        self.end: TransferEnd | None = None

    @property
    def next_block(self) -> int:
        """The number of the block that has not arrived yet."""
        return self._next

    def feed(self, data: bytes) -> list[ReceivedBlock]:
        """Take received bytes; return the blocks that are complete. Raises WrongTransfer."""
        self._buffer += data
        blocks: list[ReceivedBlock] = []
        start = 0
        view = memoryview(self._buffer)
        try:
            while len(view) - start >= _FRAME_HEAD_BYTES:
                kind = view[start]
                length = int.from_bytes(view[start + 1 : start + _FRAME_HEAD_BYTES], "little")
                self._check_frame(kind, length)
                payload = start + _FRAME_HEAD_BYTES
                if len(view) < payload + length:
                    break
                block = self._take_frame(kind, view[payload : payload + length])
                if block is not None:
                    blocks.append(block)
                start = payload + length
        finally:
            view.release()
        del self._buffer[:start]
        return blocks

    def _check_frame(self, kind: int, length: int) -> None:
        """Raise WrongTransfer if no such frame may come now."""
        if self.end is not None:
            raise WrongTransfer("bytes after the end")
        if not self._has_head and kind != _HEAD:
            raise WrongTransfer("no head")
        if kind == _BLOCK:
            if self._next >= len(self._digests):
                raise WrongTransfer("more blocks than the prompt has")
            if length != DIGEST_BYTES + CHECKSUM_BYTES + self._expected.block_bytes:
                raise WrongTransfer(f"a block of {length} bytes")
        elif kind not in (_HEAD, _END) or length > _SMALL_FRAME_BYTES_MAX:
            raise WrongTransfer(f"a frame of kind {kind} with {length} bytes")

    def _take_frame(self, kind: int, payload: memoryview) -> ReceivedBlock | None:
        try:
            if kind == _BLOCK:
                return self._take_block(payload)
            if kind == _HEAD:
                self._take_head(msgspec.msgpack.decode(payload, type=TransferHead))
            else:
                end = msgspec.msgpack.decode(payload, type=TransferEnd)
                if self._next < len(self._digests):
                    missing = len(self._digests) - self._next
                    raise WrongTransfer(f"an end with {missing} blocks missing")
                self.end = end
        except msgspec.DecodeError as error:
            raise WrongTransfer(f"a malformed frame: {error}") from error
        return None

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

    def _take_block(self, payload: memoryview) -> ReceivedBlock:
        number = self._next
        digest = bytes(payload[:DIGEST_BYTES])
        content = bytes(payload[DIGEST_BYTES + CHECKSUM_BYTES :])
        if digest != self._digests[number]:
            raise WrongTransfer(f"block {number} of another prompt")
        if payload[DIGEST_BYTES : DIGEST_BYTES + CHECKSUM_BYTES] != _checksum(digest, content):
            raise WrongTransfer(f"block {number} with a wrong checksum")
        self._next += 1
        return ReceivedBlock(number, content)


def _frame(kind: int, payload: bytes) -> bytes:
    return bytes((kind,)) + len(payload).to_bytes(4, "little") + payload


def _checksum(digest: bytes, content: bytes | memoryview) -> bytes:
    checksum = xxhash.xxh3_128(digest)
    checksum.update(content)
    return checksum.digest()
