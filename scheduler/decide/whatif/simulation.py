"""Simulates changes to a saved cluster snapshot: plans again and again until nothing moves.

Rule: the snapshot and the changes are the only input. So a bug report is a file, and the same file
gives the same result bit for bit.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Final

import msgspec

from isochrone.wire.ids import DeploymentId, DeviceId, Generation, NodeId, PopId, ReplicaId
from isochrone.wire.models.model import CatalogModel, Deployment, Positive
from isochrone.wire.peers.assignment import Role
from isochrone.wire.peers.report import NodeDevice, ReplicaState
from scheduler.decide.capacity.device_classes import CLASSES, CPU, GIB, class_of
from scheduler.decide.capacity.distances import Distances
from scheduler.decide.cluster import ClusterState, FleetNode, PlacementPlan
from scheduler.decide.membership.liveness import LivenessLimits
from scheduler.decide.placement.rollout_split import plan_fleet
from scheduler.decide.whatif.predict import FleetPrediction, predict_service

FORMAT: Final = 1
ROUNDS_MAX: Final = 300
ROUND_S: Final = 60.0
"""How much older replicas are after each round of moves."""

MEMORY_SLACK: Final = 1.1
"""Memory sizes may be rounded up: an 80 GB device may be given as 80 GiB."""

Count = Annotated[int, msgspec.Meta(ge=1, le=10_000)]


class InvalidChange(ValueError):
    """A change names something that is not in the snapshot, or is not possible."""


class ClusterSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The cluster state that placement decides from, in the format of a file."""

    cluster: ClusterState
    liveness: LivenessLimits = LivenessLimits()
    format: int = FORMAT
    release: str = ""

    def __post_init__(self) -> None:
        """Raise ValueError for another format, duplicate ids, or nodes in unknown PoPs."""
        if self.format != FORMAT:
            raise ValueError(
                f"its format is {self.format}, this release reads {FORMAT}: plan it with "
                f"release {self.release or 'that saved it'}"
            )
        for kind, names in (
            ("PoP", [pop.pop for pop in self.cluster.pops]),
            ("node", [node.node_id for node in self.cluster.nodes]),
        ):
            if len(set(names)) < len(names):
                raise ValueError(f"it has the {kind} {Counter(names).most_common(1)[0][0]} twice")
        known = {pop.pop for pop in self.cluster.pops}
        misplaced = next((node for node in self.cluster.nodes if node.pop not in known), None)
        if misplaced is not None:
            raise ValueError(f"node {misplaced.node_id} is in {misplaced.pop}, which is not in it")


class AddNodes(msgspec.Struct, frozen=True, kw_only=True, tag="add_nodes"):
    """Add nodes in a PoP, each with a number of devices of one class."""

    pop: PopId
    device_class: str
    memory_bytes: Positive
    nodes: Count = 1
    devices: Count = 1

    def words(self) -> str:
        """Return the change as text."""
        return f"add {self.nodes} x {self.devices} {self.device_class} in {self.pop}"


class LosePop(msgspec.Struct, frozen=True, kw_only=True, tag="lose_pop"):
    """Remove the nodes of a PoP; its demand moves to the nearest other PoP."""

    pop: PopId

    def words(self) -> str:
        """Return the change as text."""
        return f"lose {self.pop}"


class LoseNode(msgspec.Struct, frozen=True, kw_only=True, tag="lose_node"):
    """Remove a node."""

    node_id: NodeId

    def words(self) -> str:
        """Return the change as text."""
        return f"lose {self.node_id}"


class ScaleDemand(msgspec.Struct, frozen=True, kw_only=True, tag="scale_demand"):
    """Multiply demand by a factor, of one city or deployment or of all."""

    factor: Annotated[float, msgspec.Meta(ge=0, le=1000)]
    pop: PopId | None = None
    deployment_id: DeploymentId | None = None

    def words(self) -> str:
        """Return the change as text."""
        return (
            f"demand x {self.factor:g} of {self.deployment_id or 'everything'} "
            f"in {self.pop or 'every city'}"
        )


class AddDeployment(msgspec.Struct, frozen=True, kw_only=True, tag="add_deployment"):
    """Add a deployment of a new or known model, with the demand of another one times a factor."""

    deployment: Deployment
    model: CatalogModel | None = None
    demand_like: DeploymentId | None = None
    demand_factor: Annotated[float, msgspec.Meta(ge=0, le=1000)] = 1.0

    def words(self) -> str:
        """Return the change as text."""
        return f"add {self.deployment.deployment_id} ({self.deployment.model_id})"


Change = AddNodes | LosePop | LoseNode | ScaleDemand | AddDeployment


class WhatIfMove(msgspec.Struct, frozen=True, kw_only=True):
    """One replica that would start, end, or change its role to `role`."""

    kind: str
    replica_id: ReplicaId
    deployment_id: str
    node_id: NodeId
    pop: PopId
    reason: str
    role: Role | None = None


