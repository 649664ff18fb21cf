"""The bounded queue of requests for which no replica has capacity. It decides which may try next.

A request calls `must_wait` before it uses capacity that it found, `wait` if it must wait or found
none, `admit` the moment it uses capacity (before it awaits anything), and `leave` when it is over,
however it ended. Only the head of a lane looks for capacity. So capacity is used in order, and a
thousand waiting requests cost no more than one. A deployment has one lane, and one more for each
set of regions to which keys are limited: a request that waits for the replicas of its regions must
not block those that may use others. The lanes of a deployment take turns at going first.
"""

import asyncio
from collections.abc import Callable
from enum import Enum
from typing import Final

from isochrone.native_class import mypyc_attr
from isochrone.wire.ids import DeploymentId, TenantId
from router.dataplane.inline_task import InlineEvent
from router.decide.admission.fair_queue import BytesFull, FairQueue, QueueFull, Ticket

LOOK_AGAIN_S: Final = 0.25
"""The head looks again after this time: capacity that another router's request gives back is not
reported to this router."""

OUT_OF_CAPACITY: Final = "3040: Capacity temporarily exceeded, please try again."
TOO_MANY_BYTES: Final = (
    f"{OUT_OF_CAPACITY} The bodies of your waiting requests have reached their size limit:"
    " send fewer requests at once, or shorter ones."
)


class RefusalReason(Enum):
    """Why a request does not wait, or waits no longer."""

    BUSY = "reject_if_busy"
    FULL = "queue_full"
    BYTES = "queue_bytes"
    DISPLACED = "displaced"
    DEADLINE = "deadline"


class AdmissionRefused(Exception):
    """The request must not wait any longer. The message is for its client."""

    def __init__(self, reason: RefusalReason) -> None:
        super().__init__(TOO_MANY_BYTES if reason is RefusalReason.BYTES else OUT_OF_CAPACITY)
        self.reason = reason


@mypyc_attr(free_list_len=1)
class QueueEntry(Ticket):
    """One request as the queue sees it, from its first look for capacity to its end."""

    __slots__ = (
        "can_wait", "deployment_id", "is_admitted", "is_displaced", "is_queued", "queued_at_s",
        "until_s", "wake_event", "was_refused",
    )  # fmt: skip

    def __init__(
        self,
        deployment_id: DeploymentId,
        tenant: TenantId,
        tokens: int,
        until_s: float,
        *,
        size_bytes: int = 0,
        can_wait: bool = True,
        regions: tuple[str, ...] = (),
    ) -> None:
        """Ask for `tokens` of capacity, in `regions` if there are any.

        Wait for it until `until_s` (monotonic) if `can_wait`.
        """
        # An id has no spaces, so that no two lanes have one name.
        lane = f"{deployment_id} {' '.join(regions)}" if regions else deployment_id
        super().__init__(lane, tenant, tokens, size_bytes)
        self.deployment_id = deployment_id
        self.until_s = until_s
        self.can_wait = can_wait
        self.queued_at_s: float | None = None
        self.is_queued = False
        self.is_displaced = False
        self.is_admitted = False
        self.was_refused = False
        """True while it waits because nodes refuse its tenant's requests."""
        self.wake_event: InlineEvent | None = None

    def wake(self) -> None:
        """Let the request look for capacity, or see that it was displaced.

        It resumes in a loop callback of its own, because the caller is not finished yet.
        """
        event, self.wake_event = self.wake_event, None
        if event is not None:
            asyncio.get_running_loop().call_soon(event.set)


