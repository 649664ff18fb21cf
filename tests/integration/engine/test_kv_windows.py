"""Blocks go through memory that two processes map, and a slot is never filled too early."""

import asyncio
import errno
import hashlib
import logging
import mmap
import os
import secrets
import socket
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from isochrone.service.windows import window_pool
from isochrone.service.windows.received_window import WindowLost, received_window
from isochrone.service.windows.shared_window import (
    MappedWindows,
    OwnedWindow,
    WindowRefused,
    receive_window,
)
from isochrone.service.windows.slot_ring import SlotRing, SlotRun
from isochrone.service.windows.window_pool import WINDOWS_MAX, SenderWindow
from isochrone.wire.errors import ApiError
from isochrone.wire.kv.transfer_frames import (
    TransferEnd,
    TransferHead,
    WrongTransfer,
    encode_block_in_window,
    encode_end,
    encode_head,
    transfer_bytes,
)
from nodeagent.engine.kvcache.staging_memory import StagingMemory
from nodeagent.engine.kvcache.transfer_reader import ReceivedBlock, TransferReader
from nodeagent.engine.server.kv.kv_reading import contents_of, read_blocks
from nodeagent.engine.server.kv.kv_windows import KvWindows
from tests.unit.engine.test_kv_receiving import a_stream

BLOCK_BYTES = 1 << 20
FORM: Any = SimpleNamespace(block_bytes=BLOCK_BYTES, dtype=torch.uint8, shape=(BLOCK_BYTES,))
SLOTS = 16
DIGESTS = [hashlib.sha256(bytes([number])).digest() for number in range(4)]


@pytest.fixture
async def windows() -> AsyncIterator[KvWindows]:
    with tempfile.TemporaryDirectory(prefix="kvw") as folder:
        opened = KvWindows(FORM, Path(folder) / "w.sock", StagingMemory(0))
        await opened.start()
        try:
            yield opened
        finally:
            await opened.close()


def path_of(windows: KvWindows) -> str:
    return str(windows.pool.path)


def leased(windows: KvWindows) -> float:
    return windows.pool.counts()["kv_windows_leased"]


async def until_freed(windows: KvWindows) -> None:
    async with asyncio.timeout(10):
        while leased(windows) or len(windows.pool._tasks) > 1:
            await asyncio.sleep(0)


def a_name() -> str:
    return secrets.token_hex(16)


async def take(lease: SenderWindow, count: int) -> SlotRun:
    return await asyncio.to_thread(lease.take, count, 10.0)


def slots_of(lease: SenderWindow, run: SlotRun) -> torch.Tensor:
    flat = torch.frombuffer(lease.memory_of(run), dtype=torch.uint8)
    return flat.view(run.slots, BLOCK_BYTES)


async def fill(lease: SenderWindow, count: int, value: int) -> SlotRun:
    run = await take(lease, count)
    slots_of(lease, run)[:] = value
    return run


async def test_the_receiver_reads_what_the_sender_writes_and_releases_it(
    windows: KvWindows,
) -> None:
    name = a_name()
    async with windows.lease(name) as lease:
        assert lease is not None
        async with received_window(path_of(windows), name) as window:
            await lease.wait_connected()
            run = await fill(lease, 3, 7)
            part = window.memory[: 3 * BLOCK_BYTES]
            assert bytes(part[:2]) == bytes(part[-2:]) == b"\x07\x07"
            window.memory[0] = 1
            assert slots_of(lease, run)[0, 0] == 7, "the receiver cannot write"
            await fill(lease, SLOTS - run.slots, 8)
            with pytest.raises(TimeoutError):
                lease.take(4, 0.01)
            third = asyncio.create_task(take(lease, 4))
            await asyncio.sleep(0)
            window.release(3)
            assert await third == SlotRun(0, 3), "what lies side by side"
    await until_freed(windows)
    assert windows.pool.counts()["kv_windows"] == 1


