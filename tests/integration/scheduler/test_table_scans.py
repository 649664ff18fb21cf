"""No statement that runs again and again reads a large table whole.

The statements themselves run, on tables with as many rows as the planner needs to prefer an index;
Postgres counts the rows that sequential scans have read.
"""

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

from isochrone.wire.ids import ClusterId, Epoch, KeyId, NodeId, PopId
from scheduler.decide.demand import RouterSilence
from scheduler.store.accounts.keys import (
    list_keys,
    live_keys,
    read_key_page,
    revoked_among,
    revoked_keys,
)
from scheduler.store.accounts.quotas import sum_quota_usage
from scheduler.store.accounts.tenant_budgets import get_budget, list_budgets
from scheduler.store.catalogue import list_nodes, list_placements
from scheduler.store.cluster import (
    _is_demand_known,
    _read_demand,
    _read_given_up,
    _read_last_demand,
    _read_placements,
)
from scheduler.store.deployments import list_deployments
from scheduler.store.events import list_events, recent_key_changes
from scheduler.store.fleet.adoption import _record_refusal_once
from scheduler.store.fleet.nodes import read_assignment
from scheduler.store.fleet.store_members import read_store_members
from scheduler.store.forecast import read_slot
from scheduler.store.lease import ensure_cluster
from scheduler.store.pool import Connection, Pool, transaction, using
from scheduler.store.readable_rows import RowReader
from scheduler.store.retention import delete_expired, retention_rules
from scheduler.store.rollouts import read_starts
from scheduler.store.status import _replica_problems, _replica_states
from tests.unit.scheduler.test_rollout import a_rollout

ROWS: Final = 20_000
SCANNED_MAX: Final = ROWS // 10

FILL: Final = {
    "api_key": """
        INSERT INTO api_key (key_id, secret_sha256, tenant_id, limits)
        SELECT substr(md5(n::text), 1, 12), md5(n::text), 'tenant-' || n % 100,
               '{"tokens_per_day": 1000, "tokens_per_month": 9000}'
        FROM generate_series(1, $1) n""",
    "key_day": """
        INSERT INTO key_day (key_id, day, tokens, spend)
        SELECT substr(md5((n % 2000 + 1)::text), 1, 12), current_date - n / 2000, 1, 1
        FROM generate_series(0, $1 - 1) n""",
    "usage": """
        INSERT INTO usage SELECT 'r' || n, substr(md5(n::text), 1, 12), 'tenant-' || n % 100,
               'd', 'p', 'n', 'r', now() - n * interval '1 minute', 1, 0, 1, 'ok', 1, 1
        FROM generate_series(1, $1) n""",
    "event": """
        INSERT INTO event (at, actor, kind, subject)
        SELECT now() - ($1 - n) * interval '1 minute', 'a', 'k', 's' || n % 1000
        FROM generate_series(1, $1) n""",
    "demand_seen": """
        INSERT INTO demand_seen SELECT 'r' || n % 400, 'b', n, now() - n * interval '0.1 s'
        FROM generate_series(1, $1) n""",
    "demand_default": """
        INSERT INTO demand (deployment_id, pop, minute, requests)
        SELECT 'd' || n % 50, 'p', date_trunc('minute', now()) - (n / 50) * interval '1 minute', 1
        FROM generate_series(1, $1) n""",
    "idempotency": """
        INSERT INTO idempotency
            (idempotency_key, method, path, body_sha256, status, body, created_at)
        SELECT n::text, 'POST', '/', '', 200, '', now() - n * interval '1 s'
        FROM generate_series(1, $1) n""",
    # Of a week, as most of them have ended.
    "placement": """
        INSERT INTO placement (replica_id, deployment_id, version, node_id, memory_bytes, spec,
                               reason, placed_generation, state, placed_at, ended_at,
                               ended_generation, released_at)
        SELECT 'r' || n, concat('d', nullif(n % 50, 0)), 1, 'n' || n % 500, 1,
               '{"engine": {"share_kv": true}}', '', 1,
               CASE WHEN n > 500 THEN 'stopped' ELSE 'warm' END, now() - n * interval '30 s',
               ended_at, CASE WHEN n > 500 THEN 1 END, ended_at
        FROM generate_series(1, $1) n
        CROSS JOIN LATERAL (
            SELECT CASE WHEN n > 500 THEN now() - n * interval '20 s' END AS ended_at) ended""",
    # Those of the last two days, by the PoP that answered and that of the client.
    "rollout": """
        INSERT INTO rollout (rollout_id, deployment_id, from_version, to_version, spec, state,
                             step_since)
        SELECT 'd.' || n, 'd', n + 1, n + 2, '{}', 'done', now() - n * interval '1 hour'
        FROM generate_series(0, least(1000, $1)) n""",
    "rollout_trial": """
        INSERT INTO rollout_trial (rollout_id, step, version, pop, asked_pop)
        SELECT 'd.' || n / 400, 0, 1, 'p' || n % 20, 'p' || n / 20 % 20
        FROM generate_series(0, $1 - 1) n""",
    "node": """
        INSERT INTO node (node_id, pop, last_seen_at)
        SELECT 'n' || n, 'p' || n / 100, now() FROM generate_series(0, least(500, $1)) n""",
}
NOW: Final = datetime.now(UTC)
SLOT: Final = int(NOW.timestamp()) // 600 - 3


