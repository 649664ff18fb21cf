"""The stream of KV blocks: read whole at any split, and refused at the first wrong byte."""

import hashlib
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isochrone.wire.kv.transfer_frames import (
    TransferEnd,
    TransferHead,
    WrongTransfer,
    encode_block,
    encode_end,
    encode_head,
    transfer_bytes,
)
from nodeagent.engine.kvcache.transfer_reader import ReceivedBlock, TransferReader
from nodeagent.engine.server.kv.kv_reading import contents_of

FORM = b"f" * 16
BYTES = 24
DIGESTS = [hashlib.sha256(bytes((n,))).digest() for n in range(5)]
CONTENTS = [bytes((n,)) * BYTES for n in range(5)]


def head(first: int = 1, blocks: int = 4, form: bytes = FORM) -> bytes:
    return encode_head(
        TransferHead(fingerprint=form, block_bytes=BYTES, first_block=first, blocks=blocks)
    )


def block(number: int, content: bytes | None = None) -> bytes:
    return b"".join(encode_block(DIGESTS[number], content or CONTENTS[number]))


def reader() -> TransferReader:
    return TransferReader(FORM, BYTES, DIGESTS, 1)


BLOCKS = head() + b"".join(block(n) for n in range(1, 5))
WHOLE = BLOCKS + encode_end(TransferEnd(cached_tokens=7))


@given(cuts=st.lists(st.integers(0, len(WHOLE)), max_size=12))
def test_a_transfer_is_read_at_any_split(cuts: list[int]) -> None:
    reading, blocks = reader(), []
    edges = [0, *sorted(cuts), len(WHOLE)]
    for start, end in itertools.pairwise(edges):
        assert reading.end is None or start == len(WHOLE)
        blocks += reading.feed(WHOLE[start:end])
    assert blocks == [ReceivedBlock(n, memoryview(CONTENTS[n])) for n in range(1, 5)]
    assert reading.end == TransferEnd(cached_tokens=7)


@given(at=st.integers(0, len(WHOLE) - 1))
def test_a_truncated_transfer_has_no_end(at: int) -> None:
    reading = reader()
    reading.feed(WHOLE[:at])
    assert reading.end is None


@given(at=st.integers(0, len(WHOLE) - 1), flip=st.integers(1, 255))
def test_a_changed_byte_is_never_taken_for_a_block(at: int, flip: int) -> None:
    changed = bytearray(WHOLE)
    changed[at] ^= flip
    reading = reader()
    try:
        blocks = reading.feed(bytes(changed))
    except WrongTransfer:
        return
    # A longer length waits for bytes that do not come; a number in the end frame may differ.
    assert blocks == [ReceivedBlock(n, memoryview(CONTENTS[n])) for n in range(1, 1 + len(blocks))]


@pytest.mark.parametrize(
    ("stream", "reason"),
    [
        (block(1), "no head"),
        (encode_end(TransferEnd(cached_tokens=0)), "no head"),
        (head() + head(), "a second head"),
        (BLOCKS + encode_end(TransferEnd(cached_tokens=-1)), "malformed"),
        (BLOCKS + encode_end(TransferEnd(cached_tokens=2**60)), "malformed"),
        (BLOCKS + encode_end(TransferEnd(cached_tokens=0, after_prefill_ms=-1.0)), "malformed"),
        (head(form=b"g" * 16), "another model or KV format"),
        (head(first=0, blocks=5), "5 blocks from number 0 on"),
        (head() + block(2), "block 1 of another prompt"),
        (head() + block(1) + block(1), "block 2 of another prompt"),
        (head() + block(1, b"x"), "a block of 49 bytes"),
        (head() + encode_end(TransferEnd(cached_tokens=0)), "an end with 4 blocks missing"),
        (WHOLE + block(4), "bytes after the end"),
        (WHOLE + head(), "bytes after the end"),
        (head() + bytes((9, 1, 0, 0, 0, 0)), "a frame of kind 9"),
        (bytes((1, 255, 255, 255, 255)), "a frame of kind 1 with 4294967295 bytes"),
        (bytes((1, 3, 0, 0, 0)) + b"abc", "a malformed frame"),
        (bytes((1, 0, 0, 0, 0)), "a frame of kind 1 with 0 bytes"),
        (head() + bytes((2, 0, 0, 0, 0)), "a block of 0 bytes"),
        (head() + bytes((4, 0, 0, 0, 0)), "a block in a window, in 0 bytes"),
        (BLOCKS + bytes((2, 0, 0, 0, 0)), "more blocks than the prompt has"),
        (WHOLE + bytes((3, 0, 0, 0, 0)), "bytes after the end"),
    ],
)
def test_a_wrong_transfer_is_refused_with_a_reason(stream: bytes, reason: str) -> None:
    with pytest.raises(WrongTransfer, match=reason):
        reader().feed(stream)


@given(cached=st.integers(0, 1 << 40), after_ms=st.floats(0, 1e12))
def test_the_length_of_a_transfer_is_known_when_it_begins(cached: int, after_ms: float) -> None:
    form = TransferHead(fingerprint=FORM, block_bytes=BYTES, first_block=1, blocks=4)
    end = TransferEnd(cached_tokens=cached, after_prefill_ms=after_ms)
    blocks = b"".join(block(n) for n in range(1, 5))
    assert transfer_bytes(form) == len(encode_head(form) + blocks + encode_end(end))


def test_an_endless_transfer_is_refused_at_its_first_block_too_many() -> None:
    reading = reader()
    reading.feed(WHOLE[: -len(encode_end(TransferEnd(cached_tokens=7)))])
    with pytest.raises(WrongTransfer, match="more blocks than the prompt has"):
        reading.feed(block(4))


@given(cuts=st.lists(st.integers(0, len(WHOLE)), max_size=8), part=st.integers(1, 6))
def test_contents_lie_side_by_side_and_are_handed_on_without_a_copy(
    cuts: list[int], part: int
) -> None:
    reading = TransferReader(FORM, BYTES, DIGESTS, 1, part_blocks=part)
    form: Any = SimpleNamespace(block_bytes=BYTES, dtype=torch.uint8, shape=(BYTES,))
    blocks: list[ReceivedBlock] = []
    for start, end in itertools.pairwise([0, *sorted(cuts), len(WHOLE)]):
        blocks += reading.feed(WHOLE[start:end])
    for first in range(0, len(blocks), part):
        group = blocks[first : first + part]
        contents = contents_of(group, form)
        assert [bytes(row.tolist()) for row in contents] == [CONTENTS[b.number] for b in group]
        group[0].content[0] ^= 255
        assert contents[0][0] == group[0].content[0]
    # Of two parts they are joined.
    assert len(contents_of(blocks, form)) == len(blocks)
