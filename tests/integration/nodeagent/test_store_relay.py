"""The way from engines to the master of their PoP's store of KV, and the master's process.

A server that echoes stands in for the master: the relay carries bytes, whatever they say. Real
engines and a real master are in tests/engines/test_vllm_store.py.
"""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from time import monotonic

import aiohttp
import pytest
from aiohttp import web

from isochrone.service.network.http_server import error_middleware, json_error, serve_http
from isochrone.wire.ids import NodeId
from isochrone.wire.peers.assignment import StoreMasterPlace
from nodeagent.api.peer_replicas import PeerReplicaClient
from nodeagent.api.store_relay import MASTER_PATH, StoreRelay, dial_through
from nodeagent.host import store_master
from nodeagent.host.processes import is_alive
from nodeagent.host.store_master import STEADY_S, StoreMaster, missing_master
from nodeagent.loops.supervise_store import SuperviseStore
from tests.ports import free_port
from tests.system.harness import until


class Agent:
    """A node's part in the store, without engines."""

    def __init__(self, name: str) -> None:
        self.name = NodeId(name)
        self.place: StoreMasterPlace | None = None
        self.master_port = 0
        self.engine_port = free_port()
        self.address = ""
        self.connections = 0
        self.peers = PeerReplicaClient(None, monotonic)
        self.relay = StoreRelay(
            self.name, lambda: self.place, lambda: self.master_port, dial_through(self.peers)
        )

    @property
    def as_place(self) -> StoreMasterPlace:
        return StoreMasterPlace(node_id=self.name, address=self.address)

    async def echo(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while data := await reader.read(65536):
                writer.write(self.name.encode() + b":" + data)
        finally:
            self.connections -= 1
            writer.close()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        app = web.Application(middlewares=[error_middleware(json_error)])
        self.relay.attach(app)
        async with serve_http(app, "127.0.0.1", 0) as port, self.relay.listening(self.engine_port):
            self.address = f"http://127.0.0.1:{port}"
            yield
        await self.peers.close()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect as an engine does."""
        return await asyncio.open_connection("127.0.0.1", self.engine_port)

    async def ask(self, words: bytes) -> bytes:
        """Return the master's answer on a connection of its own, b"" if there is none."""
        reader, writer = await self.connect()
        writer.write(words)
        try:
            async with asyncio.timeout(20.0):
                return await reader.read(65536)
        except ConnectionResetError:
            return b""
        finally:
            writer.close()


@pytest.fixture
async def agents(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Agent, Agent]]:
    monkeypatch.setattr("nodeagent.api.peer_replicas.PROBE_TIMEOUT_S", 10.0)
    here, there = Agent("here"), Agent("there")
    async with AsyncExitStack() as stack:
        for agent in (here, there):
            await stack.enter_async_context(agent.serving())
            server = await asyncio.start_server(agent.echo, "127.0.0.1", 0)
            stack.callback(server.close)
            agent.master_port = server.sockets[0].getsockname()[1]
        yield here, there


async def test_engines_reach_the_master_wherever_it_runs(agents: tuple[Agent, Agent]) -> None:
    here, there = agents
    here.place = here.as_place
    assert await here.ask(b"x") == b"here:x"
    here.place = there.as_place
    assert await here.ask(b"x") == b"there:x"


async def test_without_a_master_a_connection_ends_at_once(agents: tuple[Agent, Agent]) -> None:
    here, there = agents
    assert await here.ask(b"x") == b""
    here.place, here.master_port = here.as_place, 0
    assert await here.ask(b"x") == b""
    here.place, there.master_port = there.as_place, 0
    assert await here.ask(b"x") == b""


async def test_nodes_that_name_each_other_do_not_relay_in_a_circle(
    agents: tuple[Agent, Agent],
) -> None:
    here, there = agents
    here.place, there.place = there.as_place, here.as_place
    here.master_port = there.master_port = 0
    assert await here.ask(b"x") == b""
    async with (
        aiohttp.ClientSession() as http,
        http.get(f"{here.address}{MASTER_PATH}") as answer,
    ):
        assert answer.status == 404
        assert "its master does not run here" in await answer.text()


