"""Usage of keys and tenants, by day and in total, in pages, and in the CLI."""

import asyncio
import json
from datetime import UTC, date, datetime, timedelta
from typing import Any

import msgspec
import pytest

from isochrone.wire.ids import KeyId, TenantId
from isochrone.wire.models.model import Price
from isochrone.wire.peers.usage import UsageRow
from scheduler.store import catalogue, deployments
from scheduler.store.accounts import usage_sums
from scheduler.store.accounts.usage import record_usage
from scheduler.store.pool import Pool, transaction, using
from tests.builders import a_deployment, a_model
from tests.integration.admin.conftest import Admin
from tests.integration.admin.test_cli import run_cli
from tests.integration.scheduler.test_quotas import a_usage

DAY = date(2026, 5, 10)
NOON_S = datetime(DAY.year, DAY.month, DAY.day, 12, tzinfo=UTC).timestamp()
DAY_S = 86_400.0


def used(name: str, key_id: str, tenant: str, started_at: float) -> UsageRow:
    """Return the usage of one request: 100 prompt tokens, 40 of them cached, 50 output tokens."""
    return msgspec.structs.replace(
        a_usage(name), key_id=KeyId(key_id), tenant_id=TenantId(tenant), started_at=started_at
    )


@pytest.fixture
async def ledger(admin: Admin, pool: Pool) -> dict[str, str]:
    """Store usage of two keys of acme and one of zeta on two days; return the keys' ids."""
    price = Price(prompt_per_million=1e6, cached_per_million=1e5, output_per_million=2e6)
    async with transaction(pool) as connection:
        model = msgspec.structs.replace(a_model(), price=price)
        await catalogue.put_model(connection, model, None)
        await deployments.add_deployment(connection, a_deployment())
    ids = {}
    for name in ("acme", "acme-2", "zeta"):
        made = await admin.ask("POST", "/v1/keys", {"tenant_id": name.removesuffix("-2")})
        ids[name] = made.body["key_id"]
    rows = [
        used("a1", ids["acme"], "acme", NOON_S),
        used("a2", ids["acme"], "acme", NOON_S),
        used("a3", ids["acme"], "acme", NOON_S + DAY_S),
        used("b1", ids["acme-2"], "acme", NOON_S),
        used("z1", ids["zeta"], "zeta", NOON_S),
        # The first and the last moment of the first day, and the moments next to them.
        used("z2", ids["zeta"], "zeta", NOON_S - DAY_S / 2),
        used("z3", ids["zeta"], "zeta", NOON_S - DAY_S / 2 - 0.001),
        used("z4", ids["zeta"], "zeta", NOON_S + DAY_S / 2 - 0.001),
        used("z5", ids["zeta"], "zeta", NOON_S + DAY_S / 2),
    ]
    async with transaction(pool) as connection:
        await record_usage(connection, tuple(rows))
    return ids


async def listed(admin: Admin, query: str) -> list[Any]:
    answer = await admin.ask("GET", f"/v1/usage?{query}")
    assert answer.status == 200, answer
    assert answer.body["next_cursor"] is None
    return list(answer.body["data"])


async def test_usage_is_summed_by_key_or_tenant_by_day_or_in_total(
    admin: Admin, ledger: dict[str, str]
) -> None:
    one_day = f"from={DAY}&to={DAY}"
    rows = await listed(admin, f"{one_day}&key_id={ledger['acme']}")
    assert rows == [
        {
            "day": None,
            "tenant_id": "acme",
            "key_id": ledger["acme"],
            "deployment_id": "d",
            "requests": 2,
            "prompt_tokens": 200,
            "cached_tokens": 80,
            "output_tokens": 100,
            # 60 uncached at 1, 40 cached at 0.1, 50 out at 2: twice.
            "spend": pytest.approx(328.0),
        }
    ]
    rows = await listed(admin, f"{one_day}&by=tenant")
    counts = [(row["tenant_id"], row["key_id"], row["requests"]) for row in rows]
    assert counts == [("acme", "", 3), ("zeta", "", 3)]
    rows = await listed(admin, f"from={DAY}&to={DAY + timedelta(days=1)}&tenant_id=acme&per=day")
    by_day = [(row["day"], row["key_id"], row["requests"]) for row in rows]
    keys = sorted([(ledger["acme"], 2), (ledger["acme-2"], 1)])
    assert by_day == [
        *((str(DAY), key_id, count) for key_id, count in keys),
        (str(DAY + timedelta(days=1)), ledger["acme"], 1),
    ]
    assert await listed(admin, "") == [], "the last week by default"
    assert await listed(admin, "tenant_id=acme") == [], "it has keys"
    assert (await admin.ask("DELETE", f"/v1/keys/{ledger['zeta']}")).status == 204
    assert await listed(admin, "tenant_id=zeta") == [], "it had a key"


