"""The KV tiers below the device: restored blocks have the content that was saved."""

import errno
import os
import shutil
import threading
from collections.abc import Sequence as Ordered
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nodeagent.engine.kvcache.block_mover import BlockMover
from nodeagent.engine.kvcache.block_pool import BLOCK_TOKENS, BlockPool, CachedBlock
from nodeagent.engine.kvcache.file_tier import FileTier
from nodeagent.engine.kvcache.host_tier import HostTier
from nodeagent.engine.kvcache.staging_memory import StagingMemory
from nodeagent.engine.scheduler.batch import StepLimits
from nodeagent.engine.scheduler.batch_scheduler import BatchScheduler
from nodeagent.engine.scheduler.fair_queue import SchedulingParams
from nodeagent.engine.scheduler.sequence import FinishReason, Sequence, StopConditions

MODEL = bytes(16)


def digest(number: int) -> bytes:
    return number.to_bytes(32, "big")


class Pages:
    """A device on which the KV of a token is the token and the length of its salt."""

    can_copy_beside_steps = True

    def __init__(self, blocks: int) -> None:
        self.rows = torch.full((blocks, BLOCK_TOKENS, 2), -1)

    def read_blocks(self, blocks: Ordered[int], out: Tensor | None = None) -> Tensor:
        return self.rows[list(blocks)].clone()

    def write_blocks(self, blocks: Ordered[int], contents: Tensor) -> None:
        self.rows[list(blocks)] = contents

    def compute(self, sequence: Sequence, start: int, end: int) -> None:
        places = torch.arange(start, end)
        blocks = torch.tensor(sequence.blocks)[places // BLOCK_TOKENS]
        values = [[token, len(sequence.salt)] for token in sequence.tokens[start:end]]
        self.rows[blocks, places % BLOCK_TOKENS] = torch.tensor(values)

    def holds(self, sequence: Sequence, end: int) -> bool:
        found = self.rows[sequence.blocks].view(-1, 2)[:end]
        expected = [[token, len(sequence.salt)] for token in sequence.tokens[:end]]
        return found.tolist() == expected


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 90),
            st.integers(1, 30),
            st.sampled_from([b"", b"x"]),
            st.integers(0, 2),
            st.integers(0, 2),
        ),
        min_size=2,
        max_size=14,
    ),
    st.integers(0, 12),
    st.integers(5, 40),
    st.integers(1, 12),
)
def test_a_step_reads_only_the_kv_of_its_own_sequences(
    requests: list[tuple[int, int, bytes, int, int]],
    host_blocks: int,
    budget: int,
    staged_blocks: int,
) -> None:
    pages = Pages(8)
    host = HostTier(host_blocks, (BLOCK_TOKENS, 2), torch.int64)
    mover = BlockMover(pages, host, None, StagingMemory(staged_blocks * host.block_bytes))
    scheduler = BatchScheduler(StepLimits(budget, 4), BlockPool(8), lower_tiers=host)
    coming = []
    for number, (prompt, output, salt, start, priority) in enumerate(requests):
        # Few different prefixes, so that they are shared, evicted and needed again.
        tokens = [start * 100 + at for at in range(prompt)]
        params = SchedulingParams(priority=priority)
        stop = StopConditions(output, frozenset())
        coming.append(Sequence(number, tokens, stop, salt, scheduling=params))
    while coming or scheduler.has_work:
        # One per step, so that later requests of higher priority preempt earlier ones.
        if coming:
            scheduler.submit(coming.pop(0))
        batch = scheduler.next_batch()
        mover.move(batch.evicted, batch.restores, lambda: None)
        assert len(host) <= host_blocks
        for chunk in batch.chunks:
            assert pages.holds(chunk.sequence, chunk.start)
            pages.compute(chunk.sequence, chunk.start, chunk.start + chunk.tokens)
        for chunk in batch.chunks:
            scheduler.mark_computed(chunk)
        for chunk in batch.chunks:
            if chunk.samples and chunk.sequence.append(7) is FinishReason.LENGTH:
                scheduler.remove(chunk.sequence)


