"""A clock for engines that a benchmark steps: other processes take none of its time."""

import time


class ProcessorTime:
    """The processor seconds of this process, and the seconds that it was idle."""

    def __init__(self) -> None:
        self._idle_s = 0.0

    def now_s(self) -> float:
        """Return the time."""
        return time.process_time() + self._idle_s

    def idle(self, seconds: float) -> None:
        """Let time pass."""
        self._idle_s += seconds
