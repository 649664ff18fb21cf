"""Reports requirements that a plan cannot meet, in words and numbers that operators can use."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, product

import msgspec

from isochrone.wire.ids import NodeId, PopId
from isochrone.wire.models.model import CatalogModel, Deployment, EngineSettings
from scheduler.decide.capacity.device_classes import DeviceClass, class_of
from scheduler.decide.capacity.replica_capacity import (
    CannotFit,
    devices_needed,
    gib,
    replica_capacity,
    stored_kv_bytes_per_token,
)
from scheduler.decide.cluster import FleetNode, UnmetRequirement
from scheduler.decide.placement.fleet.fleet_capacity import FleetCapacity
from scheduler.decide.placement.fleet.slots import (
    FreeMemory,
    classes_with_space,
    policy_contradiction,
    why_no_slot,
)
from scheduler.decide.placement.search.deployment_needs import DeploymentNeeds
from scheduler.decide.placement.search.deployment_state import DeploymentState
from scheduler.decide.placement.search.draft import PlacementDraft
from scheduler.decide.placement.search.role_pins import (
    can_generate,
    can_prefill,
    pins_refusal,
    pins_refuse_node,
)

NODES_SHOWN_MAX = 6
"""How many nodes' refusals one message lists."""

NODES_COMPARED_MAX = 256
"""How many nodes are compared to find the one that lacks the least memory."""

UNSERVED_SHARE = 0.02
"""Less unserved load than this share is not reported."""


def impossible_policy(fleet: FleetCapacity, deployment: Deployment) -> str:
    """Return the requirement of a deployment that this fleet could not meet even if it were empty,
    or ""."""
    policy, engine = deployment.policy, deployment.engine
    if engine.devices % engine.nodes:
        return (
            f"cannot spread {engine.devices} devices over {engine.nodes} nodes: each node must "
            "have the same number; change devices or nodes"
        )
    contradiction = policy_contradiction(policy, fleet.pops, fleet.allowed_pops(policy))
    contradiction = contradiction or pins_refusal(policy, fleet.table, fleet.allowed_pops(policy))
    return f"cannot satisfy the policy: {contradiction}" if contradiction else ""


def kv_types_differ(fleet: FleetCapacity, deployment: Deployment, model: CatalogModel) -> str:
    """Return why replicas on the classes of pinned roles cannot read each other's KV; "" if they
    can.

    The number of devices does not matter: blocks are sent whole, and each engine divides them.
    """
    policy, engine = deployment.policy, deployment.engine
    classes = fleet.table.device_classes
    prefill = [name for name in classes if policy.prefill_devices and can_prefill(policy, name)]
    decode = [name for name in classes if policy.decode_devices and can_generate(policy, name)]
    for prefill_class, decode_class in product(prefill, decode):
        sent = stored_kv_bytes_per_token(model, engine, prefill_class)
        read = stored_kv_bytes_per_token(model, engine, decode_class)
        if sent != read:
            return (
                f"cannot send KV from {prefill_class} to {decode_class}: a token takes"
                f" {sent:.0f} bytes on one and {read:.0f} on the other; set the type of the KV"
                " cache (kv_dtype) or use devices of one kind for both roles"
            )
    return ""


def unmet_requirements(draft: PlacementDraft, state: DeploymentState) -> Iterator[UnmetRequirement]:
    """Yield what a deployment still lacks at the end of a plan, with each node's refusal."""
    fleet, needs, pops = draft.fleet, state.needs, state.pops()
    policy = needs.deployment.policy
    for pop in sorted(set(policy.keep_warm) - set(pops)):
        if not needs.replicas_max or pop not in fleet.allowed_pops(policy):
            continue
        # At the maximum, a later plan moves a replica to a free slot.
        if not (state.is_full and _has_slot_in(draft, needs, pop)):
            yield _cannot_place(draft, needs, f"{pop} is kept warm", pop)
    if len(pops) < needs.replicas_min:
        yield _cannot_place(draft, needs, needs.minimum_reason)
    for pop in state.pops_without_prefill() if not state.is_full else ():
        yield _cannot_place(draft, needs, f"{pop} has too few prefill replicas", pop)
    unserved = state.assignment.unserved() if needs.has_demand else 0.0
    share_unserved = unserved / float(state.assignment.load.sum()) if unserved > 0 else 0.0
    if share_unserved > UNSERVED_SHARE and len(pops) >= needs.replicas_min:
        share = f"{100 * share_unserved:.0f} % of the demand has no capacity"
        if state.is_full:
            limit = f"the policy allows {needs.replicas_max} replicas; raise replicas_max"
            yield UnmetRequirement(deployment_id=needs.deployment_id, reason=f"{share}: {limit}")
        else:
            yield _cannot_place(draft, needs, share)


