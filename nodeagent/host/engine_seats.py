"""Lets a request wait on the node until its engine has a seat for it (decide/requests/seats.py)."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial

from isochrone.ttft_order import TtftObjective
from nodeagent.decide.requests.preemption import BatchItem
from nodeagent.decide.requests.seats import STARTED_AFTER_S, SeatRequest, Seats


class EngineSeats:
    """The seats of a replica's engine, and the requests that wait for one."""

    def __init__(
        self, seats_max: int, spare: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Give out `seats_max` seats, and `spare` more to tenants without one; 0 for no limit."""
        self._clock = clock
        self._seats = Seats(seats_max, spare)
        self._seated: dict[SeatRequest, asyncio.Event] = {}
        self._next_fill: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def seat(
        self,
        tenant: str,
        objective: TtftObjective | None = None,
        *,
        yields: bool = False,
        item: BatchItem | None = None,
    ) -> AsyncIterator[Callable[[], None]]:
        """Wait for a seat, and give it back at the end, or when the wait is cancelled.

        Yields a function that the caller calls when the first token has arrived.

        `yields` says that the request has the lowest priority. `item` is set for an item of a
        batch, which gives the seat back as soon as it is preempted.
        """
        now_s = self._clock()
        request = self._seats.request(
            tenant, objective or TtftObjective(now_s), now_s, yields=yields, item=item
        )
        # Since the last change others may have become ready by time alone (Rule 5).
        self._wake([waiting for waiting in self._seated if waiting.is_seated])
        if item is not None:
            item.on_preempt(partial(self._release, request))
        for choose in (self._seats.unread_item, self._seats.item_to_preempt):
            preempted = choose(request, self._clock())
            if preempted is not None:
                preempted.preempt()
        timer: asyncio.TimerHandle | None = None
        try:
            if not request.is_seated:
                event = self._seated[request] = asyncio.Event()
                await event.wait()
            started = partial(self._record_start, request)
            delay_s = request.objective.prefill_s + STARTED_AFTER_S
            timer = asyncio.get_running_loop().call_later(delay_s, started)
            yield started
        finally:
            if timer is not None:
                timer.cancel()
            self._seated.pop(request, None)
            self._release(request)

    def _release(self, request: SeatRequest) -> None:
        """Give a seat back, and wake the requests that have one now."""
        self._wake(self._seats.release(request, self._clock()))

    def _record_start(self, request: SeatRequest) -> None:
        self._wake(self._seats.record_start(request, self._clock()))

    def _wake(self, requests: Iterable[SeatRequest]) -> None:
        for following in requests:
            event = self._seated.get(following)
            if event is not None:
                event.set()
        if self._next_fill is not None:
            self._next_fill.cancel()
            self._next_fill = None
        due_s = self._seats.next_fill_s
        if due_s is not None:
            delay_s = max(0.0, due_s - self._clock())
            self._next_fill = asyncio.get_running_loop().call_later(delay_s, self._fill)

    def _fill(self) -> None:
        """Wake the item whose turn to begin has come."""
        self._wake(self._seats.fill(self._clock()))
