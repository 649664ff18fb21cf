"""A scheduler process: its own composition, on the simulated network and store."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from contextvars import ContextVar
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from isochrone.service.loop import Loop
from isochrone.wire.ids import KeyId
from isochrone.wire.peers.routes import KeyEntry
from scheduler import app
from scheduler.api.control.certificates import CertificateIssuer
from scheduler.config import SchedulerConfig
from scheduler.database import INTAKE_CONNECTIONS, RESERVED_CONNECTIONS, Database
from scheduler.decide.cluster import PlacementPlan
from scheduler.decide.membership import NodeContact
from scheduler.listeners import control_app
from scheduler.loops.renew_lease import LeaseRenewalThread
from scheduler.planner.messages import PlanRequest
from scheduler.planner.server import PlannerServer
from scheduler.state.scheduler_state import SchedulerState
from scheduler.store.fleet.node_reports import NodeReportCache
from tests.simulation.event_loop import SimProcess
from tests.simulation.network import ServerEnd
from tests.simulation.store import SimPool, Tables

if TYPE_CHECKING:
    from tests.simulation.world import World

JOBS: Final = frozenset(
    {
        *("hold_lease", "flush_pulses", "disconnect_revoked", "record_node_loss"),
        *("place_replicas", "publish_routes", "delete_expired_rows", "advance_history"),
    }
)
"""The periodic jobs that are simulated; the others only concern demand, usage and rollouts."""

DELETE_S: Final = 5.0
RESTART_S: Final = 1.0
ACCEPTED: ContextVar[ServerEnd] = ContextVar("ACCEPTED")


class SimAuthority:
    """The cluster's authority without cryptography: a seal is a hash."""

    ca_pem = "simulated authority"
    fingerprint = "simulated"

    def seal(self, payload: bytes) -> str:
        return sha256(b"sealed" + payload).hexdigest()

    def cache_salt_secret(self, version: int) -> bytes:
        return b"simulated" * 4

    def verify_seal(self, payload: bytes, seal: str) -> bool:
        return seal == self.seal(payload)


class SimPlanner:
    """The planner, in the scheduler's own process."""

    def __init__(self, server: PlannerServer, world: "World") -> None:
        self._server = server
        self._world = world

    async def plan(self, contact: NodeContact, *, is_quick: bool = False) -> PlacementPlan:
        plan = await self._server.answer(PlanRequest(contact, is_quick))
        assert isinstance(plan, PlacementPlan)
        await asyncio.sleep(self._world.rng.uniform(0.005, 0.2))
        return plan


class SimTransport:
    """The transport of a connection, as far as it is used."""

    def __init__(self, end: ServerEnd) -> None:
        self._end = end

    def get_extra_info(self, name: str) -> tuple[str, int]:
        return ("10.0.0.1", 1)

    def abort(self) -> None:
        self._end.process.spawn(self._end.close())


class SimRequest:
    """The request that opens a control connection."""

    def __init__(self, end: ServerEnd) -> None:
        self.transport = SimTransport(end)


