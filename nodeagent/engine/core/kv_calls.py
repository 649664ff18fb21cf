"""Calls that touch only the bookkeeping of KV blocks: they need not wait for a step to end.

A step uses that bookkeeping before and after the model computes it, and a step of prompts takes up
to two seconds. Meanwhile other engines wait for blocks to be held, or for free ones.

Rule 1: a call runs between two steps on the step thread, or on another thread while the model
computes. Two calls never run at the same time.
Rule 2: calls keep their order among themselves. They may run before generations and other calls
that were sent to the step thread earlier, and run before those that are sent to it later.
Rule 3: an error in a call is fatal, like one in a step.
Rule 4: a call that will not run any more is refused, so that no caller waits for it.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple


class _KvCall(NamedTuple):
    run: Callable[[], None]
    refuse: Callable[[], None]


class KvCalls:
    """The calls that wait. One thread is in `run`, the step thread in all that says so."""

    def __init__(self) -> None:
        self._waiting: deque[_KvCall] = deque()
        self._changed = threading.Condition()
        self._is_computing = False
        self._is_running = False
        """Whether `run` makes a call."""
        self._is_closed = False

    def close(self) -> None:
        """End `run` after the call that it makes, and refuse what waits. For the step thread."""
        with self._changed:
            self._is_closed = True
            refused = tuple(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
        for call in refused:
            call.refuse()

    @property
    def are_waiting(self) -> bool:
        """Whether a call has yet to begin. For any thread."""
        return bool(self._waiting)

    def put(self, run: Callable[[], None], refuse: Callable[[], None] = lambda: None) -> None:
        """Have `run` called, or `refuse` once this is closed. For any thread."""
        with self._changed:
            if not self._is_closed:
                self._waiting.append(_KvCall(run, refuse))
                if self._is_computing:
                    self._changed.notify_all()
                return
        refuse()

    def run_waiting(self) -> None:
        """Run what waits. For the step thread, between two steps."""
        while self._waiting:
            self._waiting.popleft().run()

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

    def run(self) -> None:
        """Run calls while the model computes, until this is closed. On a thread of its own."""
        while (call := self._next()) is not None:
            try:
                call()
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
            return self._waiting.popleft().run
