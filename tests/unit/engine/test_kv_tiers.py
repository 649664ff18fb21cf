"""KV below the device's: what comes back is what went down, whatever was pushed out meanwhile."""

import errno
import os
import shutil
from collections.abc import Sequence as Ordered
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nodeagent.engine.kvcache.block_mover import Mover
from nodeagent.engine.kvcache.blocks import Blocks
from nodeagent.engine.kvcache.file_tier import FileTier
from nodeagent.engine.kvcache.host_tier import HostTier
from nodeagent.engine.scheduler.batching import Batching, Limits
from nodeagent.engine.scheduler.fair_queue import Standing
from nodeagent.engine.scheduler.sequence import BLOCK_TOKENS, Ending, Finish, Sequence

MODEL = bytes(16)


def digest(number: int) -> bytes:
    return number.to_bytes(32, "big")


class Pages:
    """A device whose KV of a token is the token itself and its sequence's salt."""

    def __init__(self, blocks: int) -> None:
        self.rows = torch.full((blocks, BLOCK_TOKENS, 2), -1)

    def read_blocks(self, blocks: Ordered[int]) -> Tensor:
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
        wanted = [[token, len(sequence.salt)] for token in sequence.tokens[:end]]
        return found.tolist() == wanted


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
)
def test_a_step_sees_what_its_sequences_computed_and_nothing_else(
    asks: list[tuple[int, int, bytes, int, int]], host_blocks: int, budget: int
) -> None:
    pages = Pages(8)
    host = HostTier(host_blocks, (BLOCK_TOKENS, 2), torch.int64)
    mover = Mover(pages, host, None)
    batching = Batching(Limits(budget, 4), Blocks(8), below=host)
    coming = []
    for number, (prompt, output, salt, start, priority) in enumerate(asks):
        # Few different beginnings, so that prefixes are shared, pushed out and asked for again.
        tokens = [start * 100 + at for at in range(prompt)]
        standing = Standing(priority=priority)
        ending = Ending(output, frozenset())
        coming.append(Sequence(number, tokens, ending, salt, standing=standing))
    while coming or batching.busy:
        # One a step: who comes later and is more urgent makes others give way.
        if coming:
            batching.submit(coming.pop(0))
        batch = batching.next_batch()
        mover.move(batch.evicted, batch.restores, lambda: None)
        assert len(host) <= host_blocks
        for chunk in batch.chunks:
            assert pages.holds(chunk.sequence, chunk.start)
            pages.compute(chunk.sequence, chunk.start, chunk.start + chunk.tokens)
        for chunk in batch.chunks:
            batching.computed(chunk)
        for chunk in batch.chunks:
            if chunk.samples and chunk.sequence.append(7) is Finish.LENGTH:
                batching.remove(chunk.sequence)


def test_a_session_pushed_out_comes_back_whole() -> None:
    pages, host = Pages(6), HostTier(6, (BLOCK_TOKENS, 2), torch.int64)
    mover = Mover(pages, host, None)
    batching = Batching(Limits(200, 2), Blocks(6), below=host)
    cached = []
    for number, start in enumerate((0, 1000, 0)):
        tokens = list(range(start, start + 5 * BLOCK_TOKENS + 1))
        sequence = Sequence(number, tokens, Ending(1, frozenset()))
        batching.submit(sequence)
        batch = batching.next_batch()
        mover.move(batch.evicted, batch.restores, lambda: None)
        for chunk in batch.chunks:
            pages.compute(sequence, chunk.start, chunk.start + chunk.tokens)
            batching.computed(chunk)
        batching.remove(sequence)
        cached.append(sequence.cached_tokens)
    assert cached == [0, 0, 5 * BLOCK_TOKENS]
    assert (mover.restored_total, mover.saved_total) == (5, 10)


def test_a_prefix_outlives_what_follows_it() -> None:
    host = HostTier(3, (1,), torch.int64)
    host.put([digest(n) for n in range(5)], torch.arange(5)[:, None])
    assert [n for n in range(5) if digest(n) in host] == [0, 1, 2]
    host.put([digest(9)], torch.tensor([[9]]))
    assert [n for n in (0, 1, 2, 9) if digest(n) in host] == [0, 1, 9]
    assert host.get([digest(1), digest(9)]).tolist() == [[1], [9]]


def test_files_outlive_their_process_and_stay_within_their_bytes(tmp_path: Path) -> None:
    content = bytes(range(100))
    tier = FileTier(tmp_path, MODEL, 100, 10_000)
    for number in range(4):
        assert tier.write(digest(number), content)
    again = FileTier(tmp_path, MODEL, 100, 10_000)
    assert len(again) == 4
    assert again.held_bytes == tier.held_bytes
    assert again.read(digest(2)) == content
    assert FileTier(tmp_path, b"another model---", 100, 10_000).read(digest(2)) is None
    # 163 bytes a file: two have room. Read last, number 2 stays.
    small = FileTier(tmp_path, MODEL, 100, 400)
    assert len(small) == 2
    assert small.held_bytes <= 400
    held = [number for number in range(4) if digest(number) in small]
    assert small.read(digest(held[0])) == content
    small.write(digest(7), content)
    assert digest(held[0]) in small
    assert digest(held[1]) not in small
    assert sum(1 for _ in tmp_path.glob(f"{MODEL.hex()}/*/*")) == 2


@pytest.mark.parametrize("change", ["cut", "flip", "grow", "gone", "swap"])
def test_a_spoilt_file_is_a_miss(tmp_path: Path, change: str) -> None:
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
    assert tier.spoilt_total == (change != "gone")
    assert not path.exists()
    assert tier.read(digest(2)) == b"x" * 50


def test_a_disk_that_takes_nothing_is_no_error_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = FileTier(tmp_path, MODEL, 50, 10_000)
    in_the_way = tmp_path / MODEL.hex() / "00"
    for wanted in (1, 2):
        in_the_way.write_text("in the way")
        for _ in range(3):
            assert not tier.write(digest(1), bytes(50))
            assert digest(1) not in tier
        assert [record.message for record in caplog.records] == ["cannot keep KV"] * wanted
        in_the_way.unlink()
        assert tier.write(digest(2), bytes(50))
        # Also where somebody has removed all of it.
        shutil.rmtree(in_the_way.parent)
        assert tier.write(digest(2), bytes(50))
        shutil.rmtree(in_the_way)


def test_a_disk_that_lets_go_of_nothing_is_no_error(
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
    assert (len(tier), tier.spoilt_total) == (1, 1)
    assert tier.write(digest(2), bytes(100))
    assert tier.write(digest(3), bytes(100))
    assert [n for n in range(4) if digest(n) in tier] == [2, 3]
    (tmp_path / MODEL.hex() / "00" / "junk").touch()
    assert len(FileTier(tmp_path, MODEL, 100, 10_000)) == 3, "the cut one is none"
