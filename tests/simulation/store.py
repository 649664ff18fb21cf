"""An in-memory database with what the control plane relies on: transactions, locks and crashes.

Writers exclude each other from their first write to the end of their transaction, which is stricter
than row locks. Readers see committed states only; a REPEATABLE READ transaction sees one of them.
The lease's expiry is apart, because its renewal does not wait for writers that hold the epoch.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import msgspec

from isochrone.wire.ids import ClusterId
from isochrone.wire.peers.routes import KeyEntry
from tests.simulation.event_loop import CURRENT, EPOCH, SimLoop
from tests.simulation.network import Network

DATABASE: Final = "db"
IDLE_TIMEOUT_S: Final = 5.0
"""As in scheduler/store/pool.py: a transaction that is idle for longer is ended."""

ASYNC_COMMIT_S: Final = 0.2
EPOCH_UNIX_S: Final = EPOCH.timestamp()


class NodeRow(msgspec.Struct, frozen=True, kw_only=True):
    node_id: str
    pop: str
    address: str = ""
    boot_id: str = ""
    report_seq: int = 0
    report: bytes | None = None
    last_seen_at: float | None = None
    lost_at: float | None = None
    generation: int = 0
    draining: bool = False
    revoked: bool = False
    created_at: float = 0.0


class PlacementRow(msgspec.Struct, frozen=True, kw_only=True):
    replica_id: str
    node_id: str
    spec: Any
    reason: str
    placed_at: float
    state: str
    state_since: float
    state_reason: str = ""
    restarts: int = 0
    ended_at: float | None = None
    ended_generation: int | None = None
    ended_reason: str = ""
    drain_timeout_s: float = 30.0
    released_at: float | None = None


class EventRow(msgspec.Struct, frozen=True, kw_only=True):
    at: float
    kind: str
    subject: str
    actor: str = "scheduler"
    reason: str = ""


class Tables:
    """A state of the database. Rows are immutable, so a copy of the dictionaries is a snapshot."""

    def __init__(self) -> None:
        self.generation = 1
        self.route_generation = 1
        self.lost_generation = 0
        self.epoch = 0
        self.server = ""
        """The server on which the newest term began."""
        self.pops: dict[str, Any] = {}
        self.models: dict[str, Any] = {}
        self.deployments: dict[str, Any] = {}
        self.deleted: dict[str, float] = {}
        self.nodes: dict[str, NodeRow] = {}
        self.routers: dict[str, str] = {}
        self.devices: dict[str, tuple[Any, ...]] = {}
        self.placements: dict[str, PlacementRow] = {}
        self.keys: dict[str, KeyEntry] = {}
        self.revoked_keys: dict[str, float] = {}
        self.profiles: dict[tuple[str, str], Any] = {}
        self.events: dict[int, EventRow] = {}
        self.next_event = 1
        self.history_at = 0.0

    def rows_of(self, table: str) -> dict[Any, Any]:
        """Return the rows of the tables that have a retention; none of others."""
        found: dict[str, dict[Any, Any]] = {"event": self.events, "placement": self.placements}
        return found.get(table, {})

    def add_event(self, at: float, kind: str, subject: str, actor: str = "scheduler") -> None:
        """Append an event."""
        self.events[self.next_event] = EventRow(at=at, kind=kind, subject=subject, actor=actor)
        self.next_event += 1

    def copy(self) -> "Tables":
        copied = Tables.__new__(Tables)
        for name, value in vars(self).items():
            setattr(copied, name, value.copy() if isinstance(value, dict) else value)
        return copied

    def set_draining(self, node_id: str, draining: bool) -> None:
        """Change one column of a node."""
        node = self.nodes[node_id]
        self.nodes[node_id] = msgspec.structs.replace(node, draining=draining)


class LeaseRow:
    """Who holds the lease and until when by the database's clock."""

    def __init__(self) -> None:
        self.holder = ""
        self.expires_at = float("-inf")
        self.acting_since = 0.0


