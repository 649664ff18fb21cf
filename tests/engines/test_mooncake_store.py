"""Clients of a real Mooncake Store reach its real master through our agents, whatever fails.

Each client is a process with Mooncake's own library, as in an engine. `python -m
ops.engines.mooncake` installs it. No model is loaded: the tests take seconds.
"""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

import pytest
from aiohttp import web

from isochrone.service.loop import Loop
from isochrone.service.network.http_server import error_middleware, json_error, serve_http
from isochrone.wire.ids import NodeId
from isochrone.wire.peers.assignment import StoreMasterPlace
from nodeagent.api.peer_replicas import PeerReplicaClient
from nodeagent.api.store_relay import StoreRelay, dial_through
from nodeagent.host.store_master import StoreMaster
from nodeagent.loops.supervise_store import SuperviseStore
from tests.engines.real_engines import VLLM_COMMANDS
from tests.ports import free_port
from tests.system.harness import until

pytestmark = pytest.mark.skipif(
    not (VLLM_COMMANDS / "mooncake_master").exists(),
    reason="no Mooncake beside vLLM: run `python -m ops.engines.mooncake`",
)

BLOCK_BYTES: Final = 1_000_000
BLOCKS: Final = 20
WAIT_S: Final = 60.0

CLIENT: Final = """
import hashlib, sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
sizes = (256 << 20, 64 << 20)
print(store.setup("127.0.0.1", "P2PHANDSHAKE", *sizes, "tcp", "", sys.argv[1]), flush=True)
for line in sys.stdin:
    verb, *words = line.split()
    if verb == "put":
        data = hashlib.shake_256(words[0].encode()).digest(int(words[1]))
        print(store.put(words[0], data), flush=True)
    elif verb == "get":
        data = bytes(store.get(words[0]))
        whole = hashlib.shake_256(words[0].encode()).digest(int(words[1]))
        print("whole" if data == whole else "wrong" if data else "none", flush=True)
"""
"""A client. A block's contents follow from its name, so that a wrong one is noticed."""