def test_an_evicted_session_is_restored_completely() -> None:
    pages, host = Pages(6), HostTier(6, (BLOCK_TOKENS, 2), torch.int64)
    mover = BlockMover(pages, host, None)
    scheduler = BatchScheduler(StepLimits(200, 2), BlockPool(6), lower_tiers=host)
    cached = []
    for number, start in enumerate((0, 1000, 0)):
        tokens = list(range(start, start + 5 * BLOCK_TOKENS + 1))
        sequence = Sequence(number, tokens, StopConditions(1, frozenset()))
        scheduler.submit(sequence)
        batch = scheduler.next_batch()
        mover.move(batch.evicted, batch.restores, lambda: None)
        for chunk in batch.chunks:
            pages.compute(sequence, chunk.start, chunk.start + chunk.tokens)
            scheduler.mark_computed(chunk)
        scheduler.remove(sequence)
        cached.append(sequence.cached_tokens)
    assert cached == [0, 0, 5 * BLOCK_TOKENS]
    assert (mover.restored_total, mover.saved_total) == (5, 10)


def test_what_is_saved_in_parts_is_evicted_as_if_saved_at_once() -> None:
    device = Pages(8)
    device.rows[:] = torch.arange(8)[:, None, None]
    host = HostTier(4, (BLOCK_TOKENS, 2), torch.int64)
    host.put([digest(9)], device.rows[:1])
    mover = BlockMover(device, host, None, StagingMemory(2 * host.block_bytes))
    mover.move([CachedBlock(n, digest(n)) for n in range(6)], (), lambda: None)
    assert [n for n in range(10) if digest(n) in host] == [0, 1, 2, 3]
    host.put([digest(9)], device.rows[:1])
    assert [n for n in range(10) if digest(n) in host] == [0, 1, 2, 9]
    # Three are restored, and saving two more would evict one of them.
    restores = [CachedBlock(n + 5, digest(n)) for n in range(3)]
    device.rows[5:] = -1
    mover.move([CachedBlock(n, digest(n)) for n in (6, 7)], restores, lambda: None)
    assert device.rows[5:, 0, 0].tolist() == [0, 1, 2]
    assert [n for n in range(10) if digest(n) in host] == [0, 1, 6, 7]


def test_a_prefix_outlives_what_follows_it() -> None:
    host = HostTier(3, (1,), torch.int64)
    host.put([digest(n) for n in range(5)], torch.arange(5)[:, None])
    assert [n for n in range(5) if digest(n) in host] == [0, 1, 2]
    host.put([digest(9)], torch.tensor([[9]]))
    assert [n for n in (0, 1, 2, 9) if digest(n) in host] == [0, 1, 9]
    assert host.get([digest(1), digest(9)]).tolist() == [[1], [9]]


def test_files_outlive_their_process_and_stay_within_their_limit(tmp_path: Path) -> None:
    content = bytes(range(100))
    tier = FileTier(tmp_path, MODEL, 100, 10_000)
    for number in range(4):
        assert tier.write(digest(number), content)
    again = FileTier(tmp_path, MODEL, 100, 10_000)
    assert len(again) == 4
    assert again.used_bytes == tier.used_bytes
    assert again.read(digest(2)) == content
    assert FileTier(tmp_path, b"another model---", 100, 10_000).read(digest(2)) is None
    # A file takes 163 bytes: two fit.
    small = FileTier(tmp_path, MODEL, 100, 400)
    assert len(small) == 2
    assert small.used_bytes <= 400
    stored = [number for number in range(4) if digest(number) in small]
    assert small.read(digest(stored[0])) == content
    small.write(digest(7), content)
    assert digest(stored[0]) in small
    assert digest(stored[1]) not in small
    assert sum(1 for _ in tmp_path.glob(f"{MODEL.hex()}/*/*")) == 2


@pytest.mark.parametrize("change", ["cut", "flip", "grow", "gone", "swap"])
def test_a_corrupt_file_is_a_miss(tmp_path: Path, change: str) -> None:
    tier = FileTier(tmp_path, MODEL, 50, 10_000)
    tier.write(digest(1), bytes(50))
    tier.write(digest(2), b"x" * 50)
    path, other = (tmp_path / MODEL.hex() / "00" / digest(n).hex() for n in (1, 2))
    whole = bytearray(path.read_bytes())
    if change == "cut":
        path.write_bytes(whole[:-1])
    elif change == "flip":
        whole[-7] ^= 1
        path.write_bytes(whole)
    elif change == "grow":
        path.write_bytes(bytes(whole) + b"x")
    elif change == "huge":
        os.truncate(path, 1 << 45)
    elif change == "swap":
        path.write_bytes(other.read_bytes())
    else:
        path.unlink()
    assert tier.read(digest(1)) is None
    assert digest(1) not in tier
    assert tier.corrupt_total == (change != "gone")
    assert not path.exists()
    assert tier.read(digest(2)) == b"x" * 50


