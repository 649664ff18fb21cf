"""One replica of this node, as its supervisor and the data plane see it."""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

import msgspec

from isochrone.wire.engines.engine import EngineStats
from isochrone.wire.peers.assignment import ReplicaSpec, Tombstone
from isochrone.wire.peers.report import ReplicaProfile, ReplicaReport, ReplicaState
from nodeagent import metrics
from nodeagent.decide.replicas.backoff import WINDOW_S
from nodeagent.decide.replicas.replica import ReplicaEvent, next_state
from nodeagent.decide.requests.admission import ReplicaAdmission
from nodeagent.decide.requests.blame import BlameLedger
from nodeagent.drivers import is_queue_fair, sequences_max, spare_seats_of
from nodeagent.host.engine_seats import EngineSeats
from nodeagent.host.engines.engine_adapters import EngineAdapters
from nodeagent.host.engines.engine_process import EngineProcess

log = logging.getLogger(__name__)

TOKENS_IN_FLIGHT_UNPLANNED: Final = 32_768
"""The limit of a replica that was placed without a planned one."""

CLOSED: Final = (
    "takes no new requests: its engine is close to its memory limit; raise memory_max_bytes or the"
    " limit of its cgroup, or lower --kv-bytes"
)

RATE_MAX: Final = 1e12
BYTES_MAX: Final = 1 << 53
"""The most that a report may say of a rate and of bytes (`Amount` and `NonNegative`). With more in
it the scheduler refuses the whole report."""


class ManagedReplica:
    """One replica of this node: its state, its engine and the task that runs it."""

    def __init__(self, spec: ReplicaSpec, clock: Callable[[], float]) -> None:
        self.spec = spec
        self.state = ReplicaState.WANTED
        self.state_since_s = clock()
        self.reason = ""
        self.last_failure = ""
        self.failure_times: list[float] = []
        self.failed_starts = 0
        """Failures since it was last warm, without those for lack of memory or descriptors."""
        self.was_starting = False
        """True if it broke last before it was warm."""
        self.waits_since_s: float | None = None
        """Since when its starts lack memory or descriptors; None if the last one did not."""
        self.lacked_descriptors = False
        """True if it broke last because the agent had no free file descriptor."""
        self.is_failure_permanent = False
        """True if every restart would fail the same way."""
        self.fetched_bytes = 0
        self.profile = ReplicaProfile()
        self.admission = ReplicaAdmission(
            spec.engine.tokens_in_flight_max or TOKENS_IN_FLIGHT_UNPLANNED,
            sequences_max(spec),
            is_engine_fair=is_queue_fair(spec),
        )
        seats = 0 if is_queue_fair(spec) else sequences_max(spec)
        self.seats = EngineSeats(seats, spare_seats_of(spec))
        """Requests that the engine's own queue would serve unfairly wait here."""
        self.adapters = EngineAdapters()
        self.blame = BlameLedger()
        self.trial_lock = asyncio.Lock()
        """Held by the one suspect request that the engine tries."""
        self.bytes_out = 0
        self.engine: EngineProcess | None = None
        self.tombstone: Tombstone | None = None
        self.end_ordered = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self.attempt: asyncio.Task[str] | None = None
        """Starts and watches one engine process. Cancelled when the replica's end is ordered."""
        self._clock = clock
        self._store_hit_tokens = 0

    def __repr__(self) -> str:
        return f"<ManagedReplica {self.spec.replica_id} {self.state.value} {self.reason!r}>"

    @property
    def is_serving(self) -> bool:
        """True while requests can be sent to the engine."""
        return self.state is ReplicaState.WARM and self.engine is not None

    def apply(self, event: ReplicaEvent, reason: str = "") -> None:
        """Move to the next state of the transition table. Raises ImpossibleReplicaEvent."""
        before, self.state = self.state, next_state(self.state, event)
        if event is ReplicaEvent.BROKE:
            self.last_failure = reason
            self.was_starting = before is not ReplicaState.WARM
        elif event is ReplicaEvent.ENGINE_READY:
            self.failed_starts, self.waits_since_s = 0, None
        self.reason = reason
        if self.state is not before:
            self.state_since_s = self._clock()
        fields = {"replica": self.spec.replica_id, "event": event.value}
        fields |= {"state": self.state.value, "reason": reason}
        log.info("replica event", extra={"fields": fields})

    def note_failure(self) -> None:
        """Count a failure of the engine, after which the next restart waits longer."""
        self.failure_times.append(self._clock())
        self.failed_starts += 1
        self.waits_since_s = None

    def note_wait(self, now_s: float) -> float:
        """Note that a start failed for lack of memory or descriptors; return since when they do."""
        if self.waits_since_s is None:
            self.waits_since_s = now_s
        return self.waits_since_s

    def report(self) -> ReplicaReport:
        """Return the replica's part of the node's report."""
        return ReplicaReport(
            spec=self.spec,
            state=self.state,
            reason=(self.reason or self._condition())[:500],
            since_s=self._clock() - self.state_since_s,
            restarts=len(self.failure_times),
            fetched_bytes=self.fetched_bytes,
            profile=self.profile,
        )

    def _condition(self) -> str:
        """Return what operators see of a replica whose state has no reason of its own, or ""."""
        is_closed = self.is_serving and self.admission.is_closed
        conditions = (
            CLOSED if is_closed else "",
            self.admission.sleep_reason(),
            self._restart_reason(),
        )
        return "; ".join(filter(None, conditions))

    def _restart_reason(self) -> str:
        """Return why the engine was started again, as long as that failure counts, or ""."""
        is_recent = any(self._clock() - at_s < WINDOW_S for at_s in self.failure_times[-1:])
        counts = is_recent or self.failed_starts or self.waits_since_s is not None
        return f"restarted after: {self.last_failure}" if counts else ""

    def take_stats(self, stats: EngineStats) -> None:
        """Take over the engine's statistics; a negative age is unknown."""
        self.admission.is_closed = stats.memory_full
        age_s = stats.prefix_evicted_age_s
        self.admission.cache_since_s = self._clock() - age_s if age_s >= 0 else None
        self.profile = msgspec.structs.replace(
            self.profile,
            memory_bytes=stats.weights_bytes if 0 <= stats.weights_bytes <= BYTES_MAX else 0,
            prefill_tokens_per_s=_possible_rate(stats.prefill_tokens_per_s),
            decode_tokens_per_s=_possible_rate(stats.decode_tokens_per_s),
        )
        found = stats.store_hit_tokens_total - self._store_hit_tokens
        metrics.KV_FOUND_TOKENS.labels("store").inc(max(0, found))  # a new engine counts from 0
        self._store_hit_tokens = stats.store_hit_tokens_total

    def note_memory(self, used_bytes: int) -> None:
        """Note what the engine's processes take of one device; the most so far is reported."""
        used_bytes = max(used_bytes, self.profile.used_bytes)
        self.profile = msgspec.structs.replace(self.profile, used_bytes=used_bytes)

    async def stop_engine(self, *, kill: bool = False) -> None:
        """Stop the engine process, if there is one."""
        if self.engine is not None:
            await self.engine.stop(kill=kill)
            self.engine = None


def _possible_rate(tokens_per_s: float) -> float:
    """Return a rate; 0, which is unknown, for what is none (negative, endless, NaN)."""
    return tokens_per_s if 0.0 <= tokens_per_s <= RATE_MAX else 0.0