def no_slot_for_version(draft: PlacementDraft, state: DeploymentState) -> UnmetRequirement:
    """Return why a new version has not started: it starts beside the old one or not at all."""
    version = state.needs.deployment.version
    purpose = f"version {version}; until it finds a slot the one before it serves"
    unmet = _cannot_place(draft, state.needs, purpose)
    remedy = _memory_remedy(draft, state)
    if not remedy:
        return unmet
    return msgspec.structs.replace(unmet, reason=f"{unmet.reason}. {remedy}")


def slot_refusals(
    fleet: FleetCapacity, needs: DeploymentNeeds, nodes: Sequence[FleetNode], free: FreeMemory
) -> Mapping[NodeId, str]:
    """Return why each node can hold no replica now, or no part of one; "" where it can."""
    engine = needs.deployment.engine
    refusals = {node.node_id: _refusal(fleet, needs, node, free) for node in nodes}
    if engine.nodes == 1:
        return refusals
    sites = {
        node.node_id: [
            (node.pop, name)
            for name in classes_with_space(node, needs.deployment, needs.model, free)
        ]
        for node in nodes
        if not refusals[node.node_id]
    }
    nodes_at = Counter(site for of_node in sites.values() for site in of_node)
    for node_id, of_node in sites.items():
        nodes_with_space = max(nodes_at[site] for site in of_node)
        if nodes_with_space < engine.nodes:
            refusals[node_id] = (
                f"it has space for one of {engine.nodes} parts, but together with nodes like it in "
                f"{fleet.nodes[node_id].pop} there is space for {nodes_with_space}"
            )
    return refusals


def _has_slot_in(draft: PlacementDraft, needs: DeploymentNeeds, pop: PopId) -> bool:
    nodes = [node for node in draft.fleet.nodes.values() if node.pop == pop]
    return sum(1 for _ in _refusals(draft, needs, nodes)) < len(nodes)


def _cannot_place(
    draft: PlacementDraft, needs: DeploymentNeeds, purpose: str, only_pop: str = ""
) -> UnmetRequirement:
    fleet = draft.fleet
    backoff = fleet.start_history.backoff_of(needs.deployment_id)
    if backoff:
        return UnmetRequirement(
            deployment_id=needs.deployment_id,
            reason=f"cannot place a replica ({purpose}): {backoff}",
        )
    nodes = [node for node in fleet.nodes.values() if only_pop in ("", node.pop)]
    # Stop after as many as are shown: else each of thousands of nodes is checked for each
    # deployment.
    refused = list(islice(_refusals(draft, needs, nodes), NODES_SHOWN_MAX + 1))
    listed = "; ".join(f"{name}: {reason}" for name, reason in refused[:NODES_SHOWN_MAX])
    more = f"; and more of {len(nodes)} nodes" if len(refused) > NODES_SHOWN_MAX else ""
    no_node = f"there is no node in {only_pop}" if only_pop else "there is no node"
    never = _why_never(fleet, needs)
    reason = f"cannot place a replica ({purpose}): {listed or no_node}{more}"
    return UnmetRequirement(
        deployment_id=needs.deployment_id, reason=reason + (f". {never}" if never else "")
    )


