"""The blocks that an engine shares: found in any tier, kept below the device, and never held."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isochrone.wire.kv_sharing import FoundTokens, format_found, parse_found
from nodeagent.engine.core.kv_transfers import HeldPrefix, KvTransfers
from nodeagent.engine.kvcache.block_mover import BlockMover
from nodeagent.engine.kvcache.block_pool import BlockPool
from nodeagent.engine.kvcache.file_tier import FileTier
from nodeagent.engine.kvcache.host_tier import HostTier
from nodeagent.engine.kvcache.transfer_frames import (
    TransferEnd,
    TransferHead,
    TransferReader,
    WrongTransfer,
    encode_block,
    encode_end,
    encode_head,
)
from tests.unit.engine.test_kv_transfers import Memory, digest

CHAIN = [digest("x", number) for number in range(6)]
FINGERPRINT = b"f" * 16


def store(transfers: KvTransfers, digests: Sequence[bytes]) -> None:
    """Store blocks on the device, as a transfer does."""
    transfers.open_incoming("t", ())
    assert transfers.store_incoming("t", digests, torch.ones(len(digests), 1))
    transfers.close_incoming("t")


@pytest.fixture
def mover(tmp_path: Path) -> BlockMover:
    files = FileTier(tmp_path, FINGERPRINT, 4, 1 << 20)
    return BlockMover(Memory(12), HostTier(4, (1,), torch.float32), files)


def test_a_prefix_counts_whatever_tier_each_block_is_in(mover: BlockMover) -> None:
    transfers = KvTransfers(BlockPool(12), Memory(12), mover)
    assert transfers.count_prefix(CHAIN) == 0
    store(transfers, CHAIN[:2])
    mover.import_blocks(CHAIN[2:4], torch.full((2, 1), 2.0))
    assert mover.files is not None
    mover.files.write(CHAIN[4], bytes(4))
    assert transfers.count_prefix(CHAIN) == 5
    assert transfers.count_prefix(CHAIN[3:]) == 2
    # What arrived is read from the device first, then from host memory; files have a thread.
    device, host = transfers.read_prefix(CHAIN), transfers.read_prefix(CHAIN[2:])
    assert device is not None
    assert host is not None
    assert (device.tolist(), host.tolist()) == ([[1.0], [1.0]], [[2.0], [2.0]])
    assert transfers.read_prefix(CHAIN[4:]) is None
    assert transfers.open_incoming("t", CHAIN) == HeldPrefix(2, 5)
    transfers.close_incoming("t")
    assert transfers.held_blocks == 0
    mover.close(())


def test_a_copy_is_kept_in_host_memory_and_in_files(mover: BlockMover) -> None:
    transfers = KvTransfers(BlockPool(12), Memory(12), mover)
    transfers.keep(CHAIN[:3], torch.ones(3, 1))
    assert len(mover.host) == 3
    mover.close(())
    assert mover.files is not None
    assert len(mover.files) == 3
    # Without tiers below the device it stays there until its blocks are needed.
    pool = BlockPool(12)
    bare = KvTransfers(pool, Memory(12), None)
    bare.keep(CHAIN, torch.ones(6, 1))
    assert bare.count_prefix(CHAIN) == 6
    assert bare.held_blocks == pool.used_blocks == 0


def test_shared_blocks_of_a_wrong_transfer_are_forgotten(mover: BlockMover) -> None:
    transfers = KvTransfers(BlockPool(12), Memory(12), mover)
    transfers.open_incoming("t", CHAIN)
    assert transfers.store_shared("t", CHAIN[:2], torch.ones(2, 1))
    transfers.close_incoming("t", is_wrong=True, shared=CHAIN[:2])
    assert transfers.count_prefix(CHAIN) == 0
    assert not transfers.store_shared("t", CHAIN[:2], torch.ones(2, 1))
    mover.close(())


def test_a_sender_may_have_less_than_was_asked_for() -> None:
    def reader(*, may_be_shorter: bool) -> TransferReader:
        return TransferReader(FINGERPRINT, 4, CHAIN, 2, may_be_shorter=may_be_shorter)

    head = TransferHead(fingerprint=FINGERPRINT, block_bytes=4, first_block=2, blocks=3)
    stream = encode_head(head)
    for name in CHAIN[2:5]:
        stream += b"".join(bytes(piece) for piece in encode_block(name, b"1234"))
    stream += encode_end(TransferEnd(cached_tokens=0))
    shorter = reader(may_be_shorter=True)
    assert [block.number for block in shorter.feed(stream)] == [2, 3, 4]
    assert (shorter.next_block, shorter.end is not None) == (5, True)
    with pytest.raises(WrongTransfer, match="3 blocks from number 2 on"):
        reader(may_be_shorter=False).feed(stream)
    for blocks in (0, 5):
        longer = TransferHead(fingerprint=FINGERPRINT, block_bytes=4, first_block=2, blocks=blocks)
        with pytest.raises(WrongTransfer):
            reader(may_be_shorter=True).feed(encode_head(longer))


@given(
    device=st.integers(0, 999),
    host=st.integers(0, 999),
    file=st.integers(0, 999),
    moved=st.integers(0, 3000),
)
def test_where_tokens_were_found_survives_the_wire(
    device: int, host: int, file: int, moved: int
) -> None:
    found = FoundTokens(device=device, host=host, file=file)
    assert parse_found(format_found(found)) == found
    fetched = found.moved("peer", moved)
    assert fetched.peer == min(moved, device + host)
    assert fetched.device + fetched.host + fetched.peer == device + host
    assert min(fetched.device, fetched.host) >= 0


def test_a_malformed_header_counts_nothing() -> None:
    assert parse_found("device=x;peer=-1;host=7;moon=3;;=") == FoundTokens(host=7)
