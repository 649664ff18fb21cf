import asyncio
import time

from isochrone.service.event_loop_lag import LagMonitor, LoopStall


async def test_the_task_that_blocks_the_event_loop_is_named() -> None:
    beats: list[float] = []
    stalls: list[LoopStall] = []
    watch = asyncio.create_task(LagMonitor(beats.append, stalls.append).run())

    async def hold() -> None:
        time.sleep(0.5)  # noqa: ASYNC251 - the fault to be detected

    async with asyncio.timeout(30):
        while not beats:
            await asyncio.sleep(0.01)
        while not any(stall.task == "blocking task" for stall in stalls):
            await asyncio.create_task(hold(), name="blocking task")
            await asyncio.sleep(0.2)
    stall = next(stall for stall in stalls if stall.task == "blocking task")
    assert stall.late_s > 0.3
    assert "hold" in stall.location
    assert max(beats) >= stall.late_s
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)
