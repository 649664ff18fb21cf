"""Cancels a coroutine at each of its awaits in turn, and checks that nothing is left behind.

A cut cancels the task at its k-th await: either while it waits, or when the awaited result has just
arrived and is not delivered yet. Awaits of tasks that it creates count too. After each cut there
must be no new task, file descriptor or child process. Further conditions are tested by `check`.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import psutil

SETTLE_S = 30.0
CUTS_MAX = 500

_at: "ContextVar[_Cut | None]" = ContextVar("cut", default=None)


class _Cut:
    """Cancels a task at the `wait`-th await, counting those of the tasks it creates."""

    def __init__(self, wait: int, *, as_it_comes: bool) -> None:
        self.left, self.as_it_comes = wait, as_it_comes
        self.task: asyncio.Task[Any] | None = None

    def waits(self, awaited: Any) -> None:
        self.left -= 1
        if self.left == 0 and self.task is not None:
            if self.as_it_comes and isinstance(awaited, asyncio.Future):
                # Runs before the callback that the waiting task adds.
                awaited.add_done_callback(lambda _: self.task and self.task.cancel())
            else:
                asyncio.get_running_loop().call_soon(self.task.cancel)


class _Waits:
    """Runs a coroutine step by step and reports each await to the cut."""

    def __init__(self, work: Coroutine[Any, Any, Any], cut: _Cut) -> None:
        self._work, self._cut = work, cut

    def __await__(self) -> Generator[Any, Any, Any]:
        step: Callable[[], Any] = lambda: self._work.send(None)  # noqa: E731
        while True:
            try:
                awaited = step()
            except StopIteration as end:
                return end.value
            self._cut.waits(awaited)
            try:
                yield awaited
                step = lambda: self._work.send(None)  # noqa: E731
            except BaseException as error:
                step = lambda thrown=error: self._work.throw(thrown)  # type: ignore[misc]  # noqa: E731


def _factory(loop: asyncio.AbstractEventLoop, work: Any, **named: Any) -> asyncio.Task[Any]:
    cut = _at.get()

    async def counted() -> Any:
        assert cut is not None
        return await _Waits(work, cut)

    return asyncio.Task(work if cut is None else counted(), loop=loop, **named)


def held() -> Counter[str]:
    """Return the file descriptors of this process, by target, and its child processes."""
    found: Counter[str] = Counter()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found[str(descriptor.readlink())] += 1
    # pytest opens it when the first line is logged.
    del found["/dev/null"]
    found.update(f"process {child.pid}" for child in psutil.Process().children())
    return found


async def until_as_before(before: Counter[str], tasks: set[asyncio.Task[Any]], when: str) -> None:
    """Wait until there is no descriptor, child process or task that was not there `before`."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + SETTLE_S
    while (left := held() - before) or (asyncio.all_tasks() - tasks):
        assert loop.time() < until_s, f"cut {when}: {left} {asyncio.all_tasks() - tasks}"
        await asyncio.sleep(0.002)


async def _called(check: Callable[[], object]) -> None:
    answer = check()
    if isinstance(answer, Awaitable):
        await answer


async def cut_everywhere(
    work: Callable[[], Awaitable[object]],
    *,
    at_once: Callable[[], object] = lambda: None,
    check: Callable[[], object] = lambda: None,
) -> int:
    """Run `work` once for each cut; return the number of cuts.

    `at_once` is called as soon as the task has ended, and `check` once nothing is left over. Either
    may be a coroutine function.
    """
    loop = asyncio.get_running_loop()
    loop.set_task_factory(_factory)
    cuts = 0
    for as_it_comes in (False, True):
        for wait in range(1, CUTS_MAX):
            before, tasks = held(), asyncio.all_tasks()
            cut = _Cut(wait, as_it_comes=as_it_comes)

            async def whole() -> None:
                await work()

            token = _at.set(cut)
            cut.task = asyncio.create_task(whole())
            _at.reset(token)
            outcome = (await asyncio.gather(cut.task, return_exceptions=True))[0]
            when = f"{'as it came' if as_it_comes else 'waiting'} at wait {wait}"
            if outcome is not None and not isinstance(outcome, asyncio.CancelledError):
                raise AssertionError(f"cut {when}: it failed") from outcome
            await _called(at_once)
            await until_as_before(before, tasks, when)
            await _called(check)
            if cut.left > 0:
                break
            cuts += 1
        else:
            raise AssertionError(f"more than {CUTS_MAX} waits")
    return cuts
