"""Batches take turns: a large or broken one delays no other, nor does one without a quota."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import BinaryIO

import pytest

from isochrone.wire.admin import LimitsBody
from isochrone.wire.errors import ApiError
from isochrone.wire.peers.batches import ItemResult
from scheduler.decide.batch_limits import BatchLimits
from scheduler.decide.batch_shares import WaitingBatch
from scheduler.loops.advance_batches import ANALYZED_MIN, AdvanceBatches
from scheduler.state.files.batch_folder import BatchFolder
from scheduler.store.accounts import tenant_budgets
from scheduler.store.client_objects.batch_files import add_file
from scheduler.store.client_objects.batch_items import (
    NewItem,
    add_items,
    fail_repeated_ids,
    lease_items,
    store_results,
    waiting_batches,
    without_spent_quota,
)
from scheduler.store.client_objects.batches import add_batch
from scheduler.store.pool import Pool, transaction, using
from tests.builders import a_deployment
from tests.integration.scheduler.test_batch_statements import READ
from tests.integration.scheduler.test_quotas import (
    KEY,
    a_usage,
    limited,
    record,
    sum_quotas,
    with_key,
)
from tests.system.harness import until

__all__ = ["with_key"]

MODEL = a_deployment().name
LIMITS = BatchLimits(tenant_items_max=3_000)


class SlowFolder(BatchFolder):
    """A folder in which some files cannot be read yet, and some never."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.may_read = threading.Event()
        self.opened: list[str] = []

    def open(self, file_id: str) -> BinaryIO:
        self.opened.append(file_id)
        if "broken" in file_id:
            raise OSError("the disk is gone")
        if "large" in file_id:
            self.may_read.wait(60)
        return super().open(file_id)


class Turns:
    """The job under test, with its folder."""

    def __init__(self, pool: Pool, folder: SlowFolder) -> None:
        self.pool = pool
        self.folder = folder
        self.nudges = 0
        self.skipped_s = 0.0
        self.lease = SimpleNamespace(is_acting=True)
        self.job = AdvanceBatches(
            pool=pool,
            lease=self.lease,  # type: ignore[arg-type]
            folder=folder,
            limits=LIMITS,
            nudge=self._nudge,
            unix_clock=lambda: time.time() + self.skipped_s,
        )

    def _nudge(self) -> None:
        self.nudges += 1

    async def begin(self, name: str, tenant_id: str = "acme", *, lines: int = 1) -> None:
        """Create a batch of some items."""
        body = {"model": MODEL, "messages": []}
        line = {"method": "POST", "url": "/v1/chat/completions", "body": body}
        items = [json.dumps({**line, "custom_id": str(number)}) for number in range(lines)]
        text = "\n".join(items).encode()

        def write() -> None:
            with self.folder.writing(name) as output:
                output.write(text)

        await asyncio.to_thread(write)
        async with transaction(self.pool) as connection:
            await add_file(
                connection,
                file_id=name,
                tenant_id=tenant_id,
                purpose="batch",
                filename=name,
                size_bytes=len(text),
                expires_after_s=None,
            )
            await add_batch(
                connection,
                batch_id=name,
                tenant_id=tenant_id,
                key_id=KEY,
                endpoint="/v1/chat/completions",
                input_file_id=name,
                metadata={},
                expires_after_s=3600,
            )

    async def statuses(self) -> dict[str, str]:
        async with using(self.pool) as connection:
            rows = await connection.fetch("SELECT batch_id, status FROM batch")
        open_ones = ("validating", "in_progress", "finalizing", "cancelling")
        return {row["batch_id"]: row["status"] for row in rows if row["status"] in open_ones}

    async def until_begun(self, *names: str) -> None:
        """Take turns until these batches are in progress."""

        async def have_begun() -> bool:
            await self.job.run_once()
            statuses = await self.statuses()
            return all(statuses[name] == "in_progress" for name in names)

        await until(f"{names} have begun", have_begun)

    async def waiting(self) -> Sequence[str]:
        async with using(self.pool) as connection:
            batches: list[WaitingBatch] = await waiting_batches(connection, [MODEL], 10)
            return [one.batch_id for one in await without_spent_quota(connection, batches)]


@pytest.fixture
async def turns(with_key: Pool, tmp_path: Path) -> AsyncIterator[Turns]:
    folder = SlowFolder(tmp_path)
    turns = Turns(with_key, folder)
    try:
        yield turns
    finally:
        folder.may_read.set()
        await turns.job.close()


async def test_batches_begin_while_a_large_one_is_read(turns: Turns) -> None:
    await turns.begin("large-1")
    await turns.job.run_once()
    await turns.begin("small-1")
    await turns.begin("small-2", "other")
    await turns.until_begun("small-1", "small-2")
    assert (await turns.statuses())["large-1"] == "validating"
    assert turns.nudges, "the end of a step asks for the next turn"
    turns.folder.may_read.set()
    await turns.until_begun("large-1")


async def test_a_step_ends_with_the_lease_and_is_repeated(turns: Turns) -> None:
    await turns.begin("large-1")
    await turns.job.run_once()
    turns.lease.is_acting = False
    await turns.job.run_once()
    turns.folder.may_read.set()
    async with using(turns.pool) as connection:
        assert await connection.fetchval("SELECT count(*) FROM batch_item") == 0
    assert await turns.statuses() == {"large-1": "validating"}
    turns.lease.is_acting = True
    await turns.until_begun("large-1")


