"""A fleet state that adopts one table after another knows the same as one that adopts the last."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isochrone.wire.ids import (
    ClusterId,
    DeploymentId,
    Epoch,
    Generation,
    ModelId,
    NodeId,
    PopId,
    ReplicaId,
)
from isochrone.wire.peers.routes import DeploymentEntry, Route, RouteTable, apply_delta, diff
from router import fleet_state
from router.decide.choice.deployment_routing import DeploymentRouting
from router.decide.routes.route_directory import TableIndexes
from router.fleet_state import REPLICAS_FORGOTTEN_AT_ONCE, FleetState

# Replica -> (deployment, node).
ROUTES = st.dictionaries(
    st.integers(0, 12), st.tuples(st.integers(0, 5), st.integers(0, 4)), max_size=12
)
STEPS = st.lists(st.tuples(ROUTES, st.sets(st.integers(0, 5))), min_size=1, max_size=5)


def a_table(
    generation: int, routes: dict[int, tuple[int, int]], deployments: set[int]
) -> RouteTable:
    return RouteTable(
        cluster_id=ClusterId("c"),
        generation=Generation(generation),
        epoch=Epoch(1),
        deployments=tuple(
            DeploymentEntry(
                deployment_id=DeploymentId(f"d{number}"),
                name=f"m{number}",
                model_id=ModelId("m"),
                context_tokens=4096,
            )
            for number in sorted(deployments)
        ),
        routes=tuple(
            Route(
                replica_id=ReplicaId(f"r{replica:02d}"),
                deployment_id=DeploymentId(f"d{deployment}"),
                version=1,
                node_id=NodeId(f"n{node}"),
                pop=PopId("ams"),
                address=f"n{node}:1",
            )
            for replica, (deployment, node) in sorted(routes.items())
        ),
    )


def known(fleet: FleetState) -> dict[str, object]:
    """Return what the fleet state knows, without the order in which it learned it."""
    return {
        "nodes": fleet.directory.node_addresses(),
        "replicas": {n: sorted(fleet.directory.replicas_on(NodeId(f"n{n}"))) for n in range(5)},
        "slots": {n: sorted(routing_of(fleet, n).replicas.slots) for n in range(6)},
        "routes": {n: list(routing_of(fleet, n).routes) for n in range(6)},
    }


def routing_of(fleet: FleetState, number: int) -> DeploymentRouting:
    return fleet.routing(DeploymentId(f"d{number}"))


@pytest.mark.parametrize("at_once_max", [0, 64])
@settings(deadline=None, max_examples=80)
@given(STEPS, st.booleans(), st.sampled_from(("at once", "in slices", "overtaken")))
def test_tables_add_up(
    at_once_max: int,
    steps: list[tuple[dict[int, tuple[int, int]], set[int]]],
    by_delta: bool,
    how: str,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fleet_state, "DEPLOYMENTS_SET_AT_ONCE_MAX", at_once_max)
        fleet = FleetState(PopId("ams"), lambda: 1.0)
        table: RouteTable | None = None
        for generation, (routes, deployments) in enumerate(steps, 1):
            new = a_table(generation, routes, deployments)
            table = apply_delta(table, diff(table, new)) if by_delta and table else new
            prepared = TableIndexes(fleet.directory, table)
            if how != "at once":
                before = known(fleet)
                assert sum(1 for _ in prepared.steps(1)) >= 2 * len(routes)
                assert known(fleet) == before, "what is served has changed"
            if how == "overtaken":
                # Another table is adopted meanwhile: what was prepared does not fit any more.
                fleet.adopt(a_table(generation, {3: (2, 1)}, {2}))
            fleet.adopt(table, prepared if how != "at once" else None)
            assert table == new
        fresh = FleetState(PopId("ams"), lambda: 1.0)
        assert table is not None
        fresh.adopt(table)
        assert known(fleet) == known(fresh)


def test_a_change_marks_only_its_replica_as_out_of_date() -> None:
    fleet = FleetState(PopId("ams"), lambda: 1.0)
    table = a_table(1, {1: (0, 0), 2: (0, 1), 3: (1, 1)}, {0, 1})
    fleet.adopt(table)
    for number in (0, 1):
        routing_of(fleet, number).take_changed()
    fleet.adopt(a_table(2, {1: (0, 2), 2: (0, 1), 3: (1, 1)}, {0, 1}))
    assert routing_of(fleet, 0).changed == {"r01"}
    assert not routing_of(fleet, 1).changed
    fleet.note_change(ReplicaId("r03"))
    fleet.note_change(ReplicaId("unknown"))
    assert routing_of(fleet, 1).changed == {"r03"}


def test_a_deployment_starts_from_its_models_cost_of_depth() -> None:
    fleet = FleetState(PopId("ams"), lambda: 1.0)
    table = a_table(1, {1: (0, 0), 2: (0, 1)}, {0, 1})

    def with_cost(generation: int, cost: float) -> RouteTable:
        entries = tuple(
            msgspec.structs.replace(entry, depth_cost_per_token=cost) for entry in table.deployments
        )
        return msgspec.structs.replace(
            table, generation=Generation(generation), deployments=entries
        )

    fleet.adopt(with_cost(1, 2e-5))
    deployment = routing_of(fleet, 0)
    assert deployment.replicas.depth_cost.per_token == 2e-5
    assert deployment.prefill_replicas.table.depth_cost.per_token == 2e-5
    fleet.adopt(with_cost(2, 4e-5))
    assert routing_of(fleet, 0) is deployment
    assert deployment.replicas.depth_cost.per_token == 4e-5, "a rollout to another model"


def test_nodes_are_given_their_replicas_in_slices() -> None:
    """Ten thousand replicas that come or go at once take five milliseconds."""
    fleet = FleetState(PopId("ams"), lambda: 1.0)
    full = a_table(1, {number: (0, number) for number in range(8)}, {0})
    for table in (full, a_table(2, {}, {0}), a_table(3, {1: (0, 1)}, {0})):
        prepared = TableIndexes(fleet.directory, table)
        nodes = len(prepared.replicas_by_node)
        for _ in prepared.steps(1):
            assert abs(len(prepared.replicas_by_node) - nodes) <= 1
            nodes = len(prepared.replicas_by_node)
        fleet.adopt(table, prepared)
        assert len(fleet.directory.nodes) == len(table.routes)


def test_what_is_known_of_very_many_replicas_is_dropped_in_slices() -> None:
    """A scheduler that takes over may drop ten thousand at once: that took 25 milliseconds."""
    fleet = FleetState(PopId("ams"), lambda: 1.0)
    count = 3 * REPLICAS_FORGOTTEN_AT_ONCE
    numbers = range(1, 2 * count, 2)
    fleet.adopt(a_table(1, {number: (0, number) for number in numbers}, {0}))
    for number in numbers:
        fleet.in_flight.record_report(ReplicaId(f"r{number:02d}"), 0, 500, 1.0)
        fleet.nodes.record_round_trip(NodeId(f"n{number}"), 1.0, 1.0)
    fleet.adopt(a_table(2, {}, {0}))
    known_max = count - REPLICAS_FORGOTTEN_AT_ONCE
    nodes = {trip.node_id for trip in fleet.nodes.round_trips()}
    assert len([number for number in numbers if reported_at(fleet, number)]) == known_max
    assert len(nodes) == known_max
    # One that comes back in time is not forgotten, and the others are a slice at a time.
    returned = min(n for n in numbers if reported_at(fleet, n) and NodeId(f"n{n}") in nodes)
    fleet.adopt(a_table(3, {returned: (0, returned)}, {0}))
    while fleet.forget_removed():
        known_max -= REPLICAS_FORGOTTEN_AT_ONCE
        assert len([number for number in numbers if reported_at(fleet, number)]) <= known_max + 1
    assert [number for number in numbers if reported_at(fleet, number)] == [returned]
    assert [trip.node_id for trip in fleet.nodes.round_trips()] == [f"n{returned}"]


def reported_at(fleet: FleetState, number: int) -> int:
    """Return the tokens that a replica has reported."""
    return fleet.in_flight.tokens_at(ReplicaId(f"r{number:02d}"), 1.0).others_decode_tokens


def test_a_deployment_is_known_once_it_is_used() -> None:
    """A first table of a thousand deployments took seven milliseconds to adopt."""
    fleet = FleetState(PopId("ams"), lambda: 1.0)
    deployments = set(range(100))
    fleet.adopt(a_table(1, {number: (number, number) for number in deployments}, deployments))
    assert not fleet._deployments
    assert set(routing_of(fleet, 7).replicas.slots) == routing_of(fleet, 7).changed == {"r07"}
    assert len(fleet._deployments) == 1
    # One that is not in the table is not kept, even if a replica of it is.
    fleet.adopt(a_table(2, {7: (7, 7), 8: (8, 8)}, {8}))
    assert not routing_of(fleet, 7).replicas.slots
    assert not fleet._deployments
