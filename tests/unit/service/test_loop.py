"""A loop runs its job when nudged, counts failures, and never loses a nudge."""

import asyncio
from contextlib import suppress

from isochrone.service.loop import Loop

NEVER_S = 3600.0


async def run_briefly(loop: Loop, turns: int) -> None:
    task = asyncio.create_task(loop.run())
    async with asyncio.timeout(30):
        await loop.wait_turns(turns)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def test_a_nudge_during_a_turn_causes_another_turn() -> None:
    counts: list[int] = []

    async def once() -> int:
        counts.append(len(counts))
        if len(counts) == 1:
            loop.nudge()
        return len(counts)

    loop = Loop("test", once, NEVER_S)
    await run_briefly(loop, 2)
    assert counts == [0, 1]
    assert loop.last_result == 2


async def test_a_failed_turn_is_counted_and_the_next_one_runs() -> None:
    async def once() -> None:
        loop.nudge()
        if loop.turns == 0:
            raise ValueError("first turn")

    loop = Loop("test", once, NEVER_S)
    await run_briefly(loop, 2)
    assert loop.failures == 1
    assert "failures=1" in repr(loop)


async def test_a_cancelled_loop_ends_though_the_clean_up_of_its_turn_fails() -> None:
    begun = asyncio.Event()

    async def once() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            raise TimeoutError("cannot give the connection back")

    task = asyncio.create_task(Loop("test", once, NEVER_S).run())
    await begun.wait()
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=5.0)
    assert done
    assert task.cancelled()