async def test_a_window_is_not_used_again_while_its_receiver_may_read_it(
    windows: KvWindows,
) -> None:
    name = a_name()
    async with windows.lease(name) as lease:
        assert lease is not None
        receiving = received_window(path_of(windows), name)
        window = await receiving.__aenter__()
        await lease.wait_connected()
        await fill(lease, 1, 1)
    # The sender has failed, and the receiver goes on copying.
    async with windows.lease(a_name()) as other:
        assert other is not None
        await fill(other, 1, 2)
        assert window.memory[0] == 1
        assert windows.pool.counts()["kv_windows"] == 2
        await receiving.__aexit__(None, None, None)
    await until_freed(windows)


async def test_a_receiver_that_is_gone_ends_the_wait_for_slots(windows: KvWindows) -> None:
    name = a_name()
    async with windows.lease(name) as lease:
        assert lease is not None
        async with received_window(path_of(windows), name):
            await lease.wait_connected()
            await fill(lease, SLOTS, 1)
            waiting = asyncio.create_task(take(lease, 1))
        with pytest.raises(WindowLost, match="closed"):
            await waiting
    await until_freed(windows)


async def test_places_reach_the_receiver_in_order_whenever_it_connects(windows: KvWindows) -> None:
    name = a_name()
    async with windows.lease(name) as lease:
        assert lease is not None
        lease.send(b"early,")
        async with received_window(path_of(windows), name) as window:
            await lease.wait_connected()
            lease.send(b"late")
            assert await asyncio.to_thread(window.receive) == b"early,late"
            waiting = asyncio.create_task(asyncio.to_thread(window.receive))
            await asyncio.sleep(0)
            window.interrupt()
            assert await waiting == b""
            with pytest.raises(WindowLost):
                lease.send(b"more")
            await fill(lease, 1, 1)
            window.release(1)
            assert (await take(lease, SLOTS)).slots > 0, "the window is still the receiver's"
    await until_freed(windows)


async def transferred(windows: KvWindows, stream: list[bytes], places: list[bytes]) -> list[int]:
    """Have the blocks of a window stored; return the first byte of each."""
    name, stored = a_name(), list[int]()
    async with windows.lease(name) as lease:
        assert lease is not None
        async with received_window(path_of(windows), name) as window:
            await lease.wait_connected()
            run = await take(lease, 4)
            for number, slot in enumerate(slots_of(lease, run)):
                slot.fill_(number)
            content = a_stream()
            reader = TransferReader(b"f" * 16, BLOCK_BYTES, DIGESTS, 0, window=window.memory)

            def store(blocks: Sequence[ReceivedBlock]) -> None:
                stored.extend(block.content[0] for block in blocks)
                window.release(len(blocks))

            reading = asyncio.create_task(read_blocks(content, reader, 3, store, 1, window))
            content.feed_data(stream[0])
            for place in places:
                lease.send(place)
            for piece in stream[1:]:
                content.feed_data(piece)
            content.feed_eof()
            try:
                await reading
            finally:
                await until_released(lease, run.slots - len(stored))
    await until_freed(windows)
    return stored


async def until_released(lease: SenderWindow, left: int) -> None:
    async with asyncio.timeout(10):
        while lease._ring.used > left:
            await asyncio.sleep(0)


async def test_blocks_of_a_window_are_taken_between_the_head_and_the_end(
    windows: KvWindows,
) -> None:
    head = TransferHead(fingerprint=b"f" * 16, block_bytes=BLOCK_BYTES, first_block=0, blocks=4)
    end = encode_end(TransferEnd(cached_tokens=0))
    places = [
        encode_block_in_window(digest, memoryview(bytes([number]) * BLOCK_BYTES), place)
        for number, digest in enumerate(DIGESTS)
        for place in [number * BLOCK_BYTES]
    ]
    assert await transferred(windows, [encode_head(head), end], places) == [0, 1, 2, 3]
    # The last place is missing, and no more will come.
    with pytest.raises(WindowLost, match="blocks are missing"):
        await transferred(windows, [encode_head(head), end], places[:3])
    with pytest.raises(WindowLost, match="blocks are missing"):
        await transferred(windows, [encode_head(head)], [])
    # Blocks of another prompt, more blocks than it has, and no end.
    with pytest.raises(WrongTransfer, match="another prompt"):
        await transferred(windows, [encode_head(head), end], places[1:])
    with pytest.raises(WrongTransfer, match="more blocks"):
        await transferred(windows, [encode_head(head), end], [b"".join([*places, places[0]])])
    with pytest.raises(ApiError, match="no end"):
        await transferred(windows, [encode_head(head)], places)


