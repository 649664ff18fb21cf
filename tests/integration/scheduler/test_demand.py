"""Demand and usage on a real Postgres: sent at least once, counted once; daily partitions."""

import asyncio
from datetime import UTC, datetime
from typing import Any

import asyncpg
import msgspec
import pytest

from isochrone.service.clock import utc_now
from isochrone.wire.admin import PopBody
from isochrone.wire.ids import BootId, ClusterId, RouterId
from isochrone.wire.peers.usage import Demand, Usage
from scheduler.decide.demand import accept_demand, accept_usage
from scheduler.decide.demand.silent_routers import HELD_FOR_S
from scheduler.decide.membership import NodeContact
from scheduler.store import catalogue, deployments
from scheduler.store.accounts.usage import record_demand, record_usage, rotate_demand_partitions
from scheduler.store.cluster import read_cluster
from scheduler.store.lease import ensure_cluster
from scheduler.store.pool import Pool, transaction, using
from scheduler.store.retention import FIXED_RULES, delete_expired
from tests.builders import a_deployment, a_model
from tests.unit.scheduler.test_intake import a_demand, a_row, a_usage


async def begun(pool: Pool) -> None:
    """A cluster with the PoPs ams and sin, and deployment d."""
    async with transaction(pool) as connection:
        await ensure_cluster(connection, ClusterId("c1"))
        for pop in ("ams", "sin"):
            body = PopBody(city=pop, country="NL", latitude=52.3, longitude=4.8)
            await catalogue.put_pop(connection, pop, body, None)
        await catalogue.put_model(connection, a_model(), None)
        await deployments.add_deployment(connection, a_deployment())


async def counted(pool: Pool, demand: Demand) -> int | None:
    async with transaction(pool) as connection:
        return await record_demand(connection, demand, accept_demand(demand.rows[0].pop, demand))


async def value_of(pool: Pool, query: str) -> Any:
    async with using(pool) as connection:
        return await connection.fetchval(query)


async def test_batches_sent_again_and_out_of_order_are_counted_once(pool: Pool) -> None:
    await begun(pool)
    batches = [
        a_demand(a_row(requests=n, prompt_tokens=10 * n), a_row(pop="sin", requests=1), seq=n)
        for n in range(1, 6)
    ]
    of_another_router = msgspec.structs.replace(batches[0], router_id=RouterId("other"))
    of_another_boot = msgspec.structs.replace(batches[0], boot_id=BootId("later"))
    sent = [*reversed(batches), of_another_router, of_another_boot, *batches]
    unknown = await asyncio.gather(*(counted(pool, batch) for batch in sent))
    assert sorted(unknown, key=str) == [0] * 7 + [None] * 5
    assert await value_of(pool, "SELECT sum(requests)::int FROM demand WHERE pop = 'ams'") == 17
    assert await value_of(pool, "SELECT sum(prompt_tokens)::int FROM demand") == 170


@pytest.mark.parametrize(
    ("acting_for_s", "heard_s_ago", "is_known"),
    [
        (5.0, None, True),  # no router was ever heard
        (5.0, 20.0, True),
        (5.0, 600.0, False),
        (70.0, 665.0, True),  # all routers have reported by now
    ],
)
async def test_after_an_outage_demand_is_not_known_until_routers_have_reported(
    pool: Pool, acting_for_s: float, heard_s_ago: float | None, is_known: bool
) -> None:
    await begun(pool)
    if heard_s_ago is not None:
        await counted(pool, a_demand(a_row(requests=1), seq=1))
        async with using(pool) as connection:
            await connection.execute(
                "UPDATE demand_seen SET seen_at = seen_at - make_interval(secs => $1)", heard_s_ago
            )
    # The first router to report fills the gap for its own city only.
    await counted(pool, a_demand(a_row(requests=1), seq=2))
    async with transaction(pool, isolation="repeatable_read") as connection:
        cluster = await read_cluster(connection, NodeContact(acting_for_s=acting_for_s))
    assert cluster.is_demand_known is is_known


@pytest.mark.parametrize(
    ("silent_s", "expected"),
    [
        ({"cut-off": 1200.0}, {"ams": 1.0, "sin": 0.5}),
        ({"cut-off": 1200.0, "in-contact": 5.0}, {"ams": 1.0, "sin": 0.5}),
        ({"cut-off": HELD_FOR_S + 60.0}, {"ams": 1.0}),
    ],
    ids=["silent", "another-reports", "for-too-long"],
)
async def test_the_last_known_demand_of_a_pop_counts_while_a_router_of_it_is_silent(
    pool: Pool, silent_s: dict[str, float], expected: dict[str, float]
) -> None:
    await begun(pool)
    seen_s = {"here": ("ams", 5.0)} | {name: ("sin", s) for name, s in silent_s.items()}
    async with using(pool) as connection:
        await connection.executemany(
            """
            INSERT INTO router (router_id, pop, last_seen_at)
            VALUES ($1, $2, clock_timestamp() - make_interval(secs => $3))
            """,
            [(name, pop, age_s) for name, (pop, age_s) in seen_s.items()],
        )
    last_s = silent_s["cut-off"] + 300.0
    await counted(pool, a_demand(a_row(pop="sin", requests=300), seq=1))
    async with using(pool) as connection:
        await connection.execute(
            "UPDATE demand SET minute = date_trunc('minute', now() - make_interval(secs => $1))",
            last_s,
        )
    await counted(pool, a_demand(a_row(requests=10_000), seq=2))
    async with transaction(pool, isolation="repeatable_read") as connection:
        cluster = await read_cluster(connection, NodeContact(acting_for_s=3600.0))
    found = {row.pop: min(1.0, row.requests_per_s) for row in cluster.demand}
    assert found == expected


