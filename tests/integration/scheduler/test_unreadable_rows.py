"""A row that cannot be read concerns what it belongs to: all else is planned and published."""

import asyncpg
import pytest

from isochrone.wire.admin import KeyBody
from isochrone.wire.ids import (
    ClusterId,
    DeploymentId,
    Epoch,
    Generation,
    KeyId,
    ModelId,
    NodeId,
    TenantId,
)
from isochrone.wire.models.model import EngineSettings
from isochrone.wire.peers.rollout import RolloutSpec
from scheduler.decide.cluster import ClusterState
from scheduler.decide.membership import NodeContact
from scheduler.decide.placement import plan_fleet
from scheduler.decide.whatif import explain_placement
from scheduler.store import catalogue, deployments
from scheduler.store.accounts import keys
from scheduler.store.cluster import read_cluster
from scheduler.store.fleet.node_reports import NodeReportCache
from scheduler.store.fleet.nodes import read_assignment
from scheduler.store.pool import Pool, transaction
from scheduler.store.rollouts import add_rollout
from tests.builders import a_deployment, a_model, a_replica_report, a_spec
from tests.integration.scheduler.scheduler_parts import expire_lease, scheduler_parts
from tests.integration.scheduler.test_store import begun, planned, reported
from tests.unit.scheduler.test_rollout import a_rollout

HEARD = NodeContact(acting_for_s=1000.0, silent_s={NodeId("n1"): 0.0})

OF_A_DEPLOYMENT = {
    "deployment.engine": "UPDATE deployment SET engine = '[]' WHERE deployment_id = 'd'",
    "deployment.policy": """UPDATE deployment SET policy = '{"replicas_min": "two"}'
        WHERE deployment_id = 'd'""",
    "deployment.deprecation": "UPDATE deployment SET deprecation = '7' WHERE deployment_id = 'd'",
    "model.spec": """UPDATE model SET spec = spec || '{"context_tokens": null}'
        WHERE model_id = 'm'""",
    "rollout.spec": "UPDATE rollout SET spec = '{}'",
    "placement.role": "UPDATE placement SET role = 'conductor'",
    "placement.overcommit": """UPDATE placement SET spec = spec || '{"overcommit": "much"}'""",
    "placement.extra_bytes": """UPDATE placement SET spec = spec || '{"extra_bytes": 1.5}'""",
    "placement.tokens": """UPDATE placement
        SET spec = jsonb_set(spec, '{engine,tokens_in_flight_max}', '[1]')""",
}

REFUSED = (
    "UPDATE pop SET latitude = 'NaN'",
    "UPDATE node SET pop = 'xyz'",
    "UPDATE device SET memory_bytes = -1",
    "UPDATE placement SET state = 'asleep'",
    "UPDATE placement_device SET memory_bytes = NULL",
)
"""Postgres keeps rows of the other tables readable."""


async def two_deployments(pool: Pool) -> None:
    """Deployment `d` of model `m` has a warm replica and a rollout; `e` of `m2` has none yet."""
    epoch = await begun(pool)
    await reported(pool, epoch)
    assert await planned(pool, epoch, a_spec())
    await reported(pool, epoch, seq=2, replicas=(a_replica_report(a_spec()),))
    spec = RolloutSpec(model_id=ModelId("m"), engine=EngineSettings(driver="mock"))
    async with transaction(pool) as connection:
        await catalogue.put_model(connection, a_model("m2"), None)
        await deployments.add_deployment(connection, a_deployment("e", "m2", replicas_min=1))
        assert await add_rollout(connection, a_rollout(spec=spec))


async def read(
    pool: Pool, reports: NodeReportCache | None = None, broken_by: str = "SELECT"
) -> ClusterState:
    """Return the cluster's state; `broken_by` is undone afterwards."""
    async with pool.acquire() as connection:
        attempt = connection.transaction(isolation="repeatable_read")
        await attempt.start()
        try:
            await connection.execute(broken_by)
            return await read_cluster(connection, HEARD, reports)
        finally:
            await attempt.rollback()


