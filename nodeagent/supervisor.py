"""The replicas of this node, each a task that lives it from wanted to stopped.

What the table in decide/replica.py allows is what happens; this file makes it happen.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from isochrone.wire.assignment import ReplicaSpec, Tombstone
from isochrone.wire.engine import EngineStats
from isochrone.wire.ids import ReplicaId
from isochrone.wire.report import ReplicaProfile, ReplicaReport, ReplicaState
from nodeagent.config import NodeConfig
from nodeagent.decide import health
from nodeagent.decide.admission import ReplicaAdmission
from nodeagent.decide.backoff import retry_delay_s
from nodeagent.decide.health import LOOK_INTERVAL_S
from nodeagent.decide.replica import ReplicaEvent, after
from nodeagent.drivers.driver import UnknownOption
from nodeagent.host.artifacts import ArtifactStore
from nodeagent.host.download import ArtifactError
from nodeagent.host.engines import EngineProcess, EngineProcesses, EngineRecord, last_line, trim_log

log = logging.getLogger(__name__)

READY_INTERVAL_S: Final = 0.1


class ManagedReplica:
    """One replica's life and what the door and the report need of it."""

    def __init__(self, spec: ReplicaSpec, clock: Callable[[], float]) -> None:
        self.spec = spec
        self.state = ReplicaState.WANTED
        self.reason = ""
        self.since = clock()
        self.breaks: list[float] = []
        self.is_hopeless = False
        """Whether what broke it would break it again, however often it is tried."""
        self.fetched_bytes = 0
        self.profile = ReplicaProfile()
        self.in_flight = ReplicaAdmission(spec.engine.tokens_in_flight_max)
        self.bytes_out = 0
        self.engine: EngineProcess | None = None
        self.tombstone: Tombstone | None = None
        self.ending = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self.run: asyncio.Task[str] | None = None
        """Brings the engine up and watches it: over at once when its end is ordered."""
        self._clock = clock

    def __repr__(self) -> str:
        return f"<Replica {self.spec.replica_id} {self.state.value} {self.reason!r}>"

    def happened(self, event: ReplicaEvent, reason: str = "") -> None:
        """Move to the state that the table gives."""
        before, self.state = self.state, after(self.state, event)
        self.reason = reason
        if self.state is not before:
            self.since = self._clock()
        log.info(
            "replica",
            extra={
                "fields": {
                    "replica": self.spec.replica_id,
                    "event": event.value,
                    "state": self.state.value,
                    "reason": reason,
                }
            },
        )

    def report(self) -> ReplicaReport:
        """Return the replica as it is."""
        return ReplicaReport(
            spec=self.spec,
            state=self.state,
            reason=self.reason[:500],
            since_s=self._clock() - self.since,
            restarts=len(self.breaks),
            fetched_bytes=self.fetched_bytes,
            profile=self.profile,
        )


