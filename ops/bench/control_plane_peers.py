"""Light agents and routers, each with the real control link over a socket of its own.

What is light is behind the link: no engine, no requests, no table put together. An agent pulses,
reports, and now and then changes its replica's state; a router sends demand and notes when it
hears of each change. One process holds thousands; what it saw is written to a file at its end.
"""

import asyncio
import random
import sys
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Final

import msgspec

from isochrone.service.control_link import ControlLink, Progress
from isochrone.service.identity import Identity
from isochrone.service.run import run_service
from isochrone.wire.assignment import Assignment, ReplicaSpec
from isochrone.wire.control import Challenge, Refused, ToAgent, Welcome
from isochrone.wire.ids import BootId, DeploymentId, Epoch, Generation, NodeId, RouterId
from isochrone.wire.report import Device, Profile, Pulse, ReplicaReport, ReplicaState, Report
from isochrone.wire.routes import SnapshotWanted
from isochrone.wire.usage import Demand, DemandRow

PULSE_S: Final = 2.0
REPORT_S: Final = 10.0
DEMAND_S: Final = 5.0
SLOT_S: Final = 0.05


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """One simulated peer: its papers, and for an agent the replica that it runs."""

    identity: Identity
    spec: ReplicaSpec | None = None
    devices: tuple[Device, ...] = ()


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """What one process of peers is told."""

    urls: tuple[str, ...]
    peers: tuple[Peer, ...]
    deployments: tuple[str, ...] = ()
    changes_per_s: float = 0.0
    changes_from_s: float = 0.0


class Change(msgspec.Struct, frozen=True):
    """A replica became warm, or ceased to be, in a report sent at `at`."""

    at: float
    replica_id: str
    is_warm: bool


class Told(msgspec.Struct):
    """A table or delta, what it changed, and when each router had it."""

    generation: int
    set_ids: tuple[str, ...]
    gone_ids: tuple[str, ...]
    at: list[float] = []


class Seen(msgspec.Struct):
    """All that one process saw, by the machine's monotonic clock."""

    welcomes: list[tuple[float, str]] = []
    refusals: int = 0
    changes: list[Change] = []
    told: list[Told] = []
    snapshots: list[float] = []
    late_s_max: float = 0.0


class LightRoute(msgspec.Struct, frozen=True):
    """As much of a route as a light router reads."""

    replica_id: str


class LightTable(msgspec.Struct, frozen=True, tag="route_table"):
    """As much of a route table as a light router reads."""

    generation: int


class LightDelta(msgspec.Struct, frozen=True, tag="route_delta"):
    """As much of a delta as a light router reads."""

    base: int
    generation: int
    routes_set: tuple[LightRoute, ...] = ()
    routes_gone: tuple[str, ...] = ()


class LightAck(msgspec.Struct, frozen=True, tag="usage_ack"):
    """Usage is not sent, and so never acknowledged."""


class Swarm:
    """What agents and routers have in common: a link each, and turns taken slot by slot."""

    def __init__(self, orders: Orders, incoming: object) -> None:
        self.orders = orders
        self.seen = Seen()
        self.chance = random.Random(orders.peers[0].identity.name)
        self.links = [
            ControlLink(
                urls=orders.urls,
                identity=peer.identity,
                boot_id=BootId(f"boot-{peer.identity.name}"),
                incoming=incoming,
                progress=partial(self.progress, index),
                on_welcome=partial(self.welcomed, index),
                on_message=partial(self.told, index),
                rng=self.chance,
            )
            for index, peer in enumerate(orders.peers)
        ]

    def progress(self, index: int) -> Progress:
        """Return what this peer has stored."""
        identity = self.orders.peers[index].identity
        return Progress(identity.cluster_id, Generation(0), Epoch(0))

    async def welcomed(self, index: int, welcome: Welcome) -> None:
        """Note when a peer was taken."""
        self.seen.welcomes.append((monotonic(), self.orders.peers[index].identity.name))

    async def told(self, index: int, message: object) -> None:
        """Take a message from the scheduler."""

    async def turn(self, index: int, kind: str) -> None:
        """Say what is due."""

    async def every(self, interval_s: float, kind: str) -> None:
        """Give each peer its turn once an interval, spread evenly over it."""
        slots = round(interval_s / SLOT_S)
        began = monotonic()
        turn = 0
        while True:
            due = began + turn * SLOT_S
            wait_s = due - monotonic()
            self.seen.late_s_max = max(self.seen.late_s_max, -wait_s)
            await asyncio.sleep(max(0.0, wait_s))
            for index in range(turn % slots, len(self.links), slots):
                if self.links[index].connected:
                    await self.turn(index, kind)
            turn += 1


