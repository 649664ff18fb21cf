"""The prefix index: equal prompts match, bounds hold, and answers correct it."""

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isochrone.wire.ids import (
    ClusterId,
    DeploymentId,
    Epoch,
    Generation,
    ModelId,
    NodeId,
    PopId,
    ReplicaId,
)
from isochrone.wire.peers.routes import DeploymentEntry, Route, RouteTable
from router.decide.caches.prefix_index import (
    BLOCK_BYTES,
    CAPACITY_MIN,
    KEYS_MAX,
    NO_MATCHES,
    PrefixIndex,
    PrefixKeys,
    block_ends,
    prefix_keys,
    slots_of,
)
from router.decide.choice.ranking import RouteQuery, rank
from router.feedback import AttemptFeedback
from router.fleet_state import FleetState
from router.sharing.prompt_sharing import OUTBOX_PROMPTS_MAX, SharedPrompts

SIZES = st.integers(0, 400_000)


@given(SIZES, SIZES)
def test_prompts_of_any_size_are_cut_at_the_same_places(one: int, other: int) -> None:
    shorter, longer = sorted((one, other))
    ends = block_ends(longer)
    assert block_ends(shorter) == ends[: len(block_ends(shorter))]
    assert len(ends) <= KEYS_MAX
    if ends and len(ends) < KEYS_MAX:
        assert longer - ends[-1] < max(BLOCK_BYTES, longer / 8)


@settings(deadline=None)
@given(st.binary(max_size=3000), st.binary(max_size=3000), st.binary(max_size=3000))
def test_keys_are_equal_as_far_as_the_bytes_are(prefix: bytes, one: bytes, other: bytes) -> None:
    a, b = prefix_keys(prefix + one, 1), prefix_keys(prefix + other, 1)
    same = sum(1 for x, y in zip(a.keys, b.keys, strict=False) if x == y)
    assert same >= len(block_ends(len(prefix)))
    for n, (x, y) in enumerate(zip(a.keys, b.keys, strict=False)):
        assert (x == y) == ((prefix + one)[: a.ends[n]] == (prefix + other)[: b.ends[n]])
    assert not set(a.keys) & set(prefix_keys(prefix + one, 2).keys)


@given(st.sets(st.integers(0, 250)))
def test_slots_of_a_mask(slots: set[int]) -> None:
    assert list(slots_of(sum(1 << slot for slot in slots))) == sorted(slots)


def chain(*blocks: int, size: int = 100) -> PrefixKeys:
    """Return the keys of a prompt of named blocks, each of `size` bytes."""
    keys, key = [], 7
    for block in blocks:
        key = hash((key, block)) & (2**64 - 1)
        keys.append(key)
    ends = [size * (n + 1) for n in range(len(blocks))]
    return PrefixKeys(keys, ends, size * len(blocks))


def test_the_longest_match_of_each_replica_is_found() -> None:
    index = PrefixIndex()
    index.record_sent(0, chain(1, 2, 3, 4), 0.0)
    index.record_sent(1, chain(1, 2, 9, 9), 0.0)
    index.record_sent(2, chain(1, 8), 0.0)
    matches = index.match(chain(1, 2, 3, 4), all_slots_mask=0b1111)
    assert [matches.share_at(slot) for slot in range(4)] == [1.0, 0.5, 0.25, 0.0]
    assert matches.all_share == 0.0
    matches = index.match(chain(1, 2, 3, 4), all_slots_mask=0b111)
    assert matches.all_share == 0.25
    assert [matches.share_at(slot) for slot in range(3)] == [1.0, 0.5, 0.25]
    assert index.match(chain(5, 6)) is NO_MATCHES
    index.remove_slots({0})
    assert index.match(chain(1, 2, 3, 4), all_slots_mask=0b111).share_at(0) == 0.0
    index.remove_slots({1, 2})
    assert len(index) == 0
    assert not index._holders


CHAINS = st.lists(st.integers(0, 3), min_size=1, max_size=8)


