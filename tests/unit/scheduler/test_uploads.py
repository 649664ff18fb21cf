"""Uploads and downloads: disks that are full, fail or hang, and clients that leave."""

import asyncio
import io
import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer, make_mocked_request

from isochrone.service.network.http_server import error_middleware, json_error
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.peers.relay import store_timeout_s
from scheduler.api.client_objects import uploads
from scheduler.api.client_objects.downloads import send_file
from scheduler.api.client_objects.uploads import write_upload
from scheduler.state.files import batch_folder, file_threads
from scheduler.state.files.batch_folder import CHUNK_BYTES, RELEASES, BatchFolder
from scheduler.state.files.file_threads import THREADS_MAX

BYTES_MAX = 1 << 20


class FullDisk(BatchFolder):
    """Every write of a file fails for lack of space."""

    @contextmanager
    def writing(self, file_id: str) -> Iterator[BinaryIO]:
        with Path("/dev/full").open("wb", buffering=0) as output:
            yield output


class Sender:
    """Sends some chunks of 1000 bytes."""

    def __init__(self, chunks: int) -> None:
        self.left = chunks

    async def read_chunk(self, _size: int) -> bytes:
        self.left -= 1
        return bytes(1000) if self.left >= 0 else b""


async def refusal(
    folder: BatchFolder,
    sender: Sender,
    timeout_s_of: Callable[[int], float] = store_timeout_s,
) -> str:
    with pytest.raises(ApiError) as refused:
        await write_upload(
            folder,
            "file-1",
            sender.read_chunk,
            bytes_max=BYTES_MAX,
            timeout_s_of=timeout_s_of,
        )
    assert refused.value.code is ErrorCode.UNAVAILABLE
    return refused.value.message


async def test_uploads_leave_room_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, sender = BatchFolder(tmp_path, free_bytes_min=1 << 60), Sender(9)
    assert "almost full" in await refusal(folder, sender)
    assert sender.left == 9, "nothing of the upload was read"
    # Others fill the disk while it arrives.
    monkeypatch.setattr(uploads, "SPACE_CHECK_BYTES", 2500)
    roomy, answers = BatchFolder(tmp_path), iter((True, True, False))
    monkeypatch.setattr(roomy, "has_room", lambda: next(answers))
    assert "almost full" in await refusal(roomy, sender)
    assert not list(tmp_path.iterdir())
    size = await write_upload(BatchFolder(tmp_path), "f", Sender(3).read_chunk, bytes_max=BYTES_MAX)
    assert size == (tmp_path / "f").stat().st_size == 3000


async def test_a_full_disk_is_named_as_the_reason(tmp_path: Path) -> None:
    assert "No space left on device" in await refusal(FullDisk(tmp_path), Sender(1))


async def test_a_folder_that_hangs_takes_no_threads_of_others(tmp_path: Path) -> None:
    folder, may_end = BatchFolder(tmp_path), threading.Event()
    hanging = [asyncio.create_task(folder.run(may_end.wait)) for _ in range(40)]
    await asyncio.wait(hanging, timeout=0)
    try:
        async with asyncio.timeout(20):
            assert await asyncio.to_thread(lambda: 1) == 1
    finally:
        may_end.set()
        await asyncio.wait(hanging)


class HangingFile(io.RawIOBase):
    """A file whose reads and writes hang until `may_end`."""

    def __init__(self) -> None:
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        self._hang()
        return len(data)

    def readinto(self, buffer: Any, /) -> int:
        self._hang()
        return 0

    def _hang(self) -> None:
        self.has_begun.set()
        self.may_end.wait(20)


class HangingDisk(BatchFolder):
    """Has one file, which hangs. Its buffers are locked while a call runs, like those of others."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.file = HangingFile()

    @contextmanager
    def writing(self, file_id: str) -> Iterator[BinaryIO]:
        with io.BufferedWriter(self.file, 1) as output:
            yield cast(BinaryIO, output)

    def open(self, file_id: str) -> BinaryIO:
        return cast(BinaryIO, io.BufferedReader(self.file, 1))


@pytest.mark.parametrize("call", ["upload", "download"])
async def test_a_client_that_leaves_a_hanging_disk_does_not_stop_the_scheduler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The file was closed on the event loop, which then waited for the call that hangs."""
    disk = HangingDisk(tmp_path)
    if call == "upload":
        sender = Sender(9)
        begun: Any = write_upload(disk, "file-1", sender.read_chunk, bytes_max=BYTES_MAX)
    else:
        monkeypatch.setattr(HangingFile, "seekable", lambda _: True)
        monkeypatch.setattr(HangingFile, "seek", lambda _, place, whence=0: place)
        request, response = make_mocked_request("GET", "/"), web.StreamResponse()
        begun = send_file(request, disk, "file-1", response, first=0, count=9)
    work: asyncio.Task[Any] = asyncio.ensure_future(begun)
    assert await asyncio.to_thread(disk.file.has_begun.wait, 20)
    answers_late = threading.Timer(5.0, disk.file.may_end.set)
    answers_late.start()
    work.cancel()
    await asyncio.wait([work])
    assert work.cancelled()
    assert not disk.file.may_end.is_set()
    answers_late.cancel()
    disk.file.may_end.set()
    await asyncio.gather(*uploads._UNDOING, *RELEASES)
    assert disk.file.closed


