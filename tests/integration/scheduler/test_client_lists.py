"""A page of files or batches costs the same, however many the tenant has."""

from typing import Final

from scheduler.store.client_objects.batch_files import list_files
from scheduler.store.client_objects.batches import list_batches
from scheduler.store.pool import Connection, Pool, transaction

ROWS: Final = 20_000
PAGE: Final = 21

READ_MAX: Final = 3 * PAGE
"""A page reads its own rows, and the row after which it begins."""

FILL: Final = """
    INSERT INTO batch_file (file_id, tenant_id, purpose, filename, size_bytes, created_at)
    SELECT 'f' || md5(n::text), 't', CASE WHEN n % 1000 = 0 THEN 'rare' ELSE 'batch' END, 'n', 1,
           now() - n * interval '1 s'
    FROM generate_series(1, $1::int) n
"""
FILL_BATCHES: Final = """
    INSERT INTO batch (batch_id, tenant_id, key_id, endpoint, input_file_id, created_at, expires_at)
    SELECT 'b' || md5(n::text), 't', 'k', '/v1/chat/completions', 'f', now() - n * interval '1 s',
           now()
    FROM generate_series(1, $1::int) n
"""
READ: Final = """
    SELECT coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0)
    FROM pg_stat_xact_user_tables WHERE relname = $1
"""
MIDDLE: Final = "b7a782741f667201b54880c925faec4b"
"""The MD5 of 10000: the id of the row in the middle."""


async def _fill(pool: Pool, statement: str, table: str) -> None:
    async with transaction(pool) as connection:
        await connection.execute(statement, ROWS)
        await connection.execute(f"ANALYZE {table}")


async def _read_by(connection: Connection, table: str) -> int:
    return int(await connection.fetchval(READ, table) or 0)


async def test_a_page_of_files_reads_only_its_rows(pool: Pool) -> None:
    await _fill(pool, FILL, "batch_file")
    middle = f"f{MIDDLE}"
    for purpose, after, is_newest in (
        ("", "", True),
        ("", middle, True),
        ("", middle, False),
        ("rare", "", True),
        ("batch", middle, False),
    ):
        async with transaction(pool) as connection:
            before = await _read_by(connection, "batch_file")
            files = await list_files(
                connection, "t", purpose=purpose, after=after, limit=PAGE, newest=is_newest
            )
            rows_read = await _read_by(connection, "batch_file") - before
        assert len(files) == (20 if purpose == "rare" else PAGE)
        times = [file.created_at for file in files]
        assert times == sorted(times, reverse=is_newest)
        assert rows_read <= READ_MAX, (purpose, after, is_newest)


async def test_a_page_of_batches_reads_only_its_rows(pool: Pool) -> None:
    await _fill(pool, FILL_BATCHES, "batch")
    for after in ("", f"b{MIDDLE}"):
        async with transaction(pool) as connection:
            before = await _read_by(connection, "batch")
            batches = await list_batches(connection, "t", after, PAGE)
            rows_read = await _read_by(connection, "batch") - before
        assert len(batches) == PAGE
        assert rows_read <= READ_MAX, after


async def test_a_position_of_another_tenant_begins_no_page(pool: Pool) -> None:
    async with transaction(pool) as connection:
        await connection.execute(FILL, 5)
        other = await connection.fetchval(
            "UPDATE batch_file SET tenant_id = 'other' WHERE created_at ="
            " (SELECT max(created_at) FROM batch_file) RETURNING file_id"
        )
        for after, count in (("", 4), (other, 0)):
            files = await list_files(
                connection, "t", purpose="", after=after, limit=PAGE, newest=True
            )
            assert len(files) == count
