"""What cannot be met, in words an operator can act on: each no with its numbers."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

from isochrone.wire.ids import NodeId
from isochrone.wire.model import Deployment, EngineSettings, Model
from scheduler.decide.capacity.device_classes import DeviceClass, class_of
from scheduler.decide.capacity.replica_capacity import (
    CannotFit,
    devices_needed,
    gib,
    replica_capacity,
)
from scheduler.decide.cluster import FleetNode, UnmetRequirement
from scheduler.decide.placement.fleet.fleet_capacity import FleetCapacity
from scheduler.decide.placement.fleet.slots import (
    classes_with_room,
    policy_contradiction,
    why_no_slot,
)
from scheduler.decide.placement.search.deployment_state import DeploymentState

SHOWN_MAX = 6
UNSERVED_SHARE = 0.02


def impossible_policy(ground: FleetCapacity, deployment: Deployment) -> str:
    """Say what in a deployment can never be met by this fleet, whatever is free; "" if nothing."""
    policy, engine = deployment.policy, deployment.engine
    if engine.devices % engine.nodes:
        return (
            f"cannot spread {engine.devices} devices over {engine.nodes} nodes: each must have as "
            "many; change devices or nodes"
        )
    wrong = policy_contradiction(policy, ground.pops, ground.residents(policy))
    return f"cannot do all that the policy asks: {wrong}" if wrong else ""


def unmet_requirements(ground: FleetCapacity, wish: DeploymentState) -> Iterator[UnmetRequirement]:
    """Return what a wish still lacks at the end of a plan, with what each node said."""
    policy, pops = wish.deployment.policy, wish.pops()
    room_left = len(wish.seats) < wish.most
    for pop in sorted(set(policy.keep_warm) & set(ground.pops)):
        if pop not in pops and room_left and pop in ground.residents(policy):
            yield _unmet(ground, wish, f"{pop} is kept warm", pop)
    if len(pops) < wish.least:
        yield _unmet(ground, wish, wish.least_asked())
    unserved = wish.flow.unserved()
    asked = float(wish.flow.load.sum())
    if wish.is_asked_for and unserved > UNSERVED_SHARE * asked and len(pops) >= wish.least:
        share = f"{100 * unserved / asked:.0f} % of what is asked finds no room"
        if room_left:
            yield _unmet(ground, wish, share)
        else:
            reason = f"{share}: the policy allows {wish.most} replicas; raise the maximum"
            yield UnmetRequirement(deployment_id=wish.name, reason=reason)


def no_slot_for_version(ground: FleetCapacity, wish: DeploymentState) -> UnmetRequirement:
    """Say what a new version waits for, which starts beside the one before or not at all."""
    version = wish.deployment.version
    return _unmet(
        ground, wish, f"version {version}; until it finds a seat the one before it serves"
    )


def _unmet(
    ground: FleetCapacity, wish: DeploymentState, wanted: str, only: str = ""
) -> UnmetRequirement:
    held = ground.held_back.get(wish.name)
    if held:
        return UnmetRequirement(
            deployment_id=wish.name, reason=f"cannot place a replica ({wanted}): {held}"
        )
    asked = [node for node in ground.nodes.values() if only in ("", node.pop)]
    # No further than is shown: of thousands of nodes each is asked for each such deployment.
    refused = list(islice(_refused(ground, wish, asked), SHOWN_MAX + 1))
    said = "; ".join(f"{name}: {reason}" for name, reason in refused[:SHOWN_MAX])
    more = f"; and more of {len(asked)} nodes" if len(refused) > SHOWN_MAX else ""
    nobody = f"there is no node in {only}" if only else "there is no node"
    never = _never(ground, wish)
    reason = f"cannot place a replica ({wanted}): {said or nobody}{more}"
    return UnmetRequirement(
        deployment_id=wish.name, reason=reason + (f". {never}" if never else "")
    )


def _refused(
    ground: FleetCapacity, wish: DeploymentState, nodes: Sequence[FleetNode]
) -> Iterator[tuple[NodeId, str]]:
    if wish.deployment.engine.nodes > 1:
        said: Iterable[tuple[NodeId, str]] = slot_refusals(ground, wish, nodes).items()
    else:
        said = ((node.node_id, _why_not(ground, wish, node)) for node in nodes)
    return ((name, reason) for name, reason in said if reason)


def _why_not(ground: FleetCapacity, wish: DeploymentState, node: FleetNode) -> str:
    reason = why_no_slot(
        node,
        pop=ground.pops[node.pop],
        verdict=ground.view.by_node[node.node_id],
        deployment=wish.deployment,
        model=wish.model,
        free=ground.free,
    )
    return reason or ("held back for a moment" if ground.held_back.get(wish.name) else "")


def slot_refusals(
    ground: FleetCapacity, wish: DeploymentState, nodes: Sequence[FleetNode]
) -> Mapping[NodeId, str]:
    """Return why each node can hold no replica, or no part of one now; "" where it can."""
    engine = wish.deployment.engine
    said = {node.node_id: _why_not(ground, wish, node) for node in nodes}
    if engine.nodes == 1:
        return said
    sites = {
        node.node_id: [
            (node.pop, name) for name in classes_with_room(node, engine, wish.model, ground.free)
        ]
        for node in nodes
        if not said[node.node_id]
    }
    fellows = Counter(site for there in sites.values() for site in there)
    for node_id, there in sites.items():
        most = max(fellows[site] for site in there)
        if most < engine.nodes:
            said[node_id] = (
                f"it has room for one of {engine.nodes} parts, but with its like in "
                f"{ground.nodes[node_id].pop} there is room for {most}"
            )
    return said


def _never(ground: FleetCapacity, wish: DeploymentState) -> str:
    """Say so with the sum if no node of this fleet could hold it, were it empty."""
    if wish.nodes_of:
        return ""
    model, engine = wish.model, wish.deployment.engine
    for name in reversed(ground.device_classes):
        kind = class_of(name)
        if kind is None:
            continue
        answer = replica_capacity(model, engine, kind)
        most = ground.devices_most(name)
        if isinstance(answer, CannotFit):
            return f"{answer.reason}{_what_would(model, engine, kind, most)}"
        if most < engine.devices_per_node:
            each = " on each node" if engine.nodes > 1 else ""
            return (
                f"cannot seat {model.model_id} on {engine.devices_per_node} devices{each}: the "
                f"largest node here has {most} x {kind.name}"
                + _what_would(model, engine, kind, most)
            )
    return ""


def _what_would(model: Model, engine: EngineSettings, kind: DeviceClass, most: int) -> str:
    """Say which settings this class would hold it with, on nodes of `most` devices."""
    least = devices_needed(model, engine, kind, per_node=most) if most else 0
    if not least:
        return ""
    nodes = -(-least // most)
    if nodes == 1:
        return f"; set devices to {least}" + (" and nodes to 1" if engine.nodes > 1 else "")
    return (
        f"; {nodes} x ({least // nodes} x {gib(kind.memory_bytes)}) would hold it: set "
        f"devices to {least} and nodes to {nodes}, in a PoP with as many such nodes"
    )
