"""Estimates of the wait at each replica, by slot.

The list of ten thousand replicas is too long to be copied for each request. Estimates are therefore
kept in chunks that snapshots share: a change copies one chunk. The columns that ranking compares of
all replicas are in slot_columns.py.
"""

from typing import Final

from isochrone.native_class import mypyc_attr

_CHUNK_BITS: Final = 6
_IN_CHUNK: Final = 2**_CHUNK_BITS - 1


@mypyc_attr(acyclic=True, free_list_len=1)
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


@mypyc_attr(acyclic=True, free_list_len=1)
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

    def _owned(self, number: int) -> list[ReplicaEstimate]:
        if number not in self._own:
            self._own.add(number)
            self._chunks[number] = self._chunks[number].copy()
        return self._chunks[number]
