"""Forgets what is past its keeping, in batches."""

from typing import NamedTuple

from scheduler.acting import Acting
from scheduler.store.pool import transaction
from scheduler.store.usage import prune


class Pruned(NamedTuple):
    """One turn's count of rows."""

    rows: int


class Prune:
    """A batch a turn: the table is never locked for long."""

    def __init__(self, acting: Acting) -> None:
        self._acting = acting

    async def run_once(self) -> Pruned:
        """Delete one batch of each kind."""
        if not self._acting.is_acting:
            return Pruned(0)
        async with transaction(self._acting.pool) as connection:
            return Pruned(await prune(connection))
