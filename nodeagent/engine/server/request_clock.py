"""When the steps of one request began, for the header that the node makes spans of."""

from collections.abc import Callable

from isochrone.wire.engines.engine_times import EngineTimes
from nodeagent.engine.core.generation import GenerationDelta


class RequestClock:
    """The times of one request, on the clock of the steps."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Begin now. `clock` returns monotonic seconds."""
        self._clock = clock
        self._arrived_s = self._queued_s = clock()
        self._began_s = 0.0
        self._first_s = 0.0

    def record_kv(self) -> None:
        """Note that the KV of another engine has arrived, or will not."""
        self._queued_s = self._clock()

    def record_first(self, delta: GenerationDelta) -> None:
        """Note the first token; later ones change nothing."""
        if not self._first_s:
            self._first_s = self._clock()
            # A request that was dropped before its prompt was computed has no such step.
            self._began_s = min(max(delta.began_s, self._queued_s), self._first_s)

    def times(self, *, is_whole: bool) -> EngineTimes:
        """Return how the time was spent: to the first token, or to now if the answer `is_whole`."""
        return EngineTimes(
            wait_kv=self._queued_s - self._arrived_s,
            queue=self._began_s - self._queued_s,
            prefill=self._first_s - self._began_s,
            decode=self._clock() - self._first_s if is_whole else 0.0,
        )
