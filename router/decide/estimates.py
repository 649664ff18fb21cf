"""Estimates of the wait at each replica, by slot, and bounds on the best wait in each PoP.

The columns of ten thousand replicas are too long to be copied, or looked through, for each request.
Estimates are therefore kept in chunks that snapshots share: a change copies one chunk. The bounds
of a PoP are at or below the figures of all of its replicas. A replica that becomes better lowers
them at once. A replica that became worse is noticed when its PoP has its turn: one PoP with each
snapshot.
"""

from collections.abc import Collection
from math import inf
from typing import Final, NamedTuple

FLOOR_SHARE: Final = 0.9
"""PoPs are put in order by this share of the least wait there, so that small changes of waits do
not change their order."""

LOOSE_MAX: Final = 8
"""If more PoPs than this are out of order, all are sorted again."""

_CHUNK_BITS: Final = 6
_IN_CHUNK: Final = 2**_CHUNK_BITS - 1


class ReplicaEstimate:
    """The wait of a request at one replica. All times are in ms; an estimate is never changed.

    `ready_at_ms` is the monotonic time at which the replica is through with this router's queue,
    plus round trip and overhead, less the time a request takes to get there. `wait_min_ms` is the
    least wait whatever the clock says, round trip and overhead included. `free_tokens` is how many
    more tokens fit: infinite for an idle replica, which itself decides whether one request fits
    at all, and -1 for a slot without a replica.

    `base_ms` is the round trip and all overhead, `error_ms` the usual error of predictions, and
    `assumed_queue_ms` the usual part of the wait that no report shows.
    """

    __slots__ = (
        "assumed_queue_ms",
        "base_ms",
        "error_ms",
        "free_tokens",
        "in_flight_tokens",
        "ms_per_token",
        "ready_at_ms",
        "rtt_ms",
        "wait_min_ms",
    )  # fmt: skip

    def __init__(
        self,
        ready_at_ms: float,
        wait_min_ms: float,
        ms_per_token: float,
        free_tokens: float,
        rtt_ms: float,
        base_ms: float,
        error_ms: float,
        in_flight_tokens: float,
        assumed_queue_ms: float,
    ) -> None:
        self.ready_at_ms = ready_at_ms
        self.wait_min_ms = wait_min_ms
        self.ms_per_token = ms_per_token
        self.free_tokens = free_tokens
        self.rtt_ms = rtt_ms
        self.base_ms = base_ms
        self.error_ms = error_ms
        self.in_flight_tokens = in_flight_tokens
        self.assumed_queue_ms = assumed_queue_ms


EMPTY_SLOT: Final = ReplicaEstimate(0.0, 0.0, 0.0, -1.0, 0.0, 0.0, 0.0, 0.0, 0.0)


class Estimates:
    """The estimate of each slot. A copy shares all chunks until either side changes one."""

    def __init__(self, chunks: list[list[ReplicaEstimate]] | None = None, count: int = 0) -> None:
        """Start empty, or with the chunks of another one."""
        self._chunks = [] if chunks is None else chunks
        self._count = count
        self._own: set[int] = set()
        """The chunks that no copy shares."""

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, slot: int) -> ReplicaEstimate:
        return self._chunks[slot >> _CHUNK_BITS][slot & _IN_CHUNK]

    def copy(self) -> "Estimates":
        """Return a copy that later changes of this one do not change."""
        self._own.clear()
        return Estimates(self._chunks.copy(), self._count)

    def append(self, estimate: ReplicaEstimate) -> None:
        """Add a slot."""
        if self._count & _IN_CHUNK == 0:
            self._own.add(len(self._chunks))
            self._chunks.append([])
        self._owned(self._count >> _CHUNK_BITS).append(estimate)
        self._count += 1

    def replace(self, slot: int, estimate: ReplicaEstimate) -> None:
        """Change the estimate of a slot."""
        self._owned(slot >> _CHUNK_BITS)[slot & _IN_CHUNK] = estimate

    def of(self, slots: list[int]) -> list[ReplicaEstimate]:
        """Return the estimates of some slots."""
        chunks = self._chunks
        return [chunks[slot >> _CHUNK_BITS][slot & _IN_CHUNK] for slot in slots]

    def all(self) -> list[ReplicaEstimate]:
        """Return the estimates of all slots, in their order."""
        everything: list[ReplicaEstimate] = []
        for chunk in self._chunks:
            everything += chunk
        return everything

    def _owned(self, number: int) -> list[ReplicaEstimate]:
        if number not in self._own:
            self._own.add(number)
            self._chunks[number] = self._chunks[number].copy()
        return self._chunks[number]


class PopBound(NamedTuple):
    """A PoP, and a cost that none of its slots is below, but for the few that hold a prompt."""

    least_ms: float
    pop: int


