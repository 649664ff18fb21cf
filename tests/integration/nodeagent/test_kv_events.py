"""The events of an engine's prefix cache, read from its ZeroMQ publisher."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nodeagent.decide.cache_reach import CacheReach
from nodeagent.host.kv_events import EVENTS_MAX, SLICE_BLOCKS, KvEventReader, apply_batch
from tests.postgres import a_folder
from tests.system.harness import until

GREETING = b"\xff" + bytes(8) + b"\x7f" + bytes([3, 1]) + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB"


def stored(*hashes: int | bytes, **fields: Any) -> dict[str, Any]:
    tokens = list(range(16 * len(hashes)))
    event = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": None}
    return {**event, "token_ids": tokens, "block_size": 16, "medium": "GPU", **fields}


def removed(*hashes: int | bytes, **fields: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU", **fields}


def batch(*events: Any) -> bytes:
    return msgspec.msgpack.encode([1.5, events, 0])


def noted(sent: bytes, reach: CacheReach, now_s: float) -> int:
    """Note a batch; return how often the agent's other work had its turn meanwhile."""
    noting = apply_batch(sent, reach, now_s)
    turns = 0
    with suppress(StopIteration):
        while True:
            noting.send(None)
            turns += 1
    return turns


def reach_after(*events: Any, now_s: float = 5.0) -> CacheReach:
    reach = CacheReach(0.0)
    noted(batch(*events), reach, now_s)
    return reach


def test_blocks_are_known_by_bytes_and_by_numbers() -> None:
    reach = reach_after(stored(b"a" * 32, 2**63), removed(b"a" * 32))
    assert (reach.since_s, len(reach)) == (5.0, 1)


def test_events_of_releases_that_send_arrays_are_read() -> None:
    reach = reach_after(
        ["BlockStored", [7, 8], None, [1, 2], 16, None], ["BlockRemoved", [7]], ["Unknown"]
    )
    assert (reach.since_s, len(reach)) == (5.0, 1)
    noted(batch(["AllBlocksCleared"]), reach, 9.0)
    assert (reach.since_s, len(reach)) == (9.0, 0)


def test_only_blocks_on_the_device_with_full_attention_count() -> None:
    window = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window"}
    reach = reach_after(
        stored(1, group_idx=0, kv_cache_spec_kind="full_attention"),
        stored(1, **window),
        stored(2, ownership="disk"),
        removed(1, group_idx=1),
        removed(2, ownership="disk"),
        {"type": "SomethingNew"},
    )
    assert (reach.since_s, len(reach)) == (0.0, 1)
    noted(batch(removed(1, group_idx=0)), reach, 6.0)
    assert reach.since_s == 5.0


@pytest.mark.parametrize("wrong", [b"", b"\xc1", b"\x93\x01\x91\x90\x00", b"\x93\x01\x91\x05\x00"])
def test_what_is_no_batch_is_refused(wrong: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        noted(wrong, CacheReach(0.0), 1.0)


@pytest.mark.parametrize(
    "wrong",
    [batch(*([["x"]] * (EVENTS_MAX + 1))), batch(["BlockStored", [1] * (EVENTS_MAX + 1)])],
    ids=["events", "blocks of an event"],
)
def test_more_than_a_step_makes_is_refused(wrong: bytes) -> None:
    with pytest.raises(msgspec.DecodeError, match="length <= 65536"):
        noted(wrong, CacheReach(0.0), 1.0)


@pytest.mark.parametrize(
    "sent",
    [batch(*([["x"]] * (10 * SLICE_BLOCKS))), batch(*([removed(*range(SLICE_BLOCKS))] * 10))],
    ids=["events", "blocks"],
)
def test_other_work_of_the_agent_has_its_turn_while_a_large_batch_is_noted(sent: bytes) -> None:
    """A batch of 64 MiB held the agent up for minutes: its node was taken for lost."""
    assert noted(sent, CacheReach(0.0), 1.0) == 10


class Publisher:
    """A publisher that serves one subscriber at a time."""

    def __init__(self) -> None:
        self.subscribed = asyncio.Event()
        self.writer: asyncio.StreamWriter
        self.said: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GREETING)
        self.said = [await reader.readexactly(64)]
        writer.write(bytes([4, len(READY)]) + READY)
        for _ in range(2):
            size = (await reader.readexactly(2))[1]
            self.said.append(await reader.readexactly(size))
        self.writer = writer
        self.subscribed.set()
        await reader.read()
        writer.close()

    def publish(self, payload: bytes, sequence: int = 0) -> None:
        frames = [b"", sequence.to_bytes(8, "big")]
        sent = b"".join(bytes([1, len(frame)]) + frame for frame in frames)
        self.writer.write(sent + b"\x02" + len(payload).to_bytes(8, "big") + payload)


