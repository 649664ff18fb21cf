"""A replica over two nodes in the store: placed, reported, ended and released part by part."""

from typing import Any

import msgspec

from isochrone.wire.ids import (
    BootId,
    ClusterId,
    DeploymentId,
    Epoch,
    Generation,
    NodeId,
    PopId,
    ReplicaId,
)
from isochrone.wire.models.model import EngineSettings
from isochrone.wire.peers.assignment import Assignment
from isochrone.wire.peers.control import PeerRole
from isochrone.wire.peers.report import Refusal, Report
from scheduler.decide.cluster import ClusterState, PlacementPlan
from scheduler.decide.membership import NodeContact
from scheduler.decide.placement.fleet.slots import free_memory
from scheduler.decide.placement.planner import plan_deployments
from scheduler.store import catalogue, deployments
from scheduler.store.cluster import read_cluster
from scheduler.store.fleet.identities import add_peer
from scheduler.store.fleet.nodes import (
    ReportEffect,
    read_assignment,
    record_registration,
    record_report,
)
from scheduler.store.fleet.plans import commit_plan
from scheduler.store.pool import Pool, transaction
from scheduler.store.rollouts import read_starts
from tests.builders import (
    GIB,
    a_certificate,
    a_deployment,
    a_device,
    a_replica_report,
    a_report,
    believed,
)
from tests.integration.scheduler.test_store import begun
from tests.unit.scheduler.test_rollout import a_rollout

NODES = ("n1", "n2")


async def two_nodes(pool: Pool) -> Epoch:
    """A PoP of two nodes, and a deployment that fits only over both."""
    epoch = await begun(pool)
    async with transaction(pool) as connection:
        await add_peer(connection, PeerRole.AGENT, "n2", PopId("ams"))
        for name in NODES:
            await record_registration(
                connection,
                PeerRole.AGENT,
                name,
                BootId("boot-1"),
                Generation(0),
                a_certificate(name),
                "",
            )
        engine = EngineSettings(driver="mock", kv_memory_bytes=0, devices=2, nodes=2)
        await connection.execute("UPDATE deployment SET deleted_at = clock_timestamp()")
        await deployments.add_deployment(connection, a_deployment("g", engine=engine))
    for name in NODES:
        await told(pool, epoch, a_report(name, devices=(a_device(1.0),), rank_ports=(9400, 9409)))
    return epoch


async def told(pool: Pool, epoch: Epoch, report: Report) -> ReportEffect:
    async with transaction(pool) as connection:
        return await record_report(connection, epoch, report, believed)


async def cluster_state(pool: Pool) -> ClusterState:
    async with transaction(pool, isolation="repeatable_read") as connection:
        return await read_cluster(connection, NodeContact(acting_for_s=1000.0))


async def committed(pool: Pool, epoch: Epoch, decided: PlacementPlan) -> None:
    async with transaction(pool) as connection:
        assert await commit_plan(connection, decided, epoch)


async def assigned(pool: Pool, epoch: Epoch) -> dict[str, Assignment]:
    async with transaction(pool) as connection:
        return {
            name: await read_assignment(
                connection, NodeId(name), cluster_id=ClusterId("c1"), epoch=epoch
            )
            for name in NODES
        }


async def test_each_node_gets_its_part_and_the_cluster_state_has_one_replica(pool: Pool) -> None:
    epoch = await two_nodes(pool)
    await committed(pool, epoch, plan_deployments(await cluster_state(pool)))
    orders = await assigned(pool, epoch)
    groups = {name: order.replicas[0].group for name, order in orders.items()}
    assert {name: group.place for name, group in groups.items() if group} == {"n1": 0, "n2": 1}
    (placement,) = (await cluster_state(pool)).placements
    assert placement.node_ids == NODES
    group = groups["n1"]
    assert group is not None
    assert placement.rank_port == group.port
    # What each of them reports is known of its part.
    for name in NODES:
        spec = orders[name].replicas[0]
        report = a_report(name, 2, devices=(a_device(1.0),), replicas=(a_replica_report(spec),))
        assert (await told(pool, epoch, report)).adopted == 0
    (placement,) = (await cluster_state(pool)).placements
    assert [part.state for part in placement.parts] == ["warm", "warm"]
    async with transaction(pool) as connection:
        views = await catalogue.list_placements(connection, "", 10)
        deployment = await deployments.get_deployment(connection, "g")
    assert [(view.node_id, view.leader_id) for view in views] == [
        ("n1", ""),
        ("n2", placement.replica_id),
    ]
    assert deployment is not None
    assert deployment.replicas == {"warm": 1}


