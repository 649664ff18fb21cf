"""Batches over the public API, with their files in a bucket of a real S3 server."""

from pathlib import Path
from typing import Any

import openai
import pytest

from tests.integration.admin.conftest import admin
from tests.integration.router.test_batches import BatchBench, a_line, bench
from tests.integration.scheduler.s3_server import Server, server
from tests.system.harness import until

__all__ = ["admin", "bench", "server"]


@pytest.fixture
def settings(server: Server) -> dict[str, Any]:
    """Settings of the scheduler."""
    return {
        "batch_bucket": "s3://bucket/cluster",
        "batch_bucket_endpoint": server.proxy.url,
        "batch_spool_folder": server.spool,
    }


async def test_a_batch_is_answered_and_its_files_are_deleted(
    bench: BatchBench, server: Server, tmp_path: Path
) -> None:
    stored = tmp_path / "served" / "bucket" / "cluster"
    batch = await bench.run(a_line("one"), "this is not JSON", a_line("two"))
    output = await bench.lines(batch.output_file_id)
    assert [line["custom_id"] for line in output] == ["one", "two"]
    errors = await bench.lines(batch.error_file_id)
    assert [line["error"]["code"] for line in errors] == ["invalid_json_line"]
    file_ids = {batch.input_file_id, batch.output_file_id, batch.error_file_id}

    async def has_only(names: set[str]) -> bool:
        # rclone answers before it has written or deleted the file.
        return {path.name for path in stored.iterdir()} == names if stored.exists() else not names

    await until("the bucket has the batch's files", lambda: has_only(file_ids), 60.0)
    assert list(server.spool.iterdir()) == []

    for file_id in file_ids:
        await bench.client.files.delete(file_id)
    await until("the bucket is empty", lambda: has_only(set()), 60.0)


async def test_a_file_stays_while_the_bucket_cannot_delete_it(
    bench: BatchBench, server: Server
) -> None:
    file = await bench.client.files.create(file=("a", b"{}"), purpose="batch")
    server.process.kill()
    server.process.wait()
    for failing in (
        bench.client.files.delete(file.id),
        bench.client.files.content(file.id),
        bench.client.files.create(file=("b", b"{}"), purpose="batch"),
    ):
        with pytest.raises(openai.InternalServerError, match="cannot use the bucket") as refused:
            await failing
        assert refused.value.status_code == 503
    assert [found.id async for found in bench.client.files.list()] == [file.id]
