"""Grants the memory of devices to the replicas that are awake, and puts others to sleep for it.

`decide/replicas/sleep.py` makes the decisions. Switches are done one after the other, because
loading weights takes all of the node's cores or of its bus; but a late one, whose engine may hang,
holds up no other.

Rule 1: a node without over-committed replicas grants memory at once.
Rule 2: a wake is done only while a request waits for it.
Rule 3: memory counts as in use while it is unknown whether an engine holds it: from the start of
the agent until an adopted engine says that it sleeps, and from a failed switch until the engine has
ended.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final, NamedTuple

from isochrone.wire.ids import DeviceId, ReplicaId
from isochrone.wire.peers.assignment import ReplicaSpec
from nodeagent import metrics
from nodeagent.decide.replicas.sleep import (
    SHORTAGE_LIMIT_S,
    WAKE_RETRY_S,
    YIELD_AFTER_S,
    AwakeReplica,
    SleepOutcome,
    WakeOutcome,
    WakePlan,
    late_after_s,
    plan_wake,
    sleep_limit_s,
    waiting_reason,
    wake_limit_s,
)
from nodeagent.host.resident import Resident, SleepingEngine

WAKE_WEIGHT: Final = 0.3
"""The weight of the latest wake in the reported one."""

SLEEP_REFUSED_S: Final = 0.1
"""A replica whose engine refused to sleep is tried again after this time."""

SWITCHING: Final = "its engine falls asleep or wakes up"
WAKE_FAILED: Final = "the engine did not wake up"
SLEEP_FAILED: Final = "the engine did not fall asleep"


class CannotWake(Exception):
    """A replica's engine did not wake up, or ended meanwhile."""


class _Switch(NamedTuple):
    """The next step to a wake or a start: of the `waiting` replica, or of one that sleeps first."""

    waiting: Resident
    resident: Resident

    @property
    def is_sleep(self) -> bool:
        """Whether the resident falls asleep; if not, it wakes or starts."""
        return self.resident is not self.waiting

    @property
    def is_start(self) -> bool:
        """Whether the resident's engine may start."""
        return self.resident.engine is None


