"""Simulated agents and routers, each with the real control link over its own socket.

There are no engines, requests or route tables behind the link. An agent sends pulses and reports,
and now and then changes the state of its first replica; a router sends demand and records when it
receives each change. A router keeps no keys, only their sums: most begin with those of the stored
keys, as routers that were there before, and some with none. One process simulates thousands and
writes its log to a file when it stops.
"""

import asyncio
import random
import sys
from array import array
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Final

import msgspec

from isochrone.service.logs import setup_logs
from isochrone.service.network.control_link import ControlLink, Progress
from isochrone.service.run import run_service
from isochrone.service.trust.identity import Identity
from isochrone.wire.client_keys.key_sums import KeySums
from isochrone.wire.ids import BootId, DeploymentId, Epoch, Generation, NodeId, RouterId
from isochrone.wire.peers.assignment import Assignment, ReplicaSpec
from isochrone.wire.peers.control import (
    TABLE_PARTS,
    Challenge,
    RegistrationRefused,
    ToAgent,
    Welcome,
)
from isochrone.wire.peers.report import (
    NodeDevice,
    Pulse,
    ReplicaProfile,
    ReplicaReport,
    ReplicaState,
    Report,
)
from isochrone.wire.peers.routes import KeyEntry, SnapshotWanted
from isochrone.wire.peers.usage import Demand, DemandRow

PULSE_S: Final = 2.0
REPORT_S: Final = 10.0
DEMAND_S: Final = 5.0
SLOT_S: Final = 0.05


class SimulatedPeer(msgspec.Struct, frozen=True, kw_only=True):
    """One simulated peer: its identity and, for an agent, its replicas and devices.

    An agent that `is_stuck` never takes the assignments that it is sent.
    """

    identity: Identity
    specs: tuple[ReplicaSpec, ...] = ()
    devices: tuple[NodeDevice, ...] = ()
    is_stuck: bool = False


