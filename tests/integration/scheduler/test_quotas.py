"""A key's usage today, counted once over the whole fleet however often it is sent."""

import asyncio
import time
from datetime import UTC, datetime

import msgspec
import pytest

from isochrone.wire.admin import KeyBody, LimitsBody
from isochrone.wire.client_keys.key_table import budget_id
from isochrone.wire.ids import (
    DeploymentId,
    KeyId,
    NodeId,
    PopId,
    ReplicaId,
    RequestId,
    TenantId,
)
from isochrone.wire.models.model import Price
from isochrone.wire.peers.usage import RequestOutcome, UsageRow
from scheduler.store import catalogue, deployments
from scheduler.store.accounts import keys, tenant_budgets
from scheduler.store.accounts.quotas import sum_quota_usage
from scheduler.store.accounts.usage import record_usage
from scheduler.store.catalogue import EtagMoved
from scheduler.store.pool import Pool, transaction, using
from tests.builders import a_deployment, a_model
from tests.system.harness import until

KEY = KeyId("k1")
DAY_S = 86_400.0

SLOW_PRICES = """
    CREATE OR REPLACE FUNCTION spend_of(which text, prompt bigint, cached bigint, output bigint)
    RETURNS double precision LANGUAGE plpgsql AS $$
    BEGIN
        PERFORM pg_advisory_xact_lock_shared(1);
        RETURN 1;
    END $$
"""
"""Prices that a count waits for, once it has its snapshot."""


def a_usage(request_id: str, key_id: str = KEY, age_s: float = 0.0) -> UsageRow:
    return UsageRow(
        request_id=RequestId(request_id),
        key_id=KeyId(key_id),
        tenant_id=TenantId("acme"),
        deployment_id=DeploymentId("d"),
        pop=PopId("ams"),
        node_id=NodeId("n1"),
        replica_id=ReplicaId("r1"),
        started_at=time.time() - age_s,
        prompt_tokens=100,
        cached_tokens=40,
        output_tokens=50,
        outcome=RequestOutcome.COMPLETE,
    )


async def record(pool: Pool, *rows: UsageRow) -> None:
    async with transaction(pool) as connection:
        await record_usage(connection, rows)


async def sum_quotas(pool: Pool) -> int:
    async with transaction(pool) as connection:
        return (await sum_quota_usage(connection)).rows


async def limited(pool: Pool, **limits: float) -> None:
    body = LimitsBody(**limits)  # type: ignore[arg-type]
    async with transaction(pool) as connection:
        await keys.set_limits(connection, KEY, body, None)


async def spent_until(pool: Pool) -> float:
    async with transaction(pool) as connection:
        (entry,) = (await keys.read_key_page(connection, KeyId(""))).keys
        return entry.spent_until


@pytest.fixture
async def with_key(pool: Pool) -> Pool:
    price = Price(prompt_per_million=1e6, cached_per_million=1e5, output_per_million=2e6)
    model = msgspec.structs.replace(a_model(), price=price)
    async with transaction(pool) as connection:
        await catalogue.put_model(connection, model, None)
        await deployments.add_deployment(connection, a_deployment())
        body = KeyBody(tenant_id="acme", limits=LimitsBody(tokens_per_day=400))
        await keys.add_key(connection, key_id=KEY, secret_sha256="d" * 64, body=body)
    return pool


async def test_a_spent_quota_lasts_until_midnight_and_usage_is_counted_once(with_key: Pool) -> None:
    pool = with_key
    await record(pool, a_usage("q1"), a_usage("q2"), a_usage("other", key_id="k2"))
    await record(pool, a_usage("q2"), a_usage("q1"))
    assert await sum_quotas(pool) == 2
    assert await sum_quotas(pool) == 0
    assert await spent_until(pool) == 0.0
    await record(pool, a_usage("q3"))
    await sum_quotas(pool)
    until_s = await spent_until(pool)
    assert until_s % DAY_S == 0
    assert 0 < until_s - time.time() <= DAY_S
    async with transaction(pool) as connection:
        view = await keys.get_key(connection, KEY)
    assert view is not None
    assert (view.tokens_today, view.spend_today) == (450, pytest.approx(492.0))


