"""Collects garbage between answers of the planner, not within them.

A plan for a thousand deployments makes and drops objects in cycles by the hundred thousand. When
Python chose the moment, a collection of half a second fell into a plan now and then.
"""

import gc
from typing import Final

ANSWERS_PER_FULL: Final = 50
"""One in this many collections is of all objects, the others of those of the last answer only."""


class GarbageBetweenAnswers:
    """Collects garbage when `collect` is called, and at no other time."""

    def __init__(self) -> None:
        self._answers = 0
        gc.collect()
        # Objects that exist by now live as long as the process.
        gc.freeze()
        gc.disable()

    def collect(self) -> None:
        """Collect the garbage of the last answer."""
        self._answers += 1
        gc.collect(2 if self._answers % ANSWERS_PER_FULL == 0 else 0)
