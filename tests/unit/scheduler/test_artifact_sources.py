"""A node fetches weights from near nodes first, and only one node of a PoP fetches from afar."""

from hypothesis import given, settings
from hypothesis import strategies as st

from isochrone.wire.ids import NodeId, PopId
from scheduler.decide.routing.artifact_sources import SOURCES_MAX, ArtifactHolder, rank_sources

FAR = {"ams": 0.0, "fra": 8.0, "iad": 85.0, "sin": 161.0}


def named(name: str, *, holds: bool = True) -> ArtifactHolder:
    """A node named for its PoP: `fra-2` is in fra."""
    return ArtifactHolder(
        node_id=NodeId(name), pop=PopId(name[:3]), address=f"http://{name}", holds=holds
    )


def asked(name: str, *candidates: ArtifactHolder) -> list[str]:
    found = rank_sources(NodeId(name), PopId(name[:3]), candidates, lambda pop: FAR[pop])
    return [peer.node_id for peer in found]


def test_the_nearest_holder_comes_first() -> None:
    holders = [named(n) for n in ("sin-1", "iad-1", "fra-1", "ams-2")]
    assert asked("ams-1", *holders) == ["ams-2", "fra-1", "iad-1", "sin-1"]
    assert asked("ams-1", named("ams-1")) == []


def test_one_node_of_a_pop_fetches_from_afar_and_the_others_wait_for_it() -> None:
    city = [named(f"ams-{i}", holds=False) for i in (1, 2, 3)]
    far = named("iad-1")
    assert asked("ams-1", *city, far) == ["iad-1"]
    assert asked("ams-2", *city, far) == ["ams-1", "iad-1"]
    assert asked("ams-3", *city, far) == ["ams-1", "ams-2", "iad-1"]
    assert asked("fra-1", *city) == [], "another city does not wait for them"
    assert asked("ams-3", named("ams-9"), *city)[0] == "ams-9", "who holds it comes before"


def test_many_nodes_do_not_all_ask_the_same_holder() -> None:
    holders = [named(f"fra-{i}") for i in range(6)]
    firsts = {asked(f"ams-{i}", *holders)[0] for i in range(40)}
    assert len(firsts) >= 5


NAMES = st.builds(lambda pop, n: f"{pop}-{n}", st.sampled_from(sorted(FAR)), st.integers(0, 30))


@settings(deadline=None, max_examples=80)
@given(
    me=NAMES,
    others=st.dictionaries(NAMES, st.booleans(), max_size=40),
)
def test_the_list_is_short_and_ordered_and_never_circular(me: str, others: dict[str, bool]) -> None:
    candidates = [named(name, holds=holds) for name, holds in sorted(others.items())]
    found = asked(me, *candidates)
    assert me not in found
    assert len(found) <= SOURCES_MAX
    assert len(set(found)) == len(found)
    is_far = [name[:3] != me[:3] for name in found]
    assert is_far == sorted(is_far)
    holders = {name for name, holds in others.items() if holds and name != me}
    assert not holders or holders & set(found), "somebody who holds it is always named"
    # Nobody waits in a circle: of those that fetch, one only waits for names before its own.
    assert all(name < me for name in found if not others[name])
