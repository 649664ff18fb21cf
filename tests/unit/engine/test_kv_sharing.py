"""The blocks that an engine shares: found in any tier, kept below the device, and never held."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isochrone.wire.errors import ApiError
from isochrone.wire.kv.kv_sharing import (
    BlockQuery,
    FoundTokens,
    LocatedBlocks,
    format_found,
    parse_found,
)
from isochrone.wire.kv.transfer_frames import (
    TransferEnd,
    TransferHead,
    WrongTransfer,
    encode_block,
    encode_end,
    encode_head,
)
from nodeagent.engine.core.kv_transfers import HeldPrefix, KvTransfers
from nodeagent.engine.kvcache.block_mover import BlockMover
from nodeagent.engine.kvcache.block_pool import BlockPool
from nodeagent.engine.kvcache.file_tier import FileTier
from nodeagent.engine.kvcache.host_tier import HostTier
from nodeagent.engine.kvcache.staging_memory import StagingMemory
from nodeagent.engine.kvcache.transfer_reader import TransferReader
from nodeagent.engine.server.kv.kv_receiving import KvReceiver
from nodeagent.engine.server.kv.kv_sharing import KvSharing
from nodeagent.engine.server.kv.kv_windows import KvWindows
from nodeagent.engine.server.kv.kv_writing import BlockDestination
from nodeagent.engine.server.kv.waiting_prompt import WaitingPrompt
from tests.unit.engine.test_abandoned_transfers import InlineWorker
from tests.unit.engine.test_kv_transfers import Memory, digest
from tests.unit.engine.test_kv_writing import Response, a_writer

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


def test_a_copy_evicts_nothing(mover: BlockMover) -> None:
    transfers = KvTransfers(BlockPool(12), Memory(12), mover)
    mover.import_blocks(CHAIN[:2], torch.ones(2, 1))
    # Three of them do not fit beside the two; files take them.
    transfers.keep(CHAIN[2:5], torch.ones(3, 1))
    assert (len(mover.host), transfers.count_prefix(CHAIN)) >= (2, 2)
    assert CHAIN[2] not in mover.host
    mover.close(())
    assert transfers.count_prefix(CHAIN) == 5
    without_files = BlockMover(Memory(12), HostTier(4, (1,), torch.float32), None)
    assert KvTransfers(BlockPool(12), Memory(12), without_files).keep_blocks_max == 4
    # Without tiers below the device, only empty blocks are used.
    pool = BlockPool(8)
    bare = KvTransfers(pool, Memory(8), None)
    store(bare, CHAIN)
    assert (bare.keep_blocks_max, pool.free_blocks) == (2, 8)
    others = [digest("y", number) for number in range(3)]
    bare.keep(others, torch.ones(3, 1))
    assert (bare.count_prefix(CHAIN), bare.count_prefix(others)) == (6, 0)
    bare.keep(others[:2], torch.ones(2, 1))
    assert (bare.count_prefix(CHAIN), bare.count_prefix(others)) == (6, 2)


def test_blocks_are_held_while_they_are_read_and_evicted_first_once_they_have_moved() -> None:
    pool = BlockPool(8)
    transfers = KvTransfers(pool, Memory(8), None)
    old, moved = CHAIN[:3], [digest("y", number) for number in range(5)]
    store(transfers, old)
    store(transfers, moved)
    held = transfers.open_reading(1, moved)
    assert (len(held), transfers.held_blocks) == (5, 5)
    # Not even all the rest is enough for another one.
    assert pool.allocate((), 4) is None
    assert transfers.read_held(held).tolist() == [[1.0]] * 5
    transfers.close_reading(1)
    transfers.close_reading(1)
    assert pool.used_blocks == 0
    reaches_back_to_s = pool.evicted_used_at_s
    transfers.demote(moved)
    assert transfers.count_prefix(moved) == 5
    taken = pool.allocate((), 2)
    assert taken is not None
    # The end of what moved goes first, although `old` was used before it.
    assert (transfers.count_prefix(moved), transfers.count_prefix(old)) == (3, 3)
    assert pool.evicted_used_at_s == reaches_back_to_s


def test_a_device_that_only_the_step_thread_may_read_is_not_held() -> None:
    class OrderedMemory(Memory):
        can_copy_beside_steps = False

    transfers = KvTransfers(BlockPool(8), OrderedMemory(8), None)
    store(transfers, CHAIN)
    assert transfers.open_reading(1, CHAIN) == []
    assert transfers.held_blocks == 0


def test_shared_blocks_of_a_wrong_transfer_are_forgotten(mover: BlockMover) -> None:
    transfers = KvTransfers(BlockPool(12), Memory(12), mover)
    transfers.open_incoming("t", CHAIN)
    assert transfers.store_shared("t", CHAIN[:2], torch.ones(2, 1))
    transfers.close_incoming("t", is_wrong=True, shared=CHAIN[:2])
    assert transfers.count_prefix(CHAIN) == 0
    assert not transfers.store_shared("t", CHAIN[:2], torch.ones(2, 1))
    mover.close(())


def test_the_end_of_a_fetched_prefix_does_not_evict_its_beginning(mover: BlockMover) -> None:
    """A prefix that is longer than the host tier was fetched as a whole, and computed as a whole,
    because its first blocks were gone."""
    transfers = KvTransfers(BlockPool(12), Memory(12), mover)
    transfers.open_incoming("t", CHAIN)
    form: Any = SimpleNamespace(block_bytes=4)
    worker: Any = InlineWorker(transfers)
    receiver = KvReceiver(
        form, worker, transfers, 1, staging=StagingMemory(64), host_blocks=mover.host.total
    )
    waiting = WaitingPrompt(100, CHAIN, CHAIN)

    def fetch(first: int, end: int) -> None:
        contents = torch.ones(end - first, 1)
        receiver.store_blocks("t", waiting, CHAIN[first:end], contents, None)

    fetch(0, 3)
    with pytest.raises(ApiError, match="none is free"):
        fetch(3, 6)
    assert transfers.count_prefix(CHAIN) == waiting.held.in_all_tiers == mover.host.total == 4
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


class StoppedWorker:
    """A step thread in the middle of a long step: calls wait until `step` ends it."""

    def __init__(self, transfers: KvTransfers) -> None:
        self._core = SimpleNamespace(kv_transfers=transfers)
        self._waiting: list[tuple[Callable[[object], object], Future[object]]] = []
        self.called = threading.Semaphore(0)

    def call(self, function: Callable[[object], object]) -> Future[object]:
        future: Future[object] = Future()
        self._waiting.append((function, future))
        self.called.release()
        return future

    def call_beside_steps(self, function: Callable[[object], object]) -> Future[object]:
        return self.call(function)

    def step(self) -> None:
        waiting, self._waiting = self._waiting, []
        for function, future in waiting:
            if future.set_running_or_notify_cancel():
                future.set_result(function(self._core))


async def test_how_much_is_here_is_said_during_a_step_and_a_part_waits_for_one() -> None:
    transfers = KvTransfers(BlockPool(8), Memory(8), None)
    store(transfers, CHAIN)
    worker: Any = StoppedWorker(transfers)
    form: Any = SimpleNamespace(
        block_bytes=4,
        dtype=torch.float32,
        shape=(1,),
        read_fingerprint=AsyncMock(return_value=FINGERPRINT),
    )
    windows = KvWindows(form, Path("unused"), StagingMemory(64))
    sharing = KvSharing(form, worker, transfers, None, windows, StagingMemory(64), 1.0)
    body = msgspec.msgpack.encode(BlockQuery(digests=tuple(CHAIN)))

    async def read() -> bytes:
        return body

    query: Any = SimpleNamespace(content_length=len(body), read=read)
    answer = await sharing._locate(query)
    assert isinstance(answer.body, bytes)
    located = msgspec.json.decode(answer.body, type=LocatedBlocks)
    assert (located.blocks, located.keep_blocks_max) == (6, 2)
    for is_given_up in (False, True):
        response: Any = Response(reads=0 if is_given_up else 1000)
        writer = a_writer(response, 60.0, windows)
        reading = asyncio.create_task(writer.write_all(partial(sharing._read_all, writer, CHAIN)))
        await asyncio.to_thread(worker.called.acquire)
        assert transfers.held_blocks == 0
        if is_given_up:
            reading.cancel()
        worker.step()
        # They are held until the next step.
        await asyncio.to_thread(worker.called.acquire)
        assert transfers.held_blocks == 6
        worker.step()
        assert transfers.held_blocks == 0
        with suppress(asyncio.CancelledError):
            await reading
        if not is_given_up:
            assert b"".join(response.written[1::2]) == torch.ones(6).numpy().tobytes()


class PromptWorker(StoppedWorker):
    """A step thread that has no step to do."""

    def call(self, function: Callable[[object], object]) -> Future[object]:
        future = super().call(function)
        self.step()
        return future


@pytest.mark.parametrize("on_device", [6, 5, 3, 0])
async def test_the_next_part_is_held_while_one_is_read(on_device: int) -> None:
    mover = BlockMover(Memory(12), HostTier(8, (1,), torch.float32), None)
    transfers = KvTransfers(BlockPool(12), Memory(12), mover)
    if on_device:
        store(transfers, CHAIN[:on_device])
    mover.import_blocks(CHAIN[on_device:], torch.ones(6 - on_device, 1))
    form: Any = SimpleNamespace(block_bytes=4, dtype=torch.float32, shape=(1,))
    windows = KvWindows(form, Path("unused"), StagingMemory(64))
    worker: Any = PromptWorker(transfers)
    sharing = KvSharing(form, worker, transfers, None, windows, StagingMemory(64), 1.0)
    sharing._held_blocks = 2
    response: Any = Response()
    writer = a_writer(response, 60.0, windows)
    held, put = [], writer.put

    def put_and_count(
        digests: Sequence[bytes], contents: torch.Tensor, destination: BlockDestination
    ) -> None:
        held.append(transfers.held_blocks)
        put(digests, contents, destination)

    writer.put = put_and_count  # type: ignore[method-assign]
    await writer.write_all(partial(sharing._read_all, writer, CHAIN))
    expected = {6: [4, 4, 2], 5: [4, 3, 1, 0], 3: [3, 1, 0], 0: [0]}
    assert held == expected[on_device]
    assert transfers.held_blocks == 0
    assert sharing.shared_blocks_total == 6
    assert b"".join(response.written[1::2]) == torch.ones(6).numpy().tobytes()


@pytest.mark.parametrize(("block_bytes", "held"), [(368_640, 44), (1 << 20, 16), (32 << 20, 1)])
def test_what_is_held_is_whole_parts(block_bytes: int, held: int) -> None:
    form: Any = SimpleNamespace(block_bytes=block_bytes, dtype=torch.uint8, shape=(block_bytes,))
    windows = KvWindows(form, Path("unused"), StagingMemory(0))
    none: Any = None
    sharing = KvSharing(form, none, none, None, windows, StagingMemory(0), 1.0)
    assert sharing._held_blocks == held
