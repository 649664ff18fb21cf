"""Chooses the nodes from which a router requests the loads of all nodes.

In a small fleet the router pings each node. In a large one a round of pings takes longer than a
load stays true, so one node of a PoP answers for up to 64. All routers choose the same node, or one
of the same two, so that nodes ping each other once for many routers.

Some nodes are pinged by the router itself, too: those with its own requests, because the wait for
their answers depends on whether they are alive; those that no other node answered for; and each in
turn, because only a router's own ping shows whether it can reach the node.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Final

from isochrone.wire.ids import NodeId, PopId
from isochrone.wire.peers.pop_loads import GROUP_NODES_MAX
from router.decide.caches.affinity import hash64

PING_ALL_NODES_MAX: Final = 256
"""A fleet of at most this many nodes is pinged one by one: four rounds of 64, 0.4 s at 100 ms."""

ANSWERERS: Final = 2
"""How many nodes of a group share the routers, while both answer."""

TURN_S: Final = 30.0
"""Within this time the router pings each node itself, even if another node answers for it."""

FAILED_FOR_S: Final = 10.0
"""A node that did not answer for its group is not chosen again for this time."""

LOAD_AGE_MAX_MS: Final = 5_000.0
"""An older load is not used. The choice of replicas is proven for loads up to this age."""


class ProbeGroup:
    """Nodes of one PoP, and which of them to ask about all, in order of preference."""

    __slots__ = ("answerers", "node_ids")

    def __init__(self, node_ids: Sequence[NodeId], answerers: Sequence[NodeId]) -> None:
        self.node_ids = node_ids
        self.answerers = answerers


class GroupPlan:
    """The groups of one round, and the nodes for which no other node can answer."""

    __slots__ = ("alone", "groups")

    def __init__(self, groups: Sequence[ProbeGroup], alone: Set[NodeId]) -> None:
        self.groups = groups
        self.alone = alone


def plan_groups(
    pops: Mapping[NodeId, PopId],
    *,
    router: str,
    failed_at_s: Mapping[NodeId, float],
    now_s: float,
) -> GroupPlan:
    """Return which nodes to ask for the loads of others; none in a small fleet.

    `pops` has all nodes of the route table, and `failed_at_s` when a node failed to answer for its
    group.
    """
    groups: list[ProbeGroup] = []
    alone: set[NodeId] = set()
    if len(pops) <= PING_ALL_NODES_MAX:
        return GroupPlan(groups, alone)
    by_pop: dict[PopId, list[NodeId]] = {}
    for node_id, pop in pops.items():
        by_pop.setdefault(pop, []).append(node_id)
    for node_ids in by_pop.values():
        node_ids.sort()
        for start in range(0, len(node_ids), GROUP_NODES_MAX):
            members = node_ids[start : start + GROUP_NODES_MAX]
            answerers = choose_answerers(members, router, failed_at_s, now_s)
            if len(members) > 1 and answerers:
                groups.append(ProbeGroup(members, answerers))
            else:
                alone.update(members)
    return GroupPlan(groups, alone)


def nodes_to_ping(
    node_ids: Set[NodeId],
    *,
    used: Set[NodeId],
    unanswered: Set[NodeId],
    pinged_at_s: Mapping[NodeId, float],
    interval_s: float,
    now_s: float,
) -> Set[NodeId]:
    """Return the nodes that the router pings itself in this round.

    `used` are nodes with requests of this router, `unanswered` those of which no other node knows
    the load, and `pinged_at_s` says when the router pinged each node last.
    """
    if len(node_ids) <= PING_ALL_NODES_MAX:
        return node_ids
    return (used | unanswered) & node_ids | _in_turn(node_ids, pinged_at_s, interval_s, now_s)


def choose_answerers(
    members: Sequence[NodeId], router: str, failed_at_s: Mapping[NodeId, float], now_s: float
) -> Sequence[NodeId]:
    """Return the nodes to ask about `members`, the best first; none if all failed lately."""
    able = [
        node_id for node_id in members if now_s - failed_at_s.get(node_id, -1e18) >= FAILED_FOR_S
    ]
    able.sort(key=hash64)
    first = able[:ANSWERERS]
    if len(first) > 1 and hash64(router) % ANSWERERS:
        first.reverse()
    return first


def unanswered(members: Iterable[NodeId], ages_ms: Mapping[NodeId, float]) -> set[NodeId]:
    """Return the members whose loads are missing or too old: the router pings them itself."""
    return {
        node_id for node_id in members if not 0.0 <= ages_ms.get(node_id, -1.0) <= LOAD_AGE_MAX_MS
    }


def _in_turn(
    node_ids: Set[NodeId],
    pinged_at_s: Mapping[NodeId, float],
    interval_s: float,
    now_s: float,
) -> set[NodeId]:
    """Return the nodes whose turn it is: those pinged longest ago, a share of all each round."""
    due = [(pinged_at_s.get(node_id, -1e18), node_id) for node_id in node_ids]
    due.sort()
    count = int(len(due) * min(1.0, interval_s / TURN_S)) + 1
    return {node_id for at_s, node_id in due[:count] if now_s - at_s >= TURN_S / 2}
