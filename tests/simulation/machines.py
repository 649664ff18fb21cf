"""Machines of the fleet: nodes with an agent and engines, and routers."""

import asyncio
import random
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from isochrone.service.loop import Loop
from isochrone.service.network.control_link import ControlLink
from isochrone.service.trust.identity import Identity
from isochrone.service.trust.model_signature import NO_SIGNERS
from isochrone.wire.engines.engine import EngineStats
from isochrone.wire.ids import BootId, PopId
from isochrone.wire.peers.assignment import Assignment, ReplicaSpec
from isochrone.wire.peers.control import KEYS_FIRST, TABLE_PARTS, PeerRole, ToAgent, ToRouter
from isochrone.wire.peers.report import NodeDevice, ReplicaState
from nodeagent import app as agent_app
from nodeagent.config import NodeConfig
from nodeagent.host.cache_salts import CacheSalts
from nodeagent.node import NodeState
from nodeagent.supervisor import Supervisor
from router.app import RECHECK_INTERVAL_S
from router.decide.admission.limits import KeyLimiter
from router.fleet_state import FleetState
from router.loops.follow_routes import TableFollower
from tests.simulation.event_loop import CURRENT, SimProcess, sim_monotonic

if TYPE_CHECKING:
    from tests.simulation.world import World

SCHEDULERS: Final = ("http://a:1", "http://b:1")
PROBE_S: Final = 2.0
STATS: Final = EngineStats(prefill_tokens_per_s=1000.0, decode_tokens_per_s=100.0)


class Disk:
    """The files of one machine. They survive crashes of its processes."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}


class SimEngine:
    """An engine process on a machine. It survives its agent."""

    def __init__(self, spec: ReplicaSpec, ready_at: float, fails: bool) -> None:
        self.spec = spec
        self.ready_at = ready_at
        self.fails = fails
        self.is_alive = True
        self.on_exit: list[Callable[[], None]] = []

    def exit(self) -> None:
        self.is_alive = False
        for call in self.on_exit:
            call()


class EngineHandle:
    """An agent's view of an engine, in place of EngineProcess."""

    log = Path("/nonexistent/engine.log")
    exit_reason = "the engine exited"
    pid = 0
    is_adopted = lacks_descriptors = False
    problem = ""
    handshake = None

    def __init__(self, node: "SimNode", engine: SimEngine) -> None:
        # It is ready within seconds, so the shorter wait of a loaded engine changes nothing.
        command = SimpleNamespace(stall_s=0.0)
        self.record = SimpleNamespace(
            spec=engine.spec, command=command, step_limit_s=0.0, was_ready=True
        )
        self.exited = asyncio.Event()
        self._node, self._engine = node, engine
        engine.on_exit.append(self.exited.set)
        if not engine.is_alive:
            self.exited.set()

    async def is_ready(self) -> bool:
        engine = self._engine
        if engine.fails and sim_monotonic() >= engine.ready_at:
            self._node.end_engine(engine)
        return engine.is_alive and sim_monotonic() >= engine.ready_at

    async def stats(self) -> EngineStats | None:
        return STATS if self._engine.is_alive else None

    async def canary(self, kind: str) -> bool:
        return self._engine.is_alive

    async def stop(self, *, kill: bool = False) -> None:
        process = CURRENT.get()
        if process is not None and process.is_alive and self._engine.is_alive:
            self._node.note_stop(self._engine)
            self._node.end_engine(self._engine)

    async def release(self) -> None:
        """Leave the engine running."""


class SimEngines:
    """In place of EngineProcesses."""

    def __init__(self, node: "SimNode") -> None:
        self._node = node

    async def start(self, spec: ReplicaSpec, path: Path) -> EngineHandle:
        await asyncio.sleep(0.05)
        return EngineHandle(self._node, self._node.start_engine(spec))

    def survivors(self) -> list[Any]:
        return [SimpleNamespace(spec=engine.spec, pid=0) for engine in self._node.engines.values()]

    def adopt(self, record: Any) -> EngineHandle:
        return EngineHandle(self._node, self._node.engines[record.spec.replica_id])


class SimArtifacts:
    """In place of ArtifactStore: a fetch takes a moment."""

    link = SimpleNamespace(measured_bytes_per_s=0.0)

    def digests(self) -> tuple[str, ...]:
        return ()

    def disk_free_bytes(self, pinned: Collection[str]) -> int:
        return 1 << 40

    async def delete_idle_adapters(self, kept: Collection[str], used_before: float) -> int:
        return 0

    async def ensure(self, artifact: Any, pinned: Any, on_progress: Any, **options: Any) -> Path:
        await asyncio.sleep(0.2)
        return Path("/nonexistent")


