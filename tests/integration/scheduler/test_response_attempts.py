"""Background responses that fail are tried again, later each time."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from isochrone.wire.ids import TenantId
from isochrone.wire.peers.responses import BeginResponse, FinishResponse, LeaseResponses
from scheduler.api.client_objects.relayed import ClientTurns
from scheduler.api.client_objects.responses import ResponseWork
from scheduler.decide.response_limits import ResponseLimits
from scheduler.loops.end_responses import EndResponses
from scheduler.store.client_objects import responses
from scheduler.store.client_objects.responses import (
    add_response,
    lease_responses,
    postpone_response,
)
from scheduler.store.pool import Pool, transaction, using
from tests.integration.scheduler.test_quotas import KEY, with_key

__all__ = ["with_key"]

ATTEMPTS = 5


async def test_a_response_that_fails_waits_longer_each_time(with_key: Pool) -> None:
    async with transaction(with_key) as connection:
        begun = BeginResponse(
            response_id="resp_1",
            tenant_id=TenantId("acme"),
            key_id=KEY,
            body=b"{}",
            input_items=b"[]",
            run=b"{}",
        )
        assert await add_response(connection, begun, b"", "", ResponseLimits())

    async def fail(*, counts: bool = True) -> tuple[float, bool]:
        """Fail the response once; return how long it waits, and whether it may be tried again."""
        async with transaction(with_key) as connection:
            await connection.execute("UPDATE stored_response SET available_at = now()")
            (leased,) = await lease_responses(connection, 1, "lease", 60.0)
            failed = FinishResponse(ref=leased.ref, retry_after_s=1.0, counts_as_attempt=counts)
            may_retry = await postpone_response(connection, failed, ATTEMPTS)
            wait_s = await connection.fetchval(
                "SELECT extract(epoch FROM available_at - now()) FROM stored_response"
            )
        return float(wait_s), may_retry

    waits = [await fail(), await fail(), await fail(counts=False), await fail(), await fail()]
    assert waits == [(1.0, True), (4.0, True), (1.0, True), (16.0, True), (64.0, True)]
    assert (await fail())[1] is False


async def test_a_lease_says_whether_the_key_of_its_response_is_valid(with_key: Pool) -> None:
    work = ResponseWork(with_key, ResponseLimits(), ClientTurns())

    async def is_valid(response_id: str) -> bool:
        begun = BeginResponse(
            response_id=response_id,
            tenant_id=TenantId("acme"),
            key_id=KEY,
            body=b"{}",
            input_items=b"[]",
            run=b"{}",
        )
        await work.begin(msgspec.msgpack.encode(begun))
        (leased,) = (await work.lease(msgspec.msgpack.encode(LeaseResponses(wanted=9)))).responses
        return leased.is_key_valid

    assert await is_valid("resp_1")
    async with using(with_key) as connection:
        await connection.execute("UPDATE api_key SET revoked_at = now()")
    assert not await is_valid("resp_2")


async def test_a_response_survives_a_time_in_which_its_lease_could_not_be_renewed(
    with_key: Pool,
) -> None:
    """After 30 s without the database, the scheduler ended what routers were about to finish."""
    lease: Any = SimpleNamespace(is_acting=True)
    now_s = [1000.0]
    limits = ResponseLimits(lease_s=60.0)
    job = EndResponses(pool=with_key, lease=lease, limits=limits, clock=lambda: now_s[0])
    begun = BeginResponse(
        response_id="resp_1", tenant_id=TenantId("acme"), key_id=KEY, body=b"{}", input_items=b"[]"
    )
    async with transaction(with_key) as connection:
        assert await add_response(connection, begun, b"", "lease", limits)
        await connection.execute("UPDATE stored_response SET available_at = now()")

    async def turn(after_s: float) -> int:
        now_s[0] += after_s
        return await job.run_once()

    assert [await turn(0.0), await turn(59.0)] == [0, 0], "it has just begun to act"
    lease.is_acting = False
    assert await turn(9.0) == 0
    lease.is_acting = True
    assert [await turn(1.0), await turn(59.0), await turn(1.0)] == [0, 0, 1]


async def test_only_responses_that_fit_into_a_message_are_leased(
    with_key: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that a router asked for were in memory, and those that did not fit waited a minute."""
    size = 1000
    monkeypatch.setattr(responses, "MESSAGE_BYTES_MAX", 3 * size)
    async with transaction(with_key) as connection:
        for number in range(8):
            begun = BeginResponse(
                response_id=f"resp_{number}",
                tenant_id=TenantId("acme"),
                key_id=KEY,
                body=bytes(size if number else 4 * size),
                input_items=b"",
                run=b"{}",
            )
            assert await add_response(connection, begun, b"", "", ResponseLimits())
            await connection.execute(
                "UPDATE stored_response SET created_at = now() + interval '1 second' * $1"
                " WHERE response_id = $2",
                *(float(number), begun.response_id),
            )
        counts = [len(await lease_responses(connection, 9, "lease", 60.0)) for _ in range(6)]
    assert counts == [1, 2, 2, 2, 1, 0]
