"""Replicas that use each other's KV: balanced by load within a PoP, and the copy found again."""

from hypothesis import given
from hypothesis import strategies as st

from isochrone.wire.ids import PopId, ReplicaId
from isochrone.wire.peers.assignment import Role
from router.decide.caches.prefix_index import (
    NO_KEYS,
    NO_MATCHES,
    PrefixMatch,
    PrefixMatches,
    prefix_keys,
)
from router.decide.choice.shared_kv import (
    FETCH_VALUE_MAX,
    FETCH_VALUE_UNKNOWN,
    HOLDERS_MAX,
    NO_SHARED_KV_PEERS,
    FetchValue,
    SharedKvPeers,
    pool_matches,
    shared_kv_peers,
)
from router.decide.replicas.ranked_route import RankedRoute
from router.decide.replicas.replica_table import ReplicaTable
from tests.unit.router.test_prefill_replicas import a_route, ranked

KEYS = prefix_keys(b"x" * 4000, 7)
NAMES = ("a", "b", "c", "d")


def a_table(*names: str, far: str = "") -> ReplicaTable:
    table = ReplicaTable()
    routes = [a_route(name, Role.UNIFIED) for name in names]
    routes += [a_route(name, Role.UNIFIED, pop=PopId("sjc")) for name in far]
    table.set_routes(routes)
    return table


def held(table: ReplicaTable, **shares: float) -> PrefixMatches:
    """Return matches of one share for each of some replicas."""
    longer = [
        PrefixMatch(1 << table.slots[ReplicaId(name)], share) for name, share in shares.items()
    ]
    return PrefixMatches(0.0, longer) if longer else NO_MATCHES


def target(table: ReplicaTable, name: str) -> RankedRoute:
    route = table.routes[table.slots[ReplicaId(name)]]
    assert route is not None
    return ranked(route)


def choose(
    table: ReplicaTable, name: str, matches: PrefixMatches = NO_MATCHES, session: str = ""
) -> SharedKvPeers:
    return shared_kv_peers(table, target(table, name), 1000, KEYS, matches, session, frozenset())


def share(table: ReplicaTable, matches: PrefixMatches, name: str) -> float:
    return matches.share_at(table.slots[ReplicaId(name)])


def test_what_one_replica_has_counts_for_its_pop() -> None:
    table = a_table("a", "b", "c", far="z")
    pooled = pool_matches(held(table, a=0.8, b=0.2), table, 0.5)
    assert share(table, pooled, "a") == 0.8
    assert share(table, pooled, "b") == share(table, pooled, "c") == 0.5 * 0.8
    assert share(table, pooled, "z") == 0
    assert pool_matches(NO_MATCHES, table, 0.5) is NO_MATCHES


@given(
    shares=st.dictionaries(st.sampled_from(NAMES), st.floats(0.01, 1)),
    all_share=st.floats(0, 1),
    value=st.floats(0, FETCH_VALUE_MAX),
)
def test_pooling_takes_nothing_from_a_replica(
    shares: dict[str, float], all_share: float, value: float
) -> None:
    table = a_table("a", "b", far="cd")
    own = PrefixMatches(all_share, held(table, **shares).longer)
    pooled = pool_matches(own, table, value)
    for name in NAMES:
        pop = "ab" if name in "ab" else "cd"
        best = max((shares.get(other, 0.0) for other in pop), default=0.0)
        expected = max(share(table, own, name), value * best)
        assert share(table, pooled, name) == expected
    masks = [match.mask for match in pooled.longer]
    for first in range(len(masks)):
        assert all(not masks[first] & other for other in masks[first + 1 :])


def test_the_holders_of_most_are_named_with_the_one_that_keeps_a_copy() -> None:
    table = a_table("a", "b", "c", "d", far="z")
    found = choose(table, "a", held(table, a=0.1, b=0.5, c=0.9, z=1.0))
    names = [str(peer.replica_id) for peer in found.replicas]
    assert names[0] == "a"
    assert found.keeper in names[1:]
    assert set(names[1:]) >= {"c"}
    assert "z" not in names
    assert len(names) <= 1 + HOLDERS_MAX