class SimScheduler:
    """One scheduler of the fleet. It may crash and start again."""

    def __init__(self, world: "World", name: str) -> None:
        self.name = name
        self.boots = 0
        self.process = SimProcess(name, world.loop)
        self.process.is_alive = False
        self.state: SchedulerState | None = None
        self._world = world
        self._pool: SimPool | None = None
        self._place: asyncio.Event | None = None
        self._handlers: dict[str, Any] = {}

    @property
    def is_acting(self) -> bool:
        alive = self.process.is_alive and not self.process.is_paused
        return alive and self.state is not None and self.state.lease.is_acting

    def start(self) -> None:
        self.boots += 1
        self.state = None
        self.process = SimProcess(self.name, self._world.loop)
        self.process.spawn(self._run())

    def crash(self) -> None:
        self.process.crash()
        self._world.network.crashed(self.process)

    async def accept(self, end: ServerEnd, path: str) -> None:
        """Serve a new control connection."""
        ACCEPTED.set(end)
        await self._handlers[path](SimRequest(end))

    async def put_deployment(self, deployment: Any) -> None:
        """Store a deployment as the admin API does."""

        def change(tables: Tables, now: float) -> None:
            tables.deployments[deployment.deployment_id] = deployment
            tables.generation += 1

        await self._change(change)
        assert self._place is not None
        self._place.set()

    async def set_draining(self, node_id: str, *, draining: bool) -> None:
        """Drain a node, or let it run replicas again."""

        def change(tables: Tables, now: float) -> None:
            tables.set_draining(node_id, draining)
            tables.generation += 1

        await self._change(change)
        assert self._place is not None
        self._place.set()

    async def add_key(self, key: KeyEntry) -> None:
        """Store a key."""

        def change(tables: Tables, now: float) -> None:
            tables.keys[key.key_id] = key

        await self._change(change)
        assert self.state is not None
        self.state.routes.mark_key_changed(key.key_id)

    async def revoke_key(self, key_id: str) -> None:
        """Revoke a key."""

        def change(tables: Tables, now: float) -> None:
            tables.revoked_keys.setdefault(key_id, now)

        await self._change(change)
        assert self.state is not None
        self.state.routes.mark_key_changed(KeyId(key_id))

    async def _change(self, change: Callable[[Tables, float], None]) -> None:
        """Change the store in a transaction of this process."""
        task = self.process.spawn(self._change_in_transaction(change))
        # An operator may leave: a scheduler that hangs never ends its transaction.
        await asyncio.wait((task,))
        task.result()

    async def _change_in_transaction(self, change: Callable[[Tables, float], None]) -> None:
        assert self._pool is not None
        async with self._pool.acquire(timeout=1.0) as connection, connection.transaction():
            await connection.round_trip()
            change(await connection.write(), connection.now)

    async def _run(self) -> None:
        while True:
            try:
                pools = [
                    SimPool(self._world.store, size)
                    for size in (20, RESERVED_CONNECTIONS, INTAKE_CONNECTIONS)
                ]
                async with pools[0].acquire(timeout=2.0) as connection:
                    await connection.round_trip()
                break
            except (OSError, TimeoutError):
                await asyncio.sleep(RESTART_S)
        await self._serve(pools)

    async def _serve(self, pools: Sequence[SimPool]) -> None:
        config = SchedulerConfig(
            name=f"{self.name}.{self.boots}",
            database_url="",
            authority=Path("/"),
            admin_token_file=Path("/"),
        )
        authority: Any = SimAuthority()
        simulated: Sequence[Any] = pools
        pool, reserved, intake = simulated
        database = Database(pool, reserved, intake, pool, self._world.store.cluster_id)
        nudges = app.JobNudges(*(asyncio.Event() for _ in app.JobNudges._fields))
        state = app._make_state(config, database, nudges)
        server = PlannerServer(database.pool, config.liveness)
        server.forecast.is_made = True  # of no demand, which is not simulated
        planner: Any = SimPlanner(server, self._world)
        made = app.Composition(
            *(config, database, state, planner, authority, nudges, NodeReportCache()),
            batches=None,
            running=AsyncExitStack(),
        )
        jobs = [job for job in app._periodic_loops(made, None) if job.name in JOBS]
        for job in jobs:
            if job.name in ("delete_expired_rows", "advance_history"):
                # A history is shorter than the intervals of these jobs.
                job._interval_s = DELETE_S
        renewal = LeaseRenewalThread(
            database_url="", interval_s=config.lease_renew_s, lease=state.lease
        )
        jobs.append(Loop("renew_lease", renewal.run_once, config.lease_renew_s))
        application = control_app(
            database, state, CertificateIssuer(authority, lifetime_s=1e9), nudges.place.set
        )
        self._handlers = {
            route.resource.canonical: route.handler
            for route in application.router.routes()
            if route.resource is not None
        }
        self._pool, self._place, self.state = pools[0], nudges.place, state
        self._world.network.servers[self.name] = (self.process, self.accept)
        for job in jobs:
            self.process.spawn(job.run())