def _memory_remedy(draft: PlacementDraft, state: DeploymentState) -> str:
    """Return which changes let a replica of a new version start; "" if memory is not the reason.

    The node is the one that lacks the least memory, among NODES_COMPARED_MAX.
    """
    needs = state.needs
    deployment, engine = needs.deployment, needs.deployment.engine
    lacking = list(islice(_lacking_bytes(draft, needs), NODES_COMPARED_MAX))
    if not lacking or engine.nodes > 1:
        return ""
    lacks, node_id = min(lacking)
    each = "" if engine.devices == 1 else f" on each of {engine.devices} devices"
    ways = [f"free {gib(lacks)}{each} on {node_id}"]
    if engine.kv_memory_bytes > lacks:
        ways.append(f"set kv_memory_bytes to {engine.kv_memory_bytes - lacks} or less")
    versions = {replica.placement.version for replica in state.replicas if replica.placement}
    if deployment.version in versions and 1 < len(state.replicas) <= needs.replicas_min:
        fewer = len(state.replicas) - 1
        ways.append(f"set replicas_min to {fewer}, so that one of the version before may end first")
    return f"To start it, {', or '.join(ways)}"


def _lacking_bytes(draft: PlacementDraft, needs: DeploymentNeeds) -> Iterator[tuple[int, NodeId]]:
    """Yield how much memory a replica lacks on each device, of nodes that could hold one if they
    were empty."""
    needed = needs.device_bytes
    count = needs.deployment.engine.devices_per_node
    for site, nodes in needs.eligible_nodes.items():
        device_class = draft.fleet.sites[site].device_class
        for node in nodes:
            free = sorted(
                max(0, draft.ledger.free[node.node_id, device.device_id])
                for device in node.devices
                if device.healthy and device.device_class == device_class
            )
            if len(free) >= count and free[-count] < needed:
                yield needed - free[-count], node.node_id


def _refusals(
    draft: PlacementDraft, needs: DeploymentNeeds, nodes: Sequence[FleetNode]
) -> Iterator[tuple[NodeId, str]]:
    fleet, free = draft.fleet, draft.ledger.all_free_for(needs.deployment.policy.overcommit)
    if needs.deployment.engine.nodes > 1:
        pairs: Iterable[tuple[NodeId, str]] = slot_refusals(fleet, needs, nodes, free).items()
    else:
        pairs = ((node.node_id, _refusal(fleet, needs, node, free)) for node in nodes)
    return ((name, reason) for name, reason in pairs if reason)


def _refusal(
    fleet: FleetCapacity, needs: DeploymentNeeds, node: FleetNode, free: FreeMemory
) -> str:
    reason = pins_refuse_node(needs.deployment.policy, fleet.table, node) or why_no_slot(
        node,
        pop=fleet.pops[node.pop],
        liveness=fleet.liveness.by_node[node.node_id],
        deployment=needs.deployment,
        model=needs.model,
        free=free,
    )
    backoff = fleet.start_history.backoff_of(needs.deployment_id)
    return reason or ("the deployment is in start backoff" if backoff else "")


def _why_never(fleet: FleetCapacity, needs: DeploymentNeeds) -> str:
    """Return the arithmetic if no node of this fleet could hold a replica, even empty; else ""."""
    if needs.eligible_nodes:
        return ""
    model, engine = needs.model, needs.deployment.engine
    for name in reversed(fleet.table.device_classes):
        kind = class_of(name)
        if kind is None:
            continue
        capacity = replica_capacity(model, engine, kind)
        most = fleet.table.largest_node_devices(name)
        if isinstance(capacity, CannotFit):
            return f"{capacity.reason}{_settings_that_fit(model, engine, kind, most)}"
        if most < engine.devices_per_node:
            each = " on each node" if engine.nodes > 1 else ""
            return (
                f"cannot place {model.model_id} on {engine.devices_per_node} devices{each}: the "
                f"largest node here has {most} x {kind.name}"
                + _settings_that_fit(model, engine, kind, most)
            )
    return ""


def _settings_that_fit(
    model: CatalogModel, engine: EngineSettings, kind: DeviceClass, node_devices: int
) -> str:
    """Return which settings would fit on this class, on nodes with `node_devices` devices."""
    devices = devices_needed(model, engine, kind, per_node=node_devices) if node_devices else 0
    if not devices:
        return ""
    nodes = -(-devices // node_devices)
    if nodes == 1:
        return f"; set devices to {devices}" + (" and nodes to 1" if engine.nodes > 1 else "")
    return (
        f"; {nodes} x ({devices // nodes} x {gib(kind.memory_bytes)}) would hold it: set "
        f"devices to {devices} and nodes to {nodes}, in a PoP with as many such nodes"
    )
