"""`python -m tests.chaos.soak`: faults drawn from a seed strike a live fleet for as long as asked.

In rounds: while numbered streams run, faults strike, several at once; then what was stopped is
started again, the fleet must become whole by itself, and every invariant must hold. The first
failure ends the soak, with the seed, the faults and the logs kept in `.state/soak`.
"""

import argparse
import asyncio
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import asyncpg
import psutil

from tests.chaos.invariants import invariants
from tests.chaos.starvation import all_connections_taken, starved_of_cpu, without_descriptors
from tests.system.harness import CITIES, ROOT, Fleet, a_fleet, until
from tests.system.load import Load, under_load, wait_ended

ROUND_S: Final = 45.0
BETWEEN_S: Final = (1.0, 8.0)
WHOLE_S: Final = 180.0
"""How long a fleet may take to be whole: more than a new term's grace."""

KEPT: Final = ROOT / ".state" / "soak"


class Soak:
    """A fleet, its faults and what has happened to it."""

    def __init__(self, fleet: Fleet, seed: int) -> None:
        self.fleet = fleet
        self.rng = random.Random(seed)
        self.history: list[str] = []
        self._busy: set[str] = set()

    def note(self, text: str) -> None:
        """Add a line to the history."""
        line = f"{datetime.now():%H:%M:%S} {text}"
        self.history.append(line)
        print(line, flush=True)

    async def run_round(self) -> None:
        """Let faults strike under load, then expect a whole fleet and every invariant."""
        fleet = self.fleet
        fleet.note_baseline()
        async with under_load(fleet, list(CITIES), streams=6) as load:
            await wait_ended(load, 6)
            await self._strike_for(ROUND_S)
            await self._wait_whole(load)
        ends = {how: load.count(how) for how in sorted({ended.how for ended in load.ended})}
        self.note(f"whole again; streams: {ends}")
        await invariants(fleet, load)

    async def _strike_for(self, round_s: float) -> None:
        until_s = time.monotonic() + round_s
        async with asyncio.TaskGroup() as faults:
            while time.monotonic() < until_s:
                target, fault = self._draw()
                if target not in self._busy:
                    self._busy.add(target)
                    faults.create_task(self._strike(target, fault))
                await asyncio.sleep(self.rng.uniform(*BETWEEN_S))

    async def _strike(self, target: str, fault: Callable[[str], Coroutine[Any, Any, None]]) -> None:
        try:
            await fault(target)
        finally:
            self._busy.discard(target)

    def _draw(self) -> tuple[str, Callable[[str], Coroutine[Any, Any, None]]]:
        pop = self.rng.choice(list(CITIES))
        scheduler = self.rng.choice(("scheduler-a", "scheduler-b"))
        return self.rng.choice(
            (
                (f"engine-{pop}", self._kill_engine),
                (f"engine-{pop}", self._pause_engine),
                (f"node-{pop}", self._kill_node),
                (f"node-{pop}", self._pause),
                (f"router-{pop}", self._kill_router),
                (f"router-{pop}", self._pause),
                (scheduler, self._kill_scheduler),
                (scheduler, self._pause),
                ("postgres", self._kill_postgres),
                ("postgres", self._crowd_postgres),
                (f"engine-{pop}", self._starve_engine),
                (f"node-{pop}", self._starve),
                (f"router-{pop}", self._starve),
                (scheduler, self._starve),
                (f"node-{pop}", self._take_descriptors),
                (f"router-{pop}", self._take_descriptors),
                (scheduler, self._take_descriptors),
            )
        )

    async def _wait_whole(self, load: Load) -> None:
        fleet = self.fleet

        async def is_whole() -> bool:
            with suppress(Exception):
                of = "a" if await fleet.acts("a") else "b"
                rows = (await fleet.ask("GET", "/v1/routers", of=of))["data"]
                status = await fleet.ask("GET", "/v1/status", of=of)
                follow = all(row["generation"] >= status["route_generation"] for row in rows)
                is_warm = await fleet.is_warm(2, list(CITIES), of=of)
                return follow and is_warm and fleet.engine_processes() == 2
            return False

        await until("the fleet is whole", is_whole, WHOLE_S)
        await wait_ended(load, 12, WHOLE_S)

    async def _kill_engine(self, target: str) -> None:
        pid = self.fleet.engine_pids().get(target.replace("engine", "node"))
        if pid is not None:
            self.note(f"kill of {target}")
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    async def _pause_engine(self, target: str) -> None:
        pid = self.fleet.engine_pids().get(target.replace("engine", "node"))
        if pid is not None:
            await self._pause_pid(target, pid)

    async def _pause(self, target: str) -> None:
        await self._pause_pid(target, self.fleet.processes.pid(target))

    async def _pause_pid(self, target: str, pid: int) -> None:
        rest_s = self.rng.choice((1.0, 4.0, 12.0, 25.0))
        self.note(f"pause of {target} for {rest_s:g} s")
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            try:
                await asyncio.sleep(rest_s)
            finally:
                os.kill(pid, signal.SIGCONT)

    async def _starve_engine(self, target: str) -> None:
        pid = self.fleet.engine_pids().get(target.replace("engine", "node"))
        if pid is not None:
            await self._starve_pid(target, pid)

    async def _starve(self, target: str) -> None:
        await self._starve_pid(target, self.fleet.processes.pid(target))

    async def _starve_pid(self, target: str, pid: int) -> None:
        rest_s = self.rng.choice((4.0, 12.0))
        self.note(f"a tenth of a processor for {target} for {rest_s:g} s")
        with suppress(ProcessLookupError):
            async with starved_of_cpu(pid):
                await asyncio.sleep(rest_s)

    async def _take_descriptors(self, target: str) -> None:
        port = self.fleet.ports[target.replace("scheduler", "control")]
        rest_s = self.rng.choice((1.0, 5.0))
        self.note(f"no descriptors for {target} for {rest_s:g} s")
        with suppress(OSError, psutil.Error):
            async with without_descriptors(self.fleet.processes.pid(target), port):
                await asyncio.sleep(rest_s)

    async def _crowd_postgres(self, target: str) -> None:
        self.note("strangers take all connections of postgres")
        with suppress(OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError):
            async with all_connections_taken(self.fleet.dsn()):
                await asyncio.sleep(5.0)

    async def _kill_node(self, target: str) -> None:
        await self._kill(target)
        await self.fleet.start_node(target.removeprefix("node-"))

    async def _kill_router(self, target: str) -> None:
        await self._kill(target)
        await self.fleet.start_router(target.removeprefix("router-"))

    async def _kill_scheduler(self, target: str) -> None:
        await self._kill(target)
        # Without a database it ends at once, and its supervisor would start it again.
        while "postgres" in self._busy:
            await asyncio.sleep(0.2)
        self._busy.add("postgres")
        try:
            await self.fleet.start_scheduler(target.removeprefix("scheduler-"))
        finally:
            self._busy.discard("postgres")

    async def _kill_postgres(self, target: str) -> None:
        await self._kill(target)
        await self.fleet.start_postgres()

    async def _kill(self, target: str) -> None:
        rest_s = self.rng.choice((0.0, 1.0, 5.0, 15.0))
        self.note(f"kill of {target} for {rest_s:g} s")
        await self.fleet.kill(target)
        await asyncio.sleep(rest_s)

    def keep(self, seed: int, error: BaseException) -> Path:
        """Keep the history and the logs of a failed soak; return their folder."""
        folder = KEPT / f"seed-{seed}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        lines = [f"seed {seed}", *self.history, f"{type(error).__name__}: {error}"]
        (folder / "history.txt").write_text("\n".join(lines) + "\n")
        shutil.copytree(self.fleet.folder / "logs", folder / "logs")
        return folder


async def soak(minutes: float, seed: int) -> int:
    """Run rounds for so many minutes; return an exit code."""
    print(f"soak of {minutes:g} minutes with seed {seed}", flush=True)
    until_s = time.monotonic() + 60 * minutes
    rounds = 0
    async with a_fleet() as fleet:
        await fleet.start_scheduler("b")
        await fleet.deploy(replicas=2)
        running = Soak(fleet, seed)
        while time.monotonic() < until_s:
            try:
                await running.run_round()
            except (AssertionError, ExceptionGroup) as error:
                running.note(f"FAILED: {error}")
                print(f"kept in {running.keep(seed, error)}", flush=True)
                return 1
            rounds += 1
    print(f"seed {seed}: {rounds} rounds, every invariant held", flush=True)
    return 0


def main() -> int:
    """Soak as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    arguments = parser.parse_args()
    return asyncio.run(soak(arguments.minutes, arguments.seed))


if __name__ == "__main__":
    sys.exit(main())