class PopBounds:
    """The slots of each PoP, and lower bounds of what its replicas' estimates say."""

    def __init__(self, slots_by_pop: Collection[list[int]], slot_count: int) -> None:
        """Hold the slots of each PoP; the bounds are computed by the first `tighten_next`."""
        self.slots = list(slots_by_pop)
        self.pop_of = [-1] * slot_count
        for pop, slots in enumerate(self.slots):
            for slot in slots:
                self.pop_of[slot] = pop
        count = len(self.slots)
        self.rtt_ms = [-inf] * count
        self.wait_min_ms = [-inf] * count
        self.ready_at_ms = [-inf] * count
        self.ms_per_token = [-inf] * count
        self.order: list[int] = []
        """The PoPs by their floors, least first, those in `loose` included."""
        self.floors: list[float] = []
        """For each PoP in `order`, a lower bound of its replicas' waits."""
        self.loose: list[int] = []
        """PoPs whose wait has fallen below their floor since they were put in order."""
        self.fastest_ms_per_token = -inf
        self._floor_of = [-inf] * count
        self._is_new = True
        self._next = 0

    def lower(self, slot: int, estimate: ReplicaEstimate) -> None:
        """Take a new estimate of a slot into account."""
        pop = self.pop_of[slot]
        if estimate.rtt_ms < self.rtt_ms[pop]:
            self.rtt_ms[pop] = estimate.rtt_ms
        if estimate.wait_min_ms < self.wait_min_ms[pop]:
            self.wait_min_ms[pop] = estimate.wait_min_ms
            if estimate.wait_min_ms < self._floor_of[pop]:
                # Snapshots share the list.
                self.loose = [*self.loose, pop]
                self._floor_of[pop] = -inf
        if estimate.ready_at_ms < self.ready_at_ms[pop]:
            self.ready_at_ms[pop] = estimate.ready_at_ms
        if estimate.ms_per_token < self.ms_per_token[pop]:
            self.ms_per_token[pop] = estimate.ms_per_token
            if estimate.ms_per_token < self.fastest_ms_per_token:
                self.fastest_ms_per_token = estimate.ms_per_token

    def tighten_next(self, estimates: Estimates) -> None:
        """Compute the bounds of the next PoP from the estimates of its replicas."""
        if self._is_new:
            self._is_new = False
            for pop in range(len(self.slots)):
                self._tighten(pop, estimates)
            self._put_in_order()
        elif self.slots:
            self._next = (self._next + 1) % len(self.slots)
            self._tighten(self._next, estimates)
            if self._next == 0 or len(self.loose) > LOOSE_MAX:
                self._put_in_order()

    def nearest(self, estimates: Estimates, ratio: float, margin_ms: float) -> frozenset[int]:
        """Return the slots with a round trip within `ratio` and `margin_ms` of the shortest."""
        if self._is_new:
            self.tighten_next(estimates)
        bounds, lowest_ms = self.rtt_ms, inf
        looked_at: list[int] = []
        for pop in sorted(range(len(bounds)), key=bounds.__getitem__):
            if bounds[pop] > ratio * lowest_ms + margin_ms:
                break
            looked_at += self.slots[pop]
            for estimate in estimates.of(self.slots[pop]):
                if estimate.rtt_ms < lowest_ms:
                    lowest_ms = estimate.rtt_ms
        limit_ms = ratio * lowest_ms + margin_ms
        return frozenset([slot for slot in looked_at if estimates[slot].rtt_ms <= limit_ms])

    def _put_in_order(self) -> None:
        self._floor_of = [FLOOR_SHARE * wait if wait > 0.0 else wait for wait in self.wait_min_ms]
        self.order = sorted(range(len(self.slots)), key=self._floor_of.__getitem__)
        self.floors = [self._floor_of[pop] for pop in self.order]
        self.loose = []
        self.fastest_ms_per_token = min(self.ms_per_token, default=0.0)

    def _tighten(self, pop: int, estimates: Estimates) -> None:
        rtt_ms = wait_min_ms = ready_at_ms = ms_per_token = inf
        for estimate in estimates.of(self.slots[pop]):
            if estimate.rtt_ms < rtt_ms:
                rtt_ms = estimate.rtt_ms
            if estimate.wait_min_ms < wait_min_ms:
                wait_min_ms = estimate.wait_min_ms
            if estimate.ready_at_ms < ready_at_ms:
                ready_at_ms = estimate.ready_at_ms
            if estimate.ms_per_token < ms_per_token:
                ms_per_token = estimate.ms_per_token
        self.rtt_ms[pop], self.wait_min_ms[pop] = rtt_ms, wait_min_ms
        self.ready_at_ms[pop], self.ms_per_token[pop] = ready_at_ms, ms_per_token
