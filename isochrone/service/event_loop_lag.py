"""Measures how late an event loop runs its timers, and finds the task that blocked it.

A task in the loop sleeps for a fixed time again and again; a thread watches it. While a wake-up is
overdue, the thread samples which task the loop is running, and where. If the loop is running no
task, its own work does not block it: it waits for a processor, for a thread of this process that
holds the interpreter lock, or for the garbage collector.
"""

import asyncio
import gc
import sys
import threading
from collections import Counter
from collections.abc import Callable
from time import monotonic, process_time
from types import FrameType
from typing import Any, Final, NamedTuple, NoReturn

TICK_S: Final = 0.1
STALL_S: Final = 0.1
SAMPLE_S: Final = 0.02
STACK_DEPTH: Final = 4
NO_TASK: Final = "no task"


class LoopStall(NamedTuple):
    """One late wake-up, with the task and the code location that were sampled most meanwhile.

    `cpu_s` is the process's CPU time and `garbage_s` its time in the garbage collector meanwhile.
    """

    late_s: float
    cpu_s: float
    garbage_s: float
    task: str
    location: str


class LagMonitor:
    """Calls `on_tick` with the lateness of each wake-up, and `on_stall` for those of STALL_S."""

    def __init__(
        self, on_tick: Callable[[float], None], on_stall: Callable[[LoopStall], None]
    ) -> None:
        """Monitor the event loop that will run `run()`."""
        self._on_tick = on_tick
        self._on_stall = on_stall
        self._due_at = float("inf")
        self._samples: Counter[tuple[str, str]] = Counter()
        self._stopped = threading.Event()
        self._garbage_s = self._collecting_since = 0.0

    async def run(self) -> NoReturn:
        """Monitor until cancelled."""
        sampler = threading.Thread(
            target=self._sample,
            args=(asyncio.get_running_loop(), threading.get_ident()),
            name="lag",
            daemon=True,
        )
        sampler.start()
        gc.callbacks.append(self._note_collection)
        try:
            while True:
                cpu_before_s, garbage_before_s = process_time(), self._garbage_s
                self._due_at = monotonic() + TICK_S
                await asyncio.sleep(TICK_S)
                late_s = max(0.0, monotonic() - self._due_at)
                self._due_at = float("inf")
                self._on_tick(late_s)
                if late_s >= STALL_S:
                    samples, self._samples = self._samples, Counter()
                    task, location = samples.most_common(1)[0][0] if samples else (NO_TASK, "")
                    cpu_s = process_time() - cpu_before_s
                    garbage_s = self._garbage_s - garbage_before_s
                    self._on_stall(LoopStall(late_s, cpu_s, garbage_s, task, location))
        finally:
            gc.callbacks.remove(self._note_collection)
            self._stopped.set()
            await asyncio.to_thread(sampler.join, 1.0)

    def _note_collection(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._collecting_since = monotonic()
        else:
            self._garbage_s += monotonic() - self._collecting_since

    def _sample(self, loop: asyncio.AbstractEventLoop, thread_id: int) -> None:
        while not self._stopped.wait(SAMPLE_S):
            if monotonic() - self._due_at < SAMPLE_S:
                continue
            task = asyncio.current_task(loop)
            frame = sys._current_frames().get(thread_id)
            if frame is not None:
                self._samples[task_name(task), call_location(frame)] += 1
            del frame


def task_name(task: asyncio.Task[Any] | None) -> str:
    """Return a task's given name, else the name of its coroutine: one name for all tasks alike."""
    if task is None:
        return NO_TASK
    name = task.get_name()
    if not name.startswith("Task-"):
        return name
    return str(getattr(task.get_coro(), "__qualname__", "task"))


def call_location(frame: FrameType) -> str:
    """Return the innermost function and its callers, as `file:line function < file:line ...`."""
    locations: list[str] = []
    caller: FrameType | None = frame
    while caller is not None and len(locations) < STACK_DEPTH:
        code = caller.f_code
        file = code.co_filename.rpartition("/")[2]
        locations.append(f"{file}:{caller.f_lineno} {code.co_name}")
        caller = caller.f_back
    return " < ".join(locations)
