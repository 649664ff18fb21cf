"""Runs blocking work in threads, to completion even if the caller is cancelled."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def run_to_completion(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `work` in a thread. A cancelled caller still waits until it has ended.

    A thread cannot be cancelled: left alone it could still write when the next writer begins.
    """
    return await wait_to_completion(asyncio.to_thread(work, *args, **kwargs))


def start_thread(name: str, work: Callable[[], T]) -> "asyncio.Future[T]":
    """Run `work` in a thread of its own: it may wait for long, which would fill a shared pool."""
    thread = ThreadPoolExecutor(1, name)
    running = asyncio.get_running_loop().run_in_executor(thread, work)
    # The thread ends with its work.
    thread.shutdown(wait=False)
    return running


def start_daemon_thread(name: str, work: Callable[[], T]) -> "asyncio.Future[T]":
    """Run `work` in a thread of its own that holds up no exit of the process: it may never end."""
    running: Future[T] = Future()
    running.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            running.set_exception(error)
        else:
            running.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return asyncio.wrap_future(running)


async def wait_to_completion(work: Awaitable[T]) -> T:
    """Wait until `work` has ended, then raise the cancellation that arrived meanwhile, if any."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        # Retrieved, so that asyncio does not log it as never retrieved; no caller wants it.
        task.exception()
        raise cancelled
    return task.result()
