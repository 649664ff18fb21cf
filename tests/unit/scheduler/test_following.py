"""Which routers do not follow the route tables, and which nodes not their assignment."""

from isochrone.wire.ids import Generation, NodeId
from scheduler.decide.membership import AssignmentFollowing, RouteFollowing
from scheduler.decide.membership.following import ASSIGNMENT_BEHIND_S, BEHIND_S


def a_fleet() -> RouteFollowing:
    following = RouteFollowing()
    for name in ("r1", "r2"):
        following.record_registered(name, Generation(3), reports=True, last_error="")
    following.record_published(Generation(4), 100.0)
    return following


def test_a_router_has_some_time_to_adopt_a_table() -> None:
    following = a_fleet()
    following.record_served("r1", Generation(4), "")
    assert not following.behind(99.0 + BEHIND_S)
    (name, reason), *others = following.behind(100.0 + BEHIND_S).items()
    assert (name, others) == ("r2", [])
    assert "generation 3, at least 4 is due" in reason


def test_frequent_tables_do_not_put_a_following_router_behind() -> None:
    following = a_fleet()
    for turn in range(200):
        following.record_published(Generation(5 + turn), 101.0 + turn)
        following.record_served("r1", Generation(3 + turn), "")
    assert list(following.behind(301.0)) == ["r2"]


def test_the_reason_is_what_the_router_says_or_why_its_connection_ended() -> None:
    following = a_fleet()
    following.record_served("r1", Generation(3), "quarantined: it drops every key")
    error = "cannot read frame: 17 bytes, the limit is 16"
    following.record_registered("r2", Generation(3), reports=True, last_error=error)
    behind = following.behind(200.0)
    assert behind["r1"].endswith("quarantined: it drops every key")
    assert error in behind["r2"]


def test_a_router_that_reconnects_without_end_stays_behind() -> None:
    following = a_fleet()
    for _ in range(100):
        following.record_registered("r1", Generation(3), reports=True, last_error="broken")
    assert "r1" in following.behind(200.0)


def test_an_older_router_is_listed_at_once_if_it_cannot_be_sent_the_table() -> None:
    following = RouteFollowing()
    following.record_registered("old", Generation(0), reports=False, last_error="")
    following.record_published(Generation(4), 0.0)
    assert not following.behind(1000.0)
    assert following.record_unsendable("old", "too large")
    assert not following.record_unsendable("old", "too large")
    assert "too large" in following.behind(0.0)["old"]
    following.record_sendable("old")
    assert not following.behind(1000.0)


NODE = NodeId("n1")


def test_a_node_has_some_time_to_store_an_assignment_and_says_why_it_has_not() -> None:
    following = AssignmentFollowing()
    following.record_stored(NODE, Generation(3), "")
    following.record_sent(NODE, Generation(4), 100.0)
    following.record_stored(NODE, Generation(3), "cannot store generation 4 on disk: full")
    assert not following.behind(99.0 + ASSIGNMENT_BEHIND_S)
    # A newer one starts no new wait.
    following.record_sent(NODE, Generation(5), 120.0)
    reason = following.behind(100.0 + ASSIGNMENT_BEHIND_S)[NODE]
    assert reason == (
        "it has assignment 3, at least 4 is due: cannot store generation 4 on disk: full"
    )
    following.record_stored(NODE, Generation(4), "")
    assert not following.behind(119.0 + ASSIGNMENT_BEHIND_S)
    assert "has not said why" in following.behind(120.0 + ASSIGNMENT_BEHIND_S)[NODE]
    following.record_stored(NODE, Generation(5), "")
    assert not following.behind(1e9)


def test_a_node_that_is_sent_the_assignment_it_has_follows() -> None:
    following = AssignmentFollowing()
    following.record_sent(NODE, Generation(4), 100.0)
    following.record_stored(NODE, Generation(4), "")
    following.record_sent(NODE, Generation(4), 200.0)
    assert not following.behind(1e9)
    following.record_sent(NODE, Generation(6), 300.0)
    assert not following.behind(299.0 + ASSIGNMENT_BEHIND_S)
    assert "at least 6 is due" in following.behind(300.0 + ASSIGNMENT_BEHIND_S)[NODE]
    following.clear()
    assert not following.behind(1e9)