class AwakeMemory:
    """The replicas of this node, and which of them have their model in memory."""

    def __init__(
        self,
        budgets: Callable[[], Awaitable[Mapping[DeviceId, int]]],
        clock: Callable[[], float],
    ) -> None:
        """`budgets` returns the bytes of each device that replicas may take."""
        self._budgets = budgets
        self._clock = clock
        self._residents: dict[ReplicaId, Resident] = {}
        self._queue: deque[Resident] = deque()
        self._switching: asyncio.Task[None] | None = None
        self._switch_due_s: float | None = None
        """When the switch should end that others wait for; None if they wait for none."""
        self._in_progress: set[asyncio.Task[bool]] = set()
        """The switches, late ones included."""
        self._changed = asyncio.Event()

    async def admit(self, spec: ReplicaSpec) -> None:
        """Wait until a replica that is about to start may take its memory.

        The memory counts as in use from then on, until `settle`.
        """
        resident = self._residents[spec.replica_id] = Resident(spec)
        if all(other.spec.overcommit <= 1 for other in self._residents.values()):
            self._set_awake(resident)
        else:
            await self._wait_awake(resident)
        resident.admitted_s = self._clock()
        resident.requests += 1

    def adopt(self, spec: ReplicaSpec) -> None:
        """Count the memory of an engine that was running before this agent as in use.

        It may be asleep, but only the engine knows: `settle` corrects the count later.
        """
        resident = self._residents[spec.replica_id] = Resident(spec)
        self._set_awake(resident)
        resident.requests += 1

    def settle(
        self, replica_id: ReplicaId, engine: SleepingEngine, *, is_asleep: bool = False
    ) -> None:
        """The engine of an admitted or adopted replica is warm: it may sleep when it is idle."""
        resident = self._residents[replica_id]
        resident.engine = engine
        if resident.admitted_s is not None:
            resident.start_s = self._clock() - resident.admitted_s
        resident.is_awake = not is_asleep
        self._end_use(resident)

    def refuse_waiting(self, replica_id: ReplicaId) -> None:
        """Refuse the requests that wait for a wake of a replica whose end was ordered."""
        resident = self._residents.get(replica_id)
        if resident is not None and resident.engine is not None:
            self._resolve(resident, CannotWake("its replica ends"))

    def forget(self, replica_id: ReplicaId) -> None:
        """A replica's engine has ended: its memory is free."""
        resident = self._residents.pop(replica_id, None)
        if resident is None:
            return
        resident.is_awake = False
        self._resolve(resident, CannotWake("the engine ended"))
        self._changed.set()

    @asynccontextmanager
    async def use(
        self, replica_id: ReplicaId, *, is_test: bool = False, is_leg: bool = False
    ) -> AsyncIterator[None]:
        """Use a replica, after waking it if it sleeps. Raises CannotWake.

        A test request of the agent's own is no demand: awake replicas get one every few seconds,
        and would never sleep. A prefill leg waits for no busy replica: that may wait for the leg.
        """
        resident = self._residents.get(replica_id)
        if resident is None:
            yield
            return
        if not is_test:
            resident.demand.add(self._clock())
        while not resident.is_awake or resident.is_yielding:
            if resident.problem:
                raise CannotWake(resident.problem)
            if is_leg:
                budgets = await self._budgets()
                if self._residents.get(replica_id) is not resident:
                    raise CannotWake("the engine ended")
                if self._plan(resident, budgets).sleeping is None:
                    raise CannotWake("other replicas use its memory")
            await self._wait_awake(resident)
        resident.requests += 1
        used_s = resident.used_s
        try:
            yield
        finally:
            self._end_use(resident)
            if is_test:
                resident.used_s = used_s

    def is_awake(self, replica_id: ReplicaId) -> bool:
        """Return True unless a replica sleeps or is about to."""
        resident = self._residents.get(replica_id)
        return resident is None or (resident.is_awake and not resident.is_yielding)

    def wake_ms(self, replica_id: ReplicaId) -> int:
        """Return how long a request would wait for a replica to wake; 0 if it is awake."""
        if self.is_awake(replica_id):
            return 0
        resident = self._residents[replica_id]
        queued = [waiting for waiting in self._queue if not waiting.is_switching]
        ahead = queued.index(resident) if resident in queued else len(queued)
        due_s = self._switch_due_s
        if resident.is_switching:
            ahead, due_s = 0, resident.switch_due_s
        wait_s = resident.expected_wake_s * (1 + ahead)
        if due_s is not None:
            # A switch that takes too long may take as long again.
            wait_s += max(0.0, self._clock() - due_s)
        if resident.short_since_s is not None:
            wait_s += SHORTAGE_LIMIT_S
        return max(1, round(1000 * wait_s))

    def switch_problem(self, replica_id: ReplicaId) -> str:
        """Return why a replica's engine must be started again, or "".

        After a failed switch it is unknown what memory the engine holds, and another try would
        delay the wakes of all other replicas.
        """
        resident = self._residents.get(replica_id)
        return resident.problem if resident is not None else ""

    def reason(self, replica_id: ReplicaId) -> str:
        """Return what operators see of a replica that sleeps or waits to start; "" of others."""
        resident = self._residents.get(replica_id)
        if resident is None or (resident.is_awake and not resident.is_yielding):
            return ""
        if resident.is_switching:
            return SWITCHING
        return waiting_reason(
            resident.spec.device_ids,
            is_short=resident.short_since_s is not None,
            awaits=("wake" if resident.engine else "start") if resident in self._queue else "",
            fits=resident.fits,
            one_starts=resident.awaits_start,
        )

    def asleep_count(self) -> int:
        """Return how many replicas sleep."""
        return sum(
            not resident.is_awake and resident.engine is not None and not resident.problem
            for resident in self._residents.values()
        )

    def _set_awake(self, resident: Resident) -> None:
        resident.is_awake, resident.is_yielding = True, False
        resident.awake_since_s = resident.used_s = self._clock()

    def _end_use(self, resident: Resident) -> None:
        resident.requests -= 1
        resident.used_s = self._clock()
        if self._queue:
            self._changed.set()

    async def _wait_awake(self, resident: Resident) -> None:
        """Queue a replica for a wake, and wait for it."""
        if resident.waiting is None or resident.waiting.done():
            resident.waiting = asyncio.get_running_loop().create_future()
            resident.asked_s = self._clock()
            self._queue.append(resident)
        self._changed.set()
        if self._switching is None or self._switching.done():
            self._switching = asyncio.create_task(self._switch_all())
        resident.waiters += 1
        try:
            await asyncio.shield(resident.waiting)
        finally:
            resident.waiters -= 1
            if not resident.waiters and resident in self._queue:
                self._queue.remove(resident)
                resident.waiting = None
                self._changed.set()

    async def _switch_all(self) -> None:
        """Wake the queued replicas, the first one first, until the queue is empty."""
        try:
            await self._switch_queued()
        # A bug must fail the requests that wait, not leave them waiting.
        except BaseException as error:
            for resident in list(self._queue):
                self._resolve(resident, CannotWake(f"internal error of the agent: {error!r}"))
            raise

    async def _switch_queued(self) -> None:
        while self._queue:
            self._changed.clear()
            # Read first: what follows must not change between the plan and its first step.
            switch = self._next_switch(await self._budgets())
            if isinstance(switch, float):
                with suppress(TimeoutError):
                    async with asyncio.timeout(switch):
                        await self._changed.wait()
            elif switch.is_start:
                self._set_awake(switch.resident)
                self._resolve(switch.resident, None)
            elif not await self._is_done_in_time(switch):
                await asyncio.sleep(SLEEP_REFUSED_S)
        for resident in self._residents.values():
            resident.is_yielding = False

    async def _is_done_in_time(self, switch: _Switch) -> bool:
        """Do a switch, or leave it to itself once it is late (Rule 4); return False if refused."""
        resident = switch.resident
        self._switch_due_s = self._clock() + resident.expected_wake_s
        resident.switch_due_s = self._switch_due_s
        work = self._put_to_sleep(switch) if switch.is_sleep else self._wake(resident)
        task = asyncio.create_task(work)
        self._in_progress.add(task)
        task.add_done_callback(self._in_progress.discard)
        try:
            await asyncio.wait((task,), timeout=late_after_s(resident.expected_wake_s))
        finally:
            self._switch_due_s = None
        return not task.done() or task.result()

    def _next_switch(self, budgets: Mapping[DeviceId, int]) -> _Switch | float:
        """Return the first wake that can be done now, or in how many seconds to look again.

        A wake that has to wait keeps its devices from those behind it, if it can be done at all.
        """
        retry_s = YIELD_AFTER_S
        awaited: set[DeviceId] = set()
        for resident in list(self._queue):
            if resident.is_switching:
                continue
            devices = resident.spec.device_ids
            is_first = awaited.isdisjoint(devices)
            if resident.is_awake and (is_first or not resident.is_yielding):
                # Its own turn may have come before it could sleep: then it stays.
                resident.is_yielding = False
                self._resolve(resident, None)
                continue
            if not is_first:
                continue
            plan = self._plan(resident, budgets)
            if plan.sleeping is not None:
                return self._first_step(resident, plan.sleeping)
            if plan.yielding is not None:
                self._residents[plan.yielding].is_yielding = True
            resident.fits = plan.can_fit
            resident.awaits_start = any(
                other.is_starting and not set(devices).isdisjoint(other.spec.device_ids)
                for other in self._residents.values()
            )
            if plan.can_fit:
                awaited.update(devices)
            retry_s = min(retry_s, plan.retry_s)
        return retry_s

    def _first_step(self, waiting: Resident, sleeping: Sequence[ReplicaId]) -> _Switch:
        """Return the first step of a plan; after it the rest is planned again."""
        if not sleeping:
            return _Switch(waiting, waiting)
        resident = self._residents[sleeping[0]]
        # Requests that come from now on wait for a wake.
        resident.is_awake, resident.is_yielding = False, False
        return _Switch(waiting, resident)

    def _plan(self, resident: Resident, budgets: Mapping[DeviceId, int]) -> WakePlan:
        now_s = self._clock()
        return plan_wake(
            resident.spec.device_ids,
            resident.spec.memory_bytes,
            self._awake_replicas(),
            budgets,
            now_s=now_s,
            waited_s=now_s - resident.asked_s,
            is_short=now_s < resident.retry_at_s,
        )

    def _awake_replicas(self) -> list[AwakeReplica]:
        return [
            AwakeReplica(
                replica_id=replica_id,
                device_ids=resident.spec.device_ids,
                memory_bytes=resident.spec.memory_bytes,
                may_sleep=resident.may_sleep,
                requests=resident.requests,
                used_s=resident.used_s,
                awake_since_s=resident.awake_since_s,
                is_yielding=resident.is_yielding,
                demand=resident.demand.at(self._clock()),
            )
            for replica_id, resident in self._residents.items()
            if resident.is_awake or resident.problem or resident.is_switching
        ]

    async def _put_to_sleep(self, switch: _Switch) -> bool:
        """Put a replica to sleep for another one; return whether it does."""
        resident, started_s = switch.resident, self._clock()
        outcome = SleepOutcome.FAILED
        try:
            if resident.engine is not None:
                limit_s = sleep_limit_s(resident.spec.artifact.size_bytes)
                outcome = await resident.engine.fall_asleep(limit_s)
        finally:
            resident.switch_due_s = None
            self._changed.set()
            if outcome is SleepOutcome.FAILED:
                self._fail(resident, SLEEP_FAILED)
        if outcome is SleepOutcome.REFUSED:
            self._set_awake(resident)
        if outcome is not SleepOutcome.ASLEEP:
            return False
        metrics.SWITCHES.labels("sleep").observe(self._clock() - started_s)
        # A wake that lacked memory is tried again at once.
        switch.waiting.retry_at_s = 0.0
        return True

    async def _wake(self, resident: Resident) -> bool:
        """Wake a replica whose memory is free."""
        started_s = self._clock()
        outcome = WakeOutcome.FAILED
        try:
            if resident.engine is not None:
                weights_bytes = resident.spec.artifact.size_bytes
                limit_s = wake_limit_s(resident.wake_s, resident.start_s, weights_bytes)
                outcome = await resident.engine.wake_up(limit_s)
        finally:
            resident.switch_due_s = None
            self._changed.set()
            is_gone = self._residents.get(resident.spec.replica_id) is not resident
            if outcome is WakeOutcome.FAILED or is_gone:
                self._fail(resident, WAKE_FAILED)
        if resident.problem:
            return True
        if outcome is WakeOutcome.NO_MEMORY:
            self._note_shortage(resident)
        else:
            took_s = self._clock() - started_s
            metrics.SWITCHES.labels("wake").observe(took_s)
            self._note_wake(resident, took_s)
        return True

    def _note_wake(self, resident: Resident, took_s: float) -> None:
        resident.short_since_s = None
        resident.wake_s += WAKE_WEIGHT * (took_s - resident.wake_s) if resident.wake_s else took_s
        self._set_awake(resident)
        self._resolve(resident, None)

    def _note_shortage(self, resident: Resident) -> None:
        """Try the wake again after a while; after SHORTAGE_LIMIT_S refuse the waiting requests."""
        now_s, since_s = self._clock(), resident.short_since_s
        resident.short_since_s = now_s if since_s is None else since_s
        resident.retry_at_s = now_s + WAKE_RETRY_S
        if now_s - resident.short_since_s >= SHORTAGE_LIMIT_S:
            self._resolve(resident, CannotWake(self.reason(resident.spec.replica_id)))

    def _fail(self, resident: Resident, problem: str) -> None:
        """Have a replica's engine started again, and refuse the requests that wait for it."""
        resident.problem = problem
        self._resolve(resident, CannotWake(problem))

    def _resolve(self, resident: Resident, error: CannotWake | None) -> None:
        if resident in self._queue:
            self._queue.remove(resident)
        waiting = resident.waiting
        if waiting is None or waiting.done():
            return
        if error is None:
            waiting.set_result(None)
        else:
            waiting.set_exception(error)
            waiting.exception()