class Supervisor:
    """Holds every replica. `on_change` is called whenever one changes."""

    def __init__(
        self,
        *,
        config: NodeConfig,
        artifacts: ArtifactStore,
        engines: EngineProcesses,
        clock: Callable[[], float],
        chance: random.Random,
        on_change: Callable[[], None],
    ) -> None:
        self.replicas: dict[ReplicaId, ManagedReplica] = {}
        self.relaying = 0
        """Requests that siblings on other nodes answer through this one's door."""
        self._config = config
        self._artifacts = artifacts
        self._engines = engines
        self._clock = clock
        self._chance = chance
        self._on_change = on_change
        self._leaving = False

    def states(self) -> dict[ReplicaId, ReplicaState]:
        """Return the state of every replica, as reconcile reads it."""
        return {replica_id: replica.state for replica_id, replica in self.replicas.items()}

    def pinned(self) -> Collection[str]:
        """Return the digests of artifacts in use."""
        return {replica.spec.artifact.digest for replica in self.replicas.values()}

    def is_fetching(self) -> bool:
        """Say whether a replica is waiting for its weights to come."""
        return any(r.state is ReplicaState.FETCHING for r in self.replicas.values())

    def begin(self, spec: ReplicaSpec, survivor: EngineRecord | None = None) -> None:
        """Bring a replica up, or take up its engine of an earlier life."""
        replica = ManagedReplica(spec, self._clock)
        if survivor is not None:
            # Held from now on: whatever comes before its task turns, it is ended or left in order.
            replica.engine = self._engines.adopt(survivor)
        self.replicas[spec.replica_id] = replica
        replica.task = asyncio.create_task(self._live(replica), name=spec.replica_id)
        replica.task.add_done_callback(self._ended)
        self._on_change()

    def end(self, tombstone: Tombstone) -> None:
        """Drain a replica and stop it; its task does the rest."""
        replica = self.replicas[tombstone.replica_id]
        replica.tombstone = tombstone
        replica.happened(ReplicaEvent.END_ORDERED, tombstone.reason)
        replica.ending.set()
        if replica.run is not None:
            replica.run.cancel()
        self._on_change()

    def forget(self, replica_ids: Collection[ReplicaId]) -> None:
        """Drop stopped replicas that were reported as such."""
        for replica_id in replica_ids:
            replica = self.replicas.get(replica_id)
            if replica is not None and replica.state is ReplicaState.STOPPED:
                del self.replicas[replica_id]

    async def leave(self, *, keep_engines: bool) -> None:
        """End every task: with their engines, or leaving those to be adopted by the next life."""
        self._leaving = True
        replicas = self.replicas.values()
        kept = [r.engine for r in replicas if keep_engines and r.engine is not None]
        for replica in replicas:
            if keep_engines:
                replica.engine = None
            for task in (replica.run, replica.task):
                if task is not None:
                    task.cancel()
        tasks = [r.task for r in replicas if r.task is not None]
        await asyncio.gather(*tasks, return_exceptions=True)
        for engine in kept:
            await engine.release()
        for replica in replicas:
            if replica.engine is not None:
                # Its task was cancelled before its first turn.
                await replica.engine.stop()

    async def wait_idle(self, timeout_s: float) -> None:
        """Wait until no request is in flight, for `timeout_s` at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.relaying or any(  # noqa: ASYNC110
                    replica.in_flight.running for replica in self.replicas.values()
                ):
                    await asyncio.sleep(READY_INTERVAL_S)

    async def _live(self, replica: ManagedReplica) -> None:
        """Live one replica: up, watched, up again when it breaks, until its end is ordered."""
        try:
            while not replica.ending.is_set():
                problem = await self._live_once(replica)
                self._on_change()
                if not replica.ending.is_set():
                    await self._wait_to_retry(replica, problem)
            await self._drain(replica)
        finally:
            if replica.engine is not None:
                await asyncio.shield(replica.engine.stop())
                replica.engine = None

    async def _live_once(self, replica: ManagedReplica) -> str:
        """Bring the engine up and watch it; return what broke it, "" where its end is ordered."""
        replica.run = asyncio.create_task(self._run(replica))
        try:
            await asyncio.wait((replica.run,))
        finally:
            replica.run.cancel()
            await asyncio.gather(replica.run, return_exceptions=True)
        if replica.ending.is_set():
            return ""
        try:
            problem = replica.run.result()
        except (ArtifactError, OSError, UnknownOption) as error:
            problem = str(error)
            replica.is_hopeless = isinstance(error, UnknownOption)
        # This replica's own edge: what nobody foresaw breaks it alone, and it is tried again.
        except Exception as error:
            log.exception("replica failed", extra={"fields": {"replica": replica.spec.replica_id}})
            problem = f"a fault of the agent: {error!r}"
        if replica.engine is not None:
            said = last_line(replica.engine.log)
            problem = f"{problem}: {said}" if said else problem
        replica.happened(ReplicaEvent.BROKE, problem)
        if replica.engine is not None:
            await replica.engine.stop(kill=True)
            replica.engine = None
        return problem

    async def _run(self, replica: ManagedReplica) -> str:
        """Bring the engine up and watch it; return what is wrong."""
        began = self._clock()
        engine, is_adopted = replica.engine, replica.engine is not None
        if engine is not None:
            replica.happened(ReplicaEvent.ENGINE_ADOPTED)
        else:
            path = await self._fetch(replica)
            engine = replica.engine = await self._engines.start(replica.spec, path)
        problem = await self._wait_ready(engine)
        if problem:
            return problem
        if not is_adopted and replica.spec.leads:
            await _have_first_token(engine)
        replica.happened(ReplicaEvent.ENGINE_READY)
        if not is_adopted:
            load_s = self._clock() - began
            replica.profile = msgspec.structs.replace(replica.profile, load_s=load_s)
        self._on_change()
        return await self._watch(replica, engine)

    async def _fetch(self, replica: ManagedReplica) -> Path:
        """Return where the weights are, once they have come."""

        def progress(size: int) -> None:
            replica.fetched_bytes = size

        replica.happened(ReplicaEvent.FETCH_BEGAN)
        self._on_change()
        path = await self._artifacts.ensure(replica.spec.artifact, self.pinned(), progress)
        replica.happened(ReplicaEvent.ARTIFACT_READY)
        self._on_change()
        return path

    async def _wait_ready(self, engine: EngineProcess) -> str:
        deadline = self._clock() + self._config.load_timeout_s
        while not await engine.is_ready():
            if engine.exited.is_set():
                return "the engine ended while loading"
            if self._clock() > deadline:
                return f"the engine was not ready after {self._config.load_timeout_s:g} s"
            await asyncio.sleep(READY_INTERVAL_S)
        return ""

    async def _watch(self, replica: ManagedReplica, engine: EngineProcess) -> str:
        """Look at an engine every second until it ends or stalls."""
        watch = health.EngineWatch()
        next_s = self._clock() + self._config.canary_interval_s
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_INTERVAL_S):
                    await engine.exited.wait()
            if engine.exited.is_set():
                return "the engine ended"
            is_due = self._clock() >= next_s
            if is_due:
                next_s = self._clock() + self._config.canary_interval_s
                await asyncio.to_thread(trim_log, engine.log)
            if not replica.spec.leads:
                # Whether it makes progress, its leader sees, and ends it with its own.
                continue
            stats = await engine.stats()
            running = replica.in_flight.running
            watch = health.observe(
                watch,
                answered=stats is not None,
                steps=stats.steps_total if stats else 0,
                bytes_out=replica.bytes_out,
                in_flight=running,
            )
            if stats is not None:
                replica.in_flight.is_shut = stats.memory_full
                _note_profile(replica, stats)
            if is_due and running == 0 and stats is not None:
                failed = 0 if await engine.canary(stats.kind) else watch.canaries_failed + 1
                watch = msgspec.structs.replace(watch, canaries_failed=failed)
            problem = health.kill_reason(watch, stall_s=self._config.stall_s, in_flight=running)
            if problem:
                return problem

    async def _wait_to_retry(self, replica: ManagedReplica, problem: str) -> None:
        """Wait out the backoff; one that is given up waits for its end to be ordered."""
        replica.breaks.append(self._clock())
        wait_s = retry_delay_s(replica.breaks, self._clock(), self._chance.random())
        if wait_s is None or replica.is_hopeless:
            often = "" if replica.is_hopeless else f"broke {len(replica.breaks)} times: "
            replica.happened(ReplicaEvent.GAVE_UP, f"{often}{problem}")
            self._on_change()
            await replica.ending.wait()
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await replica.ending.wait()

    async def _drain(self, replica: ManagedReplica) -> None:
        timeout_s = replica.tombstone.drain_timeout_s if replica.tombstone else 0.0
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                if replica.engine and not replica.spec.leads and await replica.engine.is_ready():
                    # Its leader answers what it has begun, and lets it go.
                    await replica.engine.exited.wait()
                while replica.in_flight.running:  # noqa: ASYNC110
                    await asyncio.sleep(READY_INTERVAL_S)
        if replica.engine is not None:
            await replica.engine.stop()
            replica.engine = None
        replica.happened(ReplicaEvent.DRAINED, replica.reason)
        self._on_change()

    def _ended(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and task.exception() is not None and not self._leaving:
            log.error("replica task failed", exc_info=task.exception())


async def _have_first_token(engine: EngineProcess) -> None:
    """Have an engine give a token before anybody is sent to it: its first takes longer than others.

    Whether it came is for the watch to judge, which asks again.
    """
    stats = await engine.stats()
    if stats is not None:
        await engine.canary(stats.kind)


def _note_profile(replica: ManagedReplica, stats: EngineStats) -> None:
    replica.profile = msgspec.structs.replace(
        replica.profile,
        memory_bytes=stats.weights_bytes,
        prefill_tokens_per_s=stats.prefill_tokens_per_s,
        decode_tokens_per_s=stats.decode_tokens_per_s,
    )