class WhatIfResult(msgspec.Struct, frozen=True, kw_only=True):
    """The moves that follow, and the service before and after.

    `digest` identifies the first plan: equal digests mean equal plans.
    """

    changes: tuple[str, ...]
    digest: str
    moves: tuple[WhatIfMove, ...]
    unmet: tuple[str, ...]
    frozen: str
    rounds: int
    is_at_rest: bool
    now: FleetPrediction
    then: FleetPrediction


def what_if(
    snapshot: ClusterSnapshot, changes: Sequence[Change], prices: Mapping[str, float] | None = None
) -> WhatIfResult:
    """Return what follows from `changes`, applied in their order; raise InvalidChange."""
    cluster = snapshot.cluster
    for change in changes:
        cluster = apply_change(cluster, change)
    classes = _classes(snapshot.cluster) | _classes(cluster)
    unknown = sorted(set(prices or {}) - classes)
    if unknown:
        known = ", ".join(sorted(classes))
        raise InvalidChange(f"cannot price {unknown[0]}: the device classes are {known or 'none'}")
    first = plan_fleet(cluster, snapshot.liveness)
    moves: list[WhatIfMove] = []
    plan, rounds = first, 0
    while not plan.is_empty and rounds < ROUNDS_MAX:
        moves += _moves(cluster, plan)
        cluster = apply_plan(cluster, plan)
        plan = plan_fleet(cluster, snapshot.liveness)
        rounds += 1
    return WhatIfResult(
        changes=tuple(change.words() for change in changes),
        digest=plan_digest(first),
        moves=tuple(moves),
        unmet=tuple(f"{unmet.deployment_id}: {unmet.reason}" for unmet in plan.unmet),
        frozen=first.frozen,
        rounds=rounds,
        is_at_rest=plan.is_empty,
        now=predict_service(snapshot.cluster, prices),
        then=predict_service(cluster, prices),
    )


def plan_digest(plan: PlacementPlan) -> str:
    """Return a short hash of a plan."""
    return hashlib.sha256(msgspec.json.encode(plan)).hexdigest()[:16]


def apply_change(cluster: ClusterState, change: Change) -> ClusterState:
    """Return the cluster state after one change; raise InvalidChange."""
    match change:
        case AddNodes():
            _require_pop(cluster, change.pop)
            _require_plausible_devices(cluster, change)
            taken = {node.node_id for node in cluster.nodes}
            added = tuple(_node(change, number, taken) for number in range(1, change.nodes + 1))
            nodes = sorted((*cluster.nodes, *added), key=lambda node: node.node_id)
            return msgspec.structs.replace(cluster, nodes=tuple(nodes))
        case LosePop():
            _require_pop(cluster, change.pop)
            return _without_pop(cluster, change.pop)
        case LoseNode():
            if all(node.node_id != change.node_id for node in cluster.nodes):
                raise InvalidChange(f"cannot lose {change.node_id}: the snapshot has no such node")
            return _without_nodes(cluster, {change.node_id})
        case ScaleDemand():
            return _scaled(cluster, change)
        case AddDeployment():
            return _with_deployment(cluster, change)


def apply_plan(cluster: ClusterState, plan: PlacementPlan) -> ClusterState:
    """Return the cluster state after a plan: started replicas are warm, ended ones are gone."""
    ended = {ending.replica_id for ending in plan.endings}
    roles = {change.replica_id: change.role for change in plan.role_changes}
    stay = [
        msgspec.structs.replace(
            placement,
            age_s=placement.age_s + ROUND_S,
            role=roles.get(placement.replica_id, placement.role),
        )
        for placement in cluster.placements
        if placement.replica_id not in ended
    ]
    new = [start.placement(ReplicaState.WARM) for start in plan.starts]
    return msgspec.structs.replace(
        cluster,
        generation=Generation(cluster.generation + 1),
        placements=tuple(sorted((*stay, *new), key=lambda placement: placement.replica_id)),
    )


def _classes(cluster: ClusterState) -> set[str]:
    return {device.device_class for node in cluster.nodes for device in node.devices}


def _moves(cluster: ClusterState, plan: PlacementPlan) -> Iterable[WhatIfMove]:
    pops = {node.node_id: node.pop for node in cluster.nodes}
    deployments = {p.replica_id: p.deployment_id for p in cluster.placements}
    for start in plan.starts:
        yield WhatIfMove(
            kind="start",
            replica_id=start.spec.replica_id,
            deployment_id=start.spec.deployment_id,
            node_id=start.node_id,
            pop=pops[start.node_id],
            reason=start.reason,
            role=start.spec.role,
        )
    for ending in plan.endings:
        yield WhatIfMove(
            kind="end",
            replica_id=ending.replica_id,
            deployment_id=deployments.get(ending.replica_id, DeploymentId("")),
            node_id=ending.node_id,
            pop=pops.get(ending.node_id, PopId("")),
            reason=ending.reason,
        )
    for role_change in plan.role_changes:
        yield WhatIfMove(
            kind="role",
            replica_id=role_change.replica_id,
            deployment_id=deployments[role_change.replica_id],
            node_id=role_change.node_id,
            pop=pops[role_change.node_id],
            reason=role_change.reason,
            role=role_change.role,
        )


