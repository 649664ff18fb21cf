"""An event loop whose clock counts the CPU time of what is measured, and the time that it waits.

On a machine with other work a process waits for a processor, and any age or duration that it
measures includes that wait. This loop's clock stands still meanwhile: it advances by the CPU time
that the thread uses, and while nothing is ready it jumps to the next timer. So durations are those
of a machine with a free processor. What runs in `elsewhere()` (another machine's part, simulated in
the same process) does not advance the clock; its CPU time is counted apart.

Connections over loopback are real. The kernel's work for them counts for the caller.
"""

import asyncio
import selectors
import time
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from typing import Any, Final

GRACE_S: Final = 0.001
"""Before the clock jumps, the loop waits this long (of wall time) for the kernel's last packets."""

_ELSEWHERE: Final = ContextVar("_ELSEWHERE", default=False)


class _Selector(selectors.DefaultSelector):
    """Jumps to the next timer where another selector would wait."""

    skipped_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what is ready, at the latest when the next timer is due."""
        ready = super().select(0)
        if ready or timeout is None or timeout <= 0:
            return ready if ready or timeout is not None else super().select(None)
        ready = super().select(GRACE_S)
        if not ready:
            self.skipped_s += timeout
        return ready


class CpuClockLoop(asyncio.SelectorEventLoop):
    """Runs what is measured, and what runs elsewhere, in one thread."""

    def __init__(self) -> None:
        """Begin at 0 s."""
        self._jumping = _Selector()
        self.elsewhere_s = 0.0
        """The CPU time of what has run elsewhere."""
        self._elsewhere_since_s: float | None = None
        self._began_s = time.thread_time()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Return the seconds that have passed, without those that other work took."""
        return self.cpu_s() + self._jumping.skipped_s

    def cpu_s(self) -> float:
        """Return the CPU time of what is measured."""
        now_s = self._elsewhere_since_s
        if now_s is None:
            now_s = time.thread_time()
        return now_s - self._began_s - self.elsewhere_s

    def begin_elsewhere(self) -> None:
        """Stop the clock."""
        self._elsewhere_since_s = time.thread_time()

    def end_elsewhere(self) -> None:
        """Let the clock go on from where it stopped."""
        if self._elsewhere_since_s is not None:
            self.elsewhere_s += time.thread_time() - self._elsewhere_since_s
            self._elsewhere_since_s = None

    def run_elsewhere(self, work: Callable[[], Any]) -> Any:
        """Call `work` so that its callbacks, and those of all that it starts, run elsewhere."""
        context = copy_context()
        context.run(_ELSEWHERE.set, True)
        return context.run(work)


def run_with_cpu_clock(main: Callable[[CpuClockLoop], Any]) -> Any:
    """Run a coroutine function on a new loop, which it is given."""
    loop = CpuClockLoop()
    run: Any = vars(asyncio.Handle)["_run"]

    def timed(handle: Any) -> None:
        if not handle._context.get(_ELSEWHERE):
            run(handle)
            return
        loop.begin_elsewhere()
        run(handle)
        loop.end_elsewhere()

    handles: Any = asyncio.Handle
    handles._run = timed
    try:
        asyncio.set_event_loop(loop)
        return loop.run_until_complete(main(loop))
    finally:
        handles._run = run
        asyncio.set_event_loop(None)
        loop.close()
