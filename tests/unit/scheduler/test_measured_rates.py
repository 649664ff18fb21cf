"""The rates that the planner counts on, when a node is wrong or lies."""

import msgspec
import pytest

from isochrone.wire.ids import DeploymentId, PopId
from isochrone.wire.peers.report import ReplicaProfile
from scheduler.decide.capacity.measured_rates import measured_rates
from scheduler.decide.cluster import ClusterState, DemandRate, MeasuredProfile
from tests.builders import a_cluster, a_deployment, a_node, a_placement
from tests.unit.scheduler.test_pop_roles import settled

HONEST = ReplicaProfile(load_s=5.0, prefill_tokens_per_s=1000.0, decode_tokens_per_s=100.0)
FASTEST = ReplicaProfile(load_s=1e-3, prefill_tokens_per_s=1e9, decode_tokens_per_s=1e9)
SLOWEST = ReplicaProfile(load_s=1e12, prefill_tokens_per_s=1e-3, decode_tokens_per_s=1e-3)


def a_fleet(*profiles: ReplicaProfile, last: ReplicaProfile | None = None) -> ClusterState:
    """Return a busy deployment with one replica on each node; `last` is what the store has kept."""
    nodes = tuple(a_node(f"ams-{number}", "ams") for number in range(len(profiles)))
    placements = tuple(
        a_placement(f"r-{node.node_id}", node.node_id, profile=profile)
        for node, profile in zip(nodes, profiles, strict=True)
    )
    demand = DemandRate(
        deployment_id=DeploymentId("d"),
        pop=PopId("ams"),
        requests_per_s=20.0,
        uncached_tokens_per_s=200.0,
        output_tokens_per_s=330.0,
    )
    kept = MeasuredProfile(model_id="m", device_class="cpu", profile=last or profiles[-1])
    return a_cluster(
        nodes=nodes,
        deployments=(a_deployment(replicas_min=1, replicas_max=12),),
        placements=placements,
        demand=(demand,),
        profiles=(kept,),
    )


@pytest.mark.parametrize("lie", [FASTEST, SLOWEST], ids=["fastest", "slowest"])
def test_one_node_that_lies_changes_no_plan(lie: ReplicaProfile) -> None:
    honest = settled(a_fleet(HONEST, HONEST, HONEST, HONEST))
    lied = settled(a_fleet(HONEST, HONEST, HONEST, lie))
    assert len(honest.placements) >= 4
    assert len(lied.placements) == len(honest.placements)


def test_of_two_nodes_the_slower_one_counts() -> None:
    rates = measured_rates(a_fleet(HONEST, FASTEST))
    assert rates["m", "cpu"].decode_tokens_per_s == 100.0


def test_a_node_counts_once_however_many_replicas_it_reports() -> None:
    fleet = a_fleet(HONEST, HONEST, HONEST)
    more = tuple(a_placement(f"x{number}", "liar", profile=FASTEST) for number in range(9))
    liar = a_node("liar", "ams")
    crowded = msgspec.structs.replace(
        fleet, nodes=(*fleet.nodes, liar), placements=(*more, *fleet.placements)
    )
    assert measured_rates(crowded)["m", "cpu"] == HONEST


def test_what_was_kept_counts_where_no_node_measures_now() -> None:
    unmeasured = ReplicaProfile(decode_tokens_per_s=50.0)
    fleet = a_fleet(unmeasured, unmeasured, last=HONEST)
    assert measured_rates(fleet)["m", "cpu"] == HONEST
    assert measured_rates(a_fleet(last=HONEST)) == {("m", "cpu"): HONEST}