@settings(deadline=None, max_examples=80)
@given(
    st.lists(st.tuples(st.integers(0, 5), CHAINS, st.integers(1, 60)), max_size=40),
    CHAINS,
    st.integers(200, 3000),
    st.integers(5, 60),
)
def test_it_matches_only_what_was_sent_and_stays_within_bounds(
    sent: list[tuple[int, list[int], int]], prompt: list[int], capacity: int, pairs_max: int
) -> None:
    index, now_s = PrefixIndex(capacity, pairs_max), 0.0
    longest: dict[int, int] = {}
    for slot, blocks, gap_s in sent:
        now_s += gap_s
        index.record_sent(slot, chain(*blocks), now_s)
        same = 0
        for one, other in zip(blocks, prompt, strict=False):
            if one != other:
                break
            same += 1
        longest[slot] = max(longest.get(slot, 0), same)
        assert len(index) <= pairs_max + 6
        assert all(cache.blocks.size <= max(capacity, 100) for cache in index._caches.values())
        matches = index.match(chain(*prompt), all_slots_mask=0b111111)
        for slot in range(6):
            # Compare with a walk over all keys.
            walked = 0
            for key in chain(*prompt).keys:
                if not index._holders.get(key, 0) >> slot & 1:
                    break
                walked += 1
            assert abs(matches.share_at(slot) - walked / len(prompt)) < 1e-9
            assert walked <= longest.get(slot, 0)


def test_the_least_recently_used_prompt_is_evicted_from_its_end() -> None:
    index = PrefixIndex(capacity=600)
    index.record_sent(0, chain(1, 2, 3), 0.0)
    index.record_sent(0, chain(1, 5, 6), 1.0)
    index.record_sent(0, chain(7, 8), 2.0)
    assert index.match(chain(1, 2, 3)).share_at(0) == 2 / 3
    assert index.match(chain(1, 5, 6)).share_at(0) == 1.0
    assert index.match(chain(7, 8)).share_at(0) == 1.0


def test_a_refused_prompt_is_not_cached() -> None:
    index = PrefixIndex()
    index.record_sent(0, chain(1, 2), 0.0)
    sent = index.record_sent(0, chain(1, 2, 3, 4), 1.0)
    assert (sent.share, sent.age) == (0.5, 100)
    index.undo_sent(sent, chain(1, 2, 3, 4))
    assert index.match(chain(1, 2, 3, 4)).share_at(0) == 0.5
    assert len(index) == 2


@pytest.mark.parametrize("size", [5979, 6798, 117_959])
def test_a_refused_prompt_takes_away_no_block_that_was_cached_before(size: int) -> None:
    # As a share of these sizes, 128 bytes are rounded down.
    index, keys = PrefixIndex(), PrefixKeys([1, 2], [128, 256], size)
    index.record_sent(0, PrefixKeys([1], [128], 128), 0.0)
    index.undo_sent(index.record_sent(0, keys, 1.0), keys)
    assert index.match(keys).share_at(0) == 128 / size


@given(
    prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=3, max_size=3),
    undone=st.lists(st.sampled_from([1, 2]), max_size=3),
)
def test_of_prompts_sent_at_once_those_that_were_not_refused_stay_cached(
    prompts: list[list[int]], undone: list[int]
) -> None:
    index = PrefixIndex()
    chains = [chain(*prompt) for prompt in prompts]
    sent = [index.record_sent(0, keys, 0.1 * n) for n, keys in enumerate(chains)]
    for n in undone:
        index.undo_sent(sent[n], chains[n])
    read = {key for n, keys in enumerate(chains) if n not in undone for key in keys.keys}
    assert len(index) == len(read)
    assert all(
        index.match(keys).share_at(0) == 1.0 for n, keys in enumerate(chains) if n not in undone
    )


def test_prompts_expire_after_an_hour() -> None:
    index = PrefixIndex()
    index.record_sent(0, chain(1, 2), 0.0)
    index.record_sent(0, chain(3, 4), 4000.0)
    assert index.match(chain(1, 2)).share_at(0) == 0.0


