"""Calls that hang in threads for files: each tenant keeps a share, and nobody waits for ever."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest

from isochrone.wire.errors import ApiError, ErrorCode
from scheduler.state.files import file_threads
from scheduler.state.files.file_threads import THREADS_MAX, FileThreads

Task = asyncio.Task[bool]


@asynccontextmanager
async def hanging_calls(
    threads: FileThreads, holder: str, count: int
) -> AsyncIterator[tuple[list[Task], threading.Event]]:
    """Start calls of a tenant that hang until the event is set."""
    may_end = threading.Event()
    calls = [
        asyncio.create_task(threads.run(holder, lambda: may_end.wait(60))) for _ in range(count)
    ]
    await asyncio.wait(calls, timeout=0)
    try:
        yield calls, may_end
    finally:
        may_end.set()
        await asyncio.gather(*calls, return_exceptions=True)


async def test_hanging_calls_of_a_tenant_leave_threads_to_others() -> None:
    threads = FileThreads()
    async with asyncio.timeout(20), hanging_calls(threads, "a", 3 * THREADS_MAX):
        assert await threads.run("b", lambda: "b") == "b"
        async with hanging_calls(threads, "b", 3 * THREADS_MAX):
            assert await threads.run("c", lambda: "c") == "c"


async def test_a_call_waits_for_a_thread_for_a_limited_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(file_threads, "TURN_TIMEOUT_S", 0.01)
    threads = FileThreads()
    async with asyncio.timeout(20), hanging_calls(threads, "a", THREADS_MAX):
        with pytest.raises(ApiError, match="does not answer") as refused:
            await threads.run("a", lambda: None)
        assert refused.value.code is ErrorCode.UNAVAILABLE
        assert refused.value.retry_after_s


async def test_calls_have_their_turn_in_order_and_give_back_their_threads() -> None:
    threads, order = FileThreads(), list[int]()
    async with asyncio.timeout(20):
        async with hanging_calls(threads, "a", THREADS_MAX // 2) as (_, may_end):
            waiting = [
                asyncio.create_task(threads.run("a", partial(order.append, number)))
                for number in range(3)
            ]
            await asyncio.wait(waiting, timeout=0)
            assert not order
            may_end.set()
        await asyncio.wait(waiting)
        assert order == [0, 1, 2]
        # All threads are free again.
        async with hanging_calls(threads, "a", THREADS_MAX // 2 - 1):
            assert await threads.run("a", lambda: "free") == "free"


async def test_a_cancelled_call_keeps_its_thread_until_it_ends() -> None:
    threads = FileThreads()
    async with asyncio.timeout(20):
        async with hanging_calls(threads, "a", THREADS_MAX // 2) as (calls, _):
            waiting = asyncio.create_task(threads.run("a", lambda: True))
            for call in (*calls, waiting):
                call.cancel()
            await asyncio.wait([*calls, waiting])
            late = asyncio.create_task(threads.run("a", lambda: True))
            await asyncio.wait([late], timeout=0)
            assert not late.done()
        assert await late


async def test_a_call_that_hangs_does_not_hold_up_the_end_of_the_process() -> None:
    """The interpreter waits at its exit for threads that are no daemons."""
    assert await FileThreads().run("a", lambda: threading.current_thread().daemon)


async def test_a_call_for_which_the_system_has_no_thread_gives_back_its_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    threads = FileThreads()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for _ in range(THREADS_MAX + 1):
            with pytest.raises(ApiError) as refused:
                await threads.run("a", lambda: None)
            assert refused.value.code is ErrorCode.UNAVAILABLE
    async with asyncio.timeout(20):
        assert await threads.run("a", lambda: "free") == "free"