async def test_an_upload_ends_if_the_disk_hangs_in_the_middle_of_it(tmp_path: Path) -> None:
    """It hung with the disk, and so did its client."""
    disk = HangingDisk(tmp_path)
    async with asyncio.timeout(10):
        # The first part gets no time; what comes before it has enough.
        reason = await refusal(disk, Sender(9), lambda size_bytes: 0.0 if size_bytes else 20.0)
    assert "does not answer" in reason
    assert await asyncio.to_thread(disk.file.has_begun.wait, 20)
    assert not RELEASES, "the file is not closed in a second thread, which would hang, too"
    disk.file.may_end.set()
    await asyncio.gather(*uploads._UNDOING)
    assert disk.file.closed


@pytest.mark.parametrize("call", ["upload", "download"])
async def test_a_client_of_a_disk_that_hangs_gets_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """An upload waited two minutes for it, and a download until its router gave up."""
    for module in (uploads, batch_folder):
        monkeypatch.setattr(module, "CLIENT_CALL_TIMEOUT_S", 0.05)
    monkeypatch.setattr(HangingFile, "seekable", lambda _: True)
    monkeypatch.setattr(HangingFile, "seek", lambda _, place, whence=0: place)
    disk = HangingDisk(tmp_path)
    begun: Any = write_upload(disk, "file-1", Sender(9).read_chunk, bytes_max=BYTES_MAX)
    if call == "download":
        begun.close()
        request, response = make_mocked_request("GET", "/"), web.StreamResponse()
        begun = send_file(request, disk, "file-1", response, first=0, count=9)
    try:
        async with asyncio.timeout(15):
            with pytest.raises(ApiError, match="does not answer") as refused:
                await begun
        assert refused.value.code is ErrorCode.UNAVAILABLE
    finally:
        disk.file.may_end.set()
        await asyncio.gather(*uploads._UNDOING, *RELEASES)


async def test_an_upload_that_gets_no_thread_does_not_wait_to_be_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All threads hang from its middle on: its file is closed once one is free."""
    monkeypatch.setattr(file_threads, "TURN_TIMEOUT_S", 0.0)
    monkeypatch.setattr(uploads, "UNDO_TIMEOUT_S", 0.0)
    folder, may_end = BatchFolder(tmp_path), threading.Event()
    hanging: list[asyncio.Task[bool]] = []

    async def read_chunk(_size: int) -> bytes:
        hanging.extend(
            asyncio.create_task(folder.run(may_end.wait, 20)) for _ in range(THREADS_MAX)
        )
        await asyncio.wait(hanging, timeout=0)
        return bytes(1000)

    async with asyncio.timeout(10):
        with pytest.raises(ApiError, match="does not answer"):
            await write_upload(folder, "file-1", read_chunk, bytes_max=BYTES_MAX)
    assert list(tmp_path.iterdir())
    may_end.set()
    await asyncio.gather(*uploads._UNDOING, *hanging, return_exceptions=True)
    assert not list(tmp_path.iterdir())


async def test_the_calls_of_an_upload_have_one_time_limit_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk on which each part takes long, but not too long, would hold it for hours."""
    loop, folder = asyncio.get_running_loop(), BatchFolder(tmp_path)
    clock, slow_s = loop.time, 0.0
    monkeypatch.setattr(loop, "time", lambda: clock() + slow_s)
    run = folder.run

    async def run_slowly(call: Any, *arguments: Any, **named: Any) -> Any:
        nonlocal slow_s
        result = await run(call, *arguments, **named)
        slow_s += 70.0
        return result

    monkeypatch.setattr(folder, "run", run_slowly)
    sender = Sender(9)
    assert "does not answer" in await refusal(folder, sender)
    assert sender.left == 8, "two calls came before the first part"
    await asyncio.gather(*uploads._UNDOING)
    assert not list(tmp_path.iterdir())


