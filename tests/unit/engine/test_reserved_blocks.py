"""Blocks reserved for a transfer: the next run while one is written, and all are released."""

from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import torch

from nodeagent.engine.core.kv_transfers import KvTransfers
from nodeagent.engine.kvcache.block_pool import BlockPool
from nodeagent.engine.server.kv.reserved_blocks import ReservedBlocks
from tests.unit.engine.test_kv_transfers import Memory, digest

DIGESTS = [digest("x", number) for number in range(10)]
CONTENTS = torch.arange(10.0).view(10, 1)


class Worker:
    """The step thread: makes each call at once."""

    def __init__(self, transfers: KvTransfers) -> None:
        self._core = SimpleNamespace(kv_transfers=transfers)

    def call(self, function: Callable[[Any], Any]) -> Future[Any]:
        result: Future[Any] = Future()
        result.set_result(function(self._core))
        return result

    call_beside_steps = call


def reserve(blocks: int) -> tuple[BlockPool, Memory, KvTransfers, ReservedBlocks]:
    pool, memory = BlockPool(blocks), Memory(blocks)
    transfers = KvTransfers(pool, memory, None)
    transfers.open_incoming("t", ())
    worker: Any = Worker(transfers)
    return pool, memory, transfers, ReservedBlocks(worker, transfers, "t", DIGESTS, 4)


def test_the_next_run_is_held_while_one_is_written() -> None:
    pool, memory, transfers, reserved = reserve(16)
    assert transfers.held_blocks == 4, "before anything has arrived"
    assert reserved.write(CONTENTS[:3])
    assert (transfers.held_blocks, len(pool.match_prefix(DIGESTS))) == (8, 0)
    assert reserved.write(CONTENTS[3:6])
    assert (transfers.held_blocks, len(pool.match_prefix(DIGESTS))) == (10, 4)
    assert reserved.write(CONTENTS[6:])
    reserved.close()
    found = pool.match_prefix(DIGESTS)
    assert memory.rows[found].tolist() == CONTENTS.tolist()
    assert not reserved.write(CONTENTS[:1]), "more than was to come"
    transfers.close_incoming("t")
    assert transfers.held_blocks == pool.used_blocks == 0


def test_what_a_broken_transfer_has_written_is_found_and_the_rest_let_go_of() -> None:
    pool, _, transfers, reserved = reserve(16)
    assert reserved.write(CONTENTS[:5])
    reserved.close()
    assert (len(pool.match_prefix(DIGESTS)), transfers.held_blocks) == (5, 5)
    transfers.close_incoming("t")
    assert transfers.held_blocks == pool.used_blocks == 0


def test_without_a_free_block_nothing_stays_held() -> None:
    # The second run still fits beside a free block for the sequence; the third does not.
    pool, _, transfers, reserved = reserve(9)
    assert reserved.write(CONTENTS[:8])
    assert not reserved.write(CONTENTS[8:])
    reserved.close()
    assert transfers.held_blocks == pool.used_blocks == 0


def test_a_request_that_is_gone_gets_no_blocks() -> None:
    pool, _, transfers, reserved = reserve(16)
    assert reserved.write(CONTENTS[:2])
    transfers.close_incoming("t")
    reserved.close()
    assert transfers.held_blocks == pool.used_blocks == 0
    assert pool.match_prefix(DIGESTS) == []
