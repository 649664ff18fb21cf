"""Computes the cost of given slots again, with the smallest model starting first on each node.

The search counts load queues in the order in which it happened to place replicas, and a solver
counts no queues. To compare their slots, both are counted in the order that makes queues cheapest.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from isochrone.wire.ids import DeploymentId, DeviceId, NodeId
from scheduler.decide.cluster import ClusterState
from scheduler.decide.membership import judge_liveness
from scheduler.decide.placement.fleet.slots import SlotPart
from scheduler.decide.placement.planner import PlanBuilder, PlanLimits
from scheduler.decide.placement.search.draft import PlacementDraft

UNLIMITED = PlanLimits(starts_max=10**6, endings_max=10**6)


class SlotColumn(NamedTuple):
    """A slot on one node: a set of its devices, at a site."""

    deployment_id: DeploymentId
    site: int
    node_id: NodeId
    device_ids: tuple[DeviceId, ...]


def empty_draft(cluster: ClusterState, limits: PlanLimits) -> PlacementDraft:
    """Return the draft of a plan before anything is placed."""
    view = judge_liveness(cluster.nodes, cluster.acting_for_s)
    return PlanBuilder(cluster, view, limits).new_draft()


def slots_of(draft: PlacementDraft) -> list[SlotColumn]:
    """Return the slots of the replicas that a draft would start."""
    return [
        SlotColumn(state.deployment_id, replica.site, part.node.node_id, part.device_ids)
        for state in draft.states
        for replica in state.replicas
        for part in (replica.slot.parts if replica.slot else ())
    ]


def recost(cluster: ClusterState, slots: Sequence[SlotColumn]) -> PlacementDraft:
    """Return a draft that holds replicas on these slots and no others."""
    draft = empty_draft(cluster, UNLIMITED)
    numbers = {state.deployment_id: number for number, state in enumerate(draft.states)}
    sizes = [state.needs.model.weights_bytes for state in draft.states]
    for column in sorted(slots, key=lambda slot: sizes[numbers[slot.deployment_id]]):
        state = draft.states[numbers[column.deployment_id]]
        node = draft.fleet.nodes[column.node_id]
        found = draft.ledger.best_candidate(column.site, [node], state.needs)
        if found is None:
            raise RuntimeError(
                f"cannot place {state.deployment_id} on {node.node_id}: no memory is left there"
            )
        slot = msgspec.structs.replace(
            found.slot, parts=(SlotPart(node=node, device_ids=column.device_ids),)
        )
        gain = draft.gain_at(state, column.site)
        candidate = msgspec.structs.replace(found, slot=slot)
        draft.take(state, msgspec.structs.replace(gain, candidate=candidate))
    return draft
