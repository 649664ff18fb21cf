"""An asyncio event loop whose time passes only while nothing can run, and processes within it.

A process is a group of tasks that can be crashed or paused together. Which process a task belongs
to is a context variable, so tasks and timers inherit it.
"""

import asyncio
import heapq
from asyncio.base_events import BaseEventLoop
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from datetime import UTC, datetime, timedelta
from typing import Any, Final

EPOCH: Final = datetime(2026, 1, 1, tzinfo=UTC)
PRUNE_TASKS: Final = 128
TURNS_MAX: Final = 2_000_000
"""Turns of the event loop in one history: more mean that something never rests."""


class Stuck(Exception):
    """Nothing can run any more, or something runs without end."""


class SimProcess:
    """A simulated operating-system process."""

    def __init__(self, name: str, loop: "SimLoop") -> None:
        self.name = name
        self.is_alive = True
        self.is_paused = False
        self.held: list[asyncio.Handle] = []
        """What would have run while the process is paused."""
        self.tasks: list[asyncio.Task[Any]] = []
        self._loop = loop
        self.context = copy_context()
        self.context.run(CURRENT.set, self)

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """Run a coroutine as part of this process."""
        return self.context.run(self._loop.create_task, coroutine)

    def pause(self) -> None:
        """Stop like SIGSTOP: nothing of the process runs, and its timers fire late."""
        self.is_paused = True

    def resume(self) -> None:
        """Run what was held, in its order."""
        self.is_paused = False
        held, self.held = self.held, []
        self._loop.run_soon(held)

    def crash(self) -> None:
        """End like SIGKILL: it does not touch network, store or engines any more."""
        self.is_alive = False
        self.resume()
        for task in self.tasks:
            if not task.done():
                task.cancel()
        self.tasks.clear()


CURRENT: ContextVar[SimProcess | None] = ContextVar("CURRENT", default=None)


class SimLoop(BaseEventLoop):
    """Runs one history. `time()` is in simulated seconds since its start."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.turns = 0
        self.errors: list[str] = []
        self.on_rest: Callable[[], None] = lambda: None
        """Called when everything of a moment has run, before the time goes on."""
        self.outside = copy_context()
        """A context of no process, for what the network and the store do."""
        self.set_task_factory(_make_task)  # type: ignore[arg-type]
        self.set_exception_handler(self._note_error)
        self._ready: Any
        self._scheduled: Any

    def time(self) -> float:
        return self.now_s

    def run_soon(self, handles: list[asyncio.Handle]) -> None:
        """Run handles that were held."""
        self._ready.extend(handles)

    def after(self, delay_s: float, call: Callable[..., object], *args: Any) -> None:
        """Call a function later, outside of any process."""
        self.call_later(delay_s, call, *args, context=self.outside)

    def run_in_executor(  # type: ignore[override]
        self, executor: object, func: Callable[..., Any], *args: Any
    ) -> "asyncio.Future[Any]":
        """Run a blocking function at once; its caller goes on in the next turn."""
        future = self.create_future()
        try:
            result = func(*args)
        except Exception as error:
            self.call_soon(_fail, future, error)
        else:
            self.call_soon(_finish, future, result)
        return future

    def _run_once(self) -> None:
        self.turns += 1
        if self.turns > TURNS_MAX:
            raise Stuck(f"{TURNS_MAX} turns at {self.now_s:.1f} s")
        scheduled, ready = self._scheduled, self._ready
        if not ready and not self._stopping:  # type: ignore[attr-defined]
            while scheduled and scheduled[0]._cancelled:
                heapq.heappop(scheduled)._scheduled = False
            if not scheduled:
                raise Stuck(f"nothing can run any more at {self.now_s:.1f} s")
            if scheduled[0]._when > self.now_s:
                self.on_rest()
                self.now_s = scheduled[0]._when
        while scheduled and scheduled[0]._when <= self.now_s:
            handle = heapq.heappop(scheduled)
            handle._scheduled = False
            ready.append(handle)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            process = handle._context.get(CURRENT)
            if process is not None and process.is_paused:
                process.held.append(handle)
            else:
                handle._run()

    def _process_events(self, event_list: object) -> None:
        """There are no events of descriptors."""

    def _write_to_self(self) -> None:
        """Nothing calls from another thread."""

    def _note_error(self, loop: object, context: dict[str, Any]) -> None:
        self.errors.append(f"{context.get('message')}: {context.get('exception')!r}")


def _make_task(
    loop: asyncio.AbstractEventLoop,
    coroutine: Coroutine[Any, Any, Any],
    context: Context | None = None,
) -> "asyncio.Task[Any]":
    task = asyncio.Task(coroutine, loop=loop, context=context)
    process = CURRENT.get()
    if process is not None:
        if len(process.tasks) > PRUNE_TASKS:
            process.tasks = [kept for kept in process.tasks if not kept.done()]
        process.tasks.append(task)
        if not process.is_alive:
            task.cancel()
    return task


def _finish(future: "asyncio.Future[Any]", result: object) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: "asyncio.Future[Any]", error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def sim_monotonic() -> float:
    """Return the simulated monotonic clock."""
    return asyncio.get_running_loop().time()


class WallClocks:
    """The wall clocks of hosts, each ahead of true time by so many seconds."""

    def __init__(self) -> None:
        self.ahead_s: dict[str, float] = {}

    def now(self, host: str) -> datetime:
        """Return a host's wall clock."""
        return EPOCH + timedelta(seconds=sim_monotonic() + self.ahead_s.get(host, 0.0))


WALL: ContextVar[WallClocks] = ContextVar("WALL")


def sim_utc_now() -> datetime:
    """Return the wall clock of the process that asks."""
    process = CURRENT.get()
    return WALL.get().now(process.name if process is not None else "")
