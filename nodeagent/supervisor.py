"""Runs the replicas of this node, each in a task of its own from WANTED to STOPPED.

The table in decide/replicas/replica.py says which state follows an event; this module performs
the work between the events: fetch the artifact, start the engine, watch it, restart it, drain it.
"""

import asyncio
import logging
import random
import signal
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from isochrone.service.failure_log import error_text
from isochrone.service.network.shortage import lacks_descriptors
from isochrone.wire.engines.engine_capabilities import capabilities_of
from isochrone.wire.ids import DeviceId, ReplicaId
from isochrone.wire.peers.assignment import ReplicaSpec, Role, Tombstone
from isochrone.wire.peers.report import ReplicaState
from nodeagent.bring_up import POLL_INTERVAL_S, find_asleep, note_ready, wait_ready, warm_up
from nodeagent.config import NodeConfig
from nodeagent.decide.replicas import health
from nodeagent.decide.replicas.backoff import retry_delay_s
from nodeagent.decide.replicas.health import OBSERVE_INTERVAL_S
from nodeagent.decide.replicas.replica import ReplicaEvent
from nodeagent.decide.replicas.start_lack import (
    WAIT_MAX_S,
    StartLack,
    descriptor_lack,
    may_start,
    memory_lack,
)
from nodeagent.drivers.driver import DeviceMemory, UnknownOption
from nodeagent.host.artifacts.artifact_store import ArtifactStore
from nodeagent.host.artifacts.download import ArtifactError
from nodeagent.host.awake_memory import AwakeMemory
from nodeagent.host.engines.engine_adapters import AdapterFetcher
from nodeagent.host.engines.engine_log import last_error, trim_log
from nodeagent.host.engines.engine_process import EngineProcess, EngineProcesses
from nodeagent.host.engines.engine_record import EngineRecord
from nodeagent.host.engines.leader_watch import LeaderWatch
from nodeagent.host.memory_guard import MemoryGuard, RunningReplica
from nodeagent.host.memory_peaks import MemoryPeaks
from nodeagent.managed_replica import ManagedReplica

log = logging.getLogger(__name__)

RESOURCE_POLL_S: Final = 1.0
"""How often a replica that lacks memory or descriptors is looked at."""

KV_FETCHED_S: Final = 2.0
"""A vendor's prefill engine stays for this long after its last request: decode engines may still
fetch KV from it, and no request shows when they have."""


async def no_budgets() -> Mapping[DeviceId, int]:
    """Return no devices: nothing is over-committed."""
    return {}


