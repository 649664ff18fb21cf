"""A table with replaced routes of a few nodes equals the table of the whole fleet."""

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from isochrone.wire.client_keys.key_table import KeyTable
from isochrone.wire.ids import Epoch, Generation, NodeId
from isochrone.wire.models.model import ModelDimensions
from isochrone.wire.models.model_shape import depth_cost_per_token
from isochrone.wire.peers.report import ReplicaState
from isochrone.wire.peers.routes import Route, RouteTable
from scheduler.decide.cluster import ClusterState
from scheduler.decide.membership import judge_liveness
from scheduler.decide.routing import (
    build_route_table,
    build_routes,
    multi_node_hosts,
    replace_node_routes,
)
from tests.builders import a_cluster, a_node, a_placement

NAMES = tuple(f"ams-{number}" for number in range(1, 6))
STATES = st.lists(
    st.sampled_from([ReplicaState.WARM, ReplicaState.LOADING, None]),
    min_size=len(NAMES),
    max_size=len(NAMES),
)


def a_fleet(states: list[ReplicaState | None]) -> ClusterState:
    """A node of each name, each with a replica in any state."""
    nodes = tuple(a_node(name, "ams") for name in NAMES)
    placements = tuple(
        a_placement(f"r-{name}", name, state=state.value)
        for name, state in zip(NAMES, states, strict=True)
        if state is not None
    )
    return a_cluster(nodes=nodes, placements=placements)


def a_table(cluster: ClusterState) -> RouteTable:
    view = judge_liveness(cluster.nodes, cluster.acting_for_s)
    return build_route_table(cluster, view, KeyTable(), generation=Generation(1), epoch=Epoch(1))


def part_of(cluster: ClusterState, names: set[NodeId]) -> ClusterState:
    return msgspec.structs.replace(
        cluster,
        nodes=tuple(node for node in cluster.nodes if node.node_id in names),
        placements=tuple(one for one in cluster.placements if one.node_id in names),
    )


@settings(max_examples=50, deadline=None)
@given(STATES, STATES)
def test_a_partially_replaced_table_equals_a_new_one(
    before: list[ReplicaState | None], after: list[ReplicaState | None]
) -> None:
    told, fleet = a_table(a_fleet(before)), a_fleet(after)
    pairs = zip(NAMES, before, after, strict=True)
    changed = {NodeId(name) for name, old, new in pairs if old is not new}
    part = part_of(fleet, changed)
    routes = build_routes(part, judge_liveness(part.nodes, part.acting_for_s))
    replaced = replace_node_routes(told, routes, changed)
    assert replaced == a_table(fleet)
    if replaced == told:
        assert replaced is told, "ten thousand routes would be compared"


def test_a_replaced_route_keeps_rates_that_hardly_moved() -> None:
    told = a_table(a_fleet([ReplicaState.WARM] * len(NAMES)))
    told = msgspec.structs.replace(told, routes=tuple(with_rate(r, 1000.0) for r in told.routes))
    first, second = (with_rate(told.routes[0], rate) for rate in (1090.0, 1200.0))
    assert replace_node_routes(told, (first,), {first.node_id}) is told
    assert second in replace_node_routes(told, (second,), {second.node_id}).routes


def with_rate(route: Route, prefill_tokens_per_s: float) -> Route:
    return msgspec.structs.replace(route, prefill_tokens_per_s=prefill_tokens_per_s)


def test_hosts_of_multi_node_replicas_are_found() -> None:
    follower = a_placement("r.1", "ams-2")
    leader = a_placement("r", "ams-1", followers=(follower,))
    assert multi_node_hosts((leader, a_placement("alone", "ams-3"))) == {"ams-1", "ams-2"}


def test_a_deployment_has_the_cost_of_depth_of_its_model() -> None:
    cluster = a_fleet([ReplicaState.WARM] * len(NAMES))
    assert a_table(cluster).deployments[0].depth_cost_per_token == 0.0
    shape = ModelDimensions(
        layers=32, hidden_size=4096, heads=32, kv_heads=8, head_size=128, parameters=8 * 10**9
    )
    model = msgspec.structs.replace(cluster.models[0], shape=shape)
    table = a_table(msgspec.structs.replace(cluster, models=(model,)))
    assert table.deployments[0].depth_cost_per_token == depth_cost_per_token(model) > 3e-5