def _node(change: AddNodes, number: int, taken: set[NodeId]) -> FleetNode:
    name = NodeId(f"new-{change.pop}-{number}")
    while name in taken:
        name = NodeId(f"{name}x")
    devices = tuple(
        NodeDevice(
            device_id=DeviceId(f"{change.device_class}-{index}"),
            device_class=change.device_class,
            memory_bytes=change.memory_bytes,
        )
        for index in range(change.devices)
    )
    return FleetNode(node_id=name, pop=change.pop, address=f"http://{name}", devices=devices)


def _without_pop(cluster: ClusterState, pop: PopId) -> ClusterState:
    gone = {node.node_id for node in cluster.nodes if node.pop == pop}
    cluster = _without_nodes(cluster, gone)
    distances = Distances(cluster.pops, cluster.distances)
    others = sorted(
        (distances.between(pop, other.pop), other.pop) for other in cluster.pops if other.pop != pop
    )
    if not others:
        raise InvalidChange(f"cannot lose {pop}: it is the only PoP")
    demand = {(row.deployment_id, row.pop): row for row in cluster.demand}
    for row in cluster.demand:
        if row.pop == pop:
            del demand[row.deployment_id, pop]
            moved = msgspec.structs.replace(row, pop=others[0][1])
            present = demand.get((moved.deployment_id, moved.pop))
            demand[moved.deployment_id, moved.pop] = present.plus(moved) if present else moved
    return msgspec.structs.replace(cluster, demand=tuple(row for _, row in sorted(demand.items())))


def _without_nodes(cluster: ClusterState, gone: set[NodeId]) -> ClusterState:
    return msgspec.structs.replace(
        cluster,
        nodes=tuple(node for node in cluster.nodes if node.node_id not in gone),
        placements=tuple(p for p in cluster.placements if not gone & set(p.node_ids)),
    )


def _scaled(cluster: ClusterState, change: ScaleDemand) -> ClusterState:
    if change.pop is not None:
        _require_pop(cluster, change.pop)
    known = {deployment.deployment_id for deployment in cluster.deployments}
    if change.deployment_id is not None and change.deployment_id not in known:
        raise InvalidChange(f"cannot scale {change.deployment_id}: there is no such deployment")
    demand = tuple(
        row.times(change.factor)
        if change.pop in (None, row.pop) and change.deployment_id in (None, row.deployment_id)
        else row
        for row in cluster.demand
    )
    return msgspec.structs.replace(cluster, demand=demand)


def _with_deployment(cluster: ClusterState, change: AddDeployment) -> ClusterState:
    name = change.deployment.deployment_id
    if any(deployment.deployment_id == name for deployment in cluster.deployments):
        raise InvalidChange(f"cannot add {name}: the snapshot has a deployment with that id")
    models = {model.model_id: model for model in cluster.models}
    model_id = change.deployment.model_id
    if change.model is not None and change.model.model_id != model_id:
        given_id = change.model.model_id
        raise InvalidChange(
            f"cannot add {name}: it serves {model_id}, the model given is {given_id}"
        )
    if change.model is not None:
        models[model_id] = change.model
    elif model_id not in models:
        raise InvalidChange(
            f"cannot add {name}: the snapshot has no model {model_id}; give `model`"
        )
    like = change.demand_like
    demand = [
        msgspec.structs.replace(row, deployment_id=name)
        for row in cluster.demand
        if row.deployment_id == like
    ]
    if like is not None and not demand:
        raise InvalidChange(f"cannot give {name} the demand of {like}: that has none")
    cluster = msgspec.structs.replace(
        cluster,
        models=tuple(model for _, model in sorted(models.items())),
        deployments=tuple(
            sorted(
                (*cluster.deployments, change.deployment),
                key=lambda deployment: deployment.deployment_id,
            )
        ),
        demand=tuple(
            sorted((*cluster.demand, *demand), key=lambda row: (row.deployment_id, row.pop))
        ),
    )
    return _scaled(cluster, ScaleDemand(factor=change.demand_factor, deployment_id=name))


def _require_plausible_devices(cluster: ClusterState, change: AddNodes) -> None:
    """Raise InvalidChange for an unknown device class, or for more memory than it has."""
    kind = class_of(change.device_class)
    known = {*CLASSES, *_classes(cluster), CPU}
    if kind is None and change.device_class not in known:
        raise InvalidChange(
            f"cannot add {change.device_class}: known classes are {', '.join(sorted(known))}"
        )
    if kind is not None and change.memory_bytes > MEMORY_SLACK * kind.memory_bytes:
        raise InvalidChange(
            f"cannot add {change.device_class} of {change.memory_bytes / GIB:.0f} GiB: it has "
            f"{kind.memory_bytes / GIB:.1f} GiB"
        )


def _require_pop(cluster: ClusterState, pop: PopId) -> None:
    if all(known.pop != pop for known in cluster.pops):
        names = ", ".join(known.pop for known in cluster.pops[:20])
        raise InvalidChange(f"cannot change {pop}: the snapshot has no such PoP; it has {names}")
