"""The route table: made from the replicas that nodes report as warm, never from the desired state.

Measured rates change with every report. A change of up to a tenth changes no routing decision
enough to send a new table to every router, so the table keeps the rates that it had.
"""

from collections.abc import Iterable, Mapping, Set

import msgspec

from isochrone.wire.engines.adapter_rank import adapter_rank_max
from isochrone.wire.engines.command_engine import lacking_features_of
from isochrone.wire.engines.engine_capabilities import (
    capabilities_of,
)
from isochrone.wire.ids import DeploymentId, Epoch, Generation, NodeId
from isochrone.wire.models.model import UNIFIED_ROLES, CatalogModel, Deployment
from isochrone.wire.models.model_shape import depth_cost_per_token
from isochrone.wire.peers.report import ReplicaProfile, ReplicaState
from isochrone.wire.peers.routes import (
    DeploymentEntry,
    KeyTable,
    RolloutEntry,
    Route,
    RouteTable,
)
from scheduler.decide.cluster import (
    TOKENS_IN_FLIGHT_UNKNOWN,
    ClusterState,
    FleetNode,
    Placement,
)
from scheduler.decide.membership.liveness import LivenessView
from scheduler.decide.membership.report_diff import rate_moved
from scheduler.decide.rollout.lifecycle import Rollout


def build_route_table(
    cluster: ClusterState,
    view: LivenessView,
    keys: KeyTable,
    *,
    generation: Generation,
    epoch: Epoch,
) -> RouteTable:
    """Return the table that routers should hold.

    A suspect node keeps its routes: routers notice a dead node within one request, while the
    scheduler may merely have lost contact with a live one. Routes are withdrawn when a node is lost
    or a replica drains or ends.
    """
    models = {model.model_id: model for model in cluster.models}
    rollouts = {rollout.deployment_id: rollout for rollout in cluster.rollouts}
    withdrawn = _withdrawn_versions(cluster)
    return RouteTable(
        cluster_id=cluster.cluster_id,
        generation=generation,
        epoch=epoch,
        pops=tuple(sorted(cluster.pops, key=lambda pop: pop.pop)),
        deployments=tuple(
            _entry(
                deployment,
                models,
                rollouts.get(deployment.deployment_id),
                withdrawn.get(deployment.deployment_id),
            )
            for deployment in sorted(cluster.deployments, key=lambda d: d.deployment_id)
        ),
        routes=build_routes(cluster, view),
        keys=keys,
    )


def build_routes(cluster: ClusterState, view: LivenessView) -> tuple[Route, ...]:
    """Return the routes of the table alone: those to the placements that `cluster` has."""
    nodes = {node.node_id: node for node in cluster.nodes}
    deployments = {entry.deployment_id: entry for entry in cluster.deployments}
    measured = cluster.measured()
    rollouts = {rollout.deployment_id: rollout for rollout in cluster.rollouts}
    routes = [
        _route(
            placement,
            nodes[placement.node_id],
            _version_of(placement, deployments, rollouts),
            measured,
        )
        for placement in cluster.placements
        if placement.deployment_id in deployments and _is_routable(placement, nodes, view)
    ]
    return tuple(sorted(routes, key=lambda route: route.replica_id))


def replace_node_routes(
    table: RouteTable, routes: Iterable[Route], node_ids: Set[NodeId]
) -> RouteTable:
    """Return a table with its routes to some nodes replaced by `routes`.

    Rates that moved by at most a tenth stay as they are. If nothing else changed either, the result
    is `table` itself.
    """
    sent = {route.replica_id: route for route in table.routes if route.node_id in node_ids}
    new = {r.replica_id: _with_sent_rates(sent.get(r.replica_id), r) for r in routes}
    if new == sent:
        return table
    kept = [route for route in table.routes if route.node_id not in node_ids]
    kept += new.values()
    return msgspec.structs.replace(
        table, routes=tuple(sorted(kept, key=lambda route: route.replica_id))
    )


def multi_node_hosts(placements: Iterable[Placement]) -> frozenset[NodeId]:
    """Return the nodes of replicas over several nodes: such a replica needs all of its nodes."""
    spread = (placement.node_ids for placement in placements if placement.followers)
    return frozenset(node_id for node_ids in spread for node_id in node_ids)


def keep_unchanged_rates(sent: RouteTable | None, new: RouteTable) -> RouteTable:
    """Return `new` with the generation of `sent`, and with the rates of `sent` where they moved by
    at most a tenth. If nothing else changed either, the result equals `sent`."""
    if sent is None or sent.epoch != new.epoch:
        return new
    before = {route.replica_id: route for route in sent.routes}
    routes = tuple(_with_sent_rates(before.get(route.replica_id), route) for route in new.routes)
    return msgspec.structs.replace(
        new, generation=Generation(sent.generation), epoch=sent.epoch, routes=routes
    )


