"""Writes the output file and the error file of a batch."""

import asyncio
import hashlib
from contextlib import ExitStack
from typing import BinaryIO, Final, NamedTuple

from scheduler.decide.batch_lines import error_line, result_line
from scheduler.state.files.batch_folder import BatchFolder
from scheduler.store.client_objects.batch_items import AnsweredItem, each_item
from scheduler.store.client_objects.batches import StoredBatch
from scheduler.store.pool import Pool, transaction

BUFFER_BYTES: Final = 1024 * 1024
UNDO_TIMEOUT_S: Final = 5.0
"""How long results that failed wait until their files are gone."""

KINDS: Final = ("output", "error")
UNANSWERED: Final = {
    "expired": ("batch_expired", "the batch expired before this request was answered"),
    "cancelled": ("batch_cancelled", "the batch was cancelled before this request was answered"),
}
"""The error of an item without an answer, by the end of its batch."""


class ResultFile(NamedTuple):
    """A file of results that is complete."""

    file_id: str
    name: str
    size_bytes: int


class ItemsMissing(Exception):
    """The database lacks items of a batch. Nothing was written."""


class _OpenFile:
    """A file of results that is being written, with a buffer."""

    def __init__(self, folder: BatchFolder, output: BinaryIO) -> None:
        self.size_bytes = 0
        self._folder = folder
        self._output = output
        self._buffer: list[bytes] = []
        self._buffered_bytes = 0

    async def write(self, line: bytes) -> None:
        """Write a line, when enough of them are buffered."""
        self._buffer.append(line)
        self._buffered_bytes += len(line)
        if self._buffered_bytes >= BUFFER_BYTES:
            await self.flush()

    async def flush(self) -> None:
        """Write the buffer."""
        text, self._buffer = b"".join(self._buffer), []
        self.size_bytes += len(text)
        self._buffered_bytes = 0
        await self._folder.run(self._output.write, text)


def end_status(batch: StoredBatch) -> str:
    """Return how a batch that is finalizing ends."""
    if batch.cancelling_at:
        return "cancelled"
    return "expired" if batch.unanswered else "completed"


async def write_results(pool: Pool, folder: BatchFolder, batch: StoredBatch) -> list[ResultFile]:
    """Write the output file and the error file of a batch that is finalizing.

    A finalizing batch does not change, so a repeated call writes the same files under the same ids:
    it replaces what an earlier call has left, and removes nothing of one that has succeeded. The
    files are completed after the transaction, because an upload to a bucket may take longer than a
    transaction may wait.

    Raises ItemsMissing if another scheduler has ended the batch and deletes its items: while this
    process hung, and no longer acts. Its files would replace the whole ones.
    """
    file_ids = result_file_ids(batch.batch_id)
    results: list[_OpenFile] = []
    item_count = 0
    files = ExitStack()
    try:
        async with transaction(pool, by_index=True) as connection:
            for file_id in file_ids:
                output = await folder.run(files.enter_context, folder.writing(file_id))
                results.append(_OpenFile(folder, output))
            async for item in each_item(connection, batch.batch_id):
                await results[item.is_error].write(_line_of(batch, item))
                item_count += 1
            if item_count != batch.total:
                raise ItemsMissing(
                    f"cannot write the results of {batch.batch_id}: the database has {item_count}"
                    f" of {batch.total} items; has another scheduler ended it?"
                )
            for result in results:
                await result.flush()
    except BaseException as error:
        is_cancelled = isinstance(error, asyncio.CancelledError)
        if results or is_cancelled:
            undone = folder.release(files.__exit__, type(error), error, error.__traceback__)
            if not is_cancelled:
                await asyncio.wait([undone], timeout=UNDO_TIMEOUT_S)
        raise
    await folder.run(files.close)
    return [
        ResultFile(file_id, f"{batch.batch_id}_{kind}.jsonl", result.size_bytes)
        for file_id, kind, result in zip(file_ids, KINDS, results, strict=True)
    ]


def result_file_ids(batch_id: str) -> list[str]:
    """Return the ids of a batch's files of results, in the order of KINDS."""
    digests = [hashlib.sha256(f"{batch_id} {kind}".encode()).hexdigest() for kind in KINDS]
    return [f"file-{digest[:24]}" for digest in digests]


def _line_of(batch: StoredBatch, item: AnsweredItem) -> bytes:
    """Return the line of an item in the output or error file."""
    item_id = f"batch_req_{batch.batch_id.removeprefix('batch_')}_{item.line}"
    if item.is_done and not item.error_code:
        return result_line(
            item_id=item_id,
            custom_id=item.custom_id,
            status_code=item.status_code,
            request_id=item.request_id,
            body=item.result,
        )
    code, message = item.error_code, item.result.decode(errors="replace")
    if not item.is_done:
        code, message = UNANSWERED.get(end_status(batch), UNANSWERED["expired"])
    return error_line(item_id=item_id, custom_id=item.custom_id, code=code, message=message)
