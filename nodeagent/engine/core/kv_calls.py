"""Calls that touch only the bookkeeping of KV blocks: they need not wait for a step to end.

A step uses that bookkeeping before and after the model computes it, and a step of prompts takes up
to two seconds. Meanwhile other engines wait for blocks to be held, or for room.

Rule 1: a call runs between two steps on the step thread, or while the model computes on the thread
of this class. The two never run at the same time.
Rule 2: calls keep their order among themselves. They may run before generations and other calls
that were sent to the step thread earlier, and run before those that are sent to it later.
Rule 3: an error in a call is fatal, like one in a step.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)


class KvCalls:
    """The calls that wait, and the thread that runs them while the model computes."""

    def __init__(self, on_error: Callable[[], None]) -> None:
        """`on_error` is called after a call has failed."""
        self._on_error = on_error
        self._waiting: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._is_computing = False
        self._is_running = False
        """Whether the thread of this class runs a call."""
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="kv-calls", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread after the call that it runs; what waits is not called."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    @property
    def are_waiting(self) -> bool:
        """Whether a call has yet to begin. For any thread."""
        return bool(self._waiting)

    def put(self, call: Callable[[], None]) -> None:
        """Have `call` run. For any thread."""
        with self._changed:
            self._waiting.append(call)
            if self._is_computing:
                self._changed.notify_all()

    def run_waiting(self) -> None:
        """Run what waits. For the step thread, between two steps."""
        while self._waiting:
            self._waiting.popleft()()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Let calls run while the step thread computes, and touches no bookkeeping."""
        with self._changed:
            self._is_computing = True
            if self._waiting:
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._is_computing = False
                self._changed.wait_for(lambda: not self._is_running)

    def _run(self) -> None:
        while (call := self._next()) is not None:
            try:
                call()
            # As in a step: what it has changed is in doubt, so the process ends.
            except Exception:
                log.exception("a call beside a step failed")
                self.close()
                self._on_error()
            finally:
                with self._changed:
                    self._is_running = False
                    self._changed.notify_all()

    def _next(self) -> Callable[[], None] | None:
        """Wait for a call that may run; None once this is closed."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_closed or (self._is_computing and bool(self._waiting))
            )
            if self._is_closed:
                return None
            self._is_running = True
            return self._waiting.popleft()