class AdmissionQueue:
    """The requests that wait for capacity, of all deployments."""

    def __init__(self, depth_max: int, bytes_max: int, clock: Callable[[], float]) -> None:
        """Let `depth_max` requests of `bytes_max` bytes wait. `clock` returns monotonic seconds."""
        self._queue: FairQueue[QueueEntry] = FairQueue(depth_max, bytes_max)
        self._clock = clock
        self._regional: dict[DeploymentId, list[str]] = {}
        """The lanes of regions that a deployment may have besides its own."""
        self._turn = 0

    @property
    def depth(self) -> int:
        """The number of waiting requests."""
        return self._queue.depth

    @property
    def bytes(self) -> int:
        """The total size of their bodies."""
        return self._queue.bytes

    def must_wait(self, entry: QueueEntry) -> bool:
        """Return whether another request of the lane comes first."""
        if not self._queue.depth or entry.is_admitted:
            return False
        head = self._queue.head(entry.lane)
        if head is None or head is entry:
            return False
        # A node that refuses one tenant's requests still admits another tenant's first one.
        is_first = not entry.is_queued and not self._queue.has_waiting(entry.lane, entry.tenant)
        return not (head.was_refused and is_first)

    def retry_after_s(self, entry: QueueEntry) -> float:
        """Estimate when such a request would be admitted, from the rate of the last seconds."""
        return self._queue.retry_after_s(entry.lane, entry.tokens, self._clock())

    async def wait(self, entry: QueueEntry) -> None:
        """Wait until the request may look for capacity; raise AdmissionRefused if it must not."""
        self._queue.note_full(entry.lane, self._clock())
        if not entry.can_wait:
            raise AdmissionRefused(RefusalReason.BUSY)
        if not entry.is_queued and self._enqueue(entry):
            return
        left_s = entry.until_s - self._clock()
        if left_s > 0 and not entry.is_displaced:
            is_head = self._queue.head(entry.lane) is entry
            loop = asyncio.get_running_loop()
            entry.wake_event = event = InlineEvent()
            timer = loop.call_later(min(left_s, LOOK_AGAIN_S) if is_head else left_s, event.set)
            try:
                await event
            finally:
                entry.wake_event = None
                timer.cancel()
        if entry.is_displaced:
            raise AdmissionRefused(RefusalReason.DISPLACED)
        if self._clock() >= entry.until_s:
            self.leave(entry)
            raise AdmissionRefused(RefusalReason.DEADLINE)

    def admit(self, entry: QueueEntry) -> float | None:
        """Note that the request uses capacity, and let the next one look.

        Returns how long it waited, None if it did not.
        """
        if entry.is_admitted:
            return None
        entry.is_admitted = True
        if not entry.is_queued:
            if self._queue.has_lane(entry.lane):
                self._queue.note_started(entry, self._clock())
            return None
        now_s = self._clock()
        self._queue.take(entry, now_s)
        entry.is_queued = False
        self._wake_head(entry.lane)
        return now_s - entry.queued_at_s if entry.queued_at_s is not None else None

    def leave(self, entry: QueueEntry) -> None:
        """Remove a request that is over; the ones behind it move up."""
        if entry.is_queued:
            entry.is_queued = False
            self._queue.remove(entry)
            self._wake_head(entry.lane)

    def wake(self, deployment_id: DeploymentId) -> None:
        """Let the heads of a deployment's lanes look: capacity may have become free."""
        regional = self._regional.get(deployment_id)
        if regional is None:
            self._wake_head(deployment_id)
            return
        regional = [lane for lane in regional if self._queue.head(lane) is not None]
        if regional:
            self._regional[deployment_id] = regional
        else:
            del self._regional[deployment_id]
        lanes: list[str] = [deployment_id, *regional]
        self._turn += 1
        first = self._turn % len(lanes)
        for lane in (*lanes[first:], *lanes[:first]):
            self._wake_head(lane)

    def _wake_head(self, lane: str) -> None:
        head = self._queue.head(lane) if self._queue.depth else None
        if head is not None:
            head.wake()

    def _enqueue(self, entry: QueueEntry) -> bool:
        """Add a request; return whether it is the head already without having looked yet."""
        had_others_ahead = self._queue.head(entry.lane) is not None
        was_admitted, entry.is_admitted = entry.is_admitted, False
        try:
            if was_admitted and entry.number:
                # A node refused the request although this router thought it had capacity.
                displaced = self._queue.put_back(entry)
            else:
                displaced = self._queue.push(entry)
        except QueueFull:
            raise AdmissionRefused(RefusalReason.FULL) from None
        except BytesFull:
            raise AdmissionRefused(RefusalReason.BYTES) from None
        if entry.queued_at_s is None:
            entry.queued_at_s = self._clock()
        entry.is_queued = True
        if entry.lane != entry.deployment_id:
            regional = self._regional.setdefault(entry.deployment_id, [])
            if entry.lane not in regional:
                regional.append(entry.lane)
        if displaced is not None:
            displaced.is_queued, displaced.is_displaced = False, True
            displaced.wake()
            self._wake_head(displaced.lane)
        return had_others_ahead and not was_admitted and self._queue.head(entry.lane) is entry
