"""What a scheduler remembers of the nodes that it has heard."""

from typing import Any, cast

from isochrone.wire.ids import Generation, NodeId
from scheduler.state.peers.heartbeats import FORGOTTEN_AFTER_S, Heartbeats


class OneTerm:
    """The lease of a term that began at 0, and its clock."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def clock(self) -> float:
        return self.now_s

    @property
    def acting_for_s(self) -> float:
        return self.now_s


def test_nodes_that_are_gone_for_good_are_forgotten() -> None:
    """A term may last for months, and a fleet have new nodes every day."""
    term = OneTerm()
    heartbeats = Heartbeats(cast(Any, term), lost_after_s=30.0)
    stays = NodeId("stays")
    for day in range(5):
        gone = NodeId(f"gone{day}")
        for pause_s in (0.0, 60.0):  # silent for a while, and back
            term.now_s += pause_s
            heartbeats.record(gone)
            heartbeats.record(stays)
        heartbeats.following.record_sent(gone, Generation(1), term.now_s)
        term.now_s += FORGOTTEN_AFTER_S - 60.0
        heartbeats.record(stays)
        observed = heartbeats.observed()
        assert set(observed.silent_s) == {stays, gone}
        term.now_s += 60.0
    observed = heartbeats.observed()
    assert (set(observed.silent_s), set(observed.back_s)) == ({stays}, {stays})
    assert heartbeats.following.behind(term.now_s) == {}
    assert heartbeats.silent_s(NodeId("gone0")) == float("inf")
