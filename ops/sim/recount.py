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
from scheduler.decide.feasible import Part
from scheduler.decide.liveness import liveness
from scheduler.decide.plan import Draft, PlanLimits
from scheduler.decide.search import Search

UNLIMITED = PlanLimits(starts_max=10**6, endings_max=10**6)


class Column(NamedTuple):
    """A seat on one node: a set of its devices, at a site."""

    deployment_id: DeploymentId
    site: int
    node_id: NodeId
    device_ids: tuple[DeviceId, ...]


def columns_of(search: Search) -> list[Column]:
    """Return the seats that a search would start."""
    return [
        Column(wish.name, seated.site, part.node.node_id, part.device_ids)
        for wish in search.wishes
        for seated in wish.seats
        for part in (seated.seat.parts if seated.seat else ())
    ]


def recounted(cluster: ClusterState, seats: Sequence[Column]) -> Search:
    """Return a search that holds these seats and no others."""
    draft = Draft(cluster, liveness(cluster.nodes, cluster.acting_for_s), UNLIMITED)
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
            found.seat, parts=(Part(node=node, device_ids=column.device_ids),)
        )
        worth = search.worth_to(wish, column.site)
        offered = msgspec.structs.replace(found, seat=seat)
        search.take(wish, msgspec.structs.replace(worth, offered=offered))
    return search
