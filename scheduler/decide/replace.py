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
    node = ground.nodes.get(placement.node_id)
    return (
        node is not None
        and not node.draining
        and not is_lost(ground.view, node)
        and placement.state not in OVER
        and not placement.is_ending
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


def end_failed(mine: Sequence[Placement], end: End) -> None:
    """End what has failed for good: its node tries no more."""
    for placement in mine:
        if placement.state in OVER:
            end(placement, f"it {placement.state.value}: {placement.state_reason}"[:300])


def end_drained(
    ground: Ground, deployment: Deployment, mine: Sequence[Placement], least: int, end: End
) -> None:
    """End what is on a draining node, once `least` are warm on others and none is coming."""
    standing = [p for p in mine if stands(ground, p)]
    warm = [p for p in standing if p.state is ReplicaState.WARM]
    if len(warm) < least or any(p.state in COMING for p in standing):
        return
    for placement in mine:
        node = ground.nodes.get(placement.node_id)
        if placement.state not in OVER and node is not None and node.draining:
            end(placement, f"node {node.node_id} is draining, others are warm")