def test_answers_teach_the_capacity_of_a_cache() -> None:
    true_capacity, chance = 100_000, random.Random(4)
    index = PrefixIndex(capacity=4_000_000)
    lru: dict[int, None] = {}
    wrong, found = [], []
    for n in range(4000):
        keys = chain(chance.randrange(300), 1, size=1000)
        held = all(key in lru for key in keys.keys)
        predicted = index.match(keys).share_at(0) == 1.0
        wrong.append(predicted and not held)
        found.append((held, predicted))
        index.learn_cached_share(index.record_sent(0, keys, 0.1 * n), 1.0 if held else 0.0)
        for key in keys.keys:
            lru.pop(key, None)
            lru[key] = None
        while len(lru) * 1000 > true_capacity:
            del lru[next(iter(lru))]
    assert sum(wrong[:300]) > 0
    assert sum(wrong[-1000:]) < 30
    expected = [was_predicted for was_held, was_predicted in found[-1000:] if was_held]
    assert sum(expected) > 0.6 * len(expected)
    assert CAPACITY_MIN < index._caches[0].capacity < 1.5 * true_capacity


def test_a_reported_eviction_drops_what_was_used_before_it() -> None:
    index = PrefixIndex(capacity=5 * BLOCK_BYTES)
    old, kept = (prefix_keys(bytes([n]) * 4 * BLOCK_BYTES, 1) for n in (1, 2))
    index.record_evicted(0, 1.0)
    index.record_sent(0, old, 10.0)
    index.record_evicted(0, 9.0)
    # The cache is not assumed to be small from here on.
    sent = index.record_sent(0, kept, 20.0)
    assert index.match(old).share_at(0) == index.match(kept).share_at(0) == 1.0
    index.record_evicted(0, 15.5)
    assert index.match(old).share_at(0) == 0.0
    assert index.match(kept).share_at(0) == 1.0
    # An answer with less than expected does not make it small again.
    again = index.record_sent(0, kept, 21.0)
    index.learn_cached_share(again, 0.0)
    many = prefix_keys(bytes(40 * BLOCK_BYTES), 1)
    index.record_sent(0, many, 22.0)
    assert index.match(kept).share_at(0) == 1.0
    assert sent.share == 0.0
    # An answer keeps its prompt's blocks; what was sent after it may be evicted before.
    again.use.ended_at_s = 200.0
    index.record_evicted(0, 100.0)
    assert index.match(kept).share_at(0) == 1.0
    assert index.match(many).share_at(0) == 0.0
    index.record_evicted(0, 201.0)
    assert len(index) == 0


def test_what_one_replica_teaches_is_assumed_of_those_that_taught_nothing_yet() -> None:
    index = PrefixIndex(capacity=4_000_000)
    for slot in range(4):
        index.record_sent(slot, chain(slot, size=30_000), 0.0)
    for slot, size in ((0, 90_000), (1, 70_000), (2, 50_000)):
        index.record_sent(slot, chain(10 + slot, size=size), 1.0)
    again = [index.record_sent(slot, chain(slot, size=30_000), 2.0) for slot in range(3)]
    assert [sent.share for sent in again] == [1.0, 1.0, 1.0]
    for sent in again:
        index.learn_cached_share(sent, 0.0)
    # Three have proven evictions after so much; the median of these is assumed of the fourth.
    assert [index._caches[slot].capacity for slot in range(4)] == [90_000, 70_000, 50_000, 70_000]
    index.record_sent(5, chain(5, size=1000), 3.0)
    assert index._caches[5].capacity == 70_000


