"""The thread that runs a model, of either kind: begun, watched, ended.

Rule: an error in a step is fatal: the state of all that is under way is in doubt. The thread says
so and ends; the process then ends too, for whoever supervises it to start another.
"""

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

log = logging.getLogger(__name__)


class StepThread(ABC):
    """Owns the thread."""

    def __init__(self, on_death: Callable[[], None]) -> None:
        self._on_death = on_death
        self._wake = threading.Condition()
        self._stopping = False
        self._progress_s = time.monotonic()
        self.died = False
        self._thread = threading.Thread(target=self._live, name="step", daemon=True)

    @abstractmethod
    def counts(self) -> Mapping[str, float]:
        """Return what is reported of the queue and of the steps, by name: EngineStats."""

    @abstractmethod
    def has_work(self) -> bool:
        """True where a step is due or under way."""

    @abstractmethod
    def _run(self) -> None:
        """Take one step after another, until it is time to stop."""

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """End the thread after its current step; False where that takes longer than allowed."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def fail(self) -> None:
        """Take the engine for dead: what a step needs is gone. Whoever waits for it need not."""
        self.died = True
        self._on_death()

    def idle_s(self) -> float:
        """Seconds since the last step ended, or since there last was nothing to do."""
        return time.monotonic() - self._progress_s

    def _expect_progress(self) -> None:
        """Start the stall clock of an idle engine, which has made no progress for long."""
        if not self.has_work():
            self._progress_s = time.monotonic()

    def _live(self) -> None:
        try:
            self._run()
        # The thread's own edge: whatever a step raises ends here, is told, and ends the process.
        except Exception:
            log.exception("the step thread died")
            self.fail()