async def test_a_late_batch_is_counted_in_its_own_minute(pool: Pool) -> None:
    await begun(pool)
    await counted(pool, a_demand(a_row(requests=1), seq=1))
    await counted(pool, a_demand(a_row(requests=1), seq=2, age_s=1200.0))
    apart = "SELECT extract(epoch FROM max(minute) - min(minute))::int FROM demand"
    assert 1140 <= await value_of(pool, apart) <= 1260


async def test_rows_of_unknown_deployments_are_counted_and_sums_never_overflow(pool: Pool) -> None:
    await begun(pool)
    batch = a_demand(a_row(requests=1), a_row("no-such"), a_row("nor-this", requests=1))
    assert await counted(pool, batch) == 1
    async with using(pool) as connection:
        await connection.execute("UPDATE demand SET requests = 9223372036854775807")
    assert await counted(pool, msgspec.structs.replace(batch, seq=2)) == 1
    assert await value_of(pool, "SELECT requests FROM demand") == 2**62 + 1


async def test_usage_sent_again_is_written_once(pool: Pool) -> None:
    await begun(pool)
    batch = Usage(router_id=RouterId("x"), batch_id="1", rows=(a_usage("q1"), a_usage("q2")))
    again = msgspec.structs.replace(batch, batch_id="2", rows=(a_usage("q2"), a_usage("q3")))
    for usage in (batch, again, batch):
        async with transaction(pool) as connection:
            await record_usage(connection, accept_usage(usage).rows)
    assert await value_of(pool, "SELECT count(*) FROM usage") == 3
    assert await value_of(pool, "SELECT sum(output_tokens)::int FROM usage") == 15


async def test_partitions_are_created_ahead_and_dropped_when_expired(pool: Pool) -> None:
    await begun(pool)
    async with using(pool) as connection:
        await connection.execute(
            "CREATE TABLE demand_20200101 PARTITION OF demand"
            " FOR VALUES FROM ('2020-01-01 00:00+00') TO ('2020-01-02 00:00+00')"
        )
    async with transaction(pool) as connection:
        at_that_time = datetime(2020, 1, 5, tzinfo=UTC)
        assert await rotate_demand_partitions(connection, at_that_time) == 3, (
            "one clock alone drops no partition"
        )
    async with transaction(pool) as connection:
        assert await rotate_demand_partitions(connection, utc_now()) == 1
    async with transaction(pool) as connection:
        assert await rotate_demand_partitions(connection, utc_now()) == 0
    assert await value_of(pool, "SELECT to_regclass('demand_20200101') IS NULL")
    await counted(pool, a_demand(a_row(requests=1)))
    assert await value_of(pool, "SELECT sum(requests)::int FROM demand") == 1
    assert await value_of(pool, "SELECT count(*) FROM demand_default") == 0


async def test_a_day_with_rows_in_the_default_partition_stays_there(pool: Pool) -> None:
    await begun(pool)
    made = asyncio.Event()

    async def write(router: str, pop: str) -> int:
        seq = 0
        while not made.is_set() or seq < 3:
            seq += 1
            batch = a_demand(a_row(pop=pop, requests=1), seq=seq)
            await counted(pool, msgspec.structs.replace(batch, router_id=RouterId(router)))
        return seq

    writers = [
        asyncio.create_task(write(f"r-{n}-{pop}", pop)) for n in (1, 2) for pop in ("ams", "sin")
    ]
    while await value_of(pool, "SELECT count(*) FROM demand_seen") < 20:
        await asyncio.sleep(0)
    async with transaction(pool) as connection:
        assert await rotate_demand_partitions(connection, utc_now()) == 2
    made.set()
    written = sum(await asyncio.gather(*writers))
    assert await value_of(pool, "SELECT sum(requests)::int FROM demand") == written
    async with using(pool) as connection:
        await connection.execute("UPDATE demand SET minute = minute - interval '16 days'")
        minutes = FIXED_RULES[0]
        assert await delete_expired(connection, minutes, utc_now(), 1) == 1
        for rule in FIXED_RULES:
            await delete_expired(connection, rule, utc_now(), 5_000)
    assert await value_of(pool, "SELECT count(*) FROM demand") == 0


async def test_demand_written_by_the_previous_release_is_counted(database_dsn: str) -> None:
    connection = await asyncpg.connect(database_dsn)
    try:
        # The statement of the previous release, while both run.
        await connection.execute(
            "INSERT INTO demand AS d (minute, deployment_id, pop, requests)"
            " VALUES (date_trunc('minute', clock_timestamp()), 'd', 'ams', 1)"
            " ON CONFLICT (minute, deployment_id, pop) DO UPDATE SET requests = d.requests + 1"
        )
        assert await connection.fetchval("SELECT requests FROM demand") == 1
    finally:
        await connection.close()