async def test_a_transfer_that_ends_ends_the_wait_for_slots(windows: KvWindows) -> None:
    name = a_name()
    async with windows.lease(name) as lease:
        assert lease is not None
        async with received_window(path_of(windows), name):
            await lease.wait_connected()
            await fill(lease, SLOTS, 1)
            waiting = asyncio.create_task(take(lease, 1))
            await asyncio.sleep(0)
            lease.close()
            with pytest.raises(WindowLost):
                await waiting
    await until_freed(windows)


async def test_without_a_receiver_the_sender_gives_up(
    windows: KvWindows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window_pool, "CONNECT_S", 0.01)
    async with windows.lease(a_name()) as lease:
        assert lease is not None
        await fill(lease, SLOTS, 1)
        with pytest.raises(TimeoutError):
            await take(lease, 1)
        with pytest.raises(TimeoutError):
            await lease.wait_connected()
    assert leased(windows) == 0


async def test_a_lease_is_for_one_receiver_that_knows_its_name(windows: KvWindows) -> None:
    name = a_name()
    async with windows.lease(name) as lease:
        assert lease is not None
        with pytest.raises(WindowLost, match="cannot take KV"):
            async with received_window(path_of(windows), a_name()):
                pass
        async with received_window(path_of(windows), name):
            await lease.wait_connected()
            with pytest.raises(WindowLost, match="cannot take KV"):
                async with received_window(path_of(windows), name):
                    pass
    with pytest.raises(WindowLost, match="cannot take KV"):
        async with received_window(path_of(windows), name):
            pass
    async with windows.lease("not a name") as none:
        assert none is None


async def test_a_receiver_that_releases_more_than_it_has_is_cut(windows: KvWindows) -> None:
    name = a_name()
    async with windows.lease(name) as lease:
        assert lease is not None
        async with received_window(path_of(windows), name) as window:
            await lease.wait_connected()
            await fill(lease, 2, 1)
            window.release(SLOTS + 1)
            with pytest.raises(WindowLost):
                for _ in range(2):
                    await take(lease, SLOTS)
    await until_freed(windows)


async def test_without_a_free_window_blocks_go_through_the_sockets(windows: KvWindows) -> None:
    contexts = [windows.lease(a_name()) for _ in range(WINDOWS_MAX + 1)]
    opened = [await context.__aenter__() for context in contexts]
    assert [lease is None for lease in opened] == [False] * WINDOWS_MAX + [True]
    for context in contexts:
        await context.__aexit__(None, None, None)
    assert leased(windows) == 0


async def test_memory_that_others_may_have_mapped_is_not_filled(windows: KvWindows) -> None:
    async def memory_of_all(readers: str, block_bytes: int = BLOCK_BYTES) -> set[int]:
        async with AsyncExitStack() as stack:
            leases = [
                await stack.enter_async_context(windows.pool.lease(a_name(), block_bytes, readers))
                for _ in range(WINDOWS_MAX)
            ]
            return {os.fstat(lease.window._descriptor).st_ino for lease in leases if lease}

    first = await memory_of_all("a")
    assert await memory_of_all("a") == first
    second = await memory_of_all("b")
    assert len(first) == len(second) == WINDOWS_MAX
    assert not first & second
    assert not second & await memory_of_all("b", 5 * BLOCK_BYTES), "of another size"
    assert windows.pool.counts()["kv_windows"] == WINDOWS_MAX