class SwarmOrders(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one process of peers."""

    urls: tuple[str, ...]
    peers: tuple[SimulatedPeer, ...]
    deployments: tuple[str, ...] = ()
    changes_per_s: float = 0.0
    changes_from_s: float = 0.0
    keys_held: bytes = b""
    """The sums of the stored keys, which routers have at the beginning."""
    empty: int = 0
    """How many routers begin without keys."""


class ReplicaChange(msgspec.Struct, frozen=True):
    """A replica became warm, or stopped being warm, in a report sent at `at`."""

    at: float
    replica_id: str
    is_warm: bool


class RouteUpdate(msgspec.Struct):
    """A route table or delta: what it changed, and when each router received it."""

    generation: int
    set_ids: tuple[str, ...]
    gone_ids: tuple[str, ...]
    at: list[float] = []


class SwarmLog(msgspec.Struct):
    """The observations of one process; times are the machine's monotonic clock."""

    welcomes: list[tuple[float, str]] = []
    refusals: int = 0
    changes: list[ReplicaChange] = []
    updates: list[RouteUpdate] = []
    snapshots: list[float] = []
    keys: dict[str, list[float]] = {}
    late_s_max: float = 0.0


class LightRoute(msgspec.Struct, frozen=True):
    """The part of a route that a simulated router decodes."""

    replica_id: str


class LightTable(msgspec.Struct, frozen=True, tag="route_table"):
    """The part of a route table that a simulated router decodes."""

    generation: int


class LightPart(msgspec.Struct, frozen=True, tag="route_table_part"):
    """The part of a table's part that a simulated router decodes."""

    generation: int
    is_last: bool = False


class LightDelta(msgspec.Struct, frozen=True, tag="route_delta"):
    """The part of a delta that a simulated router decodes."""

    base: int
    generation: int
    routes_set: tuple[LightRoute, ...] = ()
    routes_gone: tuple[str, ...] = ()
    keys_set: tuple[KeyEntry, ...] = ()


class LightAck(msgspec.Struct, frozen=True, tag="usage_ack"):
    """The acknowledgement of demand; its contents are ignored."""


class PeerSwarm:
    """Many peers: a control link each, and turns that are spread over time slots."""

    def __init__(
        self, orders: SwarmOrders, incoming: object, capabilities: Sequence[str] = ()
    ) -> None:
        self.orders = orders
        self.log = SwarmLog()
        self.rng = random.Random(orders.peers[0].identity.name)
        self.links = [
            ControlLink(
                urls=orders.urls,
                identity=peer.identity,
                boot_id=BootId(f"boot-{peer.identity.name}"),
                incoming=incoming,
                progress=partial(self.progress, index),
                on_welcome=partial(self.welcomed, index),
                on_message=partial(self.received, index),
                rng=self.rng,
                capabilities=capabilities,
            )
            for index, peer in enumerate(orders.peers)
        ]

    def progress(self, index: int) -> Progress:
        """Return the peer's stored state: none."""
        identity = self.orders.peers[index].identity
        return Progress(identity.cluster_id, Generation(0), Epoch(0))

    async def welcomed(self, index: int, welcome: Welcome) -> None:
        """Record when a peer was registered."""
        self.log.welcomes.append((monotonic(), self.orders.peers[index].identity.name))

    async def received(self, index: int, message: object) -> None:
        """Handle a message from the scheduler."""

    async def turn(self, index: int, kind: str) -> None:
        """Send what is due."""

    async def every(self, interval_s: float, kind: str) -> None:
        """Give each peer a turn once in each interval, spread evenly over it."""
        slots = round(interval_s / SLOT_S)
        began = monotonic()
        turn = 0
        while True:
            due_at = began + turn * SLOT_S
            wait_s = due_at - monotonic()
            self.log.late_s_max = max(self.log.late_s_max, -wait_s)
            await asyncio.sleep(max(0.0, wait_s))
            for index in range(turn % slots, len(self.links), slots):
                if self.links[index].connected:
                    await self.turn(index, kind)
            turn += 1


class AgentSwarm(PeerSwarm):
    """Node agents with one replica each."""

    def __init__(self, orders: SwarmOrders) -> None:
        super().__init__(orders, ToAgent)
        self.is_warm = [True] * len(orders.peers)
        self.seq = [0] * len(orders.peers)
        self.assigned: list[tuple[Generation, Epoch]] = [(Generation(0), Epoch(0))] * len(
            orders.peers
        )

    def progress(self, index: int) -> Progress:
        """Return the generation and epoch of the node's assignment."""
        return Progress(self.orders.peers[index].identity.cluster_id, *self.assigned[index])

    async def welcomed(self, index: int, welcome: Welcome) -> None:
        """Send a full report when a connection begins."""
        await super().welcomed(index, welcome)
        await self.turn(index, "report")

    async def received(self, index: int, message: object) -> None:
        """Note the newest assignment."""
        if isinstance(message, Assignment) and not self.orders.peers[index].is_stuck:
            self.assigned[index] = (message.generation, message.epoch)

    async def turn(self, index: int, kind: str) -> None:
        """Send a pulse or a report."""
        self.seq[index] += 1
        name = NodeId(self.orders.peers[index].identity.name)
        boot_id = BootId(f"boot-{name}")
        generation, epoch = self.assigned[index]
        if kind == "pulse":
            is_stuck = self.orders.peers[index].is_stuck
            await self.links[index].send(
                Pulse(
                    node_id=name,
                    boot_id=boot_id,
                    seq=self.seq[index],
                    generation=generation,
                    assignment_refusal="cannot store it: disk full" if is_stuck else "",
                )
            )
            return
        peer = self.orders.peers[index]
        replicas = tuple(
            self._replica(spec, is_warm=self.is_warm[index] or place > 0)
            for place, spec in enumerate(peer.specs)
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
                replicas=replicas,
                artifacts=tuple(spec.artifact.digest for spec in peer.specs),
                disk_free_bytes=10**12 + self.rng.randrange(10**9),
                version="bench",
            )
        )

    def _replica(self, spec: ReplicaSpec, *, is_warm: bool) -> ReplicaReport:
        rate = self.rng.uniform(0.98, 1.02)
        return ReplicaReport(
            spec=spec,
            state=ReplicaState.WARM if is_warm else ReplicaState.LOADING,
            since_s=monotonic() % 10_000,
            profile=ReplicaProfile(
                load_s=30.0,
                memory_bytes=spec.memory_bytes,
                prefill_tokens_per_s=20_000.0 * rate,
                decode_tokens_per_s=2_000.0 * rate,
            ),
        )

    async def change(self) -> None:
        """Change the state of random replicas at a steady rate, and report it."""
        await asyncio.sleep(self.orders.changes_from_s)
        while self.orders.changes_per_s > 0:
            await asyncio.sleep(self.rng.expovariate(self.orders.changes_per_s))
            index = self.rng.randrange(len(self.links))
            if self.links[index].connected:
                spec = self.orders.peers[index].specs[0]
                self.is_warm[index] = not self.is_warm[index]
                at = monotonic()
                await self.turn(index, "report")
                self.log.changes.append(ReplicaChange(at, spec.replica_id, self.is_warm[index]))


