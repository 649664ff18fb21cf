"""One history: a fleet, the faults of one seed, and the invariants."""

import asyncio
import gc
import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from typing import Final, NamedTuple

from tests.simulation.event_loop import CURRENT, SimLoop, Stuck
from tests.simulation.faults import Nemesis
from tests.simulation.invariants import SETTLE_S, Watch, unsettled
from tests.simulation.world import World

STEP_S: Final = 0.5
"""How often it is looked whether the history is over, or has found something."""

WARM_UP_S: Final = 15.0
KEYS: Final = 3
"""The keys that there are at the beginning."""


class History(NamedTuple):
    """What came of one seed."""

    seed: int
    problems: tuple[str, ...]
    log: tuple[str, ...]
    simulated_s: float

    def __str__(self) -> str:
        lines = [f"seed {self.seed}: {self.simulated_s:.0f} s simulated", *self.log]
        return "\n".join([*lines, *(f"PROBLEM: {problem}" for problem in self.problems)])


def run_history(
    seed: int, *, only: Collection[str] = (), echo: bool = False, keys: int = KEYS
) -> History:
    """Run the history of a seed, with `only` these faults if any are given.

    Everything must be simulated (`patches.simulated`).
    """
    return copy_context().run(_run, seed, only, echo, keys)


def _run(seed: int, only: Collection[str], echo: bool, keys: int) -> History:
    loop = SimLoop()
    asyncio.set_event_loop(loop)
    world = World(loop, seed, keys)
    nemesis = Nemesis(world, seed, only)
    watch = Watch(world, nemesis)
    loop.on_rest = watch.check
    problems: list[str] = []
    with _logged_to(watch, world, echo=echo):
        try:
            problems = loop.run_until_complete(_play(world, nemesis, watch))
        except Stuck as error:
            problems = [str(error)]
        finally:
            _end(loop, world)
    return History(seed, tuple(problems), tuple(world.log), loop.now_s)


async def _play(world: World, nemesis: Nemesis, watch: Watch) -> list[str]:
    world.start()
    faults = asyncio.create_task(_strike(nemesis))
    try:
        while not nemesis.is_over:
            await asyncio.sleep(STEP_S)
            if faults.done() and (error := faults.exception()) is not None:
                raise error
            if watch.problems:
                return watch.problems
        until = world.loop.now_s + SETTLE_S
        while missing := unsettled(world, nemesis):
            await asyncio.sleep(STEP_S)
            if watch.problems:
                return watch.problems
            if world.loop.now_s > until:
                return [f"not within {SETTLE_S:.0f} s: {text}" for text in missing]
        return []
    finally:
        faults.cancel()
        await asyncio.gather(faults, return_exceptions=True)


async def _strike(nemesis: Nemesis) -> None:
    await asyncio.sleep(WARM_UP_S * nemesis.rng.random())
    await nemesis.run()


@contextmanager
def _logged_to(watch: Watch, world: World, *, echo: bool) -> Iterator[None]:
    root = logging.getLogger()
    before, propagated = root.level, root.handlers[:]
    root.handlers = [watch]
    root.setLevel(logging.INFO if echo else logging.ERROR)
    if echo:
        root.addHandler(_Echo(world))
    try:
        yield
    finally:
        root.handlers = propagated
        root.setLevel(before)


class _Echo(logging.Handler):
    """Writes the services' logs into the history."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        process = CURRENT.get()
        name = process.name if process is not None else "-"
        fields = getattr(record, "fields", {})
        self._world.note(f"    {name}: {record.getMessage()} {fields}")


def _end(loop: SimLoop, world: World) -> None:
    """Cancel everything and close the loop."""
    for part in world.parts():
        part.process.crash()
    loop.turns = 0
    # Tasks that are cancelled may begin others, such as the end of an engine.
    while tasks := asyncio.all_tasks(loop):
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    loop.close()
    asyncio.set_event_loop(None)
    gc.collect(0)
