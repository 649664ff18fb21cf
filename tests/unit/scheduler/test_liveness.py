"""One silent node is lost; many silent at once are a network cut."""

import pytest

from isochrone.wire.ids import NodeId
from scheduler.decide.cluster import Liveness
from scheduler.decide.membership import LivenessLimits, judge_liveness
from tests.builders import a_node

LIMITS = LivenessLimits()
ALIVE, QUIET, SILENT, LONG = 1.0, 10.0, 40.0, 5_000.0


@pytest.mark.parametrize(
    ("silences", "acting_for_s", "lost", "is_frozen"),
    [
        ([ALIVE, ALIVE, ALIVE], 1000, 0, False),
        ([ALIVE, ALIVE, QUIET], 1000, 0, False),
        ([ALIVE, ALIVE, SILENT], 1000, 1, False),  # one of three: lost, and replaced
        ([ALIVE, SILENT, SILENT], 1000, 0, True),  # two of three at once: a cut
        ([SILENT, SILENT, SILENT], 1000, 0, True),
        ([LONG, LONG, LONG], 1000, 0, True),  # a mostly silent fleet is never lost
        ([ALIVE] * 8 + [SILENT] * 2, 1000, 2, False),  # two of ten: a fifth, not more
        ([ALIVE] * 7 + [SILENT] * 3, 1000, 0, True),
        ([ALIVE] * 7 + [LONG] * 3, 1000, 3, False),  # after ten minutes they are lost
        ([ALIVE, ALIVE, SILENT], 30, 0, True),  # a new scheduler declares no node lost
        ([ALIVE, ALIVE, QUIET], 30, 0, False),
    ],
)
def test_liveness_follows_from_silence(
    silences: list[float], acting_for_s: float, lost: int, is_frozen: bool
) -> None:
    nodes = [a_node(f"n{i}", "ams", silent_s=silent) for i, silent in enumerate(silences)]
    view = judge_liveness(nodes, acting_for_s, LIMITS)
    assert bool(view.frozen) is is_frozen
    assert sum(v is Liveness.LOST for v in view.by_node.values()) == lost


@pytest.mark.parametrize(
    ("back", "alive", "silences", "lost"),
    [
        (1, 0, [SILENT], 0),  # one of two silent nodes is back: the other may follow
        (0, 1, [SILENT], 1),
        (4_100, 0, [SILENT] * 900, 0),  # most of a fleet is back: the rest may follow
        (4_100, 0, [LONG] * 900, 0),
        (1, 98, [SILENT], 1),  # one node that flaps does not keep another from being lost
        (20, 70, [SILENT] * 10, 0),
    ],
)
def test_a_network_cut_is_over_when_all_nodes_had_time_to_come_back(
    back: int, alive: int, silences: list[float], lost: int
) -> None:
    def lost_at(back_s: float) -> int:
        nodes = [a_node(f"b{i}", "ams", silent_s=ALIVE, back_s=back_s) for i in range(back)]
        nodes += [a_node(f"a{i}", "ams", silent_s=ALIVE) for i in range(alive)]
        nodes += [a_node(f"s{i}", "ams", silent_s=silent) for i, silent in enumerate(silences)]
        view = judge_liveness(nodes, 1000.0, LIMITS)
        return sum(verdict is Liveness.LOST for verdict in view.by_node.values())

    assert lost_at(LIMITS.grace_s - 1) == lost
    assert lost_at(LIMITS.grace_s + 1) == len(silences)


def test_revoked_nodes_do_not_count_as_a_network_cut() -> None:
    live = [a_node(f"n{i}", "ams", silent_s=ALIVE) for i in range(2)]
    revoked = [a_node(f"r{i}", "ams", silent_s=LONG, revoked=True) for i in range(3)]
    assert judge_liveness([*live, *revoked], 1000, LIMITS).frozen == ""


def test_names_that_never_connected_are_no_network_cut_and_are_not_lost() -> None:
    live = [a_node(f"n{i}", "ams", silent_s=ALIVE) for i in range(2)]
    strangers = [a_node(f"s{i}", "ams", silent_s=LONG, has_connected=False) for i in range(40)]
    for acting_for_s in (1.0, 1000.0):
        view = judge_liveness([*live, *strangers], acting_for_s, LIMITS)
        assert view.frozen == ""
        assert Liveness.LOST not in view.by_node.values()
    one_silent = [live[0], a_node("n1", "ams", silent_s=SILENT), *strangers]
    assert judge_liveness(one_silent, 1000, LIMITS).by_node[NodeId("n1")] is Liveness.LOST
