"""What holds an event loop up: how late it turns, and at what it was meanwhile.

A task of the loop beats; a thread looks on. While a beat is overdue it notes again and again which
task the loop is in, and where. A loop that is in none meanwhile is not held by its own work: it
waits for a processor, for a thread of this process that computes, or for garbage to be collected.
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

BEAT_S: Final = 0.1
HELD_S: Final = 0.1
LOOK_S: Final = 0.02
NO_TASK: Final = "no task"


class LoopStall(NamedTuple):
    """The loop came this much too late; `by` is the task it was in most, `at` the place.

    `cpu_s` is what the process computed meanwhile, `garbage_s` how long it collected garbage.
    """

    late_s: float
    cpu_s: float
    garbage_s: float
    task: str
    location: str


class LagMonitor:
    """Tells `on_beat` how late each beat is, and `on_held` what held one up."""

    def __init__(
        self, on_beat: Callable[[float], None], on_held: Callable[[LoopStall], None]
    ) -> None:
        """Watch the loop that will run `run()`."""
        self._on_beat = on_beat
        self._on_held = on_held
        self._due_at = float("inf")
        self._looks: Counter[tuple[str, str]] = Counter()
        self._ended = threading.Event()
        self._garbage_s = self._collecting_since = 0.0

    async def run(self) -> NoReturn:
        """Beat until cancelled."""
        looking = threading.Thread(
            target=self._look_on,
            args=(asyncio.get_running_loop(), threading.get_ident()),
            name="lag",
            daemon=True,
        )
        looking.start()
        gc.callbacks.append(self._collected)
        try:
            while True:
                cpu_before_s, garbage_before_s = process_time(), self._garbage_s
                self._due_at = monotonic() + BEAT_S
                await asyncio.sleep(BEAT_S)
                late_s = max(0.0, monotonic() - self._due_at)
                self._due_at = float("inf")
                self._on_beat(late_s)
                if late_s >= HELD_S:
                    looks, self._looks = self._looks, Counter()
                    by, at = looks.most_common(1)[0][0] if looks else (NO_TASK, "")
                    cpu_s = process_time() - cpu_before_s
                    garbage_s = self._garbage_s - garbage_before_s
                    self._on_held(LoopStall(late_s, cpu_s, garbage_s, by, at))
        finally:
            gc.callbacks.remove(self._collected)
            self._ended.set()
            await asyncio.to_thread(looking.join, 1.0)

    def _collected(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._collecting_since = monotonic()
        else:
            self._garbage_s += monotonic() - self._collecting_since

    def _look_on(self, loop: asyncio.AbstractEventLoop, thread_id: int) -> None:
        while not self._ended.wait(LOOK_S):
            if monotonic() - self._due_at < LOOK_S:
                continue
            task = asyncio.current_task(loop)
            frame = sys._current_frames().get(thread_id)
            if frame is not None:
                self._looks[task_name(task), call_location(frame)] += 1
            del frame


def task_name(task: asyncio.Task[Any] | None) -> str:
    """Return the name that a task was given, else that of what it runs: few, however many run."""
    if task is None:
        return NO_TASK
    name = task.get_name()
    if not name.startswith("Task-"):
        return name
    return str(getattr(task.get_coro(), "__qualname__", "task"))


def call_location(frame: FrameType) -> str:
    """Return the innermost function, and those that called it."""
    places: list[str] = []
    walked: FrameType | None = frame
    while walked is not None and len(places) < 4:
        code = walked.f_code
        places.append(f"{code.co_filename.rpartition('/')[2]}:{walked.f_lineno} {code.co_name}")
        walked = walked.f_back
    return " < ".join(places)
