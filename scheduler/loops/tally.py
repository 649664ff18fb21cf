"""Adds up what keys with a quota used, so that the next route table says who has used his up."""

from typing import NamedTuple

from scheduler.acting import Acting
from scheduler.store.pool import transaction
from scheduler.store.quotas import fold_use


class Tallied(NamedTuple):
    """One turn's count of requests."""

    requests: int


class Tally:
    """Whatever has come since the last turn."""

    def __init__(self, acting: Acting) -> None:
        self._acting = acting

    async def run_once(self) -> Tallied:
        """Fold what was used into its day."""
        if not self._acting.is_acting:
            return Tallied(0)
        async with transaction(self._acting.pool) as connection:
            return Tallied(await fold_use(connection))