def test_a_disk_that_refuses_writes_is_logged_once_and_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = FileTier(tmp_path, MODEL, 50, 10_000)
    obstacle = tmp_path / MODEL.hex() / "00"
    for outages in (1, 2):
        obstacle.write_text("not a folder")
        for _ in range(3):
            assert not tier.write(digest(1), bytes(50))
            assert digest(1) not in tier
        assert [record.message for record in caplog.records] == [
            "cannot write a KV block"
        ] * outages
        obstacle.unlink()
        assert tier.write(digest(2), bytes(50))
        # Writing works even after the whole folder was deleted.
        shutil.rmtree(obstacle.parent)
        assert tier.write(digest(2), bytes(50))
        shutil.rmtree(obstacle)


def test_a_disk_that_refuses_deletes_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = FileTier(tmp_path, MODEL, 100, 400)
    for number in range(2):
        assert tier.write(digest(number), bytes(100))
    path = tmp_path / MODEL.hex() / "00" / digest(1).hex()
    path.write_bytes(path.read_bytes()[:-1])

    def read_only(self: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", read_only)
    assert tier.read(digest(1)) is None
    assert (len(tier), tier.corrupt_total) == (1, 1)
    assert tier.write(digest(2), bytes(100))
    assert tier.write(digest(3), bytes(100))
    assert [n for n in range(4) if digest(n) in tier] == [2, 3]
    (tmp_path / MODEL.hex() / "00" / "junk").touch()
    assert len(FileTier(tmp_path, MODEL, 100, 10_000)) == 3, "the truncated file is not indexed"


def test_a_tier_that_the_disk_never_took_a_block_of_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("pathlib.Path.mkdir", refuse)
    tier = FileTier(tmp_path / "kv", b"m", 4, 1 << 20)
    assert not tier.write(b"d" * 32, b"1234")
    mover = BlockMover(Pages(1), HostTier(1, (1,), torch.float32), tier)
    # An empty tier is false.
    assert mover.counts()["kv_file_refused_total"] == 1
    monkeypatch.undo()
    assert tier.write(b"d" * 32, b"1234")
    assert tier.read(b"d" * 32) == b"1234"
    mover.close([])


@pytest.mark.parametrize("on_disk", [0, 7], ids=["none", "all-but-one"])
def test_blocks_that_wait_to_be_written_keep_no_memory_of_others(
    tmp_path: Path, on_disk: int
) -> None:
    """A slow disk takes a block now and then: each kept the memory of all that a step evicted."""
    device = Pages(8)
    block = device.rows[0]
    files = FileTier(tmp_path, MODEL, block.nbytes, 100 * block.nbytes)
    may_write = threading.Event()
    mover = BlockMover(device, HostTier(16, tuple(block.shape), block.dtype), files)
    for number in range(on_disk):
        files.write(digest(number), block.numpy().tobytes())
    write = files.write

    def write_slowly(digest: bytes, content: bytes | memoryview) -> bool:
        assert may_write.wait(5)
        return write(digest, content)

    files.write = write_slowly  # type: ignore[method-assign]
    mover._queue_writes([digest(99)], device.read_blocks([0]))
    while mover._writes.qsize():
        pass  # the thread has taken it, and waits for the disk
    evicted = [CachedBlock(number, digest(number)) for number in range(8)]
    mover.move(evicted, (), lambda: None)
    waiting = list(mover._writes.queue)
    assert [pending.digest for pending in waiting if pending] == [
        digest(number) for number in range(on_disk, 8)
    ]
    memories = {
        pending.content.untyped_storage().data_ptr(): pending.content.untyped_storage().nbytes()
        for pending in waiting
        if pending
    }
    assert sum(memories.values()) == len(waiting) * block.nbytes
    may_write.set()
    mover.close([])
    assert all(digest(number) in files for number in range(8))


def test_blocks_that_find_no_place_in_the_queue_are_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nodeagent.engine.kvcache.block_mover._WRITE_QUEUE_BLOCKS_MAX", 2)
    device = Pages(8)
    block = device.rows[0]
    mover = BlockMover(device, HostTier(16, tuple(block.shape), block.dtype), None)
    mover.files = FileTier(tmp_path, MODEL, block.nbytes, 100 * block.nbytes)
    mover.move([CachedBlock(number, digest(number)) for number in range(5)], (), lambda: None)
    waiting = [pending for pending in mover._writes.queue if pending]
    assert [pending.digest for pending in waiting] == [digest(0), digest(1)]
    assert waiting[0].content.untyped_storage().nbytes() == 2 * block.nbytes
    assert mover.unwritten_total == 3
