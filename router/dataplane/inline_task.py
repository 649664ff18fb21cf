"""Coroutines that run inside a callback of the event loop, without an asyncio task.

asyncio starts a task in the next iteration of the loop, and resumes it one iteration after the
awaited future is done. An inline task starts at once and resumes inside `InlineEvent.set`, so bytes
from a node reach the client in the same iteration of the loop.

Rule 1: an inline task awaits `InlineEvent` only. Other awaitables run in an asyncio task that sets
an event when it is done. `asyncio.timeout`, `asyncio.sleep` and `asyncio.current_task` do not work.
Rule 2: `InlineEvent.set` is the last statement of a loop callback, because the task runs within it.
"""

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any, Final

from isochrone.native_class import mypyc_attr


class _RunningTask:
    """Holds the inline task that is running now, if any."""

    def __init__(self) -> None:
        self.task: InlineTask | None = None


@mypyc_attr(free_list_len=1)
class InlineEvent:
    """A one-shot event with one waiter: an inline task or an asyncio task.

    The event may be set before anything waits for it. Setting it again has no effect.
    """

    __slots__ = ("_future", "_is_set", "_task")

    def __init__(self) -> None:
        self._is_set = False
        self._task: InlineTask | None = None
        self._future: asyncio.Future[None] | None = None

    def set(self) -> None:
        """Resume the waiter; an inline task runs before this call returns."""
        if self._is_set:
            return
        self._is_set = True
        task, self._task = self._task, None
        if task is not None:
            task.advance()
        elif self._future is not None and not self._future.done():
            self._future.set_result(None)

    def __await__(self) -> Generator[Any, None, None]:
        """Wait until the event is set."""
        task = _RUNNING.task
        if self._is_set:
            return
        if task is None:
            self._future = asyncio.get_running_loop().create_future()
            yield from self._future
        else:
            self._task = task
            try:
                yield self
            finally:
                self._task = None


@mypyc_attr(free_list_len=1)
class InlineTask:
    """One coroutine, run step by step from the first `advance` to its end."""

    __slots__ = ("_coroutine", "_is_cancelled", "_is_over", "_is_running", "_steps")

    def __init__(self, coroutine: Coroutine[Any, None, None]) -> None:
        self._coroutine = coroutine
        # An iterator reports its end with a default value, where `send` raises StopIteration.
        self._steps = coroutine.__await__()
        self._is_running = False
        self._is_cancelled = False
        self._is_over = False

    def advance(self) -> None:
        """Start or resume the coroutine, until it waits or ends.

        An exception that ends it goes to the loop's exception handler.
        """
        if self._is_over:
            return
        outer, _RUNNING.task = _RUNNING.task, self
        self._is_running = True
        try:
            self._step()
        except (asyncio.CancelledError, StopIteration):
            self._is_over = True
        except Exception as error:
            self._is_over = True
            context = {"message": "an inline task failed", "exception": error}
            asyncio.get_running_loop().call_exception_handler(context)
        finally:
            self._is_running = False
            _RUNNING.task = outer

    def _step(self) -> None:
        awaited: object = None
        if not self._is_cancelled:
            awaited = _NEXT(self._steps, _ENDED)
        while self._is_cancelled and awaited is not _ENDED:
            self._is_cancelled = False
            awaited = self._coroutine.throw(asyncio.CancelledError())
        if awaited is _ENDED:
            self._is_over = True
        elif not isinstance(awaited, InlineEvent):
            # No callback would ever resume the task.
            what = type(awaited).__name__
            self._coroutine.throw(
                RuntimeError(f"cannot await {what} in an inline task: await an InlineEvent")
            )

    def cancel(self) -> None:
        """Raise CancelledError where the coroutine waits; if it is running, at its next wait."""
        self._is_cancelled = True
        if not self._is_running:
            self.advance()


_RUNNING: Final = _RunningTask()
_ENDED: Final = object()
_NEXT: Final = next
"""The built-in, looked up once: each step uses it."""


async def inline_sleep(seconds: float) -> None:
    """Wait, in an inline task or an asyncio task."""
    event = InlineEvent()
    timer = asyncio.get_running_loop().call_later(seconds, event.set)
    try:
        await event
    finally:
        timer.cancel()
