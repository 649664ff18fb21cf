"""How much may be tried again: a share of what is asked, lest retrying multiply trouble."""

import math
from typing import Final


class RetryBudget:
    """Retries allowed as a share of recent requests.

    Both are counted over the last `WINDOW_S` or so, the newest weighing most. `reserve` is what a
    quiet router may retry in that time besides, lest one bad replica fail the few who ask.
    """

    WINDOW_S: Final = 10.0

    def __init__(self, ratio: float = 0.2, reserve: float = 10.0) -> None:
        """Allow `ratio` retries per request, and `reserve` besides."""
        self._ratio = ratio
        self._reserve = reserve
        self._at_s = -math.inf
        self._requests = 0.0
        self._retries = 0.0

    def deposit(self, now_s: float) -> None:
        """Note a first attempt."""
        self._age(now_s)
        self._requests += 1.0

    def withdraw(self, now_s: float) -> bool:
        """Take one retry out; False where the budget is spent."""
        self._age(now_s)
        if self._retries + 1.0 > self._ratio * self._requests + self._reserve:
            return False
        self._retries += 1.0
        return True

    def _age(self, now_s: float) -> None:
        if now_s > self._at_s:
            kept = math.exp((self._at_s - now_s) / self.WINDOW_S)
            self._requests *= kept
            self._retries *= kept
            self._at_s = now_s
