"""The bounded queue of requests for which no replica has room: who may look, and when.

How a request goes through it: `must_wait` before it takes room that it found; `wait` where it must,
or found none; `began` the moment it takes room, before anything is awaited; `left` when it is over,
however it ended. Only the head of a lane looks for room, so room that comes is taken in order, and
a thousand who wait cost no more than one.
"""

import asyncio
from collections.abc import Callable
from enum import Enum
from typing import Final

from isochrone.wire.ids import DeploymentId, TenantId
from router.dataplane.errand import Signal
from router.decide.fair_queue import BytesFull, FairQueue, QueueFull, Ticket

LOOK_AGAIN_S: Final = 0.25
"""Room may come of another router's request ending, which nobody here hears of."""
OUT_OF_CAPACITY: Final = "3040: Capacity temporarily exceeded, please try again."
TOO_MANY_BYTES: Final = (
    f"{OUT_OF_CAPACITY} Your waiting requests are as many bytes as may wait: "
    "send fewer at once, or shorter ones."
)


class Impatience(Enum):
    """Why a request does not wait any longer."""

    BUSY = "reject_if_busy"
    FULL = "queue_full"
    BYTES = "queue_bytes"
    OUSTED = "ousted"
    DEADLINE = "deadline"


class NoRoom(Exception):
    """The request waits no longer; `why` says what ended its patience, and the text its client."""

    def __init__(self, why: Impatience) -> None:
        super().__init__(TOO_MANY_BYTES if why is Impatience.BYTES else OUT_OF_CAPACITY)
        self.why = why


class Place(Ticket):
    """One request in the queue's eyes, from its first look to its end."""

    __slots__ = ("has_begun", "is_ousted", "is_patient", "is_queued", "since_s", "until_s", "woken")

    def __init__(
        self,
        lane: DeploymentId,
        tenant: TenantId,
        tokens: int,
        until_s: float,
        *,
        size_bytes: int = 0,
        is_patient: bool = True,
    ) -> None:
        """Ask for `tokens` of room at a deployment; wait for it until `until_s`, if at all."""
        super().__init__(lane, tenant, tokens, size_bytes)
        self.until_s = until_s
        self.is_patient = is_patient
        self.since_s: float | None = None
        self.is_queued = False
        self.is_ousted = False
        self.has_begun = False
        self.woken: Signal | None = None

    def wake(self) -> None:
        """Let it look, or hear that it was ousted: in a turn of its own, for whoever makes room is
        in the midst of something.
        """
        woken, self.woken = self.woken, None
        if woken is not None:
            asyncio.get_running_loop().call_soon(woken.give)


class Waiting:
    """Who waits for room, in all deployments."""

    def __init__(self, depth_max: int, bytes_max: int, clock: Callable[[], float]) -> None:
        """Let at most `depth_max` wait, of `bytes_max`. `clock` gives monotonic seconds."""
        self._queue: FairQueue[Place] = FairQueue(depth_max, bytes_max)
        self._clock = clock

    @property
    def depth(self) -> int:
        """How many wait."""
        return self._queue.depth

    @property
    def bytes(self) -> int:
        """How many bytes the bodies of those are."""
        return self._queue.bytes

    def must_wait(self, place: Place) -> bool:
        """Say whether others come first, whatever room there is."""
        if not self._queue.depth or place.has_begun:
            return False
        head = self._queue.head(place.lane)
        return head is not None and head is not place

    def retry_after_s(self, place: Place) -> float:
        """Return when a request like this one would be served, at the pace of the last seconds."""
        return self._queue.retry_after_s(place.lane, place.tokens, self._clock())

    async def wait(self, place: Place) -> None:
        """Wait until it is this request's turn to look; raise NoRoom where that will not come."""
        self._queue.note_full(place.lane, self._clock())
        if not place.is_patient:
            raise NoRoom(Impatience.BUSY)
        if not place.is_queued and self._enqueue(place):
            return
        left_s = place.until_s - self._clock()
        if left_s > 0 and not place.is_ousted:
            is_head = self._queue.head(place.lane) is place
            loop = asyncio.get_running_loop()
            place.woken = woken = Signal()
            timer = loop.call_later(min(left_s, LOOK_AGAIN_S) if is_head else left_s, woken.give)
            try:
                await woken
            finally:
                place.woken = None
                timer.cancel()
        if place.is_ousted:
            raise NoRoom(Impatience.OUSTED)
        if self._clock() >= place.until_s:
            self.left(place)
            raise NoRoom(Impatience.DEADLINE)

    def began(self, place: Place) -> float | None:
        """The request took room: the next may look. Returns how long it waited, if it did."""
        if place.has_begun:
            return None
        place.has_begun = True
        if not place.is_queued:
            if self._queue.has_lane(place.lane):
                self._queue.note_started(place, self._clock())
            return None
        now_s = self._clock()
        self._queue.take(place, now_s)
        place.is_queued = False
        self.wake(place.lane)
        return now_s - place.since_s if place.since_s is not None else None

    def left(self, place: Place) -> None:
        """The request is over: whoever stood behind it moves up."""
        if place.is_queued:
            place.is_queued = False
            self._queue.remove(place)
            self.wake(place.lane)

    def wake(self, lane: DeploymentId) -> None:
        """Room may have come: let the head look."""
        head = self._queue.head(lane) if self._queue.depth else None
        if head is not None:
            head.wake()

    def _enqueue(self, place: Place) -> bool:
        """Take a request in; True where it came to be first without having looked for room."""
        others_came_first = self._queue.head(place.lane) is not None
        had_begun, place.has_begun = place.has_begun, False
        try:
            if had_begun and place.number:
                # A node refused what this router thought it had room for.
                ousted = self._queue.put_back(place)
            else:
                ousted = self._queue.push(place)
        except QueueFull:
            raise NoRoom(Impatience.FULL) from None
        except BytesFull:
            raise NoRoom(Impatience.BYTES) from None
        if place.since_s is None:
            place.since_s = self._clock()
        place.is_queued = True
        if ousted is not None:
            ousted.is_queued, ousted.is_ousted = False, True
            ousted.wake()
            self.wake(ousted.lane)
        return others_came_first and not had_begun and self._queue.head(place.lane) is place
