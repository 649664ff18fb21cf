"""Renews the leases of stored responses, and answers those that run in the background.

Each process of a router renews the leases of responses that its clients wait for; its main process
answers background responses.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Set
from typing import Final

from isochrone.service.failure_log import RepeatedWarning
from isochrone.wire.errors import ApiError
from isochrone.wire.peers.responses import (
    LEASED_MAX,
    FinishResponse,
    LeasedResponse,
    LeaseResponses,
    ResponseRef,
)
from router.response_client import ResponseClient

log = logging.getLogger(__name__)

LEASE_INTERVAL_S: Final = 1.0

AnswerResponse = Callable[[LeasedResponse], Awaitable[FinishResponse]]


class AnswerResponses:
    """The periodic job of each process of a router."""

    def __init__(
        self,
        *,
        client: ResponseClient,
        answer: AnswerResponse,
        open_refs: Set[ResponseRef],
        running_max: int,
        may_lease: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        """Answer up to `running_max` background responses at once; 0 in all but one process.

        None is leased unless `may_lease`: without a route table no model would be known, and a
        router that is stopping would cancel it. `open_refs` are the responses that clients of this
        process wait for. `clock` gives monotonic seconds.
        """
        self._client = client
        self._answer = answer
        self._open = open_refs
        self._running_max = running_max
        self._may_lease = may_lease
        self._clock = clock
        self._refusals = RepeatedWarning(log, "stored responses")
        self._running: dict[ResponseRef, asyncio.Task[None]] = {}

    async def run_once(self) -> int:
        """Renew leases, drop cancelled responses, start leased ones and return how many."""
        free = min(LEASED_MAX, self._running_max - len(self._running))
        wanted = max(0, free) if self._may_lease() else 0
        holds = (*self._running, *self._open)
        if not self._client.is_connected or not (wanted or holds):
            return 0
        try:
            leased = await self._client.lease(LeaseResponses(wanted=wanted, holds=holds))
        except ApiError as error:
            self._refusals.record(error.message, self._clock())
            return 0
        for ref in leased.lost:
            if ref in self._running:
                self._running[ref].cancel()
        for response in leased.responses:
            self._running[response.ref] = asyncio.create_task(self._run(response))
        return len(leased.responses)

    def close(self) -> None:
        """Stop answering. The leases run out, and other routers answer."""
        for task in self._running.values():
            task.cancel()

    async def _run(self, leased: LeasedResponse) -> None:
        """Answer one background response, and store how it ended."""
        try:
            await self._client.finish(await self._answer(leased))
        finally:
            del self._running[leased.ref]