async def test_connections_are_cut_when_the_master_moves_and_no_sooner(
    agents: tuple[Agent, Agent],
) -> None:
    here, there = agents
    here.place = there.as_place
    reader, writer = await here.connect()
    writer.write(b"1")
    assert await reader.read(100) == b"there:1"
    assert await here.relay.drop_stale() == 0
    writer.write(b"2")
    assert await reader.read(100) == b"there:2"
    here.place = here.as_place
    assert await here.relay.drop_stale() == 1
    assert await reader.read(100) == b""
    writer.close()

    async def is_released() -> bool:
        return not there.connections

    await until("the other node's connection has ended, too", is_released, 20.0)


async def test_an_engine_that_disconnects_leaves_nothing_behind(
    agents: tuple[Agent, Agent],
) -> None:
    here, there = agents
    here.place = there.as_place
    for _ in range(20):
        _, writer = await here.connect()
        writer.write(b"x")
        writer.close()

    async def is_released() -> bool:
        return not here.relay._relayed and not there.connections

    await until("all connections have ended", is_released, 20.0)


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program on the PATH that stands in for the master: it only stays."""
    path = tmp_path / "bin" / "mooncake_master"
    path.parent.mkdir()
    path.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(600)\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")
    return path


async def test_the_next_agent_finds_the_master_that_runs(tmp_path: Path, program: Path) -> None:
    assert missing_master() == ""
    first, second = StoreMaster(tmp_path / "s"), StoreMaster(tmp_path / "s")
    try:
        assert await first.ensure_runs(0.0)
        assert not await second.ensure_runs(0.0)
        assert second.port == first.port > 0
        await second.stop()

        async def is_gone() -> bool:
            return not first.port

        await until("the killed master is gone", is_gone, 20.0)
        assert list((tmp_path / "s").glob("*.json")) == []
    finally:
        await first.stop()


async def test_a_master_that_exits_is_started_again_and_less_often_each_time(
    tmp_path: Path, program: Path
) -> None:
    master = StoreMaster(tmp_path / "s")
    try:
        assert await master.ensure_runs(0.0)
        await kill(master)
        # It begins to count when the exit is noticed.
        assert [await master.ensure_runs(at_s) for at_s in (1.0, 1.9, 2.0)] == [False, False, True]
        await kill(master)
        assert [await master.ensure_runs(at_s) for at_s in (3.0, 4.9, 5.0)] == [False, False, True]
        await kill(master)
        assert await master.ensure_runs(5.0 + STEADY_S)
    finally:
        await master.stop()


async def test_the_master_runs_where_the_assignment_says_and_nowhere_else(
    tmp_path: Path, program: Path
) -> None:
    agent = Agent("here")
    master = StoreMaster(tmp_path / "s")
    job = SuperviseStore(agent.name, lambda: agent.place, master, agent.relay.drop_stale, monotonic)
    try:
        assert (await job.run_once()).started == 0
        agent.place = StoreMasterPlace(node_id=agent.name, address="http://here")
        assert (await job.run_once()).started == 1
        assert (await job.run_once()).started == 0
        assert master.port
        agent.place = StoreMasterPlace(node_id=NodeId("there"), address="http://there")
        assert (await job.run_once()).started == 0
        assert not master.port
    finally:
        await master.stop()
        await agent.peers.close()


async def test_a_node_without_a_master_looks_for_an_old_one_once(
    tmp_path: Path, program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads the environment of all processes of the machine."""
    looked: list[Path] = []
    monkeypatch.setattr(store_master, "kill_remaining", looked.append)
    master = StoreMaster(tmp_path / "s")
    for _ in range(3):
        await master.stop()
    assert len(looked) == 1
    monkeypatch.undo()
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    assert await master.ensure_runs(0.0)
    await master.stop()
    assert not master.port


async def kill(master: StoreMaster) -> None:
    """Kill a master as the kernel would, and wait until it is gone."""
    record = master._record
    assert record is not None
    os.kill(record.pid, signal.SIGKILL)

    async def is_gone() -> bool:
        return not is_alive(record.pid, record.started)

    await until("it is gone", is_gone, 20.0)
