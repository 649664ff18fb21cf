"""Adds new usage to each key's daily total, and publishes the keys whose quota is spent."""

from collections.abc import Callable
from dataclasses import dataclass

from scheduler.state.lease_state import LeaseState
from scheduler.state.published_routes import PublishedRoutes
from scheduler.store.accounts.quotas import sum_quota_usage
from scheduler.store.pool import Pool, transaction


@dataclass(eq=False, kw_only=True)
class SumQuotas:
    """Counts only keys that have a daily quota."""

    pool: Pool
    lease: LeaseState
    routes: PublishedRoutes
    unix_clock: Callable[[], float]

    async def run_once(self) -> int:
        """Add the usage since the last turn to its day; return how many requests it was."""
        if not self.lease.is_acting:
            return 0
        async with transaction(self.pool) as connection:
            usage = await sum_quota_usage(connection)
        for key_id in usage.spent:
            published = self.routes.keys.get(key_id)
            if published is not None and published.spent_until <= self.unix_clock():
                self.routes.mark_key_changed(key_id)
        return usage.rows