class Member:
    """A client's process and the agent of its node."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = NodeId(name)
        self.place: StoreMasterPlace | None = None
        self.address = ""
        self.port = free_port()
        self.master = StoreMaster(folder)
        self.peers = PeerReplicaClient(None, time.monotonic)
        self.relay = StoreRelay(
            self.name, lambda: self.place, lambda: self.master.port, dial_through(self.peers)
        )
        self.process: asyncio.subprocess.Process

    async def serve(self, stack: AsyncExitStack) -> None:
        app = web.Application(middlewares=[error_middleware(json_error)])
        self.relay.attach(app)
        port = await stack.enter_async_context(serve_http(app, "127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{port}"
        stack.push_async_callback(self.peers.close)
        stack.push_async_callback(self.master.stop)
        await stack.enter_async_context(self.relay.listening(self.port))
        job = SuperviseStore(
            self.name, lambda: self.place, self.master, self.relay.drop_stale, time.monotonic
        )
        running = asyncio.create_task(Loop("supervise_store", job.run_once, 0.2).run())
        stack.push_async_callback(_cancelled, running)

    async def join(self, stack: AsyncExitStack) -> None:
        self.process = await asyncio.create_subprocess_exec(
            VLLM_COMMANDS / "python",
            *("-c", CLIENT, f"127.0.0.1:{self.port}"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        stack.push_async_callback(self.leave)
        assert await self.answer() == "0", "cannot join the store"

    async def leave(self) -> None:
        """End the client as kill -9 does."""
        if self.process.returncode is None:
            self.process.kill()
        await self.process.communicate()

    async def answer(self) -> str:
        assert self.process.stdout is not None
        async with asyncio.timeout(WAIT_S):
            return (await self.process.stdout.readline()).decode().strip()

    async def send(self, verb: str, name: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{verb} {name} {BLOCK_BYTES}\n".encode())
        return await self.answer()

    async def put(self, *names: str) -> list[str]:
        return [await self.send("put", name) for name in names]

    async def get(self, *names: str) -> list[str]:
        return [await self.send("get", name) for name in names]


async def _cancelled(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.wait({task})


class Pop:
    """Two members of a store, and where its master is."""

    def __init__(self, a: Member, b: Member) -> None:
        self.a, self.b = a, b

    def move_master(self, to: Member) -> None:
        for member in (self.a, self.b):
            member.place = StoreMasterPlace(node_id=to.name, address=to.address)

    async def shares_again(self, prefix: str) -> None:
        """Wait until `b` finds what `a` puts from now on."""
        count = 0

        async def is_found() -> bool:
            nonlocal count
            count += 1
            name = f"{prefix}-{count}"
            return await self.a.put(name) == ["0"] and await self.b.get(name) == ["whole"]

        await until("blocks are found again", is_found, WAIT_S)


@pytest.fixture
async def pop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pop]:
    monkeypatch.setenv("PATH", f"{VLLM_COMMANDS}:{os.environ['PATH']}")
    monkeypatch.setattr("nodeagent.api.peer_replicas.PROBE_TIMEOUT_S", 10.0)
    members = Member("a", tmp_path / "a"), Member("b", tmp_path / "b")
    async with AsyncExitStack() as stack:
        for member in members:
            await member.serve(stack)
        pop = Pop(*members)
        pop.move_master(members[0])
        await until("the master runs", _runs_at(members[0]), WAIT_S)
        for member in members:
            await member.join(stack)
        yield pop


def _runs_at(member: Member):  # type: ignore[no-untyped-def]
    async def runs() -> bool:
        return bool(member.master.port)

    return runs


def names(prefix: str) -> list[str]:
    return [f"{prefix}{number}" for number in range(BLOCKS)]


async def test_what_one_member_has_put_the_other_gets(pop: Pop) -> None:
    assert await pop.a.put(*names("x")) == ["0"] * BLOCKS
    assert await pop.b.get(*names("x")) == ["whole"] * BLOCKS
    assert await pop.b.get("unknown") == ["none"]


async def test_a_killed_master_costs_blocks_and_never_gives_wrong_ones(pop: Pop) -> None:
    await pop.a.put(*names("x"))
    record = pop.a.master._record
    assert record is not None
    os.kill(record.pid, signal.SIGKILL)
    # Each client goes on by itself; what it cannot find, an engine computes.
    assert set(await pop.b.get(*names("x")[:3])) <= {"whole", "none"}
    await pop.shares_again("y")
    assert pop.a.master._record is not None
    assert pop.a.master._record.pid != record.pid


async def test_members_stay_when_the_master_moves(pop: Pop) -> None:
    await pop.a.put(*names("x"))
    pop.move_master(pop.b)

    async def has_moved() -> bool:
        return bool(pop.b.master.port) and not pop.a.master.port

    await until("the master has moved", has_moved, WAIT_S)
    await pop.shares_again("y")
    assert [pop.a.process.returncode, pop.b.process.returncode] == [None, None]


async def test_a_killed_member_takes_only_its_own_blocks_along(pop: Pop) -> None:
    assert await pop.a.put(*names("x")) == ["0"] * BLOCKS
    await pop.a.leave()
    found = await pop.b.get(*names("x"))
    assert set(found) <= {"whole", "none"}
    assert "whole" in found, "some of the blocks lay in the other member's memory"

    # Until the master notices the loss, it gives out the dead member's memory, too.
    tries = 0

    async def puts_all() -> bool:
        nonlocal tries
        tries += 1
        return await pop.b.put(*names(f"y{tries}-")) == ["0"] * BLOCKS

    await until("the dead member's memory is not used any more", puts_all, WAIT_S)
    assert await pop.b.get(*names(f"y{tries}-")) == ["whole"] * BLOCKS
