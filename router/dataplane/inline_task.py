"""A coroutine that runs where it stands: no task, and no turn of the loop to wait for.

asyncio begins a task in the loop's next turn, and goes on with it a turn after what it waited for
has come. An errand begins at once, and goes on the moment its signal is given: what a node sends is
on its way to the client within the same turn of the loop.

Rule 1: an errand awaits signals only. What else takes time is done by a task, which gives one; so
`asyncio.timeout`, `sleep` and whatever asks for the current task have no place in it.
Rule 2: a signal is given from a callback of the loop, as its last act: the errand runs within it.
"""

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any, Final


class _Now:
    """Which errand runs at this moment."""

    def __init__(self) -> None:
        self.errand: InlineTask | None = None


class InlineEvent:
    """What one errand waits for, or one task. It is given once, also before anybody waits."""

    __slots__ = ("_errand", "_future", "_is_given")

    def __init__(self) -> None:
        self._is_given = False
        self._errand: InlineTask | None = None
        self._future: asyncio.Future[None] | None = None

    def give(self) -> None:
        """Let whoever waits go on."""
        if self._is_given:
            return
        self._is_given = True
        errand, self._errand = self._errand, None
        if errand is not None:
            errand.go_on()
        elif self._future is not None and not self._future.done():
            self._future.set_result(None)

    def __await__(self) -> Generator[Any, None, None]:
        """Wait until it is given."""
        errand = _NOW.errand
        if self._is_given:
            return
        if errand is None:
            self._future = asyncio.get_running_loop().create_future()
            yield from self._future
        else:
            self._errand = errand
            try:
                yield self
            finally:
                self._errand = None


class InlineTask:
    """One coroutine on its way, from `go_on` to its end."""

    __slots__ = ("_is_cancelled", "_is_over", "_is_running", "_steps", "_work")

    def __init__(self, work: Coroutine[Any, None, None]) -> None:
        self._work = work
        # As an iterator: its end is a value there, where `send` raises an exception.
        self._steps = work.__await__()
        self._is_running = False
        self._is_cancelled = False
        self._is_over = False

    def go_on(self) -> None:
        """Run until it must wait, or to its end."""
        if self._is_over:
            return
        outer, _NOW.errand = _NOW.errand, self
        self._is_running = True
        try:
            self._run()
        except (asyncio.CancelledError, StopIteration):
            self._is_over = True
        except Exception as error:
            self._is_over = True
            context = {"message": "cannot go on with an errand", "exception": error}
            asyncio.get_running_loop().call_exception_handler(context)
        finally:
            self._is_running = False
            _NOW.errand = outer

    def _run(self) -> None:
        awaited: object = None
        if not self._is_cancelled:
            awaited = _NEXT(self._steps, _OVER)
        while self._is_cancelled and awaited is not _OVER:
            self._is_cancelled = False
            awaited = self._work.throw(asyncio.CancelledError())
        if awaited is _OVER:
            self._is_over = True
        elif not isinstance(awaited, InlineEvent):
            # Nobody would ever go on with it.
            what = type(awaited).__name__
            self._work.throw(RuntimeError(f"cannot await {what} in an errand, only a InlineEvent"))

    def cancel(self) -> None:
        """Raise CancelledError where it waits; in one that runs, at its next wait."""
        self._is_cancelled = True
        if not self._is_running:
            self.go_on()


_NOW: Final = _Now()
_OVER: Final = object()
_NEXT: Final = next
"""Looked up once."""


async def pause(seconds: float) -> None:
    """Let some time pass."""
    signal = InlineEvent()
    timer = asyncio.get_running_loop().call_later(seconds, signal.give)
    try:
        await signal
    finally:
        timer.cancel()