async def test_usage_of_another_day_does_not_count(with_key: Pool) -> None:
    await record(with_key, *(a_usage(f"q{n}", age_s=DAY_S) for n in range(9)))
    assert await sum_quotas(with_key) == 9
    assert await spent_until(with_key) == 0.0


async def test_spend_is_counted_by_price(with_key: Pool) -> None:
    # 60 uncached tokens at 1, 40 cached at 0.1, 50 output tokens at 2.
    await limited(with_key, spend_per_day=328.1)
    await record(with_key, a_usage("q1"), a_usage("q2"))
    await sum_quotas(with_key)
    assert await spent_until(with_key) == 0.0
    await limited(with_key, spend_per_day=327.9)
    assert await spent_until(with_key) > 0


async def test_a_new_quota_counts_earlier_usage_of_the_day(with_key: Pool) -> None:
    await limited(with_key)
    await record(with_key, *(a_usage(f"q{n}") for n in range(4)))
    assert await sum_quotas(with_key) == 0
    await limited(with_key, tokens_per_day=700)
    assert await spent_until(with_key) == 0.0
    # Usage that is not summed yet is not counted twice.
    await record(with_key, a_usage("q4", age_s=0.0))
    await limited(with_key, tokens_per_day=751)
    assert await sum_quotas(with_key) == 0
    assert await spent_until(with_key) == 0.0
    await limited(with_key, tokens_per_day=750)
    assert await spent_until(with_key) > 0
    await limited(with_key, tokens_per_day=10_000)
    assert await spent_until(with_key) == 0.0


async def test_usage_that_is_summed_during_a_count_is_not_lost(with_key: Pool) -> None:
    """A count takes seconds for a tenant with much usage."""
    pool = with_key
    await record(pool, a_usage("q1"))
    await sum_quotas(pool)
    async with using(pool) as connection:
        await connection.execute(SLOW_PRICES)
    async with transaction(pool) as connection:
        await connection.execute("SELECT pg_advisory_xact_lock(1)")
        counting = asyncio.create_task(limited(pool, tokens_per_day=500))
        await until("the count waits", lambda: is_any_waiting(pool), 10.0)
        async with transaction(pool) as other:
            # As a batch of an older scheduler that commits now: it does not wait for the count. Its
            # trigger looks up the price, too.
            await other.execute("SET LOCAL session_replication_role = replica")
            await other.execute(
                """
                INSERT INTO usage SELECT (jsonb_populate_record(u, '{"request_id": "q2"}')).*
                FROM usage u WHERE request_id = 'q1'
                """
            )
            await other.execute("INSERT INTO key_use VALUES ($1, current_date, 150, 1)", KEY)
        summing = asyncio.create_task(sum_quotas(pool))
        await asyncio.wait({summing}, timeout=1.0)
    await asyncio.gather(counting, summing)
    async with transaction(pool) as connection:
        view = await keys.get_key(connection, KEY)
    assert view is not None
    assert view.tokens_today == 300


async def test_usage_that_is_being_stored_when_a_key_gets_its_first_quota_is_counted(
    with_key: Pool,
) -> None:
    """When it was stored its key had no quota, and the count did not see it yet."""
    pool = with_key
    await limited(pool)
    async with transaction(pool) as connection:
        await record_usage(connection, (a_usage("q1"),))
        limiting = asyncio.create_task(limited(pool, tokens_per_day=150))
        await until("the count waits", lambda: is_any_waiting(pool), 10.0)
    await limiting
    # By the limits that are new.
    await record(pool, a_usage("q2"))
    assert await sum_quotas(pool) == 1
    async with transaction(pool) as connection:
        view = await keys.get_key(connection, KEY)
    assert view is not None
    assert view.tokens_today == 300


async def is_any_waiting(pool: Pool) -> bool:
    async with using(pool) as connection:
        found: bool = await connection.fetchval(
            "SELECT EXISTS (SELECT FROM pg_locks JOIN pg_database ON oid = database"
            " WHERE datname = current_database() AND locktype = 'advisory' AND NOT granted)"
        )
    return found