@asynccontextmanager
async def publishing(
    socket: Path, serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
) -> AsyncIterator[None]:
    server = await asyncio.start_unix_server(serve, socket)
    try:
        yield
    finally:
        server.close()
        socket.unlink(missing_ok=True)


@pytest.fixture
def socket(monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("nodeagent.host.kv_events.CONNECT_AGAIN_S", 0.01)
    monkeypatch.setattr("nodeagent.host.kv_events.BATCH_BYTES_MAX", 1000)
    return a_folder("iso-") / "kv.sock"


async def test_an_engines_events_are_followed_through_its_restart_of_publishing(
    socket: Path,
) -> None:
    now_s = 100.0
    reader = KvEventReader(socket, lambda: now_s)
    reader.start(is_new=True)
    assert reader.age_s() == -1.0, "it does not publish yet"
    publisher = Publisher()
    async with publishing(socket, publisher.serve):
        await publisher.subscribed.wait()
        assert publisher.said[1].startswith(b"\x05READY") and publisher.said[1].endswith(b"SUB")
        assert publisher.said[2] == b"\x01"

        async def is_connected() -> bool:
            return reader.age_s() >= 0

        await until("connected", is_connected, 60.0)
        now_s = 110.0
        assert reader.age_s() == 10.0
        payload = batch(stored(1), stored(2))
        publisher.publish(payload)

        async def is_read() -> bool:
            return reader.bytes_total == len(payload)

        await until("read", is_read, 60.0)
        now_s = 130.0
        publisher.publish(batch(removed(1)), 1)

        async def is_evicted() -> bool:
            return reader.age_s() == 20.0

        await until("evicted", is_evicted, 60.0)
        publisher.writer.close()
        publisher.subscribed.clear()
        await publisher.subscribed.wait()
        await until("connected again", is_connected, 60.0)
        assert reader.age_s() == 20.0
    await reader.stop()
    assert reader.age_s() == -1.0


@pytest.mark.parametrize(
    "wrong",
    [
        b"HTTP/1.1 200 OK\r\n\r\n".ljust(64, b"x"),
        GREETING[:12] + b"CURVE".ljust(20, b"\0") + bytes(32),
        GREETING + b"\x00\x01x",
        GREETING + bytes([4, len(READY)]) + READY + b"\x02" + (1 << 40).to_bytes(8, "big"),
        GREETING + bytes([4, len(READY)]) + READY + b"\x01\x00" * 17,
        GREETING + bytes([4, len(READY)]) + READY + b"\x01\x64".ljust(102, b"x") * 11,
        GREETING + bytes([4, len(READY)]) + READY + b"\x00\x03abc",
    ],
)
async def test_a_socket_of_something_else_is_left_alone(socket: Path, wrong: bytes) -> None:
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        writer.write(wrong)
        await reader.read()
        writer.close()

    reader = KvEventReader(socket, lambda: 1.0)
    async with publishing(socket, serve):
        reader.start(is_new=True)
        assert reader._task is not None
        async with asyncio.timeout(60):
            await asyncio.wait({reader._task})
        assert (connections, reader.age_s()) == (1, -1.0)
    await reader.stop()
