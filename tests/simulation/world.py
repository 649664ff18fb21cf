"""A fleet of two schedulers, some nodes and two routers, and what an operator does with it."""

import asyncio
import random
from collections import Counter
from contextlib import suppress
from typing import Any, Final

import msgspec

from isochrone.wire.ids import DeploymentId, KeyId, TenantId
from isochrone.wire.models.model import CatalogModel, Deployment
from isochrone.wire.peers.routes import KeyEntry
from tests.builders import a_deployment, a_device, a_model, a_pop
from tests.simulation.event_loop import EPOCH, WALL, SimLoop, WallClocks
from tests.simulation.machines import SimNode, SimRouter
from tests.simulation.network import Network, SimSession
from tests.simulation.patches import FILES, OPEN_POOL
from tests.simulation.schedulers import SimScheduler
from tests.simulation.store import EventRow, NodeRow, SimPool, SimStore

POPS: Final = ("ams", "sin", "iad")
DEVICE_GIB: Final = 3.0
MODEL_GIB: Final = 1.0
UNACKNOWLEDGED: Final = (OSError, TimeoutError, asyncio.CancelledError)
"""What an operator's request ends with if the scheduler or its database fails meanwhile."""

OLD_EVENT_AGE_S: Final = 40 * 86_400.0
"""Events are kept for 90 days: these must stay."""


class Deployed(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator asked for: this many replicas, or none any more."""

    replicas_min: int
    replicas_max: int


class World:
    """Everything of one history. Only the seed and the code decide what happens."""

    def __init__(self, loop: SimLoop, seed: int, keys: int) -> None:
        self.loop = loop
        self.rng = random.Random(seed)
        self.wall = WallClocks()
        WALL.set(self.wall)
        FILES.set({})
        self.network = Network(loop, self.rng)
        SimSession.network = self.network
        self.store = SimStore(loop, self.network, self.rng)
        OPEN_POOL.set(lambda size: SimPool(self.store, size))
        loop.outside.run(WALL.set, self.wall)
        self.problems: list[str] = []
        self.log: list[str] = []
        self.deployed: dict[str, Deployed] = {}
        self.keys: set[str] = set()
        self.revoked: set[str] = set()
        self.schedulers = {name: SimScheduler(self, name) for name in ("a", "b")}
        self.nodes: dict[str, SimNode] = {}
        self.routers: dict[str, SimRouter] = {}
        self.model: CatalogModel = a_model("m", MODEL_GIB)
        self._fill(keys)

    def note(self, text: str) -> None:
        """Write a line of the history."""
        self.log.append(f"{self.loop.now_s:8.2f}  {text}")

    def start(self) -> None:
        """Start every process."""
        for part in self.parts():
            part.start()

    def parts(self) -> list[SimScheduler | SimNode | SimRouter]:
        """Return everything that has a process."""
        return [*self.schedulers.values(), *self.nodes.values(), *self.routers.values()]

    def acting(self) -> SimScheduler | None:
        """Return the scheduler that acts, if exactly one does."""
        acting = [scheduler for scheduler in self.schedulers.values() if scheduler.is_acting]
        return acting[0] if len(acting) == 1 else None

    def generations(self) -> dict[str, tuple[int, int]]:
        """Return the epoch and generation of each node's assignment and each router's table."""
        found: dict[str, tuple[int, int]] = {
            node.name: (node.stored_assignment.epoch, node.stored_assignment.generation)
            for node in self.nodes.values()
            if node.stored_assignment is not None
        }
        for router in self.routers.values():
            if router.process.is_alive and router.table is not None:
                table = router.table
                found[f"{router.name}.{router.boots}"] = (table.epoch, table.generation)
        return found

    async def deploy(self, name: str, replicas: int, replicas_max: int) -> None:
        """Create or scale a deployment; it counts once it is acknowledged."""
        deployment = self._deployment(name, replicas, replicas_max)
        scheduler = self.acting()
        if scheduler is None:
            return
        # Unknown until it is acknowledged: either is right.
        before = self.deployed.pop(name, None)
        with suppress(*UNACKNOWLEDGED):
            await scheduler.put_deployment(deployment)
            self.note(f"deployed {name}: {replicas} to {replicas_max}")
            before = Deployed(replicas_min=replicas, replicas_max=replicas_max)
            self.deployed[name] = before

    async def add_key(self) -> None:
        """Create a key."""
        scheduler = self.acting()
        key_id = f"k{len(self.store.tables.keys):03}"
        if scheduler is not None:
            with suppress(*UNACKNOWLEDGED):
                await scheduler.add_key(a_key(key_id))
                self.keys.add(key_id)
                self.note(f"created key {key_id}")

    async def revoke_key(self) -> None:
        """Revoke some key."""
        scheduler = self.acting()
        if scheduler is not None and self.keys:
            key_id = self.rng.choice(sorted(self.keys))
            self.keys.discard(key_id)
            with suppress(*UNACKNOWLEDGED):
                await scheduler.revoke_key(key_id)
                self.revoked.add(key_id)
                self.note(f"revoked key {key_id}")

    def _deployment(self, name: str, replicas: int, replicas_max: int) -> Deployment:
        return a_deployment(name, "m", replicas_min=replicas, replicas_max=replicas_max)

    def _fill(self, keys: int) -> None:
        tables, rng = self.store.tables, self.rng
        start = EPOCH.timestamp()
        for pop in POPS:
            tables.pops[pop] = a_pop(pop)
        tables.models["m"] = self.model
        for _ in range(rng.choice((3, 3, 4, 5))):
            self.add_node()
        for number in range(rng.choice((0, 0, 1, 6))):
            # Names that joined and never connected.
            name = f"ghost{number + 1}"
            tables.nodes[name] = NodeRow(
                node_id=name, pop=rng.choice(POPS), created_at=start - 86_400
            )
        for number, pop in enumerate(("ams", "sin")):
            name = f"r{number + 1}"
            tables.routers[name] = pop
            self.routers[name] = SimRouter(self, name, pop)
        for number in range(keys):
            tables.keys[f"k{number:03}"] = a_key(f"k{number:03}")
            self.keys.add(f"k{number:03}")
        for number in range(3):
            tables.events[number + 1] = EventRow(
                at=start - OLD_EVENT_AGE_S, kind="test", subject=f"{number}"
            )
        tables.next_event = 4
        tables.history_at = start
        replicas = rng.choice((1, 2, 2, 3))
        self.deployed["d"] = Deployed(replicas_min=replicas, replicas_max=replicas)
        tables.deployments["d"] = self._deployment("d", replicas, replicas)

    def add_node(self) -> SimNode:
        """Add a node that has joined."""
        name, pop = f"n{len(self.nodes) + 1}", POPS[len(self.nodes) % len(POPS)]
        device: Any = a_device(DEVICE_GIB)
        self.store.tables.nodes[name] = NodeRow(node_id=name, pop=pop, created_at=EPOCH.timestamp())
        node = self.nodes[name] = SimNode(self, name, pop, (device,))
        return node

    def is_complete(self) -> bool:
        """Say whether every deployment has its replicas, and the store knows that they serve."""
        serving = Counter(
            str(row.spec.deployment_id)
            for row in self.store.tables.placements.values()
            if row.ended_at is None and row.state == "warm"
        )
        return all(
            serving[name] == deployed.replicas_min for name, deployed in self.deployed.items()
        )


def a_key(key_id: str) -> KeyEntry:
    return KeyEntry(key_id=KeyId(key_id), secret_sha256="0" * 64, tenant_id=TenantId("t"))


__all__ = ("Deployed", "DeploymentId", "World", "a_key")
