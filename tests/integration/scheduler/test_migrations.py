"""Databases of earlier releases are migrated with their rows."""

from collections.abc import AsyncIterator

import asyncpg
import msgspec
import pytest

from isochrone.service.clock import utc_now
from isochrone.wire.ids import KeyId
from isochrone.wire.peers.rollout import RolloutState
from scheduler.decide.membership import NodeContact
from scheduler.store import migrate as migrations
from scheduler.store.accounts import keys
from scheduler.store.accounts.quotas import sum_quota_usage
from scheduler.store.accounts.usage import rotate_demand_partitions
from scheduler.store.cluster import read_cluster
from scheduler.store.fleet.identities import list_join_tokens, list_revocations
from scheduler.store.migrate import MIGRATE_LOCK, MigrationError, migrate, read_migrations
from scheduler.store.pool import Pool, open_pool, transaction
from scheduler.store.rollouts import list_rollouts
from tests.builders import a_model, a_spec
from tests.postgres import Server

MODEL = msgspec.json.encode(a_model()).decode()
SPEC = msgspec.json.encode(a_spec()).decode()
WHEN = "2026-01-02 03:04:05+00"

WRITTEN_AT = {
    1: f"""
        INSERT INTO cluster (cluster_id, generation) VALUES ('c1', 7);
        INSERT INTO lease (epoch, holder) VALUES (3, 's1');
        INSERT INTO pop VALUES ('ams', 'Amsterdam', 'NL', 52.3, 4.8);
        INSERT INTO join_token (token_id, secret_sha256, role, pop, expires_at, used_at, used_by)
            VALUES ('t1', 'x', 'agent', 'ams', '{WHEN}', '{WHEN}', 'n1'),
                   ('t2', 'x', 'router', 'ams', '{WHEN}', NULL, NULL);
        INSERT INTO node (node_id, pop, boot_id, report_seq, report, last_seen_at, generation)
            VALUES ('n1', 'ams', 'b', 4, '\\x80', '{WHEN}', 7);
        INSERT INTO node (node_id, pop, revoked) VALUES ('n2', 'ams', true);
        INSERT INTO router (router_id, pop, revoked) VALUES ('r1', 'ams', true);
        INSERT INTO device (node_id, device_id, device_class, memory_bytes)
            VALUES ('n1', 'cpu', 'cpu', 100000000000);
        INSERT INTO model (model_id, spec) VALUES ('m', '{MODEL}');
        INSERT INTO deployment (deployment_id, name, model_id, engine, policy)
            VALUES ('d', 'd', 'm', '{{"driver": "mock"}}', '{{}}');
        INSERT INTO placement (replica_id, deployment_id, version, node_id, memory_bytes, spec,
                               reason, placed_generation, state)
            VALUES ('r1', 'd', 1, 'n1', 1000, '{SPEC}', 'test', 2, 'warm');
        INSERT INTO placement_device VALUES ('r1', 'n1', 'cpu', 1000);
        INSERT INTO profile (model_id, device_class, load_s) VALUES ('m', 'cpu', 2);
        INSERT INTO demand (deployment_id, pop, minute, requests) VALUES ('d', 'ams', '{WHEN}', 5);
        INSERT INTO demand_seen VALUES ('r1', 'b', 1);
        INSERT INTO usage VALUES ('q1', 'k', 't', 'd', 'ams', 'n1', 'r1', '{WHEN}', 10, 0, 5,
                                  'complete', 1, 2);
        INSERT INTO api_key (key_id, secret_sha256, tenant_id, limits)
            VALUES ('k', '{"0" * 64}', 't', '{{"tokens_per_day": 100}}');
        INSERT INTO event (actor, kind, subject) VALUES ('admin', 'x', 'y');
        INSERT INTO idempotency (idempotency_key, method, path, body_sha256, status, body)
            VALUES ('i', 'POST', '/v1/keys', 'x', 201, '{{}}');
    """,
    3: "INSERT INTO demand_series VALUES ('d', 'ams', 2900000, 'learned')",
    4: """
        INSERT INTO rollout (rollout_id, deployment_id, from_version, to_version, spec) VALUES
            ('d.1', 'd', 1, 2, '{"model_id": "forgotten", "engine": {"driver": "mock"}}');
        INSERT INTO rollout_trial (rollout_id, step, version, pop, asked_pop)
            VALUES ('d.1', 0, 2, 'ams', 'ams');
    """,
    6: f"INSERT INTO artifact_holder VALUES ('n1', '{'a' * 64}')",
    7: f"""
        INSERT INTO usage VALUES ('q2', 'k', 't', 'd', 'ams', 'n1', 'r1', '{WHEN}', 10, 0, 5,
                                  'complete', 1, 2)
    """,
    8: f"""
        INSERT INTO prefetch (node_id, model_id, deployment_id, bytes_per_s, reason, due_at)
            VALUES ('n1', 'm', 'd', 1e6, 'test', '{WHEN}')
    """,
}
"""Rows that a release wrote when its schema was at this number."""