def _is_routable(
    placement: Placement, nodes: Mapping[NodeId, FleetNode], view: LivenessView
) -> bool:
    return (
        placement.state is ReplicaState.WARM
        and not placement.is_ending
        and not placement.leader_id
        and all(id_ in nodes and view.is_in_fleet(nodes[id_]) for id_ in placement.node_ids)
        and nodes[placement.node_id].address != ""
    )


def _route(
    placement: Placement,
    node: FleetNode,
    deployment: Deployment,
    measured: Mapping[tuple[str, str], ReplicaProfile],
) -> Route:
    rates = placement.profile
    if rates.prefill_tokens_per_s <= 0:
        # A replica without own measurements gets the measured rates of its model and class.
        classes = {device.device_id: device.device_class for device in node.devices}
        device_class = classes.get(placement.device_ids[0], "") if placement.device_ids else ""
        rates = measured.get((deployment.model_id, device_class), rates)
    return Route(
        replica_id=placement.replica_id,
        deployment_id=placement.deployment_id,
        version=placement.version,
        node_id=node.node_id,
        pop=node.pop,
        address=node.address,
        role=placement.role,
        tokens_in_flight_max=placement.tokens_in_flight_max
        or deployment.engine.tokens_in_flight_max
        or TOKENS_IN_FLIGHT_UNKNOWN,
        prefill_tokens_per_s=rates.prefill_tokens_per_s,
        decode_tokens_per_s=rates.decode_tokens_per_s,
    )


def _version_of(
    placement: Placement,
    deployments: Mapping[DeploymentId, Deployment],
    rollouts: Mapping[DeploymentId, Rollout],
) -> Deployment:
    """Return the deployment with the model and engine of the placement's version."""
    deployment = deployments[placement.deployment_id]
    rollout = rollouts.get(placement.deployment_id)
    if rollout is None or placement.version != rollout.to_version:
        return deployment
    spec = rollout.spec
    return msgspec.structs.replace(deployment, model_id=spec.model_id, engine=spec.engine)


def _withdrawn_versions(cluster: ClusterState) -> dict[DeploymentId, int]:
    """Return the version of each rollout that was reverted or aborted and still has replicas.

    Only a rollout places replicas of a newer version than its deployment's.
    """
    versions = {entry.deployment_id: entry.version for entry in cluster.deployments}
    withdrawn: dict[DeploymentId, int] = {}
    for placement in cluster.placements:
        name, version = placement.deployment_id, placement.version
        if not placement.is_ending and version > max(
            versions.get(name, version), withdrawn.get(name, 0)
        ):
            withdrawn[name] = version
    return withdrawn


def _entry(
    deployment: Deployment,
    models: Mapping[str, CatalogModel],
    rollout: Rollout | None,
    withdrawn: int | None,
) -> DeploymentEntry:
    model = models.get(deployment.model_id)
    kind = model.kind if model else "chat"
    context = deployment.engine.context_tokens_max
    driver = deployment.engine.driver
    lacks = lacking_features_of(deployment.engine)
    if rollout is not None:
        # Either version may get a request: refuse features that one of them lacks.
        lacks = tuple(dict.fromkeys((*lacks, *lacking_features_of(rollout.spec.engine))))
    return DeploymentEntry(
        deployment_id=deployment.deployment_id,
        name=deployment.name,
        model_id=deployment.model_id,
        context_tokens=min(context, model.context_tokens) if model else context,
        kind=kind,
        created_at=deployment.created_at,
        price=model.price if model else None,
        rollout=_rollout_entry(rollout, withdrawn),
        deprecation=deployment.deprecation,
        engine=driver,
        engine_lacks=lacks,
        shares_kv=deployment.engine.share_kv,
        labels=model.labels if model else (),
        needs_prefill=capabilities_of(driver).needs_prefill
        and deployment.policy.roles != UNIFIED_ROLES,
        adapter_rank_max=min(
            adapter_rank_max(engine, kind)
            for engine in (deployment.engine, *([rollout.spec.engine] if rollout else ()))
        ),
        depth_cost_per_token=depth_cost_per_token(model) if model else 0.0,
    )


def _rollout_entry(rollout: Rollout | None, withdrawn: int | None) -> RolloutEntry | None:
    if rollout is not None:
        step = rollout.current
        return RolloutEntry(version=rollout.to_version, share=step.share, pops=step.pops)
    # Until the planner has ended its replicas, which takes minutes where the others lack capacity.
    return None if withdrawn is None else RolloutEntry(version=withdrawn, share=0.0)


def _with_sent_rates(sent: Route | None, route: Route) -> Route:
    if sent is None or sent == route:
        return sent or route
    if rate_moved(sent.prefill_tokens_per_s, route.prefill_tokens_per_s) or rate_moved(
        sent.decode_tokens_per_s, route.decode_tokens_per_s
    ):
        return route
    kept = msgspec.structs.replace(
        route,
        prefill_tokens_per_s=sent.prefill_tokens_per_s,
        decode_tokens_per_s=sent.decode_tokens_per_s,
    )
    return sent if kept == sent else kept
