"""The stream of KV blocks between two engines: a head, the blocks in order, and an end.

A frame is its kind (one byte), its length (four bytes, little endian) and its payload. A block's
payload is its digest, a checksum of digest and content, and the content as the engine stores it, so
that FP8 stays FP8. The digests form a chain over the prompt's tokens that begins with the id of the
transfer: blocks of another prompt, tenant or transfer are recognised.

Between two processes of a node the content is replaced by its place in a window, memory that the
sender fills and the receiver reads (`isochrone/service/windows`). Such blocks go beside the stream,
between its head and its end. An agent changes one kind of frame into the other and keeps digest and
checksum as they are, so that only the two engines compute them.
"""

from typing import Final

import msgspec
import xxhash

from isochrone.wire.kv.kv_transfer import Count, Milliseconds

DIGEST_BYTES: Final = 32
CHECKSUM_BYTES: Final = 16
NAMES_BYTES: Final = DIGEST_BYTES + CHECKSUM_BYTES
PLACE_BYTES: Final = 8
FRAME_HEAD_BYTES: Final = 5
BLOCK_HEAD_BYTES: Final = FRAME_HEAD_BYTES + NAMES_BYTES
"""All of a block's frame but its content."""

PLACED_BLOCK_BYTES: Final = BLOCK_HEAD_BYTES + PLACE_BYTES
"""The frame of a block in a window."""

SMALL_FRAME_BYTES_MAX: Final = 1024
"""The longest payload of a frame that is no block."""

HEAD, BLOCK, END, BLOCK_IN_WINDOW = 1, 2, 3, 4
"""The kinds of frames."""

_END_PAYLOAD_BYTES: Final = 96
"""An end is padded to this size, so that the length of a transfer is known when it begins."""


class WrongTransfer(Exception):
    """The peer sent something other than the blocks of this prompt."""


class TransferHead(msgspec.Struct, frozen=True, kw_only=True):
    """Announces `blocks` blocks from number `first_block` on, of the model `fingerprint`."""

    fingerprint: bytes
    block_bytes: int
    first_block: int
    blocks: int


class TransferEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a complete transfer, this long after the prompt was computed.

    `cached_tokens` were in the sender's prefix cache. The padding says nothing.
    """

    cached_tokens: Count
    after_prefill_ms: Milliseconds = 0.0
    padding: bytes = b""


class PlacedBlock(msgspec.Struct, frozen=True):
    """A block in a window: its frame without the content, and the first byte of that there."""

    head: bytes
    place: int


def encode_head(head: TransferHead) -> bytes:
    """Return the first frame."""
    return _frame(HEAD, msgspec.msgpack.encode(head))


def decode_head(frame: bytes) -> TransferHead:
    """Return the content of the first frame. Raises WrongTransfer if it is another one."""
    if frame[:1] != bytes((HEAD,)):
        raise WrongTransfer("no head")
    try:
        return msgspec.msgpack.decode(frame[FRAME_HEAD_BYTES:], type=TransferHead)
    except msgspec.DecodeError as error:
        raise WrongTransfer(f"a malformed frame: {error}") from error


def encode_end(end: TransferEnd) -> bytes:
    """Return the last frame, which always has the same size."""
    payload = msgspec.msgpack.encode(end)
    padding = bytes(_END_PAYLOAD_BYTES - len(payload))
    return _frame(END, msgspec.msgpack.encode(msgspec.structs.replace(end, padding=padding)))


def payload_bytes(frame: bytes | bytearray) -> int:
    """Return the size of a frame's payload as its first bytes say."""
    return int.from_bytes(frame[1:FRAME_HEAD_BYTES], "little")


def split_frame(data: bytes) -> tuple[bytes, bytes]:
    """Return the first frame of what has arrived, and what follows it."""
    end = FRAME_HEAD_BYTES + payload_bytes(data)
    return data[:end], data[end:]


def is_whole_frame(data: bytes) -> bool:
    """Return whether a whole frame has arrived, or the beginning of a large one."""
    size = payload_bytes(data)
    lacks = len(data) < FRAME_HEAD_BYTES or len(data) < FRAME_HEAD_BYTES + size
    return not lacks or size > SMALL_FRAME_BYTES_MAX


def transfer_bytes(head: TransferHead, *, in_window: bool = False) -> int:
    """Return the size of a stream.

    With it as Content-Length, nothing on the way copies the blocks into chunks.
    """
    blocks = 0 if in_window else head.blocks * (BLOCK_HEAD_BYTES + head.block_bytes)
    return len(encode_head(head)) + blocks + FRAME_HEAD_BYTES + _END_PAYLOAD_BYTES


def encode_block(digest: bytes, content: bytes | memoryview) -> list[bytes | memoryview]:
    """Return the frame of one block in two pieces, so that the content is not copied."""
    length = NAMES_BYTES + len(content)
    names = digest + block_checksum(digest, content)
    return [bytes((BLOCK,)) + length.to_bytes(4, "little") + names, content]


def encode_block_in_window(digest: bytes, content: memoryview, place: int) -> bytes:
    """Return the frame of a block whose content lies at byte `place` of the transfer's window."""
    return _placed(digest + block_checksum(digest, content), place)


def place_in_window(block_head: bytes | bytearray, place: int) -> bytes:
    """Return the frame in a window of a block that arrives in a stream with `block_head`."""
    return _placed(bytes(block_head[FRAME_HEAD_BYTES:]), place)


def take_from_window(frame: bytes, block_bytes: int) -> PlacedBlock:
    """Return a block as it goes to a stream, from its frame in a window."""
    names, place = frame[FRAME_HEAD_BYTES:-PLACE_BYTES], frame[-PLACE_BYTES:]
    length = NAMES_BYTES + block_bytes
    head = bytes((BLOCK,)) + length.to_bytes(4, "little") + names
    return PlacedBlock(head, int.from_bytes(place, "little"))


def block_checksum(digest: bytes, content: bytes | memoryview) -> bytes:
    """Return the checksum of a block."""
    checksum = xxhash.xxh3_128(digest)
    checksum.update(content)
    return checksum.digest()


def _placed(names: bytes, place: int) -> bytes:
    return _frame(BLOCK_IN_WINDOW, names + place.to_bytes(PLACE_BYTES, "little"))


def _frame(kind: int, payload: bytes) -> bytes:
    return bytes((kind,)) + len(payload).to_bytes(4, "little") + payload
