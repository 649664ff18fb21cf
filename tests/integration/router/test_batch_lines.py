"""Batches of too many lines, and of lines that are no requests: refused, and others go on."""

from pathlib import Path
from typing import Any

import pytest

from scheduler.decide.batch_limits import BatchLimits
from scheduler.store.pool import Pool
from tests.integration.router.test_batches import BatchBench, a_line, admin, bench

__all__ = ["admin", "bench"]

LINES_MAX = 1_000_000


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """Settings of the scheduler."""
    assert BatchLimits().items_max == LINES_MAX
    return {"batch_folder": tmp_path / "batches"}


async def items_stored(pool: Pool) -> int:
    async with pool.acquire() as connection:
        return int(await connection.fetchval("SELECT count(*) FROM batch_item"))


async def test_a_batch_of_a_million_lines_and_one_is_refused_unstored(
    bench: BatchBench, pool: Pool
) -> None:
    text = b"{}\n" * (LINES_MAX + 1)
    file = await bench.client.files.create(file=("in.jsonl", text), purpose="batch")
    batch = await bench.client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    # Another tenant's batch beside it is answered.
    beside = await bench.other.batches.create(
        input_file_id=await bench.upload(a_line("one"), client=bench.other),
        endpoint="/v1/chat/completions",
        completion_window="24h",
    )
    refused = await bench.ended(batch.id)
    assert refused.status == "failed"
    (error,) = refused.errors.data
    assert (error.code, "1000000 lines" in error.message) == ("too_many_lines", True)
    bench.client, bench.other = bench.other, bench.client
    assert (await bench.ended(beside.id)).request_counts.completed == 1
    assert await items_stored(pool) <= 1


async def test_lines_that_are_no_requests_fail_alone(bench: BatchBench) -> None:
    """Binary data, JSON of another kind, lines that never end: each is its own error."""
    lines: list[Any] = [
        *("\x00\x01\x02", "[]", "1e999", '"text"', "[" * 100_000, '{"custom_id": 5}'),
        a_line("good"),
        "x" * 3_000_000,
        '{"custom_id":"a","custom_id":"b"}',
    ]
    batch = await bench.run(*lines)
    assert batch.status == "completed"
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (9, 1, 8)
    assert [line["custom_id"] for line in await bench.lines(batch.output_file_id)] == ["good"]
    codes = {line["error"]["code"] for line in await bench.lines(batch.error_file_id)}
    assert codes <= {"invalid_json_line", "request_too_large"}, codes