class SimAssignmentFile:
    """In place of AssignmentFile: one value on the machine's disk."""

    def __init__(self, node: "SimNode") -> None:
        self._node = node

    def read(self) -> Assignment | None:
        return self._node.stored_assignment

    def write(self, assignment: Assignment) -> None:
        if self._node.is_disk_full:
            raise OSError(28, "No space left on device")
        process = CURRENT.get()
        if process is None or process.is_alive:
            self._node.stored_assignment = assignment


class SimDevices:
    """In place of DeviceReader."""

    def __init__(self, devices: Sequence[NodeDevice]) -> None:
        self._devices = devices

    def read(self) -> Sequence[NodeDevice]:
        return self._devices


class SimNode:
    """A machine with engines and an agent."""

    def __init__(self, world: "World", name: str, pop: str, devices: Sequence[NodeDevice]) -> None:
        self.name, self.pop, self.devices = name, pop, devices
        self.process = SimProcess(name, world.loop)
        self.process.is_alive = False
        self.stored_assignment: Assignment | None = None
        self.is_disk_full = False
        self.is_destroyed = False
        self.breaks_engines = False
        self.engines: dict[str, SimEngine] = {}
        self.engine_lost_at = float("-inf")
        """When an engine was lost through a fault."""
        self.node: NodeState | None = None
        self.supervisor: Supervisor | None = None
        self.link: ControlLink | None = None
        self._boots = 0
        self._world = world

    @property
    def is_up(self) -> bool:
        return self.process.is_alive and not self.process.is_paused

    def start(self) -> None:
        self._boots += 1
        self.process = SimProcess(self.name, self._world.loop)
        self.process.spawn(self._run())

    def crash(self) -> None:
        """Kill the agent; the engines go on."""
        self.process.crash()
        self._world.network.crashed(self.process)

    def lose_power(self) -> None:
        """Lose the agent and all engines; the disk stays."""
        self.crash()
        self.engine_lost_at = self._world.loop.now_s
        self.engines.clear()

    def start_engine(self, spec: ReplicaSpec) -> SimEngine:
        rng = self._world.rng
        ready_at = self._world.loop.now_s + rng.uniform(0.5, 4.0)
        engine = SimEngine(spec, ready_at, self.breaks_engines)
        self.engines[spec.replica_id] = engine
        return engine

    def end_engine(self, engine: SimEngine) -> None:
        if self.engines.get(engine.spec.replica_id) is engine:
            del self.engines[engine.spec.replica_id]
        engine.exit()

    def kill_engine(self, replica_id: str) -> None:
        """Let an engine crash."""
        self.engine_lost_at = self._world.loop.now_s
        self.end_engine(self.engines[replica_id])

    def note_stop(self, engine: SimEngine) -> None:
        """Check that an engine that works is stopped by order only."""
        assignment = self.node.assignment if self.node is not None else None
        tombstones = assignment.tombstones if assignment is not None else ()
        replica_id = engine.spec.replica_id
        if replica_id not in {tombstone.replica_id for tombstone in tombstones}:
            self._world.problems.append(f"{self.name} stopped {replica_id} without a tombstone")

    def warm(self) -> set[str]:
        """Return the replicas that serve here and are not ending."""
        if self.supervisor is None or not self.is_up:
            return set()
        return {
            str(replica_id)
            for replica_id, replica in self.supervisor.replicas.items()
            if replica.state is ReplicaState.WARM and replica_id in self.engines
        }

    async def _run(self) -> None:
        world = self._world
        rng = random.Random(world.rng.random())
        config = NodeConfig(
            name=self.name, schedulers=SCHEDULERS, state=Path("/"), address=f"http://{self.name}:1"
        )
        identity = an_identity(world, self.name, self.pop, PeerRole.AGENT)
        node = NodeState(
            identity,
            BootId(f"{self.name}.{self._boots}"),
            SimAssignmentFile(self),  # type: ignore[arg-type]
            SimDevices(self.devices),  # type: ignore[arg-type]
            CacheSalts(b"simulated" * 4),
        )
        await node.restore()
        artifacts: Any = SimArtifacts()
        engines: Any = SimEngines(self)
        supervisor = Supervisor(
            config=config,
            artifacts=artifacts,
            engines=engines,
            clock=sim_monotonic,
            rng=rng,
            on_change=lambda: node.nudge_report(),
        )
        link = ControlLink(
            urls=SCHEDULERS,
            identity=identity,
            boot_id=node.boot_id,
            incoming=ToAgent,
            progress=node.progress,
            on_welcome=node.on_welcome,
            on_message=node.on_message,
            rng=rng,
        )
        self.node, self.supervisor, self.link = node, supervisor, link
        jobs = agent_app._loops(config, node, supervisor, artifacts, link, rng)
        await agent_app._adopt_survivors(node, engines, supervisor, NO_SIGNERS)
        for job in jobs:
            if job.name != "prefetch":
                self.process.spawn(job.run())
        self.process.spawn(link.run())


