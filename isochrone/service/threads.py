"""Work that blocks, from an event loop: in a thread, and to its end whoever goes meanwhile."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def run_to_completion(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `work` in a thread. A caller that is cancelled, however often, waits, and then goes.

    A thread cannot be cancelled: left alone it would still write while the next writer begins.
    """
    return await wait_to_completion(asyncio.to_thread(work, *args, **kwargs))


async def wait_to_completion(work: Awaitable[T]) -> T:
    """Wait until `work` has ended. A caller that is cancelled, however often, then goes."""
    working = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not working.done():
        try:
            await asyncio.wait((working,))
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        # Looked at, lest it be logged as never looked at: there is nobody to tell it.
        working.exception()
        raise cancelled
    return working.result()