async def test_batches_of_the_same_keys_do_not_deadlock(with_key: Pool) -> None:
    async def batch(name: str) -> None:
        rows = [a_usage(f"{name}-{n}", key_id=KEY if n % 2 else "k2") for n in range(20)]
        await record(with_key, *rows)
        await sum_quotas(with_key)

    await asyncio.gather(*(batch(name) for name in "abcdef"))
    await sum_quotas(with_key)
    async with transaction(with_key) as connection:
        tokens = await connection.fetchval("SELECT tokens FROM key_day WHERE key_id = $1", KEY)
    assert tokens == 6 * 10 * 150


async def budget_spent_until(pool: Pool) -> float:
    async with transaction(pool) as connection:
        entries = (await keys.read_key_page(connection, KeyId(""))).keys
        (budget,) = [entry for entry in entries if entry.key_id == budget_id("acme")]
        assert budget.secret_sha256 == ""
        return budget.spent_until


async def set_budget(pool: Pool, **limits: float) -> None:
    async with transaction(pool) as connection:
        body = LimitsBody(**limits)  # type: ignore[arg-type]
        await tenant_budgets.put_budget(connection, "acme", body, None)


async def test_a_tenants_budget_counts_the_usage_of_all_of_its_keys(with_key: Pool) -> None:
    await record(with_key, a_usage("before", key_id="k2"))
    await set_budget(with_key, tokens_per_day=500, tokens_per_month=10_000)
    await record(with_key, a_usage("q1"), a_usage("q2", key_id="k2"))
    await record(with_key, a_usage("q2", key_id="k2"))
    assert await sum_quotas(with_key) == 3, "q1 counts for its key, too"
    assert await budget_spent_until(with_key) == 0.0
    await record(with_key, a_usage("q3", key_id="k2"))
    await sum_quotas(with_key)
    assert 0 < await budget_spent_until(with_key) - time.time() <= DAY_S
    async with transaction(with_key) as connection:
        (view,) = await tenant_budgets.list_budgets(connection, "", 10)
        assert (view.tenant_id, view.tokens_today, view.tokens_this_month) == ("acme", 600, 600)
        assert [key.key_id for key in await keys.list_keys(connection, "", 10)] == [KEY]
        assert await keys.get_key(connection, budget_id("acme")) is None


async def test_a_month_is_longer_than_a_day(with_key: Pool) -> None:
    await set_budget(with_key, tokens_per_month=300)
    await record(with_key, a_usage("q1"))
    assert await budget_spent_until(with_key) == 0.0
    await record(with_key, a_usage("q2"))
    async with transaction(with_key) as connection:
        usage = await sum_quota_usage(connection)
    assert budget_id("acme") in usage.spent
    month_end = datetime.fromtimestamp(await budget_spent_until(with_key), UTC)
    assert (month_end.day, month_end.hour, month_end.minute) == (1, 0, 0)
    await set_budget(with_key, tokens_per_month=301)
    assert await budget_spent_until(with_key) == 0.0
    await set_budget(with_key, spend_per_month=300.0)
    assert await budget_spent_until(with_key) > time.time()


async def test_a_budget_that_ended_is_gone_and_can_return(with_key: Pool) -> None:
    await set_budget(with_key, requests_per_min=3)
    async with transaction(with_key) as connection:
        await tenant_budgets.delete_budget(connection, "acme", 1)
        assert await tenant_budgets.get_budget(connection, "acme") is None
        entries = (await keys.read_key_page(connection, KeyId(""))).keys
        assert [entry.key_id for entry in entries] == [KEY]
        with pytest.raises(EtagMoved):
            await tenant_budgets.delete_budget(connection, "acme", None)
    await set_budget(with_key, requests_per_min=4)
    async with transaction(with_key) as connection:
        found = await tenant_budgets.get_budget(connection, "acme")
        assert found is not None
        assert (found.limits.requests_per_min, found.etag) == (4, 3)
        with pytest.raises(EtagMoved):
            await tenant_budgets.put_budget(connection, "acme", LimitsBody(), 2)
