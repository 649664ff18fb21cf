import asyncio
import sys

from isochrone.service.event_loop_lag import NO_TASK, call_location, task_name


async def named(name: str | None) -> str:
    async def something() -> str:
        return task_name(asyncio.current_task())

    return await asyncio.create_task(something(), name=name)


async def test_a_task_is_identified_by_its_given_name_else_by_its_coroutine() -> None:
    assert await named("publish") == "publish"
    assert (await named(None)).endswith("named.<locals>.something")
    assert task_name(None) == NO_TASK


def test_a_call_location_begins_with_the_innermost_function() -> None:
    def inner() -> str:
        return call_location(sys._getframe())

    first, second, *_ = inner().split(" < ")
    assert first.startswith("test_lag.py:") and first.endswith(" inner")
    assert second.endswith(" test_a_call_location_begins_with_the_innermost_function")