async def test_all_parts_are_ended_together_and_released_one_by_one(pool: Pool) -> None:
    epoch = await two_nodes(pool)
    await committed(pool, epoch, plan_deployments(await cluster_state(pool)))
    async with transaction(pool) as connection:
        await connection.execute("UPDATE deployment SET deleted_at = clock_timestamp()")
    decided = plan_deployments(await cluster_state(pool))
    assert [ending.follower_ids for ending in decided.endings] == [("n2",)]
    await committed(pool, epoch, decided)
    orders = await assigned(pool, epoch)
    assert [len(order.tombstones) for order in orders.values()] == [1, 1]
    for number, name in enumerate(NODES):
        gone = a_report(name, 2, devices=(a_device(1.0),), generation=orders[name].generation)
        assert (await told(pool, epoch, gone)).released == 1
        cluster = await cluster_state(pool)
        free = free_memory(cluster.nodes, cluster.placements)
        assert sum(left == GIB for left in free.values()) == number + 1
    assert not cluster.placements


async def test_a_part_that_comes_back_without_its_leader_is_ended(pool: Pool) -> None:
    epoch = await two_nodes(pool)
    await committed(pool, epoch, plan_deployments(await cluster_state(pool)))
    known = (await assigned(pool, epoch))["n2"].replicas[0]
    assert known.group is not None
    async with transaction(pool) as connection:
        await connection.execute("DELETE FROM placement")
    report = a_report("n2", 2, devices=(a_device(1.0),), replicas=(a_replica_report(known),))
    assert (await told(pool, epoch, report)).adopted == 1
    cluster = await cluster_state(pool)
    assert [p.leader_id for p in cluster.placements] == [known.group.leader_id]
    assert [e.replica_id for e in plan_deployments(cluster).endings] == [
        ReplicaId(f"{known.group.leader_id}.1")
    ]


async def test_a_refused_part_ends_the_replica_and_is_not_placed_again_at_once(
    pool: Pool,
) -> None:
    epoch = await two_nodes(pool)
    await committed(pool, epoch, plan_deployments(await cluster_state(pool)))
    orders = await assigned(pool, epoch)
    leader, part = (orders[name].replicas[0] for name in NODES)
    why = f"cannot run {part.replica_id}: no driver 'mock' here"
    refusals = (Refusal(replica_id=part.replica_id, reason=why, deployment_id=part.deployment_id),)

    def says(name: str, seq: int, **fields: Any) -> Report:
        return a_report(name, seq, devices=(a_device(1.0),), rank_ports=(9400, 9409), **fields)

    waits = says("n1", 2, replicas=(a_replica_report(leader, "loading"),))
    assert (await told(pool, epoch, waits)).adopted == 0
    assert (await told(pool, epoch, says("n2", 2, refusals=refusals))).changed == 1
    assert (await told(pool, epoch, says("n2", 3, refusals=refusals))).changed == 0
    decided = plan_deployments(await cluster_state(pool))
    ((leader_id, reason),) = [(e.replica_id, e.reason) for e in decided.endings]
    assert (leader_id, reason) == (leader.replica_id, f"it failed on n2: {why}")
    await committed(pool, epoch, decided)
    generation = (await assigned(pool, epoch))["n2"].generation
    for name in NODES:
        told_again = refusals if name == "n2" else ()
        gone = says(name, 4, generation=generation, refusals=told_again)
        assert (await told(pool, epoch, gone)).released == 1
    again = plan_deployments(await cluster_state(pool))
    assert not again.starts
    assert f"n2: it refused a replica of this deployment: {why}" in again.unmet[0].reason
    assert (await told(pool, epoch, says("n2", 5, generation=generation))).released == 0
    assert len(plan_deployments(await cluster_state(pool)).starts) == 1


async def test_a_replica_whose_parts_all_fail_has_failed_to_start_once(pool: Pool) -> None:
    """Else a rollout would be reverted after the first of the failures that it allows."""
    epoch = await two_nodes(pool)
    await committed(pool, epoch, plan_deployments(await cluster_state(pool)))
    for name, assignment in (await assigned(pool, epoch)).items():
        failed = a_replica_report(assignment.replicas[0], "failed")
        await told(pool, epoch, a_report(name, 2, devices=(a_device(1.0),), replicas=(failed,)))
    rollout = msgspec.structs.replace(a_rollout(), deployment_id=DeploymentId("g"), to_version=1)
    async with transaction(pool) as connection:
        assert (await read_starts(connection, rollout)).failed == 1
