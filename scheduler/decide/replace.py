"""What must end whatever demand says: the forbidden, the failed, the drained.

Rule: residency is obeyed at once; everything else waits until what takes its place is warm.
"""

from collections.abc import Callable, Sequence

from isochrone.wire.model import Deployment
from isochrone.wire.report import ReplicaState
from scheduler.decide.cluster import Placement
from scheduler.decide.feasible import allowed
from scheduler.decide.ground import Ground, is_lost
from scheduler.decide.start_time import COMING

End = Callable[[Placement, str], None]

OVER = (ReplicaState.FAILED, ReplicaState.STOPPED)


def stands(ground: Ground, placement: Placement) -> bool:
    """Say whether a placement serves or will: on a node that stays, and not given up."""
    return (
        not placement.is_ending
        and all(part.state not in OVER for part in placement.parts)
        and not _shaken(ground, placement)
        and not any(ground.nodes[node_id].draining for node_id in placement.node_ids)
    )


def end_forbidden(
    ground: Ground, deployment: Deployment, mine: Sequence[Placement], end: End
) -> list[Placement]:
    """End what residency forbids, and return the rest: data may not stay where it may not be."""
    kept = []
    for placement in mine:
        node = ground.nodes.get(placement.node_id)
        if node is not None and not allowed(deployment.policy, ground.pops[node.pop]):
            end(placement, f"residency no longer allows {node.pop}")
        else:
            kept.append(placement)
    return kept


def end_failed(ground: Ground, deployment: Deployment, mine: Sequence[Placement], end: End) -> None:
    """End what has failed for good: a node tries no more, or a part of it is gone."""
    for placement in mine:
        over = next((part for part in placement.parts if part.state in OVER), None)
        whole = placement.version != deployment.version or (
            len(placement.parts) == deployment.engine.nodes
        )
        if over is not None:
            where = f" on {over.node_id}" if over is not placement else ""
            end(placement, f"it {over.state.value}{where}: {over.state_reason}"[:300])
        elif placement.followers and _shaken(ground, placement):
            # One node's loss frees nothing; a group's leaves the others' memory held for nothing.
            end(placement, f"it needs all of its nodes: {_shaken(ground, placement)}")
        elif not whole:
            parts = f"{len(placement.parts)} of {deployment.engine.nodes} parts"
            end(placement, f"the store knows {parts} of it")


def end_leaderless(placements: Sequence[Placement], end: End) -> None:
    """End parts of replicas over several nodes whose leader's part is gone."""
    for placement in placements:
        if placement.leader_id and not placement.is_ending:
            end(placement, f"its leader {placement.leader_id} is gone")


def _shaken(ground: Ground, placement: Placement) -> str:
    """Say which of its nodes counts no more; "" where all do."""
    for node_id in placement.node_ids:
        node = ground.nodes.get(node_id)
        if node is None or is_lost(ground.view, node):
            return f"{node_id} is lost or revoked"
    return ""


def end_drained(
    ground: Ground, deployment: Deployment, mine: Sequence[Placement], least: int, end: End
) -> None:
    """End what is on a draining node, once `least` are warm on others and none is coming."""
    if not ground.is_draining:
        return
    standing = [p for p in mine if stands(ground, p)]
    warm = [p for p in standing if p.state is ReplicaState.WARM]
    if len(warm) < least or any(p.state in COMING for p in standing):
        return
    for placement in mine:
        nodes = [ground.nodes[node_id] for node_id in placement.node_ids if node_id in ground.nodes]
        draining = next((node for node in nodes if node.draining), None)
        if placement.state not in OVER and draining is not None:
            end(placement, f"node {draining.node_id} is draining, others are warm")