def test_what_one_replica_teaches_is_not_assumed_of_those_that_report_what_they_evict() -> None:
    index = PrefixIndex(capacity=4_000_000)
    for slot in range(2):
        index.record_sent(slot, chain(slot, size=30_000), 0.0)
    index.record_evicted(0, 0.0)
    index.record_sent(1, chain(10, size=50_000), 1.0)
    again = index.record_sent(1, chain(1, size=30_000), 2.0)
    index.learn_cached_share(again, 0.0)
    assert index._caches[1].capacity == 50_000
    index.record_sent(0, chain(10, size=50_000), 3.0)
    assert index.match(chain(0, size=30_000)).share_at(0) == 1.0
    # One that begins to report has taught something else before.
    index.record_evicted(1, 0.0)
    index.record_sent(2, chain(2, size=30_000), 4.0)
    index.record_sent(2, chain(20, size=20_000), 5.0)
    index.learn_cached_share(index.record_sent(2, chain(2, size=30_000), 6.0), 0.0)
    assert index._capacity == CAPACITY_MIN


@pytest.mark.parametrize("first", [0, 2])
def test_a_cache_that_keeps_all_leaves_each_other_one_its_share(first: int) -> None:
    index = PrefixIndex(pairs_max=60)
    for slot in (first, 1):
        index.record_sent(slot, chain(slot), 0.0)
    for number in range(100):
        index.record_sent(first, chain(100 + number, 1, 2), float(number))
        index.record_evicted(first, -1e9)
    assert len(index) == 60
    prompt = chain(*range(20))
    index.record_sent(1, prompt, 100.0)
    assert index.match(prompt).share_at(1) == 1.0
    assert index.match(chain(199, 1, 2)).share_at(first) == 1.0
    assert len(index) == 60
    # A share is no limit while others need less.
    assert len(index._caches[first].blocks) > 30


def test_processes_share_their_answered_prompts() -> None:
    def a_fleet() -> FleetState:
        fleet = FleetState(PopId("ams"), lambda: 100.0)
        route = Route(
            replica_id=ReplicaId("r"),
            deployment_id=DeploymentId("d"),
            version=1,
            node_id=NodeId("n"),
            pop=PopId("ams"),
            address="x:1",
            tokens_in_flight_max=10_000,
            prefill_tokens_per_s=1000.0,
        )
        entry = DeploymentEntry(
            deployment_id=DeploymentId("d"), name="m", model_id=ModelId("m"), context_tokens=4096
        )
        table = RouteTable(
            cluster_id=ClusterId("c"),
            generation=Generation(1),
            epoch=Epoch(1),
            deployments=(entry,),
            routes=(route,),
        )
        fleet.adopt(table)
        return fleet

    def answer(fleet: FleetState, keys: PrefixKeys) -> None:
        matches = fleet.routing(DeploymentId("d")).prefix_matches(keys)
        query = RouteQuery("q", 100, 10, matches=matches)
        ranked = rank(fleet.snapshot(DeploymentId("d"), fleet.clock()), query)[0]
        attempts = AttemptFeedback(fleet)
        sent = attempts.record_sent(ranked, fleet.clock(), keys)
        attempts.learn_cached_tokens(ranked.route, sent, 100, 0, keys)

    one, other = a_fleet(), a_fleet()
    keys = prefix_keys(bytes(1000), 7)
    answer(one, keys)
    assert one.prompt_outbox.take() == ()
    one.prompt_outbox.is_open = True
    # The replica had all of it cached: the others know it already.
    answer(one, keys)
    assert one.prompt_outbox.take() == ()
    longer = prefix_keys(bytes(1000) + b"x" * 1000, 7)
    answer(one, longer)
    rows = one.prompt_outbox.take()
    assert len(rows) == 1 and one.prompt_outbox.take() == ()
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(SharedPrompts(rows)), type=SharedPrompts)
    other.learn_prompts(read.rows)
    here, there = (fleet.routing(DeploymentId("d")) for fleet in (one, other))
    assert there.prefix_matches(longer).share_at(0) == here.prefix_matches(longer).share_at(0) > 0.9
    other.learn_prompts([msgspec.structs.replace(rows[0], replica_id=ReplicaId("gone"))])
    for n in range(OUTBOX_PROMPTS_MAX + 10):
        answer(one, prefix_keys(bytes(200) + n.to_bytes(2, "big") * 200, 7))
    assert len(one.prompt_outbox.take()) == OUTBOX_PROMPTS_MAX
