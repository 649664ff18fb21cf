"""Decides which replicas of an over-committed device sleep, so that another one can wake.

Rule 1: the awake replicas of a device take at most its memory.
Rule 2: a replica that the planner did not over-commit never sleeps. Among the others, the idle one
with the fewest recent requests sleeps first, and among equals the one used least recently. Thus a
request for a rare model does not displace a common one. Rule 3 (hysteresis): a replica that woke
stays awake for AWAKE_MIN_S, so that two models that are used in turn do not replace each other with
every request. Rule 4 (fairness): wakes are granted in the order of their first waiting request.
Once the first of them has waited YIELD_AFTER_S for memory that busy replicas hold, the one that has
been awake the longest takes no new requests, finishes those it has, and sleeps. A wake that waits
for one device does not hold up those of other devices, and one that could not be done although all
others slept holds up none. A switch that is late (`late_after_s`) holds up none either: its engine
may hang, and the memory of a replica that switches counts as in use until it sleeps.
Rule 5: a wake that the engine refused for lack of memory is tried again every WAKE_RETRY_S, and at
once after one more replica fell asleep. After SHORTAGE_LIMIT_S its requests are refused.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final, NamedTuple

from isochrone.wire.ids import DeviceId, ReplicaId

AWAKE_MIN_S: Final = 0.5
DEMAND_HALF_LIFE_S: Final = 120.0
"""A request counts half after this time."""
YIELD_AFTER_S: Final = 1.0

WAKE_LIMIT_MIN_S: Final = 10.0
"""A wake may always take this long beside its reading: a busy machine may pause for seconds."""
READ_BYTES_PER_S_MIN: Final = 250e6
"""The slowest that a wake reads weights: a hard disk. Earlier wakes may have found them in memory,
so they do not say how long the disk takes."""
READ_BYTES_PER_S_EXPECTED: Final = 1e9
"""The rate at which a first wake is expected to read weights: that of a disk in the planner's
estimates. From host memory they come faster, which the first wake shows."""
FIRST_WAKE_S: Final = 0.5
"""How long a first wake is expected to take beside its reading."""
SLEEP_LIMIT_MIN_S: Final = 30.0
"""The same for falling asleep: an engine may save its prefix cache first."""
COPY_BYTES_PER_S_MIN: Final = 1e9
"""The slowest that weights are copied to host memory, which is allocated and pinned meanwhile."""
WAKE_LIMIT_MAX_S: Final = 120.0
"""The longest limit of a wake that follows from earlier wakes or starts."""
WAKE_SLOWER_MAX: Final = 20
"""How many times as long as its earlier wakes a wake may take. From the disk it takes 4 times as
long as from the page cache on a machine with a fast disk (ops/bench/overcommit.md)."""
LATE_MIN_S: Final = 2.0
LATE_SLOWER: Final = 2
"""A switch is late after this time, and this many times as long as a wake is expected to take. Two
at a time take longer, as loading weights takes all of the node's cores or of its bus."""
WAKE_RETRY_S: Final = 1.0
SHORTAGE_LIMIT_S: Final = 10.0
"""The longest wait of requests for memory that only the plan has. Other nodes may have it."""
START_SLOWER_MAX: Final = 3
"""How many times as long as the start of its engine a first wake may take. A start reads the same
weights, and does more."""


class SleepOutcome(StrEnum):
    """The outcome of an order to fall asleep."""

    ASLEEP = "asleep"
    REFUSED = "refused"
    """The engine is awake and has work."""
    FAILED = "failed"
    """The engine did not answer, or failed: what it holds is unknown."""


class WakeOutcome(StrEnum):
    """The outcome of an order to wake."""

    AWAKE = "awake"
    NO_MEMORY = "no memory"
    """The model is still dropped: the device has less free memory than it takes."""
    FAILED = "failed"
    """The engine did not answer, or failed: what it holds is unknown."""


def expected_wake_s(wake_s: float, start_s: float, weights_bytes: int) -> float:
    """Return how long a wake is expected to take: as long as earlier wakes, else as its weights.

    A start reads the same weights, so that a first wake takes no longer. `wake_s` and `start_s` are
    0 if they are unknown.
    """
    reading_s = FIRST_WAKE_S + weights_bytes / READ_BYTES_PER_S_EXPECTED
    return wake_s or min(reading_s, start_s or reading_s)


def wake_limit_s(wake_s: float, start_s: float, weights_bytes: int) -> float:
    """Return how long a wake may take before it counts as failed.

    `wake_s` is how long earlier wakes of the engine took, and `start_s` its start; 0 if unknown.
    """
    expected_s = WAKE_SLOWER_MAX * wake_s or START_SLOWER_MAX * start_s or WAKE_LIMIT_MAX_S
    reading_s = weights_bytes / READ_BYTES_PER_S_MIN
    return max(min(expected_s, WAKE_LIMIT_MAX_S), WAKE_LIMIT_MIN_S + reading_s)


def sleep_limit_s(weights_bytes: int) -> float:
    """Return how long an engine may take to fall asleep before that counts as failed."""
    return SLEEP_LIMIT_MIN_S + weights_bytes / COPY_BYTES_PER_S_MIN


def late_after_s(expected_s: float) -> float:
    """Return after which time a switch no longer holds up those of other replicas."""
    return max(LATE_MIN_S, LATE_SLOWER * expected_s)