class RouterSwarm(PeerSwarm):
    """Routers that record when they receive each route change."""

    def __init__(self, orders: SwarmOrders) -> None:
        super().__init__(
            orders,
            Challenge
            | Welcome
            | RegistrationRefused
            | LightTable
            | LightPart
            | LightDelta
            | LightAck,
            (TABLE_PARTS,),
        )
        self.have = [0] * len(orders.peers)
        self.seq = [0] * len(orders.peers)
        self._updates: dict[int, RouteUpdate] = {}
        stored = KeySums(array("Q", orders.keys_held))
        self._sums = [
            KeySums() if index < orders.empty else stored.copy()
            for index in range(len(orders.peers))
        ]
        self._awaits_all = [index < orders.empty for index in range(len(orders.peers))]

    def progress(self, index: int) -> Progress:
        """Return the generation of the router's table, and the sums of its keys."""
        identity = self.orders.peers[index].identity
        held = b"" if self._awaits_all[index] else self._sums[index].encode()
        return Progress(identity.cluster_id, Generation(self.have[index]), Epoch(0), held)

    async def received(self, index: int, message: object) -> None:
        """Record a table or a delta; after a gap ask for a whole table."""
        now = monotonic()
        if isinstance(message, LightPart) and not message.is_last:
            return
        if isinstance(message, LightTable | LightPart):
            self.have[index] = message.generation
            self.log.snapshots.append(now)
            # Its keys were not decoded: take the sums of a router that had them before.
            has_keys = [other for other, awaits in enumerate(self._awaits_all) if not awaits]
            if self._awaits_all[index] and has_keys:
                self._sums[index] = self._sums[has_keys[-1]].copy()
                self._awaits_all[index] = False
        elif isinstance(message, LightDelta):
            if message.base != self.have[index]:
                await self.links[index].send(self._snapshot_wanted(index))
                return
            self.have[index] = message.generation
            for key in message.keys_set:
                self._sums[index].add(key.key_id, key)
                self.log.keys.setdefault(key.key_id, []).append(now)
            update = self._updates.get(message.generation)
            if update is None:
                set_ids = tuple(route.replica_id for route in message.routes_set)
                update = RouteUpdate(message.generation, set_ids, message.routes_gone, [])
                self._updates[message.generation] = update
                self.log.updates.append(update)
            update.at.append(now)

    def _snapshot_wanted(self, index: int) -> SnapshotWanted:
        progress = self.progress(index)
        return SnapshotWanted(have=progress.generation, keys_held=progress.keys_held)

    async def turn(self, index: int, kind: str) -> None:
        """Send the demand of the router's PoP."""
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
            for deployment in self.rng.sample(self.orders.deployments, 10)
        )
        await self.links[index].send(
            Demand(
                router_id=RouterId(identity.name),
                boot_id=BootId(f"boot-{identity.name}"),
                seq=self.seq[index],
                window_s=DEMAND_S,
                rows=rows,
                table_generation=Generation(self.have[index]),
            )
        )


async def simulate(kind: str, orders_path: Path, log_path: Path, stopping: asyncio.Event) -> int:
    """Run one process of peers until it is stopped; write its log."""
    orders = msgspec.msgpack.decode(
        await asyncio.to_thread(orders_path.read_bytes), type=SwarmOrders
    )
    swarm: PeerSwarm
    if kind == "agents":
        agents = swarm = AgentSwarm(orders)
        jobs = [agents.every(PULSE_S, "pulse"), agents.every(REPORT_S, "report"), agents.change()]
    else:
        swarm = RouterSwarm(orders)
        jobs = [swarm.every(DEMAND_S, "demand")]
    tasks = [asyncio.create_task(run) for run in (*jobs, *(link.run() for link in swarm.links))]
    await stopping.wait()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.to_thread(log_path.write_bytes, msgspec.msgpack.encode(swarm.log))
    return 0


if __name__ == "__main__":
    setup_logs(sys.argv[1], "WARNING")
    run_service(
        lambda stopping: simulate(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), stopping)
    )
