"""Ends stored responses whose router is gone: their client's connection went with it."""

from typing import Final, NamedTuple

from scheduler.decide.response_items import ended_body
from scheduler.state.lease_state import LeaseState
from scheduler.store.client_objects.responses import abandoned_responses, end_response
from scheduler.store.pool import Pool, transaction

BATCH_ROWS: Final = 100


class EndedResponseCounts(NamedTuple):
    """How many responses one turn ended."""

    failed: int


class EndResponses:
    """Background responses are not ended but leased again, by another router."""

    def __init__(self, *, pool: Pool, lease: LeaseState) -> None:
        self._pool = pool
        self._lease = lease

    async def run_once(self) -> EndedResponseCounts:
        """Let the responses fail whose lease has run out, up to BATCH_ROWS of them."""
        if not self._lease.is_acting:
            return EndedResponseCounts(0)
        async with transaction(self._pool) as connection:
            rows = await abandoned_responses(connection, BATCH_ROWS)
            for row in rows:
                message = "cannot answer: the router that answered has stopped"
                body = ended_body(row.body, "failed", message)
                await end_response(connection, row.response_id, "failed", body)
        return EndedResponseCounts(len(rows))