def test_a_replica_that_has_as_much_as_the_addressed_one_is_named() -> None:
    """The addressed one had moved the prefix there and evicted it, and computed it again."""
    table = a_table("a", "b", "c", "d")
    session = next(s for s in "stuvwxyz" if choose(table, "a", session=s).keeper == "d")
    found = choose(table, "a", held(table, a=0.5, b=0.5, c=0.4), session)
    assert [str(peer.replica_id) for peer in found.replicas] == ["a", "b", "d"]
    assert (found.own_share, found.held_share) == (0.5, 0.5)
    # What all replicas have is in the addressed one, too.
    matches = PrefixMatches(0.5, held(table, b=0.9).longer)
    found = choose(table, "a", matches, session)
    assert [str(peer.replica_id) for peer in found.replicas] == ["a", "b", "d"]


def test_the_copy_is_found_again_after_the_holder_is_gone() -> None:
    names = ("a", "b", "c", "d")
    for number in range(50):
        session = f"s{number}"
        keeper = choose(a_table(*names), "a", session=session).keeper
        assert keeper not in ("", "a")
        # The replica that answered is gone, and this router has just started.
        left = [name for name in names if name != "a"]
        for other in left:
            found = choose(a_table(*left), other, session=session)
            assert other == keeper or found.keeper == keeper


def test_short_prompts_and_lone_replicas_share_nothing() -> None:
    assert choose(a_table("a", far="z"), "a") is NO_SHARED_KV_PEERS
    table = a_table("a", "b")
    short = shared_kv_peers(table, target(table, "a"), 20, KEYS, NO_MATCHES, "", frozenset())
    assert short is NO_SHARED_KV_PEERS
    # Nobody has it, and nothing says which replica would keep a copy.
    unnamed = shared_kv_peers(table, target(table, "a"), 900, NO_KEYS, NO_MATCHES, "", frozenset())
    assert unnamed is NO_SHARED_KV_PEERS


def offered(own_share: float, held_share: float) -> SharedKvPeers:
    return SharedKvPeers([], "", own_share, held_share)


def test_fetches_that_fail_end_the_pooling_and_those_that_work_bring_it_back() -> None:
    value = FetchValue()
    assert value.is_worth_pooling
    # Nothing came of three quarters of the prompt, and the request waited as well.
    for _ in range(8):
        value.record(offered(0.0, 0.75), 0.0, 500.0, 1000.0)
    assert not value.is_worth_pooling
    for _ in range(40):
        value.record(offered(0.25, 0.75), 0.75, 10.0, 1000.0)
    assert value.is_worth_pooling
    # Half of what was to be saved went into waiting for it.
    for _ in range(100):
        value.record(offered(0.0, 0.8), 0.8, 400.0, 1000.0)
    assert abs(value.share - 0.5) < 0.01
    # An answer from a replica that has the most itself teaches nothing.
    value.record(offered(0.8, 0.8), 0.0, 0.0, 1000.0)
    value.record(offered(0.8, 0.0), 0.0, 0.0, 1000.0)
    assert abs(value.share - 0.5) < 0.01


@given(
    answers=st.lists(
        st.tuples(
            st.floats(0, 1), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1e5), st.floats(0, 1e5)
        )
    )
)
def test_a_value_is_a_share_and_a_local_hit_is_worth_more(
    answers: list[tuple[float, float, float, float, float]],
) -> None:
    value = FetchValue()
    assert value.share == FETCH_VALUE_UNKNOWN
    for own, other, cached, waited_ms, prompt_ms in answers:
        value.record(offered(own, other), cached, waited_ms, prompt_ms)
        assert 0 <= value.share <= FETCH_VALUE_MAX < 1
