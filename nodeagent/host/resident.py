"""The agent's state of a replica that shares the memory of devices (awake_memory.py)."""

import asyncio
from typing import Protocol

from isochrone.wire.peers.assignment import ReplicaSpec
from nodeagent.decide.replicas.sleep import (
    RecentDemand,
    SleepOutcome,
    WakeOutcome,
    expected_wake_s,
)


class SleepingEngine(Protocol):
    """An engine that can drop its model and load it again."""

    async def fall_asleep(self, timeout_s: float) -> SleepOutcome:
        """Drop the model, in at most this time."""
        ...

    async def wake_up(self, timeout_s: float) -> WakeOutcome:
        """Load the model, in at most this time."""
        ...


class Resident:
    """One replica: awake, asleep, between the two, or without an engine."""

    def __init__(self, spec: ReplicaSpec) -> None:
        self.spec = spec
        self.engine: SleepingEngine | None = None
        self.is_awake = False
        self.is_yielding = False
        self.switch_due_s: float | None = None
        """When it should be awake or asleep, while it is neither; None while it does not switch."""
        self.problem = ""
        """Why the engine must be started again; "" while it can be used."""
        self.requests = 0
        self.used_s = 0.0
        self.awake_since_s = 0.0
        self.admitted_s: float | None = None
        """When its engine was allowed to start; None for an adopted one."""
        self.start_s = 0.0
        """How long its engine took to start; 0 if that is unknown."""
        self.wake_s = 0.0
        """How long its wakes take; 0 until one was measured."""
        self.waiting: asyncio.Future[None] | None = None
        """Resolved for all waiting requests once the replica is awake."""
        self.waiters = 0
        self.asked_s = 0.0
        self.fits = True
        """Whether it could wake if all others slept that may."""
        self.awaits_start = False
        """Whether another replica of its devices was starting when it last could not wake."""
        self.short_since_s: float | None = None
        """Since when its wakes are refused for lack of memory; None if the last one was not."""
        self.retry_at_s = 0.0
        self.demand = RecentDemand()

    @property
    def may_sleep(self) -> bool:
        """Whether its model may be dropped while it is idle."""
        if self.engine is None or self.problem or self.is_switching:
            return False
        return self.spec.overcommit > 1

    @property
    def is_starting(self) -> bool:
        """Whether its engine has its memory and is not warm: it cannot sleep yet."""
        return self.is_awake and self.engine is None

    @property
    def is_switching(self) -> bool:
        """Whether it falls asleep or wakes. Its memory counts as in use until it sleeps."""
        return self.switch_due_s is not None

    @property
    def expected_wake_s(self) -> float:
        """How long a wake is expected to take."""
        return expected_wake_s(self.wake_s, self.start_s, self.spec.artifact.size_bytes)
