"""Concurrent writers do not deadlock, and a dead writer does not block the others."""

import asyncio

import msgspec
import pytest

from isochrone.wire.ids import DeploymentId, ModelId, NodeId, PopId
from isochrone.wire.peers.control import PeerRole
from isochrone.wire.peers.report import ReplicaProfile
from scheduler.decide.cluster import PlacementPlan, ReplicaStart
from scheduler.store import catalogue
from scheduler.store import pool as pools
from scheduler.store.fleet.identities import add_peer
from scheduler.store.fleet.nodes import ReportEffect, record_report
from scheduler.store.fleet.plans import commit_plan
from scheduler.store.lease import acquire_or_renew_lease, assert_epoch, read_cluster_row
from scheduler.store.pool import UNAVAILABLE, Connection, Pool, open_pool, transaction, using
from tests.builders import a_model, a_replica_report, a_report, a_spec, believed
from tests.integration.scheduler.test_store import begun, reported
from tests.locks import locked_out


async def test_a_plan_and_a_change_of_a_node_do_not_deadlock(pool: Pool) -> None:
    epoch = await begun(pool)
    await reported(pool, epoch)
    async with using(pool) as connection:
        based_on = (await read_cluster_row(connection)).generation
    start = ReplicaStart(node_id=NodeId("n1"), spec=a_spec(), reason="test")

    async def place() -> bool:
        async with transaction(pool) as connection:
            return await commit_plan(
                connection, PlacementPlan(based_on=based_on, starts=(start,)), epoch
            )

    async with transaction(pool) as connection:
        # A report or a drain locks the node first, then the cluster's generation.
        await catalogue.set_draining(connection, "n1", True)
        placing = asyncio.create_task(place())
        await locked_out(pool)
        await catalogue.bump_generation(connection)
    assert not await placing, "the generation has moved"


async def test_a_writer_that_died_in_a_transaction_does_not_block_the_next(
    database_dsn: str, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    epoch = await begun(pool, "s1")
    monkeypatch.setattr(pools, "IDLE_TIMEOUT_S", 0.5)
    dying = await open_pool(database_dsn, size_max=1)
    with pytest.raises(UNAVAILABLE):
        async with transaction(dying) as connection:
            await assert_epoch(connection, epoch)
            async with using(pool) as other:
                await other.execute("UPDATE lease SET expires_at = '-infinity'")
                taken = await asyncio.wait_for(acquire_or_renew_lease(other, "s2"), 5.0)
            assert taken is not None
            assert taken.epoch == epoch + 1
            await connection.execute("UPDATE cluster SET generation = generation + 1")
    await dying.close()


async def test_two_nodes_with_an_unknown_deployment_are_both_adopted(pool: Pool) -> None:
    epoch = await begun(pool)
    async with transaction(pool) as connection:
        await add_peer(connection, PeerRole.AGENT, "n2", PopId("ams"))
        await connection.execute("UPDATE node SET boot_id = 'boot-1'")

    async def report(connection: Connection, node: str) -> ReportEffect:
        spec = a_spec(f"r-{node}", deployment_id=DeploymentId("lost"), name="lost")
        told = a_report(node, replicas=(a_replica_report(spec),))
        return await record_report(connection, epoch, told, believed)

    async def second() -> ReportEffect:
        async with transaction(pool) as connection:
            return await report(connection, "n2")

    async with transaction(pool) as connection:
        assert (await report(connection, "n1")).adopted == 1
        reporting = asyncio.create_task(second())
        await locked_out(pool)
    assert (await reporting).adopted == 1


async def test_two_nodes_that_measured_the_same_models_do_not_deadlock(pool: Pool) -> None:
    epoch = await begun(pool)
    async with transaction(pool) as connection:
        await add_peer(connection, PeerRole.AGENT, "n2", PopId("ams"))
        await connection.execute("UPDATE node SET boot_id = 'boot-1'")
        for model in ("a", "b"):
            await catalogue.put_model(connection, a_model(model), None)

    async def measured(connection: Connection, node: str, seq: int, *models: str) -> ReportEffect:
        replicas = [
            msgspec.structs.replace(
                a_replica_report(a_spec(f"{node}-{model}", model_id=ModelId(model))),
                profile=ReplicaProfile(decode_tokens_per_s=10.0 * seq),
            )
            for model in models
        ]
        return await record_report(
            connection, epoch, a_report(node, seq=seq, replicas=tuple(replicas)), believed
        )

    async def second() -> ReportEffect:
        async with transaction(pool) as connection:
            return await measured(connection, "n2", 1, "b", "a")

    async with transaction(pool) as connection:
        await measured(connection, "n1", 1, "a")
        reporting = asyncio.create_task(second())
        await locked_out(pool)
        await measured(connection, "n1", 2, "a", "b")
    assert (await reporting).adopted == 2
