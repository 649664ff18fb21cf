"""Both versions of a rollout are planned as two deployments and joined again."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from isochrone.wire.client_keys.key_table import KeyTable
from isochrone.wire.ids import DeploymentId, Epoch, Generation, ModelId, NodeId, PopId
from isochrone.wire.models.model import EngineSettings
from isochrone.wire.peers.assignment import Role
from isochrone.wire.peers.rollout import RolloutSpec, RolloutState, RolloutStep
from isochrone.wire.peers.routes import RolloutEntry
from scheduler.decide.cluster import ClusterState, DemandRate, StartFailures
from scheduler.decide.membership import judge_liveness
from scheduler.decide.placement.rollout_split import plan_fleet, split_rollouts
from scheduler.decide.routing import build_route_table
from scheduler.decide.whatif import explain_placement
from tests.builders import a_cluster, a_deployment, a_model, a_node, a_placement
from tests.unit.scheduler.test_rollout import a_rollout

ENGINE = EngineSettings(driver="mock", kv_memory_bytes=0, tokens_in_flight_max=77)
AMS = PopId("ams")


def rolling(*steps: RolloutStep, **fields: Any) -> ClusterState:
    spec = RolloutSpec(
        model_id=ModelId("m2"), engine=ENGINE, steps=steps or (RolloutStep(share=0.25),)
    )
    state = fields.pop("state", RolloutState.RUNNING)
    defaults: dict[str, Any] = {
        "nodes": tuple(a_node(f"{pop}-{n}", pop) for pop in ("ams", "sin") for n in (1, 2, 3)),
        "models": (a_model(), a_model("m2")),
        "deployments": (a_deployment(replicas_min=2, replicas_max=8),),
        "placements": (a_placement("o1", "ams-1"), a_placement("o2", "sin-1")),
        "rollouts": (a_rollout(spec=spec, state=state),),
    }
    return a_cluster(**{**defaults, **fields})


def demand(pop: str, requests: float) -> DemandRate:
    return DemandRate(
        deployment_id=DeploymentId("d"),
        pop=PopId(pop),
        requests_per_s=requests,
        uncached_tokens_per_s=100 * requests,
        output_tokens_per_s=10 * requests,
    )


def test_the_new_version_starts_where_the_old_one_runs_and_the_old_one_stays() -> None:
    plan = plan_fleet(rolling())
    assert plan.starts
    assert not plan.endings
    for start in plan.starts:
        assert start.spec.deployment_id == "d"
        assert start.spec.version == 2
        assert start.spec.model_id == "m2"
        assert start.spec.engine == ENGINE
        assert start.spec.replica_id.startswith("d-v2-7-")
        assert start.node_id[:3] in ("ams", "sin")


def test_with_both_versions_warm_the_plan_is_stable() -> None:
    new = (a_placement("n1", "ams-3", version=2), a_placement("n2", "sin-3", version=2))
    cluster = rolling(RolloutStep(share=0.75))
    cluster = msgspec.structs.replace(cluster, placements=(*cluster.placements, *new))
    plan = plan_fleet(cluster)
    assert not plan.starts
    assert not plan.endings


@pytest.mark.parametrize("state", ["loading", "failed"])
@pytest.mark.parametrize("pops", [(), ("sin",)])
def test_the_new_version_goes_on_serving_where_the_old_one_restarts(
    state: str, pops: tuple[str, ...]
) -> None:
    """Else the crash of one replica would leave its PoP without any."""
    first = "sin-2" if pops else "ams-3"
    new = (a_placement("n1", first, version=2), a_placement("n2", "sin-3", version=2))
    old = (a_placement("o1", "ams-1"), a_placement("o2", "sin-1", state=state))
    step = RolloutStep(share=0.75, pops=tuple(map(PopId, pops)))
    plan = plan_fleet(rolling(step, placements=(*old, *new)))
    assert [ending.replica_id for ending in plan.endings] == ["o2"] * (state == "failed")
    assert {start.spec.version for start in plan.starts} <= {1}


def test_a_new_version_with_roles_has_a_replica_of_each_at_the_smallest_share() -> None:
    for driver, generates in (("embedded", Role.UNIFIED), ("sglang", Role.DECODE)):
        engine = EngineSettings(driver=driver, kv_memory_bytes=1 << 20)
        old = a_deployment(
            engine=engine,
            roles="prefill=1,decode=1",
            replicas_min=2,
            replicas_max=8,
            allow=("ams",),
        )
        spec = RolloutSpec(model_id=ModelId("m2"), engine=engine, steps=(RolloutStep(share=0.01),))
        cluster = rolling(
            deployments=(old,),
            placements=(
                a_placement("o1", "ams-1", role=generates),
                a_placement("o2", "ams-2", role=Role.PREFILL),
            ),
            rollouts=(a_rollout(spec=spec),),
        )
        new = [start.spec for start in plan_fleet(cluster).starts if start.spec.version == 2]
        assert sorted(spec.role for spec in new) == sorted([generates, Role.PREFILL]), driver


def auto_roles_of_a_canary(share: float, uncached_per_s: float, old: Sequence[Role]) -> list[Role]:
    """Return the roles of the replicas that a new version starts with."""
    engine = EngineSettings(driver="embedded", kv_memory_bytes=1 << 20)
    deployment = a_deployment(
        engine=engine, roles="auto", replicas_min=4, replicas_max=8, allow=("ams",)
    )
    spec = RolloutSpec(model_id=ModelId("m2"), engine=engine, steps=(RolloutStep(share=share),))
    read = msgspec.structs.replace(
        demand("ams", 1.0), uncached_tokens_per_s=uncached_per_s, output_tokens_per_s=10.0
    )
    cluster = rolling(
        nodes=tuple(a_node(f"ams-{n}", "ams") for n in range(1, 9)),
        deployments=(deployment,),
        placements=tuple(
            a_placement(f"o{n}", f"ams-{n}", role=role) for n, role in enumerate(old, 1)
        ),
        rollouts=(a_rollout(spec=spec),),
        demand=(read,),
    )
    plan = plan_fleet(cluster)
    assert not plan.endings
    return sorted(start.spec.role for start in plan.starts if start.spec.version == 2)


def test_a_new_version_with_auto_has_the_roles_of_the_mix_like_the_old_one() -> None:
    unified, prefill = Role.UNIFIED, Role.PREFILL
    pairs = (unified, prefill, Role.DECODE, prefill)
    # Mostly prompts: also at the smallest share there is a replica of each, to compare with.
    assert auto_roles_of_a_canary(0.01, 10_000.0, pairs) == [prefill, unified]
    assert prefill in auto_roles_of_a_canary(0.5, 10_000.0, pairs)
    # Mostly output: both versions are unified, and one replica is enough.
    assert auto_roles_of_a_canary(0.01, 10.0, (unified,) * 4) == [unified]


def test_demand_is_split_by_the_share_in_the_cities_of_the_step() -> None:
    step = RolloutStep(share=0.25, pops=(AMS,))
    cluster = split_rollouts(rolling(step, demand=(demand("ams", 8.0), demand("sin", 4.0))))
    asked = {(row.deployment_id, row.pop): row.requests_per_s for row in cluster.demand}
    assert asked == {("d", "ams"): 6.0, ("d~2", "ams"): 2.0, ("d", "sin"): 4.0}


def test_an_ended_rollout_does_not_change_the_cluster_state() -> None:
    for state in (RolloutState.REVERTED, RolloutState.ABORTED, RolloutState.DONE):
        cluster = rolling(state=state)
        assert split_rollouts(cluster) is cluster


def test_a_reverted_version_is_ended_by_the_planner() -> None:
    new = a_placement("n1", "ams-3", version=2)
    cluster = rolling(rollouts=())
    cluster = msgspec.structs.replace(cluster, placements=(*cluster.placements, new))
    assert [ending.replica_id for ending in plan_fleet(cluster).endings] == ["n1"]


def test_unmet_requirements_use_the_deployments_own_name() -> None:
    cluster = rolling(models=(a_model(), a_model("m2", gib=500)))
    unmet = plan_fleet(cluster).unmet
    assert {one.deployment_id for one in unmet} == {"d"}
    assert all(one.reason.startswith("version 2: cannot place") for one in unmet)


def test_residency_holds_for_the_new_version() -> None:
    allowed = a_deployment(replicas_min=2, replicas_max=8, allow=("SG",))
    cluster = rolling(deployments=(allowed,), placements=(a_placement("o2", "sin-1"),))
    plan = plan_fleet(cluster)
    new = [start for start in plan.starts if start.spec.version == 2]
    assert new
    assert all(start.node_id.startswith("sin") for start in new)


def test_routers_get_the_share_and_each_versions_limits() -> None:
    new = a_placement("n1", "ams-3", version=2)
    cluster = rolling(RolloutStep(share=0.25, pops=(AMS,)))
    cluster = msgspec.structs.replace(cluster, placements=(*cluster.placements, new))
    view = judge_liveness(cluster.nodes, cluster.acting_for_s, None)
    table = build_route_table(cluster, view, KeyTable(), generation=Generation(1), epoch=Epoch(1))
    (entry,) = table.deployments
    assert entry.rollout == RolloutEntry(version=2, share=0.25, pops=(AMS,))
    limits = {route.replica_id: route.tokens_in_flight_max for route in table.routes}
    assert limits == {"o1": 32_768, "o2": 32_768, "n1": 77}


@pytest.mark.parametrize(
    ("version", "is_ending", "entry"),
    [
        (2, False, RolloutEntry(version=2, share=0.0)),
        (2, True, None),
        (1, False, None),
    ],
)
def test_a_version_that_was_rolled_back_gets_no_share_while_it_has_replicas(
    version: int, is_ending: bool, entry: RolloutEntry | None
) -> None:
    """Else it would get more requests than before, until the planner has ended its replicas."""
    new = a_placement("n1", "ams-3", version=version, is_ending=is_ending)
    cluster = rolling(rollouts=())
    cluster = msgspec.structs.replace(cluster, placements=(*cluster.placements, new))
    view = judge_liveness(cluster.nodes, cluster.acting_for_s, None)
    table = build_route_table(cluster, view, KeyTable(), generation=Generation(1), epoch=Epoch(1))
    assert [deployment.rollout for deployment in table.deployments] == [entry]


def test_failures_of_the_new_version_back_off_that_version_only() -> None:
    given_up = StartFailures(
        deployment_id=DeploymentId("d"),
        version=2,
        times=9,
        ago_s=1.0,
        node_ids=(NodeId("ams-1"),),
        reason="broke 6 times",
    )
    one_left = (a_placement("o1", "ams-1"),)
    plan = plan_fleet(rolling(given_up=(given_up,), placements=one_left))
    assert [start.spec.version for start in plan.starts] == [1]
    assert ["version 2: cannot place" in unmet.reason for unmet in plan.unmet] == [True]


def test_explain_shows_a_citys_whole_demand_over_both_versions() -> None:
    explained = explain_placement(rolling(demand=(demand("ams", 8.0),)), DeploymentId("d"))
    assert explained is not None
    assert [row.requests_per_s for row in explained.cities] == [8.0]


def test_explain_covers_both_versions_and_no_other_deployment() -> None:
    cluster = rolling(
        deployments=(a_deployment(replicas_min=2), a_deployment("d-x", replicas_max=1)),
        placements=(
            a_placement("o1", "ams-1"),
            a_placement("n1", "ams-2", version=2, reason="new"),
            *(a_placement(f"d-x-{n}", f"sin-{n}", "d-x") for n in (1, 2)),
        ),
    )
    explained = explain_placement(cluster, DeploymentId("d"))
    assert explained is not None
    assert [(row.replica_id, row.reason) for row in explained.here] == [("o1", ""), ("n1", "new")]
    assert all("d-x" not in line for line in explained.next_moves)
    other = explain_placement(cluster, DeploymentId("d-x"))
    assert other is not None
    assert [line.partition(" on ")[0] for line in other.next_moves] == ["end d-x-1"]
