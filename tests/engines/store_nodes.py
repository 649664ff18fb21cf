"""Nodes that share KV through a real Mooncake Store, whose agents run and relay its master."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from isochrone.service.loop import Loop
from isochrone.wire.ids import NodeId
from isochrone.wire.peers.assignment import StoreMasterPlace
from nodeagent.api.peer_replicas import PeerReplicaClient
from nodeagent.api.store_relay import StoreRelay, dial_through
from nodeagent.drivers.driver import StorePorts
from nodeagent.host.store_master import StoreMaster
from nodeagent.loops.supervise_store import SuperviseStore
from tests.engines.real_engines import READY_S, VLLM_COMMANDS
from tests.integration.nodeagent.test_data_plane import Node, a_node
from tests.ports import free_port

needs_mooncake = pytest.mark.skipif(
    not (VLLM_COMMANDS / "mooncake_master").exists(),
    reason="no Mooncake beside vLLM: run `python -m ops.engines.mooncake`",
)


class StoreNode:
    """A node whose agent takes part in the PoP's store, and may run its master."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.place: StoreMasterPlace | None = None
        self.master = StoreMaster(folder)
        self.peers = PeerReplicaClient(None, time.monotonic)
        self.relay = StoreRelay(
            NodeId(name), lambda: self.place, lambda: self.master.port, dial_through(self.peers)
        )
        # Mooncake takes no ports of the range in which the system chooses free ones.
        first = random.randrange(20_000, 32_000)
        self.ports = StorePorts(master=free_port(), first=first, last=first + 10)
        self.node: Node

    def supervise(self) -> Loop:
        job = SuperviseStore(
            NodeId(self.name),
            lambda: self.place,
            self.master,
            self.relay.drop_stale,
            time.monotonic,
        )
        return Loop("supervise_store", job.run_once, 0.2)

    async def serve(self, stack: AsyncExitStack) -> None:
        """Start the agent."""
        # Without the master a look-up may take five seconds.
        started = a_node(READY_S, store_ports=self.ports, stall_s=15.0, attach=self.relay.attach)
        self.node = await stack.enter_async_context(started)
        stack.push_async_callback(self.peers.close)
        stack.push_async_callback(self.master.stop)
        await stack.enter_async_context(self.relay.listening(self.ports.master))


@asynccontextmanager
async def serving(nodes: Sequence[StoreNode]) -> AsyncIterator[None]:
    """Run the agents of the nodes; the first one runs the master."""
    async with AsyncExitStack() as stack:
        for one in nodes:
            await one.serve(stack)
        move_master(nodes, nodes[0])
        for one in nodes:
            task = asyncio.create_task(one.supervise().run())
            stack.push_async_callback(_cancelled, task)
        yield


async def _cancelled(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.wait({task})


def move_master(nodes: Sequence[StoreNode], to: StoreNode) -> None:
    """Give all nodes the assignment that names `to`."""
    for one in nodes:
        one.place = StoreMasterPlace(node_id=NodeId(to.name), address=to.node.address)


async def runs_only_at(here: StoreNode, elsewhere: StoreNode) -> bool:
    """Return whether the master has moved."""
    return bool(here.master.port) and not elsewhere.master.port
