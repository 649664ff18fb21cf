"""A part of a replica over several nodes notices that its leader has ended."""

import asyncio

import pytest

from isochrone.wire.assignment import ReplicaGroup, ReplicaSpec
from isochrone.wire.ids import ReplicaId
from isochrone.wire.model import EngineSettings
from nodeagent.host.leader_watch import FAILURES_MAX, LeaderWatch
from tests.builders import a_spec


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
    watch = LeaderWatch(a_part(port))
    assert not any(await problems(watch, 2))
    server.close()
    await server.wait_closed()
    assert await problems(watch, FAILURES_MAX) == [*[False] * (FAILURES_MAX - 1), True]
    assert f"127.0.0.1:{port}, has ended" in await watch.problem()


async def test_a_leader_that_does_not_listen_yet_is_awaited() -> None:
    server = await a_leader()
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    watch = LeaderWatch(a_part(port))
    assert not any(await problems(watch, 3 * FAILURES_MAX))


@pytest.mark.parametrize(("driver", "place"), [("embedded", 1), ("mock", 1), ("vllm", 0)])
async def test_others_are_not_watched(driver: str, place: int) -> None:
    server = await a_leader()
    port = server.sockets[0].getsockname()[1]
    watch = LeaderWatch(a_part(port, driver, place))
    await watch.problem()
    server.close()
    await server.wait_closed()
    assert not any(await problems(watch, 2 * FAILURES_MAX))
