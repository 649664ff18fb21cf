"""Seats counted anew by the planner's own sum, with the smallest starting first on each node.

The search counts the queue on a node in the order in which it happened to seat, a solver counts
none. Whose order it is is nobody's merit: to compare seats, each is counted in the order that makes
the queue cost least.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from isochrone.wire.ids import DeploymentId, DeviceId, NodeId
from scheduler.decide.cluster import ClusterState
from scheduler.decide.membership.liveness import judge_liveness
from scheduler.decide.placement.fleet.slots import SlotPart
from scheduler.decide.placement.planner import DraftPlan, PlanLimits
from scheduler.decide.placement.search.greedy_search import GreedySearch

UNLIMITED = PlanLimits(starts_max=10**6, endings_max=10**6)


class SlotColumn(NamedTuple):
    """A seat on one node: a set of its devices, at a site."""

    deployment_id: DeploymentId
    site: int
    node_id: NodeId
    device_ids: tuple[DeviceId, ...]


def slots_of(search: GreedySearch) -> list[SlotColumn]:
    """Return the seats that a search would start."""
    return [
        SlotColumn(wish.name, seated.site, part.node.node_id, part.device_ids)
        for wish in search.wishes
        for seated in wish.seats
        for part in (seated.seat.parts if seated.seat else ())
    ]


def recost(cluster: ClusterState, seats: Sequence[SlotColumn]) -> GreedySearch:
    """Return a search that holds these seats and no others."""
    draft = DraftPlan(cluster, judge_liveness(cluster.nodes, cluster.acting_for_s), UNLIMITED)
    search = draft.sought()
    numbers = {wish.name: number for number, wish in enumerate(search.wishes)}
    sizes = [wish.model.weights_bytes for wish in search.wishes]
    for column in sorted(seats, key=lambda c: sizes[numbers[c.deployment_id]]):
        wish = search.wishes[numbers[column.deployment_id]]
        node = search.ground.nodes[column.node_id]
        found = search.ground.offer(column.site, [node], wish.deployment, wish.model)
        if found is None:
            raise RuntimeError(
                f"cannot seat {wish.name} on {node.node_id}: what was seated before left no room"
            )
        seat = msgspec.structs.replace(
            found.seat, parts=(SlotPart(node=node, device_ids=column.device_ids),)
        )
        worth = search.worth_to(wish, column.site)
        offered = msgspec.structs.replace(found, seat=seat)
        search.take(wish, msgspec.structs.replace(worth, offered=offered))
    return search
