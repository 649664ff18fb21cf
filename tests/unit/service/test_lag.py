import asyncio
import sys

from isochrone.service.event_loop_lag import NO_TASK, call_location, task_name


async def named(name: str | None) -> str:
    async def something() -> str:
        return task_name(asyncio.current_task())

    return await asyncio.create_task(something(), name=name)


async def test_a_task_is_named_as_its_owner_named_it_else_for_what_it_runs() -> None:
    assert await named("publish") == "publish"
    assert (await named(None)).endswith("named.<locals>.something")
    assert task_name(None) == NO_TASK


def test_a_place_is_told_from_the_innermost_outwards() -> None:
    def inner() -> str:
        return call_location(sys._getframe())

    first, second, *_ = inner().split(" < ")
    assert first.startswith("test_lag.py:") and first.endswith(" inner")
    assert second.endswith(" test_a_place_is_told_from_the_innermost_outwards")
