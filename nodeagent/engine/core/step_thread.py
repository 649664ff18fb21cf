"""The thread that runs the steps of a model, decoder or encoder: started, watched, stopped.

Rule: an error in a step is fatal, because the state of everything in flight is in doubt. The thread
logs it and ends, then the process ends, and its supervisor starts another.
"""

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

log = logging.getLogger(__name__)


class StepThread(ABC):
    """Runs `_run` on a thread of its own, and tracks its progress."""

    def __init__(self, on_death: Callable[[], None]) -> None:
        self._on_death = on_death
        self._wake = threading.Condition()
        self._stopping = False
        self._progress_s = time.monotonic()
        self.died = False
        self.is_busy = False
        """Whether a step, or a call between two steps, is in progress."""
        self._thread = threading.Thread(
            target=self._run_guarded, args=(self._run,), name="step", daemon=True
        )

    @abstractmethod
    def counts(self) -> Mapping[str, float]:
        """Return the counts and rates of the queue and the steps, named as in EngineStats."""

    @abstractmethod
    def has_work(self) -> bool:
        """Return whether a step is due or in progress."""

    @abstractmethod
    def _run(self) -> None:
        """Run one step after another until the thread is stopped."""

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Stop the thread after its current step; return False if that exceeds `timeout_s`."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def fail(self) -> None:
        """Treat the engine as dead, because something that steps need is gone."""
        self.died = True
        self._on_death()

    def idle_s(self) -> float:
        """Return the seconds since the last step ended, or since work last began to wait."""
        return time.monotonic() - self._progress_s

    def _expect_progress(self) -> None:
        """Restart the stall clock of an idle engine before work is added."""
        if not self.has_work():
            self._progress_s = time.monotonic()

    def _run_guarded(self, run: Callable[[], None]) -> None:
        """Run the whole of a thread of this engine."""
        try:
            run()
        # Any error of a step ends the thread here, is logged, and ends the process. A panic in a
        # library written in Rust (tokenizers, llguidance) is no Exception.
        except BaseException:
            log.exception("the %s thread died", threading.current_thread().name)
            self.fail()
