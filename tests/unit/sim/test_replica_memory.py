"""One pool for cached prefixes and running sequences: what one takes the other does not have."""

import pytest

from ops.sim.published import PUBLISHED, output_tokens_per_s
from ops.sim.replica import SimulatedReplica
from ops.sim.replica_job import ReplicaJob
from ops.sim.replica_memory import KvPool, PrefixCache
from ops.sim.stepped_replica import REPLICA_KINDS
from ops.sim.traces import TraceRequest
from ops.sim.world import LLAMA_70B_TODAY, EngineProfile, ReplicaSite
from tests.unit.sim.test_replica import run

POOL = EngineProfile(
    "pool", 1000.0, 0.01, 0.0, 1e12, 100_000, 0, chunk_tokens=1000, pool_tokens=1000
)


def a_request(number: int, prompt: int, output: int, blocks: tuple[int, ...] = ()) -> TraceRequest:
    return TraceRequest(number, 0.0, prompt, output, blocks, 100, "", 0.0)


def a_job(request: TraceRequest) -> ReplicaJob:
    return ReplicaJob(request, request.prompt_tokens, request.prompt_tokens, 0, 0.0)


def test_a_block_that_two_sequences_share_is_held_once() -> None:
    pool = KvPool(1000)
    pool.hold(a_request(0, 250, 1, (1, 2)), 0)
    pool.hold(a_request(1, 320, 1, (1, 2, 3)), 0)
    assert pool.free_tokens(0.0) == 1000 - 300 - 50 - 20
    pool.release(a_request(0, 250, 1, (1, 2)), 0)
    assert pool.free_tokens(0.0) == 1000 - 300 - 20
    pool.release(a_request(1, 320, 1, (1, 2, 3)), 0)
    assert pool.free_tokens(0.0) == 1000
    assert pool.matched_blocks(a_request(2, 400, 1, (1, 2, 3, 4)), frozenset()) == 3


def test_running_sequences_evict_cached_prefixes() -> None:
    pool = KvPool(1000)
    first = a_request(0, 600, 1, (1, 2, 3, 4, 5, 6))
    pool.hold(first, 0)
    pool.release(first, 0)
    second = a_request(1, 700, 1, (11, 12, 13, 14, 15, 16, 17))
    pool.hold(second, 0)
    pool.put(second, 0.0)
    # 300 tokens are left, and the end of the first prompt went first.
    assert pool.matched_blocks(first, frozenset()) == 3
    pool.trim(150.0)
    assert pool.matched_blocks(first, frozenset()) == 1


def test_a_prompt_that_was_preempted_while_it_was_read_is_not_cached() -> None:
    pool = KvPool(1000)
    request = a_request(0, 200, 1, (1, 2))
    pool.hold(request, 0)
    pool.release(request, 0, is_read=False)
    assert pool.matched_blocks(request, frozenset()) == 0
    assert pool.free_tokens(0.0) == 1000


def test_a_prompt_waits_until_it_fits_beside_the_running_sequences() -> None:
    replica = SimulatedReplica(ReplicaSite(0, 0, POOL, 1000.0))
    assert replica.admit(a_job(a_request(0, 600, 11)), 0.0)
    assert replica.admit(a_job(a_request(1, 500, 1)), 0.0)
    ended = run(replica)
    # The first is read in 0.6 s and then gets ten tokens of 10 ms; only then the second is read.
    assert abs(ended[0][1] - 0.7) < 1e-6
    assert abs(ended[1][0] - 1.2) < 1e-6


def test_the_newest_sequence_is_preempted_when_the_pool_is_full_and_read_again() -> None:
    replica = SimulatedReplica(ReplicaSite(0, 0, POOL, 1000.0))
    assert replica.admit(a_job(a_request(0, 450, 101)), 0.0)
    assert replica.admit(a_job(a_request(1, 450, 101)), 0.0)
    ended = run(replica)
    # Together they may grow by 100 tokens. The first got one while the second was read, then each
    # 49.5 more, at 10 ms; the second is preempted and goes on when the first has ended.
    assert abs(ended[0][0] - 0.45) < 1e-6
    assert abs(ended[1][0] - 0.91) < 0.02
    first_ends_s = ended[0][1]
    assert first_ends_s < ended[1][1]
    # It had some fifty tokens, which are read again with its prompt: half a second.
    assert 0.4 < ended[1][1] - first_ends_s < 1.1


@pytest.mark.parametrize("kind", REPLICA_KINDS)
def test_published_throughput_is_reproduced(kind: str) -> None:
    replica_kind = REPLICA_KINDS[kind]
    row = next(row for row in PUBLISHED if row.prompt_tokens == 2048 and row.output_tokens == 128)
    large = output_tokens_per_s(LLAMA_70B_TODAY.large, 2048, 128, replica_kind)
    small = output_tokens_per_s(LLAMA_70B_TODAY.small, 2048, 128, replica_kind)
    assert abs(large / row.h100x2 - 1) < 0.05
    assert abs(small / row.h200x1 - 1) < 0.05


def test_a_cache_reaches_back_to_the_last_use_of_what_it_evicted() -> None:
    cache = PrefixCache(300)
    for at_s, block in ((1.0, 1), (2.0, 2), (3.0, 3)):
        cache.now_s = at_s
        cache.hold(a_request(block, 100, 1, (block,)), 0)
        cache.put(a_request(block, 100, 1, (block,)), 0.0)
    assert cache.evicted_used_at_s == 0.0
    cache.now_s = 4.0
    cache.hold(a_request(4, 200, 1, (4, 5)), 0)
    cache.put(a_request(4, 200, 1, (4, 5)), 0.0)
    assert cache.evicted_used_at_s == 2.0
    cache.clear()
    assert cache.evicted_used_at_s == 4.0


def test_prefixes_that_several_prompts_have_in_common_are_told() -> None:
    cache = PrefixCache(300)
    cache.hold(a_request(0, 300, 1, (1, 2, 3)), 0)
    cache.hold(a_request(1, 300, 1, (1, 2, 3)), 0)
    # Both end after the third block, with different ends of their own.
    assert [event.blocks for event in cache.events] == [(1, 2, 3)]
    cache.hold(a_request(2, 300, 1, (1, 2, 4)), 0)
    assert [event.blocks for event in cache.events] == [(1, 2, 3), (1, 2)]
    cache.put(a_request(0, 300, 1, (1, 2, 3)), 0.0)
    cache.put(a_request(5, 300, 1, (7, 8, 9)), 0.0)
    told = [(event.blocks, event.is_stored) for event in cache.events[2:]]
    assert told == [((3,), False), ((2,), False)]
