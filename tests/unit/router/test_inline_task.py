"""Inline tasks: when they start and resume, what they may await, and how they end."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from router.dataplane.inline_task import InlineEvent, InlineTask, inline_sleep
from tests.unit.router.in_memory import one_iteration


class TaskLog:
    """What the coroutines of a test did, in order."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    async def wait(self, name: str, *events: InlineEvent) -> None:
        self.lines.append(f"{name} starts")
        try:
            for number, event in enumerate(events):
                await event
                self.lines.append(f"{name} saw {number}")
        except asyncio.CancelledError:
            self.lines.append(f"{name} is cancelled")
            raise
        self.lines.append(f"{name} ends")

    async def call_then_wait(
        self, name: str, call: Callable[[], None], *events: InlineEvent
    ) -> None:
        """Call a function while the coroutine runs, then wait."""
        self.lines.append(f"{name} calls")
        call()
        await self.wait(name, *events)


def start(coroutine: Coroutine[Any, None, None]) -> InlineTask:
    task = InlineTask(coroutine)
    task.advance()
    return task


def test_a_task_starts_at_once_and_resumes_inside_set() -> None:
    log, first, second = TaskLog(), InlineEvent(), InlineEvent()
    start(log.wait("a", first, second))
    assert log.lines == ["a starts"]
    first.set()
    assert log.lines[1:] == ["a saw 0"]
    second.set()
    assert log.lines[2:] == ["a saw 1", "a ends"]


def test_an_event_set_before_the_wait_does_not_block_and_setting_it_again_has_no_effect() -> None:
    log, event, later = TaskLog(), InlineEvent(), InlineEvent()
    event.set()
    start(log.wait("a", event, later))
    assert log.lines == ["a starts", "a saw 0"]
    event.set()
    assert log.lines == ["a starts", "a saw 0"]


def test_an_event_that_the_task_sets_itself_is_not_lost() -> None:
    log, event = TaskLog(), InlineEvent()
    start(log.call_then_wait("a", event.set, event))
    assert log.lines[-1] == "a ends"


def test_a_task_that_resumes_another_one_continues_as_itself() -> None:
    log, inner, outer = TaskLog(), InlineEvent(), InlineEvent()
    start(log.wait("b", inner, InlineEvent()))
    start(log.call_then_wait("a", inner.set, outer))
    assert log.lines == ["b starts", "a calls", "b saw 0", "a starts"]
    outer.set()
    assert log.lines[4:] == ["a saw 0", "a ends"]


async def test_a_task_that_fails_inside_another_one_does_not_affect_it() -> None:
    reported: list[Any] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: reported.append(context))
    log, inner, outer = TaskLog(), InlineEvent(), InlineEvent()

    async def fail() -> None:
        await inner
        raise ValueError("broken")

    start(fail())
    start(log.call_then_wait("a", inner.set, outer))
    outer.set()
    assert log.lines[-1] == "a ends"
    assert [str(context["exception"]) for context in reported] == ["broken"]


def test_cancelling_ends_the_wait_and_later_events_have_no_effect() -> None:
    log, event = TaskLog(), InlineEvent()
    task = start(log.wait("a", event))
    task.cancel()
    assert log.lines[1:] == ["a is cancelled"]
    event.set()
    task.cancel()
    assert log.lines[2:] == []


def test_a_running_task_is_cancelled_at_its_next_wait() -> None:
    log, event = TaskLog(), InlineEvent()
    tasks: list[InlineTask] = []
    task = InlineTask(log.call_then_wait("a", lambda: tasks[0].cancel(), event))
    tasks.append(task)
    task.advance()
    assert log.lines == ["a calls", "a starts", "a is cancelled"]


async def test_awaiting_anything_but_an_inline_event_raises_where_it_is_awaited() -> None:
    messages: list[str] = []

    async def await_wrongly(awaitable: Any) -> None:
        try:
            await awaitable
        except RuntimeError as error:
            messages.append(str(error))

    future = asyncio.get_running_loop().create_future()
    start(await_wrongly(future))
    start(await_wrongly(one_iteration()))
    assert messages == [
        "cannot await Future in an inline task: await an InlineEvent",
        "cannot await NoneType in an inline task: await an InlineEvent",
    ]


async def test_an_asyncio_task_may_await_an_inline_event() -> None:
    log, event = TaskLog(), InlineEvent()
    task = asyncio.get_running_loop().create_task(log.wait("a", event))
    await one_iteration()
    event.set()
    await task
    assert log.lines == ["a starts", "a saw 0", "a ends"]


async def test_inline_sleep_ends_with_its_timer() -> None:
    is_over = asyncio.Event()

    async def pause() -> None:
        await inline_sleep(0.0)
        is_over.set()

    start(pause())
    await is_over.wait()
