"""The retry budget: retries are a share of requests, so that they do not multiply an outage."""

import math
from typing import Final


class RetryBudget:
    """Retries allowed as a share of recent requests.

    Retries and requests are counted over about the last `WINDOW_S`, the newest weighing most.
    `reserve` retries are allowed on top in that time, so that one bad replica does not fail the few
    requests of a quiet router.
    """

    WINDOW_S: Final = 10.0

    def __init__(self, ratio: float = 0.2, reserve: float = 10.0) -> None:
        """Allow `ratio` retries per request, and `reserve` on top."""
        self._ratio = ratio
        self._reserve = reserve
        self._updated_at_s = -math.inf
        self._requests = 0.0
        self._retries = 0.0

    def deposit(self, now_s: float) -> None:
        """Count a first attempt."""
        self._decay(now_s)
        self._requests += 1.0

    def withdraw(self, now_s: float) -> bool:
        """Take one retry; return False if the budget is spent."""
        self._decay(now_s)
        if self._retries + 1.0 > self._ratio * self._requests + self._reserve:
            return False
        self._retries += 1.0
        return True

    def _decay(self, now_s: float) -> None:
        if now_s > self._updated_at_s:
            kept = math.exp((self._updated_at_s - now_s) / self.WINDOW_S)
            self._requests *= kept
            self._retries *= kept
            self._updated_at_s = now_s