async def sum_quotas(connection: Connection) -> None:
    """Sum the use of a few keys, as each turn of the job does."""
    await connection.execute(
        """
        INSERT INTO key_use SELECT substr(md5(n::text), 1, 12), current_date, 10, 1
        FROM generate_series(1, 5) n
        """
    )
    await sum_quota_usage(connection)


STATEMENTS: dict[str, Callable[[Connection], Awaitable[Any]]] = {
    **{
        f"delete expired {rule.table}": partial(delete_expired, rule=rule, now=NOW, batch=5000)
        for rule in retention_rules(event_days=90.0, certificate_lifetime_s=86_400.0)
    },
    "read a page of keys": lambda c: read_key_page(c, KeyId("8")),
    "list a page of keys": lambda c: list_keys(c, "8", 100),
    "list a page of budgets": lambda c: list_budgets(c, "", 100),
    "read a budget": lambda c: get_budget(c, "tenant-7"),
    "read changed keys": lambda c: live_keys(c, [KeyId("000000000000"), KeyId("c4ca4238a0b9")]),
    "revoked among": lambda c: revoked_among(c, [KeyId("000000000000"), KeyId("c4ca4238a0b9")]),
    "revoked keys": revoked_keys,
    "sum quotas": sum_quotas,
    "newest events": lambda c: list_events(c, before_id=None, limit=100, subject=None),
    "newest changes of keys": lambda c: recent_key_changes(c, 1000),
    "events of a subject": lambda c: list_events(c, before_id=None, limit=100, subject="s7"),
    "record a refusal once": lambda c: _record_refusal_once(c, NodeId("n"), "s7", "reason"),
    "read a slot of demand": lambda c: read_slot(c, SLOT),
    "read demand": _read_demand,
    "read the last demand before silences": lambda c: _read_last_demand(
        c, [RouterSilence(PopId("p"), 3600.0)]
    ),
    "read whether demand is known": lambda c: _is_demand_known(c, 5.0),
    "read the members of stores": read_store_members,
    "read the members of a store": lambda c: read_store_members(c, pop_of=NodeId("n7")),
    "read problems of replicas": _replica_problems,
    "count replicas by state": _replica_states,
    "read replicas that failed": _read_given_up,
    "read placements": lambda c: _read_placements(c, RowReader(), {}),
    "read the placements of a node": lambda c: _read_placements(c, RowReader(), {}, [NodeId("n7")]),
    "read an assignment": lambda c: read_assignment(
        c, NodeId("n7"), cluster_id=ClusterId("c"), epoch=Epoch(1)
    ),
    "read starts": lambda c: read_starts(c, a_rollout()),
    "list nodes": lambda c: list_nodes(c, "", 100),
    "list placements": lambda c: list_placements(c, "", 100),
    "list deployments": lambda c: list_deployments(c, "", 100),
}


async def scanned(connection: Connection) -> dict[str, int]:
    """Return the rows that sequential scans have read, by table."""
    await connection.execute("SELECT pg_stat_force_next_flush()")
    rows = await connection.fetch("SELECT relname, seq_tup_read FROM pg_stat_user_tables")
    return {row["relname"]: row["seq_tup_read"] for row in rows}


async def test_no_periodic_statement_reads_a_large_table_whole(pool: Pool) -> None:
    async with using(pool) as connection:
        await ensure_cluster(connection, ClusterId("c"))
        # Without triggers: they would count each row of usage.
        await connection.execute("SET session_replication_role = replica")
        for table, fill in FILL.items():
            await connection.execute(f"ALTER TABLE {table} SET (autovacuum_enabled = false)")
            await connection.execute(fill, ROWS, timeout=120.0)
            await connection.execute(f"ANALYZE {table}")
        await connection.execute("RESET session_replication_role")
    found = {}
    for name, statement in STATEMENTS.items():
        async with using(pool) as connection:
            before = await scanned(connection)
        async with transaction(pool) as connection:
            await statement(connection)
        async with using(pool) as connection:
            after = await scanned(connection)
        read = {table: after[table] - before.get(table, 0) for table in FILL}
        if whole := {table: rows for table, rows in read.items() if rows > SCANNED_MAX}:
            found[name] = whole
    assert found == {}