async def test_a_file_is_never_closed_by_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While all threads hung, its closing was given up, and the garbage collector closed it."""
    monkeypatch.setattr(file_threads, "TURN_TIMEOUT_S", 0.0)
    folder, may_end = BatchFolder(tmp_path), threading.Event()
    async with asyncio.timeout(20):
        hanging = [asyncio.create_task(folder.run(may_end.wait, 20)) for _ in range(THREADS_MAX)]
        await asyncio.wait(hanging, timeout=0)
        closed = threading.Event()
        closing = folder.release(closed.set)
        with pytest.raises(ApiError, match="does not answer"):
            await folder.run(threading.get_ident)
        may_end.set()
        await asyncio.gather(closing, *hanging, return_exceptions=True)
    assert closed.is_set()


class LateDisk(BatchFolder):
    """The end of a file takes until `may_end`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.may_end, self.is_ending = threading.Event(), threading.Event()

    @contextmanager
    def writing(self, file_id: str) -> Iterator[BinaryIO]:
        with super().writing(file_id) as output:
            yield output
            self.is_ending.set()
            self.may_end.wait(20)


async def test_an_upload_whose_client_leaves_at_its_end_leaves_no_file(tmp_path: Path) -> None:
    """The thread that ends a file goes on: the file appeared after it had been discarded."""
    disk = LateDisk(tmp_path)
    upload = asyncio.create_task(
        write_upload(disk, "file-1", Sender(3).read_chunk, bytes_max=BYTES_MAX)
    )
    assert await asyncio.to_thread(disk.is_ending.wait, 20)
    upload.cancel()
    await asyncio.wait([upload], timeout=0)
    disk.may_end.set()
    await asyncio.wait([upload])
    assert upload.cancelled()
    await disk.run(lambda: None)
    assert not list(tmp_path.iterdir())


async def test_a_file_that_takes_too_long_to_complete_is_refused_and_not_kept(
    tmp_path: Path,
) -> None:
    """A bucket may take long for a large file, but not for ever: its client asks again."""
    disk, sizes = LateDisk(tmp_path), list[int]()

    def no_time_to_complete(size_bytes: int) -> float:
        sizes.append(size_bytes)
        # First asked for the write of the last part.
        return 0.0 if sizes.count(3000) == 2 else 20.0

    await refusal(disk, Sender(3), no_time_to_complete)
    assert sizes[-2:] == [3000, 3000]
    disk.may_end.set()
    await asyncio.gather(*uploads._UNDOING)
    assert not list(tmp_path.iterdir())


async def test_a_complete_file_survives_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name must be on disk, not only its contents, before its row is in the database."""
    synced: list[tuple[bool, bool]] = []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        synced.append((is_folder, (tmp_path / "file-1").exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    await write_upload(BatchFolder(tmp_path), "file-1", Sender(3).read_chunk, bytes_max=BYTES_MAX)
    assert synced == [(False, False), (True, True)]


@pytest.mark.parametrize("fault", ["it is short", "the disk fails"])
async def test_a_download_that_cannot_go_on_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """An error in the middle of a body was sent as a part of it, and then the reader waited."""
    folder, size = BatchFolder(tmp_path), 3 * CHUNK_BYTES
    (tmp_path / "file-1").write_bytes(bytes(size if fault == "the disk fails" else size - 1))
    run, reads = folder.run, 0

    async def run_until_it_fails(call: Any, *arguments: Any, **named: Any) -> Any:
        nonlocal reads
        reads += 1
        if fault == "the disk fails" and reads == 4:
            raise ApiError(ErrorCode.UNAVAILABLE, "cannot use the bucket")
        return await run(call, *arguments, **named)

    monkeypatch.setattr(folder, "run", run_until_it_fails)

    async def send(request: web.Request) -> web.StreamResponse:
        return await send_file(request, folder, "file-1", web.StreamResponse(), first=0, count=size)

    app = web.Application(middlewares=[error_middleware(json_error)])
    app.router.add_get("/", send)
    received = bytearray()
    async with (
        TestClient(TestServer(app)) as client,
        asyncio.timeout(20),
        client.get("/") as response,
    ):
        assert response.status == 200
        with pytest.raises((aiohttp.ClientError, ConnectionError)):
            async for chunk in response.content.iter_any():
                received += chunk
    assert not received.strip(b"\0"), "no error is within the contents"
    await asyncio.gather(*RELEASES)
