"""Writing from an event loop: in a thread, and to the end whatever happens to who asked."""

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def to_its_end(write: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `write` in a thread. A cancelled caller waits for it too, and then goes.

    A thread cannot be cancelled: left alone it would still write while the next writer begins.
    """
    writing = asyncio.ensure_future(asyncio.to_thread(write, *args, **kwargs))
    try:
        return await asyncio.shield(writing)
    except asyncio.CancelledError:
        await asyncio.wait([writing])
        raise
