import asyncio
import time

from isochrone.service.event_loop_lag import LagMonitor, LoopStall


async def test_what_holds_the_loop_up_is_named() -> None:
    beats: list[float] = []
    helds: list[LoopStall] = []
    watch = asyncio.create_task(LagMonitor(beats.append, helds.append).run())

    async def hold() -> None:
        time.sleep(0.5)  # noqa: ASYNC251 - the very fault that is to be seen

    async with asyncio.timeout(30):
        while not beats:
            await asyncio.sleep(0.01)
        while not any(held.task == "heavy duty" for held in helds):
            await asyncio.create_task(hold(), name="heavy duty")
            await asyncio.sleep(0.2)
    held = next(held for held in helds if held.task == "heavy duty")
    assert held.late_s > 0.3
    assert "hold" in held.location
    assert max(beats) >= held.late_s
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)
