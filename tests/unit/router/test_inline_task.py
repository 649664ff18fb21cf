"""Coroutines that run where they stand: what they wait for, and how they end."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from router.dataplane.inline_task import InlineEvent, InlineTask, inline_sleep
from tests.unit.router.wire import a_turn


class Told:
    """What errands did, in order."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    async def waits(self, name: str, *signals: InlineEvent) -> None:
        self.lines.append(f"{name} begins")
        try:
            for number, signal in enumerate(signals):
                await signal
                self.lines.append(f"{name} had {number}")
        except asyncio.CancelledError:
            self.lines.append(f"{name} is cancelled")
            raise
        self.lines.append(f"{name} ends")

    async def gives(self, name: str, then: Callable[[], None], *signals: InlineEvent) -> None:
        """Do something in the midst of a run, and go on waiting."""
        self.lines.append(f"{name} begins")
        then()
        await self.waits(name, *signals)


def begun(work: Coroutine[Any, None, None]) -> InlineTask:
    errand = InlineTask(work)
    errand.advance()
    return errand


def test_an_errand_begins_at_once_and_goes_on_within_the_signal() -> None:
    told, first, second = Told(), InlineEvent(), InlineEvent()
    begun(told.waits("a", first, second))
    assert told.lines == ["a begins"]
    first.set()
    assert told.lines[1:] == ["a had 0"]
    second.set()
    assert told.lines[2:] == ["a had 1", "a ends"]


def test_a_signal_given_before_is_not_waited_for_and_given_twice_is_given_once() -> None:
    told, signal, later = Told(), InlineEvent(), InlineEvent()
    signal.set()
    begun(told.waits("a", signal, later))
    assert told.lines == ["a begins", "a had 0"]
    signal.set()
    assert told.lines == ["a begins", "a had 0"]


def test_a_signal_given_within_the_errands_own_run_is_not_lost() -> None:
    told, signal = Told(), InlineEvent()
    begun(told.gives("a", signal.set, signal))
    assert told.lines[-1] == "a ends"


def test_an_errand_that_wakes_another_goes_on_as_itself() -> None:
    told, inner, outer = Told(), InlineEvent(), InlineEvent()
    begun(told.waits("b", inner, InlineEvent()))
    begun(told.gives("a", inner.set, outer))
    assert told.lines == ["b begins", "a begins", "b had 0", "a begins"]
    outer.set()
    assert told.lines[4:] == ["a had 0", "a ends"]


async def test_one_that_fails_within_another_harms_only_itself() -> None:
    caught: list[Any] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: caught.append(context))
    told, inner, outer = Told(), InlineEvent(), InlineEvent()

    async def fails() -> None:
        await inner
        raise ValueError("broken")

    begun(fails())
    begun(told.gives("a", inner.set, outer))
    outer.set()
    assert told.lines[-1] == "a ends"
    assert [str(context["exception"]) for context in caught] == ["broken"]


def test_cancelling_ends_the_wait_and_what_comes_later_is_nobodys() -> None:
    told, signal = Told(), InlineEvent()
    errand = begun(told.waits("a", signal))
    errand.cancel()
    assert told.lines[1:] == ["a is cancelled"]
    signal.set()
    errand.cancel()
    assert told.lines[2:] == []


def test_cancelling_within_the_run_waits_for_the_next_wait() -> None:
    told, signal = Told(), InlineEvent()
    errands: list[InlineTask] = []
    errand = InlineTask(told.gives("a", lambda: errands[0].cancel(), signal))
    errands.append(errand)
    errand.advance()
    assert told.lines == ["a begins", "a begins", "a is cancelled"]


async def test_what_is_no_signal_is_refused_in_words_where_it_is_awaited() -> None:
    said: list[str] = []

    async def wrong(awaited: Any) -> None:
        try:
            await awaited
        except RuntimeError as error:
            said.append(str(error))

    future = asyncio.get_running_loop().create_future()
    begun(wrong(future))
    begun(wrong(a_turn()))
    assert said == [
        "cannot await Future in an inline task: await an InlineEvent",
        "cannot await NoneType in an inline task: await an InlineEvent",
    ]


async def test_a_task_may_wait_for_a_signal_too() -> None:
    told, signal = Told(), InlineEvent()
    task = asyncio.get_running_loop().create_task(told.waits("a", signal))
    await a_turn()
    signal.set()
    await task
    assert told.lines == ["a begins", "a had 0", "a ends"]


async def test_a_pause_ends_with_its_timer() -> None:
    over = asyncio.Event()

    async def pauses() -> None:
        await inline_sleep(0.0)
        over.set()

    begun(pauses())
    await over.wait()
