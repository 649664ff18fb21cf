"""What the planner keeps is what it would compute again, and it computes nothing in vain."""

from itertools import combinations
from random import Random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from isochrone.wire.ids import DeploymentId, NodeId, PopId
from isochrone.wire.models.model import EngineSettings
from ops.sim.recost import empty_draft
from ops.sim.small_worlds import small_world
from scheduler.decide.capacity.device_classes import GIB
from scheduler.decide.cluster import DemandRate
from scheduler.decide.demand.demand_rates import demand_by_deployment
from scheduler.decide.membership.liveness import judge_liveness
from scheduler.decide.placement.fleet import fleet_capacity
from scheduler.decide.placement.planner import PlanLimits, plan_deployments
from scheduler.decide.placement.search import eviction
from scheduler.decide.placement.search.blocked_gains import BlockedGain
from scheduler.decide.placement.search.deployment_state import DeploymentState, PlannedReplica
from scheduler.decide.placement.search.draft import PlacementDraft
from scheduler.decide.placement.search.eviction import net_loss
from scheduler.decide.placement.search.greedy_fill import fill
from scheduler.decide.placement.search.packing import PackedReplica, SitePacking
from scheduler.decide.placement.search.recombine import LAID_OUT_PER_DEVICE_MAX
from tests.builders import PLACES, a_cluster, a_deployment, a_device, a_model, a_node, a_placement
from tests.unit.scheduler.test_plan import a_demand


def assert_slots_are_tightest(draft: PlacementDraft, count: int) -> None:
    """Compare what the ledger keeps about free devices with its free memory."""
    fleet, free = draft.fleet, draft.ledger.free
    largest = draft.ledger.largest_free(count)
    for site in fleet.sites:
        by_node = {
            node_id: sorted(free[key] for key in fleet.table.healthy_devices[site.index, node_id])
            for node_id in site.nodes
        }
        expected = max((f[-count] for f in by_node.values() if len(f) >= count), default=0)
        assert largest[site.index] == expected
        for state in draft.states:
            nodes = state.needs.eligible_nodes.get(site.index, ())
            found = draft.ledger.best_candidate(site.index, nodes, state.needs)
            if found is None or state.needs.deployment.engine.nodes > 1:
                continue
            part = found.slot.parts[0]
            taken = sorted(free[part.node.node_id, device] for device in part.device_ids)
            fitting = [f for f in by_node[part.node.node_id] if f >= found.slot.memory_bytes]
            assert taken == fitting[: len(taken)]


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 400), choices=st.randoms(use_true_random=False))
def test_free_devices_are_in_order_after_each_slot_that_is_taken_or_given_back(
    seed: int, choices: Random
) -> None:
    draft = empty_draft(small_world(seed), PlanLimits(starts_max=10**6))
    for _ in range(10):
        state = draft.states[choices.randrange(len(draft.states))]
        new = state.new_replicas()
        if new and choices.random() < 0.4:
            draft.remove(new[0])
        elif state.needs.eligible_nodes:
            sites = list(state.needs.eligible_nodes)
            gain = draft.gain_at(state, sites[choices.randrange(len(sites))])
            if gain.candidate is not None:
                draft.take(state, gain)
        for count in (1, 2):
            assert_slots_are_tightest(draft, count)


def test_the_fill_computes_no_gain_where_another_deployment_has_taken_the_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = a_cluster(
        nodes=(a_node("ams-1", "ams", 2.0),),
        deployments=(a_deployment("d"), a_deployment("e")),
        demand=(a_demand("ams", 9.0), a_demand("ams", 3.0, "e")),
    )
    draft = empty_draft(cluster, PlanLimits())
    computed: list[DeploymentId] = []
    saves_at = DeploymentState.saves_at

    def counted(state: DeploymentState, site: int) -> float:
        computed.append(state.deployment_id)
        return saves_at(state, site)

    monkeypatch.setattr(DeploymentState, "saves_at", counted)
    fill(draft)
    assert [len(state.replicas) for state in draft.states] == [1, 0]
    assert DeploymentId("e") not in computed
    # A swap may still find it a slot: what it would gain is known by a bound, and then computed.
    blocked = list(draft.blocked.drain(draft.states, [], draft.net_without_slot))
    assert DeploymentId("e") in [gain.state.deployment_id for gain in blocked]


