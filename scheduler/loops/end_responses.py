"""Ends stored responses whose router is gone: their client's connection went with it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from scheduler.decide.response_items import ended_body
from scheduler.decide.response_limits import ResponseLimits
from scheduler.state.lease_state import LeaseState
from scheduler.store.client_objects.responses import (
    abandoned_responses,
    end_response,
    read_response,
)
from scheduler.store.pool import Pool, transaction

BATCH_ROWS: Final = 100


@dataclass(eq=False, kw_only=True)
class EndResponses:
    """Background responses are not ended but leased again, by another router.

    While the database or the scheduler does not answer, no router can renew its leases. So a
    response ends only if its lease could have been renewed for a whole lease before.

    `clock` gives monotonic seconds.
    """

    pool: Pool
    lease: LeaseState
    limits: ResponseLimits
    clock: Callable[[], float] = time.monotonic
    _renewable_since_s: float | None = field(default=None, init=False)

    async def run_once(self) -> int:
        """Let up to BATCH_ROWS responses fail whose lease has run out; return how many."""
        since_s, self._renewable_since_s = self._renewable_since_s, None
        if not self.lease.is_acting:
            return 0
        now_s = self.clock()
        since_s = now_s if since_s is None else since_s
        async with transaction(self.pool) as connection:
            response_ids = await abandoned_responses(connection, BATCH_ROWS)
            if now_s - since_s < self.limits.lease_s:
                response_ids = []
            for response_id in response_ids:
                # One at a time: each may have megabytes.
                row = await read_response(connection, response_id)
                assert row is not None
                message = "cannot answer: the router that answered has stopped"
                body = ended_body(row.body, "failed", message)
                await end_response(connection, response_id, "failed", body)
        self._renewable_since_s = since_s
        return len(response_ids)