async def test_a_system_that_refuses_memory_is_asked_again_later(
    windows: KvWindows, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free = 4 * SLOTS * BLOCK_BYTES - 1
    windows.pool._free_bytes = lambda: free
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            async with windows.lease(a_name()) as lease:
                assert lease is None
    (record,) = caplog.records
    assert record.getMessage() == (
        f"cannot share {SLOTS * BLOCK_BYTES} bytes of memory with other processes: Cannot"
        " allocate memory; KV of this node goes through sockets"
    )
    windows.pool._free_bytes = lambda: free + 1
    windows.pool._may_allocate_at_s = 0.0
    async with windows.lease(a_name()) as lease:
        assert lease is not None


async def test_abandoned_leases_leave_no_memory_descriptor_or_task(windows: KvWindows) -> None:
    async def abandon(number: int) -> None:
        name = a_name()
        async with windows.lease(name) as lease:
            assert lease is not None
            if number % 3:
                async with received_window(path_of(windows), name):
                    await lease.wait_connected()
                    if number % 3 == 1:
                        await take(lease, 1)
        await until_freed(windows)

    for number in range(10):
        await abandon(number)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for number in range(1000):
        await abandon(number)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert windows.pool.counts() == {
        "kv_windows": 1,
        "kv_windows_leased": 0,
        "kv_window_leases_total": 1010,
        "kv_windows_lacking_total": 0,
    }


def test_a_socket_of_a_dead_engine_is_replaced_and_another_file_is_not(tmp_path: Path) -> None:
    async def listens(path: Path) -> bool:
        opened = KvWindows(FORM, path, StagingMemory(0))
        await opened.start()
        try:
            async with opened.lease(a_name()) as lease:
                return lease is not None
        finally:
            await opened.close()

    with tempfile.TemporaryDirectory(prefix="kvw") as folder:
        path = Path(folder) / "w.sock"
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(path))
        assert asyncio.run(listens(path))
        assert not path.exists()
        path.write_text("a file")
        assert not asyncio.run(listens(path))
        assert path.read_text() == "a file"


def test_connections_are_accepted_after_one_could_not_be(monkeypatch: pytest.MonkeyPatch) -> None:
    async def is_answered(path: Path) -> bool:
        loop = asyncio.get_running_loop()
        failures = [OSError(errno.EMFILE, "Too many open files")]
        accept = loop.sock_accept

        async def accept_later(listener: socket.socket) -> tuple[socket.socket, Any]:
            if failures:
                raise failures.pop()
            return await accept(listener)

        monkeypatch.setattr(loop, "sock_accept", accept_later)
        opened = KvWindows(FORM, path, StagingMemory(0))
        await opened.start()
        try:
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(a_name().encode())
            # There is no such lease, so the connection is closed.
            async with asyncio.timeout(5):
                is_closed = await reader.read() == b""
            writer.close()
            return is_closed
        finally:
            await opened.close()

    with tempfile.TemporaryDirectory(prefix="kvw") as folder:
        assert asyncio.run(is_answered(Path(folder) / "w.sock"))


def test_only_memory_that_cannot_shrink_is_mapped() -> None:
    def passed(descriptor: int, size_max: int = 1 << 20) -> mmap.mmap:
        first, second = socket.socketpair()
        with first, second:
            socket.send_fds(first, [b"w"], [descriptor])
            return receive_window(second, size_max)

    window = OwnedWindow(1 << 16)
    assert len(passed(window._descriptor)) == 1 << 16
    with pytest.raises(WindowRefused, match="65536 bytes, more than"):
        passed(window._descriptor, 1 << 15)
    for open_again in (os.pwrite, lambda *args: mmap.mmap(args[0], 1 << 16)):
        with pytest.raises(PermissionError):
            open_again(window._descriptor, b"x", 0)
    window.close()
    loose = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.truncate(loose, 4096)
    with tempfile.TemporaryFile() as file:
        for descriptor in (loose, file.fileno()):
            with pytest.raises(WindowRefused, match="its size can change"):
                passed(descriptor)
    os.close(loose)
    first, second = socket.socketpair()
    with second:
        first.close()
        with pytest.raises(WindowRefused, match="closed the connection"):
            receive_window(second, 1)