async def test_one_deployment_is_left_alone_and_the_others_are_planned(pool: Pool) -> None:
    await two_deployments(pool)
    for name, statement in OF_A_DEPLOYMENT.items():
        cluster = await read(pool, broken_by=statement)
        plan = plan_fleet(cluster)
        assert [start.spec.deployment_id for start in plan.starts] == ["e"], name
        assert not plan.endings, name
        assert [placement.replica_id for placement in cluster.placements] == ["r1"], name
        (reason,) = (unmet.reason for unmet in plan.unmet if unmet.deployment_id == "d")
        assert reason.startswith("cannot read ") and reason.endswith("repair its row"), name
        explained = explain_placement(cluster, DeploymentId("d"))
        assert explained is not None and explained.unmet == (reason,), name


async def test_what_was_last_read_of_a_row_takes_its_place(pool: Pool) -> None:
    await two_deployments(pool)
    reports = NodeReportCache()
    before = await read(pool, reports)
    for name in ("deployment.engine", "model.spec", "rollout.spec"):
        cluster = await read(pool, reports, OF_A_DEPLOYMENT[name])
        assert cluster.deployments == before.deployments, name
        assert (cluster.models, len(cluster.rollouts)) == (before.models, 1), name
        assert [row.has_last for row in cluster.unreadable] == [True], name
        assert any("what was last read" in unmet.reason for unmet in plan_fleet(cluster).unmet)


async def test_a_report_that_cannot_be_read_is_named_with_its_node(pool: Pool) -> None:
    await two_deployments(pool)
    await pool.execute("UPDATE node SET report = $1", b"\x81\xa4node\x01")
    plan = plan_fleet(await read(pool))
    assert [start.spec.deployment_id for start in plan.starts if start.spec.version == 1] == ["e"]
    assert [words.split(":")[0] for words in plan.unreadable] == ["cannot read node n1"]


async def test_postgres_refuses_other_unreadable_values(pool: Pool) -> None:
    await two_deployments(pool)
    for statement in REFUSED:
        with pytest.raises(asyncpg.IntegrityConstraintViolationError):
            await pool.execute(statement)


async def test_routes_are_published_beside_rows_that_cannot_be_read(pool: Pool) -> None:
    await two_deployments(pool)
    async with transaction(pool) as connection:
        for name in ("k1", "k2"):
            body = KeyBody(tenant_id=TenantId("t"))
            await keys.add_key(connection, key_id=KeyId(name), secret_sha256="s", body=body)
    await pool.execute(
        """UPDATE api_key SET limits = '{"tokens_per_month": "many"}' WHERE key_id = 'k1'"""
    )
    await expire_lease(pool)
    scheduler = await scheduler_parts(pool)
    await scheduler.hold_lease.run_once()
    publish = scheduler.publish_routes()
    await publish.run_once()
    table = scheduler.state.routes.table
    assert table is not None
    assert [key.key_id for key in table.keys] == ["k2"]
    assert [route.replica_id for route in table.routes] == ["r1"]
    # The routes of a deployment that was read before stay when its row no longer can be.
    await pool.execute(OF_A_DEPLOYMENT["deployment.engine"])
    scheduler.state.routes.mark_changed()
    await publish.run_once()
    assert scheduler.state.routes.table is not None
    assert [route.replica_id for route in scheduler.state.routes.table.routes] == ["r1"]


async def test_an_assignment_leaves_out_a_spec_that_cannot_be_read(pool: Pool) -> None:
    await two_deployments(pool)
    await pool.execute("UPDATE placement SET spec = '{}'")
    async with transaction(pool) as connection:
        assignment = await read_assignment(
            connection, NodeId("n1"), cluster_id=ClusterId("c1"), epoch=Epoch(1)
        )
    # Only a tombstone ends a replica on its node.
    assert (assignment.replicas, assignment.tombstones) == ((), ())
    assert assignment.generation > Generation(0)