class AgentSwarm(Swarm):
    """Nodes with one replica each."""

    def __init__(self, orders: Orders) -> None:
        super().__init__(orders, ToAgent)
        self.is_warm = [True] * len(orders.peers)
        self.seq = [0] * len(orders.peers)
        self.held: list[tuple[Generation, Epoch]] = [(Generation(0), Epoch(0))] * len(orders.peers)

    def progress(self, index: int) -> Progress:
        """Return the assignment that this node holds."""
        return Progress(self.orders.peers[index].identity.cluster_id, *self.held[index])

    async def welcomed(self, index: int, welcome: Welcome) -> None:
        """A conversation begins with the whole truth."""
        await super().welcomed(index, welcome)
        await self.turn(index, "report")

    async def told(self, index: int, message: object) -> None:
        """Hold the newest assignment."""
        if isinstance(message, Assignment):
            self.held[index] = (message.generation, message.epoch)

    async def turn(self, index: int, kind: str) -> None:
        """Pulse, or report."""
        self.seq[index] += 1
        name = NodeId(self.orders.peers[index].identity.name)
        boot_id = BootId(f"boot-{name}")
        generation, epoch = self.held[index]
        if kind == "pulse":
            await self.links[index].send(
                Pulse(node_id=name, boot_id=boot_id, seq=self.seq[index], generation=generation)
            )
            return
        peer = self.orders.peers[index]
        assert peer.spec is not None
        rate = self.chance.uniform(0.98, 1.02)
        replica = ReplicaReport(
            spec=peer.spec,
            state=ReplicaState.WARM if self.is_warm[index] else ReplicaState.LOADING,
            since_s=monotonic() % 10_000,
            profile=Profile(
                load_s=30.0,
                memory_bytes=peer.spec.memory_bytes,
                prefill_tokens_per_s=20_000.0 * rate,
                decode_tokens_per_s=2_000.0 * rate,
            ),
        )
        await self.links[index].send(
            Report(
                node_id=name,
                boot_id=boot_id,
                seq=self.seq[index],
                generation=generation,
                epoch=epoch,
                address=f"http://{name}:9000",
                devices=peer.devices,
                replicas=(replica,),
                artifacts=(peer.spec.artifact.digest,),
                disk_free_bytes=10**12 + self.chance.randrange(10**9),
                version="bench",
            )
        )

    async def change(self) -> None:
        """Let a replica somewhere cease to be warm, and become so again, at a steady rate."""
        await asyncio.sleep(self.orders.changes_from_s)
        while self.orders.changes_per_s > 0:
            await asyncio.sleep(self.chance.expovariate(self.orders.changes_per_s))
            index = self.chance.randrange(len(self.links))
            spec = self.orders.peers[index].spec
            if self.links[index].connected and spec is not None:
                self.is_warm[index] = not self.is_warm[index]
                at = monotonic()
                await self.turn(index, "report")
                self.seen.changes.append(Change(at, spec.replica_id, self.is_warm[index]))


class RouterSwarm(Swarm):
    """Routers that note when they hear of what."""

    def __init__(self, orders: Orders) -> None:
        super().__init__(orders, Challenge | Welcome | Refused | LightTable | LightDelta | LightAck)
        self.have = [0] * len(orders.peers)
        self.seq = [0] * len(orders.peers)
        self._told: dict[int, Told] = {}

    def progress(self, index: int) -> Progress:
        """Return the table that this router holds."""
        identity = self.orders.peers[index].identity
        return Progress(identity.cluster_id, Generation(self.have[index]), Epoch(0))

    async def told(self, index: int, message: object) -> None:
        """Note a table, or a delta that fits; a gap asks for a snapshot."""
        now = monotonic()
        if isinstance(message, LightTable):
            self.have[index] = message.generation
            self.seen.snapshots.append(now)
        elif isinstance(message, LightDelta):
            if message.base != self.have[index]:
                await self.links[index].send(SnapshotWanted(have=Generation(self.have[index])))
                return
            self.have[index] = message.generation
            told = self._told.get(message.generation)
            if told is None:
                set_ids = tuple(route.replica_id for route in message.routes_set)
                told = Told(message.generation, set_ids, message.routes_gone, [])
                self._told[message.generation] = told
                self.seen.told.append(told)
            told.at.append(now)

    async def turn(self, index: int, kind: str) -> None:
        """Send what this city asked for."""
        self.seq[index] += 1
        identity = self.orders.peers[index].identity
        rows = tuple(
            DemandRow(
                deployment_id=DeploymentId(deployment),
                pop=identity.pop,
                requests=3,
                prompt_tokens=1500,
                uncached_tokens=700,
                output_tokens=900,
            )
            for deployment in self.chance.sample(self.orders.deployments, 10)
        )
        await self.links[index].send(
            Demand(
                router_id=RouterId(identity.name),
                boot_id=BootId(f"boot-{identity.name}"),
                seq=self.seq[index],
                window_s=DEMAND_S,
                rows=rows,
            )
        )


async def simulate(kind: str, orders_path: Path, seen_path: Path, stopping: asyncio.Event) -> int:
    """Run one process of peers until it is told to end; write what it saw."""
    orders = msgspec.msgpack.decode(await asyncio.to_thread(orders_path.read_bytes), type=Orders)
    swarm: Swarm
    if kind == "agents":
        agents = swarm = AgentSwarm(orders)
        duties = [agents.every(PULSE_S, "pulse"), agents.every(REPORT_S, "report"), agents.change()]
    else:
        swarm = RouterSwarm(orders)
        duties = [swarm.every(DEMAND_S, "demand")]
    tasks = [asyncio.create_task(run) for run in (*duties, *(link.run() for link in swarm.links))]
    await stopping.wait()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.to_thread(seen_path.write_bytes, msgspec.msgpack.encode(swarm.seen))
    return 0


if __name__ == "__main__":
    run_service(
        lambda stopping: simulate(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), stopping)
    )