class _Nothing:
    """Metrics that nobody reads."""

    def __getattr__(self, name: str) -> "_Nothing":
        return self

    def __call__(self, *arguments: object) -> None:
        """Take a value."""


class SimRouter:
    """A router, as far as it follows the scheduler."""

    def __init__(self, world: "World", name: str, pop: str) -> None:
        self.name, self.pop = name, pop
        self.process = SimProcess(name, world.loop)
        self.process.is_alive = False
        self.disk = Disk()
        self.fleet: FleetState | None = None
        self.follower: TableFollower | None = None
        self.link: ControlLink | None = None
        self.boots = 0
        self._world = world

    def start(self) -> None:
        self.boots += 1
        self.fleet = None
        self.process = SimProcess(self.name, self._world.loop)
        self.process.spawn(self._run())

    def crash(self) -> None:
        self.process.crash()
        self._world.network.crashed(self.process)

    @property
    def table(self) -> Any:
        """Return the table in use."""
        return self.fleet.directory.table if self.fleet is not None else None

    def routes(self) -> set[str]:
        """Return the replicas that this router sends requests to."""
        return {str(route.replica_id) for route in self.table.routes} if self.table else set()

    async def _run(self) -> None:
        world = self._world
        boot_id = BootId(f"{self.name}.{self.boots}")
        identity = an_identity(world, self.name, self.pop, PeerRole.ROUTER)
        nothing: Any = _Nothing()
        fleet = FleetState(PopId(self.pop), sim_monotonic, boot_id)
        follower = TableFollower(
            fleet=fleet,
            limiter=KeyLimiter(),
            metrics=nothing,
            cluster_id=identity.cluster_id,
            snapshot=Path(f"/simulated/{self.name}"),
            clock=sim_monotonic,
        )
        await follower.load(0.0)

        async def on_message(message: Any) -> None:
            await follower.on_table(message, link.send)

        async def on_welcome(welcome: object) -> None:
            """The table follows by itself."""

        link = ControlLink(
            urls=SCHEDULERS,
            identity=identity,
            boot_id=boot_id,
            incoming=ToRouter,
            progress=follower.registering,
            on_welcome=on_welcome,
            on_message=on_message,
            rng=random.Random(world.rng.random()),
            capabilities=(TABLE_PARTS, KEYS_FIRST),
        )
        self.fleet, self.follower, self.link = fleet, follower, link
        persist = Loop("persist", follower.persist, 30.0)
        follower.on_change = persist.nudge
        probe = Loop("probe", self._probe, PROBE_S)
        follower.on_withdrawn = probe.nudge
        for job in (Loop("recheck", follower.recheck, RECHECK_INTERVAL_S), persist, probe):
            self.process.spawn(job.run())
        self.process.spawn(link.run())

    async def _probe(self) -> int:
        """Learn which nodes answer, as the prober does."""
        fleet, follower = self.fleet, self.follower
        assert fleet is not None and follower is not None
        table = fleet.directory.table
        now = sim_monotonic()
        dropped = follower.dropped()
        for route in (*(table.routes if table else ()), *dropped):
            node = self._world.nodes[route.node_id]
            if node.is_up and not self._world.network.is_cut(self.name, node.name):
                fleet.nodes.record_round_trip(route.node_id, 10.0, now)
                if route in dropped:
                    is_warm = str(route.replica_id) in node.warm()
                    refusal = "" if is_warm else "unknown_replica"
                    fleet.nodes.record_refusal(route.replica_id, refusal)
                    follower.record_answer(route, refusal)
            else:
                fleet.nodes.record_timeout(route.node_id)
        return len(dropped)


def an_identity(world: "World", name: str, pop: str, role: PeerRole) -> Identity:
    return Identity(
        name=name,
        role=role,
        pop=PopId(pop),
        cluster_id=world.store.cluster_id,
        key_pem=name,
        certificate_pem=f"{role.value}/{name}/{pop}",
        ca_pem="simulated authority",
    )
