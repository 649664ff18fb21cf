"""Requests that wait with the KV of their prefixes never keep each other from beginning."""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from nodeagent.engine.core.step import EngineCore
from nodeagent.engine.kvcache.block_pool import BLOCK_TOKENS, BlockPool
from nodeagent.engine.scheduler.batch import StepLimits
from nodeagent.engine.scheduler.batch_scheduler import BatchScheduler
from nodeagent.engine.scheduler.sequence import Sequence as TokenSequence
from nodeagent.engine.scheduler.sequence import StopConditions
from tests.unit.engine.test_kv_transfers import Memory
from tests.unit.engine.test_step import Script, generation

BLOCKS = 24
STEPS_MAX = 2000


class Engine:
    """An engine core whose requests each have a transfer that ends at the first token."""

    def __init__(self) -> None:
        self.ended: set[int] = set()
        pool = BlockPool(BLOCKS)
        self.core = EngineCore(
            Script({}),  # type: ignore[arg-type]
            BatchScheduler(StepLimits(64, 8), pool),
        )
        self.transfers = self.core.kv_transfers
        self.transfers.use_device(Memory(BLOCKS))

    def digests(self, prompt: Sequence[int], blocks: int) -> list[bytes]:
        """Return the digests of the first blocks of a prompt."""
        return TokenSequence(0, list(prompt), StopConditions(1, frozenset())).block_digests(blocks)

    def wait_for_prefix(self, number: int, blocks: int, held: int) -> None:
        """Have a request of so many blocks wait, with the first ones from another engine."""
        prompt = [number] * (blocks * BLOCK_TOKENS)
        digests = self.digests(prompt, held)
        self.transfers.open_incoming(str(number), digests)
        self.transfers.store_incoming(str(number), digests, _contents(held))
        self.core._executor.lines[number] = [65] * 4  # type: ignore[attr-defined]
        waiting = generation(number, 4)
        waiting.sequence.tokens[:] = prompt
        waiting.sequence.prompt_tokens = len(prompt)
        self.core.submit(waiting)

    def run(self) -> set[int]:
        """Step until nothing is left; return the requests that ended."""
        for _ in range(STEPS_MAX):
            if not self.core.has_work:
                return self.ended
            self.step()
        raise AssertionError(f"no progress: {self.core.scheduler.pool}, ended {self.ended}")

    def step(self) -> None:
        """Step; end the transfer of each request that has begun, as the server does."""
        for delta in self.core.step().deltas:
            self.transfers.close_incoming(str(delta.number))
            if delta.finish is not None:
                self.ended.add(delta.number)


def _contents(blocks: int) -> Tensor:
    return torch.zeros(blocks, 1)


def test_prefixes_that_fill_the_memory_do_not_keep_every_request_waiting() -> None:
    engine = Engine()
    for number in (1, 2, 3):
        engine.wait_for_prefix(number, blocks=14, held=7)
    assert engine.core.scheduler.pool.free_blocks < 14 - 7
    assert engine.run() == {1, 2, 3}
    assert engine.core.scheduler.pool.used_blocks == 0


def test_blocks_that_were_let_go_of_are_forgotten_if_the_transfer_proves_wrong() -> None:
    engine = Engine()
    pool, transfers = engine.core.scheduler.pool, engine.transfers
    digests = engine.digests([7] * (8 * BLOCK_TOKENS), 8)
    transfers.open_incoming("7", digests)
    transfers.store_incoming("7", digests[:4], _contents(4))
    assert transfers.let_go_of_prefix()
    assert (pool.used_blocks, transfers.count_on_device(digests)) == (0, 4)
    # What arrives later is held.
    transfers.store_incoming("7", digests[4:6], _contents(2))
    assert pool.used_blocks == 2
    transfers.close_incoming("7", is_wrong=True)
    assert (pool.used_blocks, transfers.count_on_device(digests)) == (0, 0)
    assert not pool.cached_blocks()
    assert pool.empty_blocks == BLOCKS


def test_requests_end_whatever_prefixes_wait_in_whatever_order() -> None:
    draws = random.Random(20)
    for _ in range(60):
        engine = Engine()
        numbers = range(1, draws.randint(2, 7))
        for number in numbers:
            blocks = draws.randint(1, BLOCKS - 2)
            engine.wait_for_prefix(number, blocks, draws.randint(0, blocks))
            for _ in range(draws.randint(0, 3)):
                engine.step()
        assert engine.run() == set(numbers)
        assert engine.core.scheduler.pool.used_blocks == 0
