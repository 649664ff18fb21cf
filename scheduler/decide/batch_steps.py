"""Decides which batches are read or written next: large ones of a tenant delay no other. Pure."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

AT_ONCE_MAX: Final = 4
"""Each step holds a connection to the database, and parts of a file in memory."""

OF_TENANT_MAX: Final = 2


class DueStep(NamedTuple):
    """A batch whose input is to be read, or whose results are to be written."""

    batch_id: str
    tenant_id: str


def next_steps(due: Sequence[DueStep], running: Iterable[str]) -> list[DueStep]:
    """Return the steps to start now, of those `due` in the order of creation.

    `running` has the tenant of each step that runs. The tenant with the fewest comes next.
    """
    counts = Counter(running)
    waiting = list(due)
    started: list[DueStep] = []
    while waiting and counts.total() < AT_ONCE_MAX:
        step = min(waiting, key=lambda step: counts[step.tenant_id])
        if counts[step.tenant_id] >= OF_TENANT_MAX:
            break
        waiting.remove(step)
        counts[step.tenant_id] += 1
        started.append(step)
    return started