class RecentDemand:
    """Counts the requests of a replica; each fades with time."""

    __slots__ = ("_at_s", "_count")

    def __init__(self) -> None:
        self._count = 0.0
        self._at_s = 0.0

    def add(self, now_s: float) -> None:
        """Count a request."""
        self._count, self._at_s = self.at(now_s) + 1.0, now_s

    def at(self, now_s: float) -> float:
        """Return the recent requests as of `now_s`."""
        elapsed_s = max(0.0, now_s - self._at_s)
        return float(self._count * 0.5 ** (elapsed_s / DEMAND_HALF_LIFE_S))


class AwakeReplica(NamedTuple):
    """A replica whose model is in memory.

    `requests` are those it serves now, and `demand` is the number of recent ones.
    """

    replica_id: ReplicaId
    device_ids: tuple[DeviceId, ...]
    memory_bytes: int
    may_sleep: bool
    requests: int
    used_s: float
    awake_since_s: float
    is_yielding: bool = False
    demand: float = 0.0


class WakePlan(NamedTuple):
    """A plan to wake a replica now: the replicas that sleep first; None if those are not enough.

    If they are not, `retry_s` is when to plan again at the latest, and `yielding` is a busy replica
    that takes no new requests from now on. `can_fit` is false if it could not wake although all
    others slept that may.
    """

    sleeping: tuple[ReplicaId, ...] | None
    retry_s: float = 0.0
    yielding: ReplicaId | None = None
    can_fit: bool = True


def plan_wake(
    device_ids: Sequence[DeviceId],
    memory_bytes: int,
    awake: Sequence[AwakeReplica],
    budgets: Mapping[DeviceId, int],
    *,
    now_s: float,
    waited_s: float,
    is_short: bool = False,
) -> WakePlan:
    """Return how a replica that takes `memory_bytes` of each of `device_ids` can wake.

    `budgets` are the bytes of each device that replicas may take. With `is_short` the devices had
    too little memory although the budgets were kept: one more replica has to sleep.
    """
    excess = {
        device: memory_bytes
        + sum(replica.memory_bytes for replica in awake if device in replica.device_ids)
        - budgets.get(device, 0)
        for device in device_ids
    }
    if is_short:
        excess = {device: max(1, bytes_over) for device, bytes_over in excess.items()}
    sleeping: list[ReplicaId] = []
    rested_s = 0.0
    for replica in sorted(awake, key=_sleeps_first):
        if all(bytes_over <= 0 for bytes_over in excess.values()):
            break
        helps = any(excess.get(device, 0) > 0 for device in replica.device_ids)
        if not helps or not replica.may_sleep or replica.requests:
            continue
        awake_s = now_s - replica.awake_since_s
        if awake_s < AWAKE_MIN_S and not replica.is_yielding:
            rested_s = max(rested_s, AWAKE_MIN_S - awake_s)
            continue
        sleeping.append(replica.replica_id)
        for device in replica.device_ids:
            if device in excess:
                excess[device] -= replica.memory_bytes
    if all(bytes_over <= 0 for bytes_over in excess.values()):
        return WakePlan(tuple(sleeping))
    can_fit = _fits_beside_fixed(excess, [r for r in awake if r.replica_id not in sleeping])
    yielding = _to_yield(excess, awake, waited_s) if can_fit else None
    return WakePlan(None, rested_s or YIELD_AFTER_S, yielding, can_fit)


def _fits_beside_fixed(excess: Mapping[DeviceId, int], awake: Sequence[AwakeReplica]) -> bool:
    """Say whether the bytes in excess are there once all replicas sleep that may."""
    return all(
        bytes_over <= sum(r.memory_bytes for r in awake if r.may_sleep and device in r.device_ids)
        for device, bytes_over in excess.items()
    )


def _sleeps_first(replica: AwakeReplica) -> tuple[bool, float, float]:
    return (not replica.is_yielding, replica.demand, replica.used_s)


def _to_yield(
    excess: Mapping[DeviceId, int], awake: Sequence[AwakeReplica], waited_s: float
) -> ReplicaId | None:
    """Return the busy replica that yields to one that has waited for long; None for none."""
    if waited_s < YIELD_AFTER_S or any(replica.is_yielding for replica in awake):
        return None
    busy = [
        replica
        for replica in awake
        if replica.may_sleep
        and replica.requests
        and any(excess.get(device, 0) > 0 for device in replica.device_ids)
    ]
    oldest = min(
        busy, key=lambda candidate: (candidate.awake_since_s, candidate.replica_id), default=None
    )
    return oldest.replica_id if oldest is not None else None


def waiting_reason(
    device_ids: Sequence[DeviceId], *, is_short: bool, awaits: str, fits: bool, one_starts: bool
) -> str:
    """Return what operators see of a replica without memory.

    With `is_short` a wake found too little. It `awaits` its "wake" or its "start", or "" for none,
    and `fits` if that could be done once all others slept that may. If `one_starts` on its devices,
    which has memory and cannot sleep before it is warm, this is what it waits for.
    """
    devices = ", ".join(device_ids)
    if is_short:
        return (
            f"asleep: {devices} has less free memory than planned, so it cannot wake; end what"
            " takes the memory outside the plan, or lower the over-commitment"
        )
    if not awaits:
        return "asleep: the next request wakes it"
    fixed = "that are starting" if one_starts else "that cannot sleep"
    others = "that are busy" if fits else fixed
    return f"waits to {awaits}: replicas {others} have the memory of {devices}"