def test_no_more_tiny_replicas_are_laid_out_than_a_machine_may_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of replicas of one byte ten thousand fit on a device, and a plan tried to lay out all."""
    tiny = EngineSettings(driver="mock", memory_bytes=1)
    deployments = [a_deployment(name, engine=tiny, replicas_max=10_000) for name in ("d", "e")]
    nodes = tuple(a_node(f"{pop}-1", pop) for pop in ("ams", "sin"))
    cluster = a_cluster(
        nodes=nodes,
        deployments=tuple(deployments),
        demand=tuple(a_demand(pop, 500.0, name) for pop in ("ams", "sin") for name in ("d", "e")),
    )
    most_replicas = most_packed = 0
    add, pack = DeploymentState.add, SitePacking.pack

    def counted_add(state: DeploymentState, replica: PlannedReplica) -> None:
        nonlocal most_replicas
        add(state, replica)
        most_replicas = max(most_replicas, len(state.replicas))

    def counted_pack(packing: SitePacking, counts: tuple[int, ...]) -> list[PackedReplica] | None:
        nonlocal most_packed
        most_packed = max(most_packed, *counts)
        return pack(packing, counts)

    monkeypatch.setattr(DeploymentState, "add", counted_add)
    monkeypatch.setattr(SitePacking, "pack", counted_pack)
    plan = plan_deployments(cluster)
    assert len(plan.starts) == PlanLimits().starts_max
    assert 0 < most_replicas <= len(nodes) * LAID_OUT_PER_DEVICE_MAX
    assert 0 < most_packed <= LAID_OUT_PER_DEVICE_MAX


@pytest.mark.parametrize(("fixed_gib", "losses"), [(4.0, 0), (3.0, 1)])
def test_losses_are_computed_only_on_nodes_where_enough_memory_could_be_freed(
    fixed_gib: float, losses: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The large replica needs 4.25 GiB of 8; one of 1.25 GiB on both devices could leave, another
    stays."""
    devices = (a_device(8.0, "a"), a_device(8.0, "b"))
    both = tuple(device.device_id for device in devices)
    cluster = a_cluster(
        nodes=(a_node("ams-1", "ams", devices=devices),),
        models=(a_model(), a_model("large", 4.0)),
        deployments=(a_deployment("d"), a_deployment("e", "large"), a_deployment("f")),
        placements=(
            a_placement("r1", "ams-1", device_ids=both),
            a_placement("r2", "ams-1", "f", device_ids=both, memory_bytes=int(fixed_gib * GIB)),
        ),
    )
    draft = empty_draft(cluster, PlanLimits())
    small, large, _ = draft.states
    computed: list[PlannedReplica] = []

    def counted(replica: PlannedReplica) -> float:
        computed.append(replica)
        return net_loss(replica)

    monkeypatch.setattr(eviction, "net_loss", counted)
    blocked = BlockedGain(state=large, site=0, net=1e9)
    found = eviction.cheapest_evictions(draft, blocked, {NodeId("ams-1"): small.replicas})
    assert found == [small.replicas] * losses
    assert computed == small.replicas * losses


def test_round_trips_are_kept_for_the_first_sets_of_sites_and_equal_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet_capacity, "LATENCIES_KEPT_MAX", 3)
    pops = sorted(PLACES)
    cluster = a_cluster(nodes=tuple(a_node(f"{pop}-1", pop) for pop in pops))
    view = judge_liveness(cluster.nodes, cluster.acting_for_s)
    fleet = fleet_capacity.FleetCapacity(cluster, view)
    kept = 0
    for size in range(1, len(pops) + 1):
        for allowed in combinations(pops, size):
            sites = fleet.eligible_sites(a_deployment(allow=allowed), a_model(), 1)
            assert [fleet.sites[site].pop for site in sites.numbers] == list(allowed)
            expected = fleet.table.latency.by_city[:, sites.numbers]
            np.testing.assert_array_equal(sites.latency_ms, expected)
            np.testing.assert_array_equal(sites.nearest_ms, expected.min(axis=1))
            kept += sites.latency_ms is sites.latency_ms
    assert kept == 3


@settings(deadline=None, max_examples=100)
@given(
    rows=st.lists(
        st.builds(
            DemandRate,
            deployment_id=st.sampled_from((DeploymentId("d"), DeploymentId("e"))),
            pop=st.sampled_from((PopId("ams"), PopId("iad"), PopId("ams"), PopId("xyz"))),
            requests_per_s=st.sampled_from((1.5, 2.5, 3.5, 4.5, 0.0, 1e12)),
            output_tokens_per_s=st.sampled_from((1.0, 2.0, 3.0, 4.0, -1.0, float("nan"))),
            refused_per_s=st.sampled_from((0.0, 0.5)),
        ),
        max_size=6,
    )
)
@example([a_demand("ams", rate, name) for name, rate in (("e", 1.0), ("d", 2.0), ("e", 3.0))])
def test_demand_that_is_read_in_place_is_what_it_is_when_rows_are_left_out(
    rows: list[DemandRate],
) -> None:
    index = {PopId("ams"): 0, PopId("iad"): 1}
    others = [DemandRate(deployment_id=DeploymentId("a"), pop=PopId("xyz"))]
    found, expected = demand_by_deployment(rows, index), demand_by_deployment(rows + others, index)
    for name in (DeploymentId("d"), DeploymentId("e")):
        for column, other in zip(found[name], expected[name], strict=True):
            np.testing.assert_array_equal(column, other)