def test_a_window_is_mapped_once_and_the_last_ones_are_kept() -> None:
    mapped = MappedWindows(2)

    def passed(window: OwnedWindow) -> mmap.mmap:
        first, second = socket.socketpair()
        with first, second:
            window.send(first)
            return receive_window(second, 1 << 20, mapped)

    windows = [OwnedWindow(1 << 16) for _ in range(3)]
    first = passed(windows[0])
    windows[0].memory[:5] = b"later"
    assert passed(windows[0]) is first
    assert first[:5] == b"later"
    second = passed(windows[1])
    assert passed(windows[0]) is first, "it was used last"
    third = passed(windows[2])
    assert passed(windows[2]) is third
    again = passed(windows[1])
    assert again is not second, "it was forgotten"
    windows[1].memory[:4] = b"both"
    assert (again[:4], second[:4]) == (b"both", b"both")
    for window in windows:
        window.close()


def test_slots_are_taken_side_by_side_and_released_in_order() -> None:
    ring = SlotRing(5)
    assert [ring.take(3), ring.take(3), ring.take(1)] == [SlotRun(0, 3), SlotRun(3, 2), None]
    ring.release(4)
    run = ring.take(4)
    assert run == SlotRun(0, 4)
    ring.give_back(3)
    assert ring.take(9) == SlotRun(1, 3)
    with pytest.raises(ValueError, match="cannot release 6 slots: 5 are in use"):
        ring.release(6)


SIZE = 24
MEMORY = memoryview(bytearray().join(bytes([number]) * SIZE for number in range(4)))
HEAD = TransferHead(fingerprint=b"f" * 16, block_bytes=SIZE, first_block=0, blocks=4)


def a_reader(window: memoryview | None = MEMORY) -> TransferReader:
    reader = TransferReader(b"f" * 16, SIZE, DIGESTS, 0, window=window)
    reader.feed(encode_head(HEAD))
    return reader


def place_of(number: int, place: int | None = None) -> bytes:
    place = number * SIZE if place is None else place
    content = MEMORY[number * SIZE : (number + 1) * SIZE]
    return encode_block_in_window(DIGESTS[number], content, place)


def test_blocks_are_taken_where_they_lie() -> None:
    assert len(place_of(0)) == 61
    assert transfer_bytes(HEAD, in_window=True) == transfer_bytes(HEAD) - 4 * (53 + SIZE)
    blocks = a_reader().feed(b"".join(map(place_of, range(4))))
    form: Any = SimpleNamespace(block_bytes=SIZE, dtype=torch.uint8, shape=(SIZE,))
    window = bytearray(MEMORY)
    assert torch.equal(
        contents_of(blocks, form), torch.frombuffer(window, dtype=torch.uint8).view(4, SIZE)
    )
    turned = [blocks[2]._replace(number=0), blocks[1]._replace(number=1)]
    assert contents_of(turned, form)[:, 0].tolist() == [2, 1], "not side by side"


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (place_of(0, 3 * SIZE + 1), "outside of the window"),
        (place_of(0, (1 << 64) - SIZE), "outside of the window"),
        (place_of(0, SIZE), "a wrong checksum"),
        (place_of(1), "of another prompt"),
        (place_of(0)[:1] + b"\x39" + place_of(0)[2:], "a block in a window, in 57 bytes"),
    ],
)
def test_a_wrong_place_is_refused(frame: bytes, why: str) -> None:
    with pytest.raises(WrongTransfer, match=why):
        a_reader().feed(frame)


def test_places_are_refused_without_a_window() -> None:
    with pytest.raises(WrongTransfer, match="a block in a window"):
        a_reader(window=None).feed(place_of(0))
    whole = a_reader()
    whole.feed(b"".join(map(place_of, range(4))))
    with pytest.raises(WrongTransfer, match="more blocks"):
        whole.feed(place_of(0))
