"""Watches how long an event loop stalls, on what, and how much memory the process has."""

import asyncio
import gc
import os
import resource
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Final, NamedTuple

from isochrone.service.event_loop_lag import call_location

TICK_S: Final = 0.002
SAMPLE_S: Final = 0.003
SAMPLED_AFTER_S: Final = 0.008
"""A tick that takes longer is sampled."""


class Stall(NamedTuple):
    """A stall in ms, and of it: the thread's CPU time, its wait for a processor, and collections.

    What is left is waiting for another thread that holds the interpreter's lock, or for the kernel.
    """

    ms: float = 0.0
    cpu_ms: float = 0.0
    queued_ms: float = 0.0
    gc_ms: float = 0.0


class BusyStall(NamedTuple):
    """The CPU time of the event loop between two ticks in ms, that of collections within it, and
    the code location that was sampled most meanwhile."""

    cpu_ms: float = 0.0
    gc_ms: float = 0.0
    location: str = ""


class StallWatch:
    """Records the longest stall of the event loop since the last reading.

    The CPU time of the loop's thread between two ticks is caused by the process itself; the rest is
    waiting for a processor or for another thread.
    """

    def __init__(self) -> None:
        self._longest = Stall()
        self._busiest = BusyStall()
        self._gc_s = self._gc_began_s = 0.0
        self._began_s = float("inf")
        self._seen: Counter[str] = Counter()
        self._ended = threading.Event()

    async def run(self) -> None:
        """Watch until cancelled."""
        gc.callbacks.append(self._note_collection)
        schedstat = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        arguments = (threading.get_ident(),)
        threading.Thread(target=self._sample, args=arguments, daemon=True).start()
        try:
            while True:
                began = time.monotonic(), time.thread_time(), _queued_s(schedstat), self._gc_s
                self._began_s = began[0]
                await asyncio.sleep(TICK_S)
                self._began_s = float("inf")
                ended = time.monotonic(), time.thread_time(), _queued_s(schedstat), self._gc_s
                took = [1000 * (end - start) for start, end in zip(began, ended, strict=True)]
                stall = Stall(took[0] - 1000 * TICK_S, *took[1:])
                self._longest = max(self._longest, stall)
                seen, self._seen = self._seen, Counter()
                if stall.cpu_ms > self._busiest.cpu_ms:
                    location = seen.most_common(1)[0][0] if seen else ""
                    self._busiest = BusyStall(stall.cpu_ms, stall.gc_ms, location)
        finally:
            self._ended.set()
            os.close(schedstat)
            gc.callbacks.remove(self._note_collection)

    def _sample(self, loop_thread: int) -> None:
        """Note in a thread what the event loop is in the middle of, while it stalls."""
        while not self._ended.wait(SAMPLE_S):
            if time.monotonic() - self._began_s > SAMPLED_AFTER_S:
                frame = sys._current_frames().get(loop_thread)
                if frame is not None:
                    self._seen[call_location(frame)] += 1
                del frame

    def take(self) -> Stall:
        """Return the longest stall since the last call."""
        longest, self._longest = self._longest, Stall()
        return longest

    def take_ms(self) -> float:
        """Return the longest stall in ms since the last call."""
        return self.take().ms

    def take_busiest(self) -> "BusyStall":
        """Return the stall with the most CPU time since the last call."""
        busiest, self._busiest = self._busiest, BusyStall()
        return busiest

    def _note_collection(self, phase: str, info: object) -> None:
        if phase == "start":
            self._gc_began_s = time.thread_time()
        else:
            self._gc_s += time.thread_time() - self._gc_began_s


def _queued_s(schedstat: int) -> float:
    """Return for how long the thread has waited for a processor."""
    return int(os.pread(schedstat, 100, 0).split()[1]) / 1e9


def resident_mib() -> float:
    """Return this process's resident memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def peak_mib() -> float:
    """Return the most memory that this process ever had; getrusage includes its parent's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024