class Supervisor:
    """Holds all replicas of the node and runs them. Calls `on_change` after every change."""

    def __init__(
        self,
        *,
        config: NodeConfig,
        artifacts: ArtifactStore,
        engines: EngineProcesses,
        clock: Callable[[], float],
        rng: random.Random,
        on_change: Callable[[], None],
        device_budgets: Callable[[], Awaitable[Mapping[DeviceId, int]]] = no_budgets,
        memory_used: Callable[[int, Sequence[DeviceId]], int] = lambda _leader, _devices: 0,
        device_memory: Callable[[Sequence[DeviceId]], DeviceMemory | None] = lambda _: None,
        memory_peaks: MemoryPeaks | None = None,
    ) -> None:
        """`device_budgets` returns the bytes of each device that replicas may take, `memory_used`
        what a process group takes of one of some devices, and `device_memory` the memory of the
        smallest of them; `memory_used` may block. `memory_peaks` are those of earlier replicas."""
        self._memory_guard = MemoryGuard(device_memory, memory_used)
        self._memory_used, self._device_memory = memory_used, device_memory
        self._memory_peaks = memory_peaks
        self.awake = AwakeMemory(device_budgets, clock)
        self.replicas: dict[ReplicaId, ManagedReplica] = {}
        self.handoffs_in_progress = 0
        """Requests that this node relays to peer replicas on other nodes."""
        self._config = config
        self.state_folder = config.state
        self._artifacts = artifacts
        self._engines = engines
        self._clock = clock
        self._rng = rng
        self._on_change = on_change
        self._is_shutting_down = False
        self.adapter_fetcher = AdapterFetcher(artifacts, self.pinned)

    def states(self) -> dict[ReplicaId, ReplicaState]:
        """Return the state of every replica."""
        return {replica_id: replica.state for replica_id, replica in self.replicas.items()}

    def pinned(self) -> Collection[str]:
        """Return the digests of the artifacts that replicas use, loaded adapters included."""
        replicas = self.replicas.values()
        adapters = (digest for replica in replicas for digest in replica.adapters.pinned)
        return {*(replica.spec.artifact.digest for replica in replicas), *adapters}

    def is_fetching(self) -> bool:
        """Return True if a replica waits for its artifact."""
        return any(r.state is ReplicaState.FETCHING for r in self.replicas.values())

    def start(self, spec: ReplicaSpec, survivor: EngineRecord | None = None) -> None:
        """Start a replica, adopting its engine process if one survived an earlier agent."""
        replica = ManagedReplica(spec, self._clock)
        replica.admission.wake_ms = partial(self.awake.wake_ms, spec.replica_id)
        replica.admission.sleep_reason = partial(self.awake.reason, spec.replica_id)
        replica.admission.decode_tokens_per_s = lambda: replica.profile.decode_tokens_per_s
        if survivor is not None:
            # Adopted before the task runs, so that a shutdown in between stops or releases it.
            replica.engine = self._engines.adopt(survivor)
            self.awake.adopt(spec)
        self.replicas[spec.replica_id] = replica
        replica.task = asyncio.create_task(self._run_replica(replica), name=spec.replica_id)
        replica.task.add_done_callback(self._log_task_failure)
        self._on_change()

    async def adopt(self, survivor: EngineRecord) -> None:
        """Run a replica whose engine survived an earlier agent, and measure what it takes.

        Measured at once: without it the scheduler would place replicas as if it kept to its plan.
        """
        spec = survivor.spec
        used = await asyncio.to_thread(self._memory_used, survivor.pid, spec.device_ids)
        self.start(spec, survivor)
        self.replicas[spec.replica_id].note_memory(used)

    def end(self, tombstone: Tombstone) -> None:
        """Order the end of a replica: its task drains and stops it."""
        replica = self.replicas[tombstone.replica_id]
        replica.tombstone = tombstone
        replica.apply(ReplicaEvent.END_ORDERED, tombstone.reason)
        replica.end_ordered.set()
        self.awake.refuse_waiting(replica.spec.replica_id)
        if replica.attempt is not None:
            replica.attempt.cancel()
        self._on_change()

    def forget(self, replica_ids: Collection[ReplicaId]) -> None:
        """Drop stopped replicas after they were reported to the scheduler as stopped."""
        for replica_id in replica_ids:
            replica = self.replicas.get(replica_id)
            if replica is not None and replica.state is ReplicaState.STOPPED:
                del self.replicas[replica_id]

    async def shut_down(self, *, keep_engines: bool) -> None:
        """Cancel every replica's task; stop the engines or leave them to the next agent."""
        self._is_shutting_down = True
        replicas = self.replicas.values()
        kept = [r.engine for r in replicas if keep_engines and r.engine is not None]
        for replica in replicas:
            if keep_engines:
                replica.engine = None
            for task in (replica.attempt, replica.task):
                if task is not None:
                    task.cancel()
        tasks = [r.task for r in replicas if r.task is not None]
        await asyncio.gather(*tasks, return_exceptions=True)
        for engine in kept:
            await engine.release()
        for replica in replicas:
            if replica.engine is not None:
                # Its task was cancelled before it ran and could not stop the engine.
                await replica.engine.stop()

    async def wait_idle(self, timeout_s: float) -> None:
        """Wait until no request is in flight, for at most `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.handoffs_in_progress or any(  # noqa: ASYNC110
                    replica.admission.running for replica in self.replicas.values()
                ):
                    await asyncio.sleep(POLL_INTERVAL_S)

    async def _run_replica(self, replica: ManagedReplica) -> None:
        """Main path of a replica: run its engine, restart it after failures, drain it, stop it."""
        try:
            if self._memory_peaks is not None:
                peak = await asyncio.to_thread(self._memory_peaks.peak_bytes, replica.spec)
                replica.note_memory(peak)
            while not replica.end_ordered.is_set():
                problem = await self._run_engine(replica)
                self._on_change()
                if replica.end_ordered.is_set():
                    break
                if not (replica.was_starting and await self._wait_for_resource(replica, problem)):
                    await self._wait_to_retry(replica, problem)
            await self._drain(replica)
        finally:
            self.awake.forget(replica.spec.replica_id)
            if replica.engine is not None:
                await asyncio.shield(replica.stop_engine())

    async def _run_engine(self, replica: ManagedReplica) -> str:
        """Run one engine process; return why it failed, or "" if the replica's end was ordered."""
        replica.attempt = asyncio.create_task(self._bring_up_and_watch(replica))
        try:
            await asyncio.wait((replica.attempt,))
        finally:
            replica.attempt.cancel()
            await asyncio.gather(replica.attempt, return_exceptions=True)
        if replica.end_ordered.is_set():
            return ""
        problem = _failure_of(replica, replica.attempt)
        replica.apply(ReplicaEvent.BROKE, problem)
        await replica.stop_engine(kill=True)
        # Not before: its memory is free once its processes have ended.
        self.awake.forget(replica.spec.replica_id)
        return problem

    async def _bring_up_and_watch(self, replica: ManagedReplica) -> str:
        """Fetch the artifact, start the engine, warm it up, watch it; return why it failed.

        An adopted engine skips the fetch, the start and the warm-up.
        """
        start_s = self._clock()
        engine, is_adopted = replica.engine, replica.engine is not None
        if engine is not None:
            replica.apply(ReplicaEvent.ENGINE_ADOPTED)
        else:
            artifact_path = await self._fetch_artifact(replica)
            await self.awake.admit(replica.spec)
            engine = replica.engine = await self._engines.start(replica.spec, artifact_path)
        guard = partial(self._memory_problem, replica)
        problem = await wait_ready(engine, self._clock, self._config.load_timeout_s, guard)
        if not problem and replica.spec.leads and not is_adopted:
            problem = await warm_up(engine)
        if problem:
            return problem
        await note_ready(engine)
        may_be_asleep = is_adopted and replica.spec.overcommit > 1
        is_asleep = await find_asleep(engine) if may_be_asleep else False
        if is_asleep is None:
            return "the engine does not say whether it sleeps"
        self.awake.settle(replica.spec.replica_id, engine, is_asleep=is_asleep)
        replica.apply(ReplicaEvent.ENGINE_READY)
        if not is_adopted:
            load_s = self._clock() - start_s
            replica.profile = msgspec.structs.replace(replica.profile, load_s=load_s)
        self._on_change()
        return await self._watch_engine(replica, engine)

    async def _fetch_artifact(self, replica: ManagedReplica) -> Path:
        """Fetch the replica's artifact and return its folder. Raises ArtifactError."""

        def on_progress(size_bytes: int) -> None:
            replica.fetched_bytes = size_bytes

        replica.apply(ReplicaEvent.FETCH_BEGAN)
        self._on_change()
        path = await self._artifacts.ensure(replica.spec.artifact, self.pinned, on_progress)
        replica.apply(ReplicaEvent.ARTIFACT_READY)
        self._on_change()
        return path

    async def _memory_problem(self, replica: ManagedReplica) -> str:
        """Return why a replica must end for lack of memory, or ""."""
        running = [
            RunningReplica(other.spec, other.engine.pid)
            for other in self.replicas.values()
            if other.engine is not None
        ]
        return await self._memory_guard.problem(replica.spec, running)

    async def _watch_engine(self, replica: ManagedReplica, engine: EngineProcess) -> str:
        """Observe the engine every second until it exits or must be killed; return the reason."""
        watch, silent_s = health.EngineWatch(), engine.record.command.stall_s
        counts_steps = capabilities_of(replica.spec.engine.driver).counts_steps
        leader = LeaderWatch(replica.spec, engine.pid, is_adopted=engine.is_adopted)
        next_canary_s = self._clock() + self._config.canary_interval_s
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(OBSERVE_INTERVAL_S):
                    await engine.exited.wait()
            if engine.exited.is_set():
                return engine.exit_reason
            switch_problem = self.awake.switch_problem(replica.spec.replica_id)
            if problem := switch_problem or await self._memory_problem(replica):
                return problem
            is_canary_due = watch.is_suspect or self._clock() >= next_canary_s
            if is_canary_due:
                next_canary_s = self._clock() + self._config.canary_interval_s
                await asyncio.to_thread(trim_log, engine.log)
                await self._measure_memory(replica, engine)
            if not replica.spec.leads:
                if problem := await leader.problem():
                    return problem
                continue
            stats = await engine.stats()
            if stats is None and engine.lacks_descriptors:
                continue  # the agent's fault, which says nothing of the engine
            is_awake = self.awake.is_awake(replica.spec.replica_id)
            # Requests that wait for a wake are not the engine's.
            running = replica.admission.in_engine if is_awake else 0
            # Those during which a healthy engine shows progress.
            shown = running if counts_steps else replica.admission.answering
            watch = health.observe(
                watch,
                answered=stats is not None or (running > 0 and silent_s > 0),
                steps=stats.steps_total + stats.layers_computed_total if stats else 0,
                bytes_out=replica.bytes_out,
                in_flight=shown,
                is_waiting_for_peers=stats is not None and stats.is_waiting_for_peers,
            )
            if stats is not None:
                replica.take_stats(stats)
            if is_canary_due and running == 0 and stats is not None and is_awake:
                async with self.awake.use(replica.spec.replica_id, is_test=True):
                    succeeded = await engine.canary(stats.kind)
                if succeeded or not engine.lacks_descriptors:
                    watch = health.after_canary(watch, succeeded=succeeded)
            stall_s = max(silent_s or self._config.stall_s, engine.record.step_limit_s)
            problem = health.kill_reason(watch, stall_s=stall_s, in_flight=shown)
            if problem:
                return f"{problem}: {engine.canary_problem}" if engine.canary_problem else problem

    async def _measure_memory(self, replica: ManagedReplica, engine: EngineProcess) -> None:
        """Record the most memory that the engine's processes were seen to take of one device."""
        used = await asyncio.to_thread(self._memory_used, engine.pid, replica.spec.device_ids)
        replica.note_memory(used)
        if self._memory_peaks is not None:
            await asyncio.to_thread(self._memory_peaks.note, replica.spec, used)

    async def _wait_to_retry(self, replica: ManagedReplica, problem: str) -> None:
        """Wait out the backoff; a replica that is given up waits for its end to be ordered."""
        replica.note_failure()
        times, failed_starts = replica.failure_times, replica.failed_starts
        delay_s = retry_delay_s(times, self._clock(), self._rng.random(), failed_starts)
        if delay_s is None or replica.is_failure_permanent:
            prefix = "" if replica.is_failure_permanent else f"failed {len(times)} times: "
            await self._give_up(replica, f"{prefix}{problem}")
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await replica.end_ordered.wait()

    async def _wait_for_resource(self, replica: ManagedReplica, problem: str) -> bool:
        """Wait until a replica whose start lacked memory or a descriptor may start again.

        This does not count as a failure of its version. After WAIT_MAX_S the replica is given up,
        because other nodes may have what it lacks. Return False at once if the start failed for
        another reason.
        """
        failed_s = self._clock()
        lack = await self._start_lack(replica, problem)
        if lack is None or replica.end_ordered.is_set():
            return replica.end_ordered.is_set()
        since_s = replica.note_wait(failed_s)
        replica.reason = lack.reason
        self._on_change()
        while not replica.end_ordered.is_set():
            now_s = self._clock()
            free_bytes = await self._free_bytes(replica) if lack.needed_bytes else 0
            if may_start(lack, free_bytes, now_s - failed_s):
                return True
            if now_s - since_s >= WAIT_MAX_S:
                reason = f"no {lack.resource} for {WAIT_MAX_S:.0f} s: {problem}"
                await self._give_up(replica, reason)
                return True
            with suppress(TimeoutError):
                async with asyncio.timeout(RESOURCE_POLL_S):
                    await replica.end_ordered.wait()
        return True

    async def _start_lack(self, replica: ManagedReplica, problem: str) -> StartLack | None:
        """Return what a replica's start lacked; None if it failed for another reason."""
        if replica.lacked_descriptors:
            return descriptor_lack(problem)
        spec, free_bytes = replica.spec, await self._free_bytes(replica)
        return memory_lack(spec.device_ids, free_bytes, spec.memory_bytes, problem)

    async def _free_bytes(self, replica: ManagedReplica) -> int:
        """Return the memory that is free on each of a replica's devices; as planned if unknown."""
        memory = await asyncio.to_thread(self._device_memory, replica.spec.device_ids)
        return replica.spec.memory_bytes if memory is None else memory.free_bytes

    async def _give_up(self, replica: ManagedReplica, reason: str) -> None:
        replica.apply(ReplicaEvent.GAVE_UP, reason)
        self._on_change()
        await replica.end_ordered.wait()

    async def _drain(self, replica: ManagedReplica) -> None:
        """Wait for the requests in flight, up to the tombstone's timeout, and stop the engine."""
        timeout_s = replica.tombstone.drain_timeout_s if replica.tombstone else 0.0
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                if replica.engine and not replica.spec.leads and await replica.engine.is_ready():
                    # The leader finishes its requests first and then ends this part.
                    await replica.engine.exited.wait()
                while replica.admission.running:  # noqa: ASYNC110
                    await asyncio.sleep(POLL_INTERVAL_S)
                if (
                    replica.engine
                    and replica.engine.handshake
                    and replica.spec.role is Role.PREFILL
                ):
                    await asyncio.sleep(KV_FETCHED_S)
        await replica.stop_engine()
        replica.apply(ReplicaEvent.DRAINED, replica.reason)
        self._on_change()

    def _log_task_failure(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and task.exception() is not None and not self._is_shutting_down:
            log.error("replica task failed", exc_info=task.exception())


def _failure_of(replica: ManagedReplica, attempt: "asyncio.Task[str]") -> str:
    """Return why an attempt failed, with the last error in the engine's log."""
    engine = replica.engine
    # The last request to the engine could not be sent.
    replica.lacked_descriptors = (
        engine is not None and engine.lacks_descriptors and not engine.exited.is_set()
    )
    try:
        problem = attempt.result()
    except (ArtifactError, OSError, UnknownOption) as error:
        problem = error_text(error)
        replica.lacked_descriptors = lacks_descriptors(error)
        replica.is_failure_permanent = isinstance(error, UnknownOption)
    # A bug in the agent must fail this replica alone; it is retried like any other failure.
    except Exception as error:
        log.exception("replica failed", extra={"fields": {"replica": replica.spec.replica_id}})
        problem = f"internal error of the agent: {error!r}"
    if signal.SIGKILL.name in problem:
        problem += ", as the kernel does when memory is short (see dmesg)"
    if replica.engine is not None:
        log_line = last_error(replica.engine.log)
        problem = f"{problem}: {log_line}" if log_line else problem
    return problem
