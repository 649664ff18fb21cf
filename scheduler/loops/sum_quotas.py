"""Adds up what keys with a quota used, so that the next route table says who has used his up."""

from typing import NamedTuple

from scheduler.acting import Acting
from scheduler.store.pool import transaction
from scheduler.store.quotas import sum_quota_usage


class QuotaCounts(NamedTuple):
    """One turn's count of requests."""

    requests: int


class SumQuotas:
    """Whatever has come since the last turn."""

    def __init__(self, acting: Acting) -> None:
        self._acting = acting

    async def run_once(self) -> QuotaCounts:
        """Fold what was used into its day."""
        if not self._acting.is_acting:
            return QuotaCounts(0)
        async with transaction(self._acting.pool) as connection:
            return QuotaCounts(await sum_quota_usage(connection))