class SimStore:
    """The database server. Its clock may jump; it may be down, slow, or restored from a backup."""

    def __init__(self, loop: SimLoop, network: Network, rng: random.Random) -> None:
        self.cluster_id = ClusterId("c1")
        self.tables = Tables()
        self.lease = LeaseRow()
        self.clock_ahead_s = 0.0
        self.started_at = float("-inf")
        self.starts = 0
        self.is_down = False
        self.incarnation = 0
        self.loses_commit_answers = 0.0
        """The share of commits whose answer is lost."""
        self.slow_s = 0.0
        self.writes_by_epoch: dict[int, str] = {}
        self.newest_write_epoch = 0
        self.problems: list[str] = []
        self.durable = self.tables
        self.loop, self.network, self.rng = loop, network, rng
        self.writer: SimDbConnection | None = None
        self._waiting: list[asyncio.Future[None]] = []

    def now(self) -> float:
        """Return the database's wall clock as Unix time."""
        return EPOCH_UNIX_S + self.loop.now_s + self.clock_ahead_s

    def crash(self) -> None:
        """Lose what was committed asynchronously, all connections and all open transactions."""
        self.is_down = True
        self.incarnation += 1
        self.tables = self.durable
        self.release(self.writer)

    def start(self) -> None:
        self.is_down = False
        self.started_at = self.now()
        self.starts += 1

    @property
    def server(self) -> str:
        """Return what differs after each start."""
        return f"start {self.starts}"

    def restore(self, backup: Tables) -> None:
        """Replace everything by a backup, as an operator does while the server is stopped."""
        self.crash()
        self.tables = self.durable = backup
        self.lease = LeaseRow()
        self.writes_by_epoch.clear()
        self.newest_write_epoch = backup.epoch
        self.start()

    async def lock_writers(self, connection: "SimDbConnection") -> None:
        """Wait until no other transaction writes; one that is idle for too long is ended."""
        while self.writer is not None and self.writer is not connection:
            if self.loop.now_s - self.writer.used_at > IDLE_TIMEOUT_S:
                self.writer.is_broken = True
                self.release(self.writer)
                break
            future = self.loop.create_future()
            self._waiting.append(future)
            await asyncio.wait((future,), timeout=1.0)
        self.writer = connection

    def release(self, connection: "SimDbConnection | None") -> None:
        if connection is not None and self.writer is connection:
            self.writer = None
            waiting, self._waiting = self._waiting, []
            for future in waiting:
                if not future.done():
                    future.set_result(None)

    def publish(self, tables: Tables, *, is_async: bool) -> None:
        """Make a transaction's tables the committed ones."""
        self.tables = tables
        if is_async:
            self.loop.after(ASYNC_COMMIT_S, self._flush, tables, self.incarnation)
        else:
            self.durable = tables

    def _flush(self, tables: Tables, incarnation: int) -> None:
        if incarnation == self.incarnation:
            self.durable = self.tables