async def test_each_sum_is_on_one_page(admin: Admin, ledger: dict[str, str]) -> None:
    for per in ("day", "total"):
        query = f"from={DAY - timedelta(days=1)}&to={DAY + timedelta(days=1)}&per={per}"
        whole = await listed(admin, query)
        assert sum(row["requests"] for row in whole) == 9
        paged: list[Any] = []
        cursor = ""
        while cursor is not None:
            page = (await admin.ask("GET", f"/v1/usage?{query}&limit=1&cursor={cursor}")).body
            paged += page["data"]
            cursor = page["next_cursor"]
        assert paged == whole


async def test_an_invalid_query_is_refused_with_the_reason(
    admin: Admin, ledger: dict[str, str]
) -> None:
    for query, words in (
        ("from=yesterday", "'yesterday' is not a day; write it as 2026-01-31"),
        ("from=2026-01-01&to=2026-02-01", "is not 1 to 31 days"),
        ("from=2026-01-02&to=2026-01-01", "is not 1 to 31 days"),
        ("to=0001-01-01", "is not between 2000 and 2999"),
        ("by=city", "by is 'city', give key or tenant"),
        ("per=hour", "per is 'hour', give total or day"),
        ("cursor=W10x", "the cursor was not returned by this list"),
        ("limit=0", "limit is '0'"),
        ("key_id=nobody", "cannot find the key 'nobody'"),
        ("tenant_id=nobody", "tenant 'nobody' has no usage in these days, and never had a key"),
        (f"tenant_id=zeta&key_id={ledger['acme']}", "belongs to the tenant acme"),
    ):
        answer = await admin.ask("GET", f"/v1/usage?{query}")
        assert answer.status in (400, 404), answer
        assert words in answer.body["error"]["message"], query


async def test_a_query_that_takes_too_long_says_what_to_do(
    admin: Admin, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage_sums, "STATEMENT_TIMEOUT_S", 0.05)
    async with using(pool) as connection, connection.transaction():
        await connection.execute("LOCK TABLE usage IN ACCESS EXCLUSIVE MODE")
        async with asyncio.timeout(30):
            answer = await admin.ask("GET", "/v1/usage")
    assert answer.status == 400
    assert "ask for fewer days" in answer.body["error"]["message"]


async def test_usage_in_the_cli(admin: Admin, ledger: dict[str, str]) -> None:
    days = ("--from", str(DAY), "--to", str(DAY + timedelta(days=1)))
    code, out, err = await run_cli(admin, "-o", "json", "usage", *days, "--by", "tenant")
    assert code == 0, err
    assert [(row["tenant_id"], row["requests"]) for row in json.loads(out)] == [
        ("acme", 4),
        ("zeta", 4),
    ]
    code, out, err = await run_cli(admin, "usage", *days, "--key", ledger["acme"], "--per", "day")
    assert code == 0, err
    head, *lines = out.splitlines()
    assert head.split()[:3] == ["DAY", "TENANT", "ID"]
    assert [line.split()[:4] for line in lines] == [
        [str(DAY), "acme", ledger["acme"], "d"],
        [str(DAY + timedelta(days=1)), "acme", ledger["acme"], "d"],
    ]