@pytest.fixture
async def empty(postgres_server: Server) -> AsyncIterator[Pool]:
    admin = await asyncpg.connect(postgres_server.dsn("isochrone"))
    await admin.execute("CREATE DATABASE of_before")
    opened = await open_pool(postgres_server.dsn("of_before"), size_max=2)
    yield opened
    await opened.close()
    await admin.execute("DROP DATABASE of_before WITH (FORCE)")
    await admin.close()


async def test_rows_of_earlier_releases_survive_each_migration(empty: Pool) -> None:
    known = read_migrations()
    for number in range(1, len(known) + 1):
        assert len(await migrate(empty, known[:number])) == 1
        async with transaction(empty) as connection:
            await connection.execute(WRITTEN_AT.get(number, "SELECT 1"))
    async with transaction(empty, isolation="repeatable_read") as connection:
        cluster = await read_cluster(connection, NodeContact(acting_for_s=1000.0))
        (rollout,) = await list_rollouts(connection, "", 9)
        (key,) = (await keys.read_key_page(connection, KeyId(""))).keys
        tokens = await list_join_tokens(connection, "", 9)
        revoked = await list_revocations(connection, "", 9)
        counted = await connection.fetchval("SELECT sum(requests)::int FROM demand")
    assert (cluster.cluster_id, cluster.generation) == ("c1", 7)
    assert [node.node_id for node in cluster.nodes if not node.revoked] == ["n1"]
    assert [(p.replica_id, p.state.value) for p in cluster.placements] == [("r1", "warm")]
    assert cluster.deployments[0].engine.driver == "mock"
    assert (rollout.state, rollout.to_version) == (RolloutState.RUNNING, 2)
    assert (key.key_id, key.limits.tokens_per_day) == ("k", 100)
    assert [(token.uses, token.uses_max) for token in tokens] == [(1, 1), (0, 1)]
    assert {(one.role.value, one.name) for one in revoked} == {("agent", "n2"), ("router", "r1")}
    assert counted == 5
    async with transaction(empty) as connection:
        assert (await sum_quota_usage(connection)).rows == 1
        assert await rotate_demand_partitions(connection, utc_now()) > 0
        await connection.execute("UPDATE rollout SET state = 'aborted'")


@pytest.mark.parametrize(
    ("lock", "reason"),
    [
        (f"SELECT pg_advisory_xact_lock({MIGRATE_LOCK})", "another scheduler has been migrating"),
        ("LOCK TABLE lease IN ACCESS SHARE MODE", "0009_lease_epoch_key did not end within"),
    ],
)
async def test_a_migration_that_waits_too_long_says_for_what(
    empty: Pool, monkeypatch: pytest.MonkeyPatch, lock: str, reason: str
) -> None:
    known = read_migrations()
    await migrate(empty, known[:8])
    monkeypatch.setattr(migrations, "MIGRATE_TIMEOUT_S", 0.3)
    async with transaction(empty) as holder:
        await holder.execute(lock)
        with pytest.raises(MigrationError, match=f"cannot migrate: {reason}"):
            await migrate(empty, known)
    monkeypatch.undo()
    assert len(await migrate(empty, known)) == len(known) - 8


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        ("DROP TABLE rollout CASCADE", "cannot run: the database lacks rollout; a backup"),
        (
            """
            INSERT INTO pop (pop, city, country, latitude, longitude)
                VALUES ('ams', 'a', 'NL', 1, 1);
            INSERT INTO node (node_id, pop) VALUES ('n1', 'ams')
            """,
            "cannot run: the database lacks the row of cluster; a backup",
        ),
        ("DELETE FROM migration", 'was not applied, and relation "cluster" already exists; a bac'),
        ("DROP TABLE migration", 'was not applied, and relation "cluster" already exists; a bac'),
    ],
)
async def test_a_backup_that_was_restored_in_part_is_refused(
    empty: Pool, lost: str, words: str
) -> None:
    await migrate(empty)
    async with transaction(empty) as connection:
        await connection.execute(lost)
    with pytest.raises(MigrationError, match=words):
        await migrate(empty)
