"""Adds new usage to each key's daily total, so that the next route table marks spent quotas."""

from typing import NamedTuple

from scheduler.state.lease_state import LeaseState
from scheduler.store.pool import Pool, transaction
from scheduler.store.quotas import sum_quota_usage


class QuotaCounts(NamedTuple):
    """How many requests one turn added."""

    requests: int = 0


class SumQuotas:
    """Counts only keys that have a daily quota."""

    def __init__(self, *, pool: Pool, lease: LeaseState) -> None:
        self._pool = pool
        self._lease = lease

    async def run_once(self) -> QuotaCounts:
        """Add what was used since the last turn to its day."""
        if not self._lease.is_acting:
            return QuotaCounts()
        async with transaction(self._pool) as connection:
            return QuotaCounts(await sum_quota_usage(connection))
