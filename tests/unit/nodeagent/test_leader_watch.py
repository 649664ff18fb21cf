"""A part of a replica over several nodes notices that its leader has ended."""

import asyncio
import errno
import os
import sys

import pytest

from isochrone.wire.ids import ReplicaId
from isochrone.wire.models.model import EngineSettings
from isochrone.wire.peers.assignment import ReplicaGroup, ReplicaSpec
from nodeagent.host.engines import leader_watch
from nodeagent.host.engines.leader_watch import FAILURES_MAX, LeaderWatch
from tests.builders import a_spec

THIS = os.getpgid(0)


async def a_leader(port: int = 0) -> asyncio.Server:
    """Accept connections at a port as torch's store does."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    return await asyncio.start_server(accept, "127.0.0.1", port)


def a_part(port: int, driver: str = "vllm", place: int = 1) -> ReplicaSpec:
    group = ReplicaGroup(
        leader_id=ReplicaId("r"), place=place, nodes=2, host="127.0.0.1", port=port
    )
    return a_spec(engine=EngineSettings(driver=driver), group=group)


async def problems(watch: LeaderWatch, probes: int) -> list[bool]:
    return [bool(await watch.problem()) for _ in range(probes)]


async def test_a_leader_that_listened_and_no_longer_does_has_ended() -> None:
    server = await a_leader()
    port = server.sockets[0].getsockname()[1]
    watch = LeaderWatch(a_part(port), THIS)
    assert not any(await problems(watch, 2))
    server.close()
    await server.wait_closed()
    assert await problems(watch, FAILURES_MAX) == [*[False] * (FAILURES_MAX - 1), True]
    assert f"127.0.0.1:{port}, has ended" in await watch.problem()


async def test_an_agent_without_descriptors_does_not_take_its_leader_for_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with await a_leader() as server:
        port = server.sockets[0].getsockname()[1]
        watch = LeaderWatch(a_part(port), THIS)
        assert not any(await problems(watch, 2))

        async def no_connection(*_: object) -> None:
            raise OSError(errno.EMFILE, "Too many open files")

        with monkeypatch.context() as patch:
            patch.setattr(asyncio, "open_connection", no_connection)
            assert not any(await problems(watch, 2 * FAILURES_MAX))
        assert not await watch.problem()


PART = """
import socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))):
    print("connected", flush=True)
    sys.stdin.readline()
print("apart", flush=True)
sys.stdin.readline()
"""


async def test_an_adopted_part_without_a_connection_to_its_leader_starts_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The leader started again while this part's agent was down: it listens, for others."""
    monkeypatch.setattr(leader_watch, "JOIN_PROBES_MAX", 5)
    monkeypatch.setattr(leader_watch, "is_connected_to", lambda _port, _group: False)
    async with await a_leader() as server:
        port = server.sockets[0].getsockname()[1]
        adopted = LeaderWatch(a_part(port), THIS, is_adopted=True)
        assert await problems(adopted, 5) == [*[False] * 4, True]
        assert "started again without this part" in await adopted.problem()
        started_here = LeaderWatch(a_part(port), THIS)
        assert not any(await problems(started_here, 10)), "it may be starting yet"


async def test_a_part_that_lost_its_connection_starts_again() -> None:
    """With the part in a process of its own, as its connections are read from /proc."""
    async with await a_leader() as server:
        port = server.sockets[0].getsockname()[1]
        part = await asyncio.create_subprocess_exec(
            *(sys.executable, "-S", "-c", PART, str(port)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        assert part.stdin is not None
        assert part.stdout is not None
        watch = LeaderWatch(a_part(port), part.pid, is_adopted=True)
        assert await part.stdout.readline() == b"connected\n"
        assert not any(await problems(watch, 2 * FAILURES_MAX))
        part.stdin.write(b"\n")
        assert await part.stdout.readline() == b"apart\n"
        assert await problems(watch, FAILURES_MAX) == [*[False] * (FAILURES_MAX - 1), True]
        part.stdin.write(b"\n")
        assert await part.wait() == 0


async def test_a_leader_that_does_not_listen_yet_is_awaited() -> None:
    server = await a_leader()
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    watch = LeaderWatch(a_part(port), THIS)
    assert not any(await problems(watch, 3 * FAILURES_MAX))


@pytest.mark.parametrize(("driver", "place"), [("embedded", 1), ("mock", 1), ("vllm", 0)])
async def test_others_are_not_watched(driver: str, place: int) -> None:
    server = await a_leader()
    port = server.sockets[0].getsockname()[1]
    watch = LeaderWatch(a_part(port, driver, place), THIS)
    await watch.problem()
    server.close()
    await server.wait_closed()
    assert not any(await problems(watch, 2 * FAILURES_MAX))
