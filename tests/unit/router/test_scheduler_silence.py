"""The watch over requests to a scheduler that hangs."""

import asyncio

import pytest

from router import scheduler_silence
from router.scheduler_silence import SilenceWatch

WAIT_S = 10.0


@pytest.fixture(autouse=True)
def without_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_silence, "LOOK_INTERVAL_S", 0.0)
    monkeypatch.setattr(scheduler_silence, "PATIENCE_S", 0.0)


async def test_a_request_that_is_slow_to_end_does_not_stop_the_watch() -> None:
    """Its timeout has expired, and cannot be set again."""
    looks = asyncio.Semaphore(0)
    ending, may_end = asyncio.Event(), asyncio.Event()

    async def is_answering(*_: object) -> bool:
        looks.release()
        return False

    watch = SilenceWatch(is_answering)

    async def end_slowly() -> None:
        async with watch.watched("http://scheduler"):
            try:
                await asyncio.Event().wait()
            finally:
                ending.set()
                await may_end.wait()

    async def hang() -> None:
        async with watch.watched("http://scheduler"):
            await asyncio.Event().wait()

    async with asyncio.timeout(WAIT_S):
        slow = asyncio.create_task(end_slowly())
        await ending.wait()
        for _ in range(3):
            await looks.acquire()
    hanging = asyncio.create_task(hang())
    await asyncio.wait({hanging}, timeout=WAIT_S)
    assert hanging.done(), "nothing is watched any more"
    may_end.set()
    results = await asyncio.gather(slow, hanging, return_exceptions=True)
    assert [type(result) for result in results] == [TimeoutError, TimeoutError]
    await watch.close()


async def test_a_watch_that_failed_starts_again_with_the_next_request() -> None:
    has_failed = asyncio.Event()

    async def is_answering(*_: object) -> bool:
        if not has_failed.is_set():
            has_failed.set()
            raise OSError("no free descriptor")
        return False

    watch = SilenceWatch(is_answering)

    async def hang() -> None:
        async with watch.watched("http://scheduler"):
            await asyncio.Event().wait()

    first = asyncio.create_task(hang())
    async with asyncio.timeout(WAIT_S):
        await has_failed.wait()
        assert watch._task is not None
        await asyncio.wait({watch._task})
    second = asyncio.create_task(hang())
    await asyncio.wait({first, second}, timeout=WAIT_S)
    assert first.done() and second.done()
    await asyncio.gather(first, second, return_exceptions=True)
    await watch.close()