async def test_a_batch_that_cannot_be_read_delays_no_other(turns: Turns) -> None:
    await turns.begin("broken-1")
    await turns.begin("small-1")
    await turns.job.run_once()
    failures = 0
    while (await turns.statuses())["small-1"] != "in_progress":
        try:
            await turns.job.run_once()
        except ApiError:
            failures += 1
    assert failures, "its failure is reported"


async def test_items_without_a_quota_are_not_leased_until_it_is_raised(turns: Turns) -> None:
    await turns.begin("of-acme")
    await turns.begin("of-other", "other")
    await turns.until_begun("of-acme", "of-other")
    assert await turns.waiting() == ["of-acme", "of-other"]
    async with transaction(turns.pool) as connection:
        limits = LimitsBody(tokens_per_day=300)
        await tenant_budgets.put_budget(connection, "acme", limits, None)
    await record(turns.pool, a_usage("q1"), a_usage("q2"))
    await sum_quotas(turns.pool)
    assert await turns.waiting() == ["of-other"], "the tenant's budget is used up"
    await record(turns.pool, a_usage("q3"))
    await sum_quotas(turns.pool)
    assert await turns.waiting() == [], "and the quota of the key"
    await limited(turns.pool, tokens_per_day=1000)
    assert await turns.waiting() == ["of-other"]
    async with transaction(turns.pool) as connection:
        await tenant_budgets.put_budget(connection, "acme", LimitsBody(tokens_per_day=1000), None)
    assert await turns.waiting() == ["of-acme", "of-other"]


async def test_a_lease_says_whether_the_key_of_its_batch_is_valid(turns: Turns) -> None:
    await turns.begin("batch")
    await turns.until_begun("batch")

    async def is_valid() -> bool:
        async with using(turns.pool) as connection:
            waiting = await waiting_batches(connection, [MODEL], 10)
            (batch,) = await without_spent_quota(connection, waiting)
        return batch.is_key_valid

    assert await is_valid()
    async with using(turns.pool) as connection:
        await connection.execute("UPDATE api_key SET revoked_at = now()")
    assert not await is_valid()


LINES = 400


@pytest.mark.parametrize("every", [2, LINES + 1])
async def test_repeated_ids_of_a_batch_that_the_planner_does_not_know_are_found_without_a_self_join(
    turns: Turns, every: int
) -> None:
    """It expects one row of such a batch: a join would compare every line with every other one."""
    for name in ("known", "new"):
        await turns.begin(name)
    async with transaction(turns.pool) as connection:
        known = [NewItem(line, f"id-{line}", 0, 1) for line in range(20 * LINES)]
        await add_items(connection, "known", known)
    async with using(turns.pool) as connection:
        await connection.execute("ANALYZE batch_item")
    items = [
        NewItem(line, f"id-{line - line % every if line % 2 else line}", 0, 1)
        for line in range(LINES)
    ]
    async with transaction(turns.pool, by_index=True) as connection:
        await add_items(connection, "new", items)
        before = await connection.fetchval(READ)
        await fail_repeated_ids(connection, "new")
        read = await connection.fetchval(READ) - before
        failed = await connection.fetch(
            "SELECT line FROM batch_item WHERE error_code = 'duplicate_custom_id'"
        )
    assert read < LINES * LINES / 10
    assert len(failed) == len(items) - len({item.custom_id for item in items})
    assert all(row["line"] % 2 for row in failed)


async def test_an_item_that_fails_waits_longer_each_time(turns: Turns) -> None:
    """Five attempts within seconds failed all items that a router sent to a node that had died."""
    await turns.begin("batch")
    await turns.until_begun("batch")

    async def fail(*, counts: bool = True) -> float | None:
        """Fail the item once; return how long it waits, None if it is answered with an error."""
        async with transaction(turns.pool) as connection:
            await connection.execute("UPDATE batch_item SET available_at = now()")
            (leased,) = await lease_items(
                connection, "batch", count=1, bytes_max=1 << 20, lease_id="lease", lease_s=60.0
            )
            result = ItemResult(ref=leased.ref, retry_after_s=1.0, counts_as_attempt=counts)
            await store_results(connection, [result])
            row = await connection.fetchrow(
                "SELECT is_done, extract(epoch FROM available_at - now()) AS wait_s FROM batch_item"
            )
        assert row is not None
        return None if row["is_done"] else float(row["wait_s"])

    waits = [await fail(), await fail(), await fail(counts=False), await fail(), await fail()]
    assert waits == [1.0, 4.0, 1.0, 16.0, 64.0]
    assert await fail() is None


async def test_the_database_knows_of_a_large_batch_once_it_is_in_progress(turns: Turns) -> None:
    await turns.begin("many", lines=ANALYZED_MIN)
    await turns.until_begun("many")
    async with using(turns.pool) as connection:
        rows = await connection.fetchval(
            "SELECT reltuples FROM pg_class WHERE relname = 'batch_item'"
        )
    assert rows == ANALYZED_MIN