class SimDbConnection:
    """A connection, with the part of asyncpg's interface that `scheduler/store/pool.py` uses."""

    def __init__(self, store: SimStore) -> None:
        self.store = store
        self.host = _host()
        self.used_at = store.loop.now_s
        self.is_broken = False
        self._incarnation = store.incarnation
        self._working: Tables | None = None
        self._frozen: Tables | None = None
        self._in_transaction = False
        self._async_commit = False
        self._wrote_with: tuple[int, str] | None = None

    async def round_trip(self) -> None:
        """Wait for the server's answer to one statement; raises OSError."""
        store = self.store
        self.used_at = store.loop.now_s
        delay_s = store.rng.uniform(0.0003, 0.004) + store.rng.random() * store.slow_s
        await asyncio.sleep(delay_s)
        self.check()
        self.used_at = store.loop.now_s

    def check(self) -> None:
        """Raise ConnectionError if the connection no longer works."""
        store, process = self.store, CURRENT.get()
        is_cut = store.network.is_cut(self.host, DATABASE) or store.network.is_cut(
            DATABASE, self.host
        )
        is_dead = process is not None and not process.is_alive
        is_lost = self._incarnation != store.incarnation
        if store.is_down or self.is_broken or is_cut or is_dead or is_lost:
            self.is_broken = True
            raise ConnectionError("cannot use the database: the connection was lost")

    @property
    def now(self) -> float:
        """Return the database's clock."""
        return self.store.now()

    @property
    def tables(self) -> Tables:
        """Return the tables as this connection sees them."""
        return self._working or self._frozen or self.store.tables

    async def write(self) -> Tables:
        """Return the tables to change, once no other transaction writes."""
        assert self._in_transaction
        if self._working is None:
            await self.store.lock_writers(self)
            self.check()
            self._working = self.store.tables.copy()
        return self._working

    def wrote_with(self, epoch: int, holder: str) -> None:
        """Note under which epoch this transaction writes."""
        self._wrote_with = (epoch, holder)

    @asynccontextmanager
    async def transaction(self, *, isolation: str = "read_committed") -> AsyncIterator[None]:
        """Commit what the block writes, or nothing of it. A nested one is a savepoint."""
        if self._in_transaction:
            saved = self._working.copy() if self._working is not None else None
            try:
                yield
            except BaseException:
                self._working = saved
                raise
            return
        await self.round_trip()
        self._in_transaction = True
        self._frozen = self.store.tables if isolation == "repeatable_read" else None
        try:
            yield
            await self._commit()
        finally:
            self._in_transaction = False
            self._frozen = self._working = self._wrote_with = None
            self.store.release(self)

    async def _commit(self) -> None:
        if self._working is None:
            self.check()
            return
        await self.round_trip()
        if self._wrote_with is not None:
            self._note_write(*self._wrote_with)
        self.store.publish(self._working, is_async=self._async_commit)
        if self.store.rng.random() < self.store.loses_commit_answers:
            self.is_broken = True
            raise ConnectionError("cannot tell whether the transaction was committed")

    def _note_write(self, epoch: int, holder: str) -> None:
        store = self.store
        if epoch < store.newest_write_epoch:
            store.problems.append(
                f"{holder} wrote with epoch {epoch} after {store.newest_write_epoch} had written"
            )
        store.newest_write_epoch = max(epoch, store.newest_write_epoch)
        if store.writes_by_epoch.setdefault(epoch, holder) != holder:
            store.problems.append(
                f"{holder} wrote with epoch {epoch} of {store.writes_by_epoch[epoch]}"
            )

    async def execute(self, statement: str, *arguments: object) -> str:
        """Take the settings of a transaction, the only statements that are not simulated above."""
        assert statement.startswith("SET LOCAL"), statement
        self._async_commit = "synchronous_commit = off" in statement
        return "SET"

    def terminate(self) -> None:
        self.is_broken = True


class SimPool:
    """A pool of connections of one process."""

    def __init__(self, store: SimStore, size_max: int = 20) -> None:
        self._store = store
        self._idle: list[SimDbConnection] = []
        self._slots = asyncio.Semaphore(size_max)

    @asynccontextmanager
    async def acquire(self, *, timeout: float) -> AsyncIterator[SimDbConnection]:
        async with asyncio.timeout(timeout):
            await self._slots.acquire()
        try:
            connection = self._idle.pop() if self._idle else None
            if connection is None or connection.is_broken:
                connection = SimDbConnection(self._store)
                await connection.round_trip()
            try:
                yield connection
            finally:
                if not connection.is_broken:
                    self._idle.append(connection)
        finally:
            self._slots.release()

    async def expire_connections(self) -> None:
        self._idle.clear()

    def terminate(self) -> None:
        self._idle.clear()


def _host() -> str:
    process = CURRENT.get()
    return process.name if process is not None else "operator"
