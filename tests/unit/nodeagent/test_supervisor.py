"""A replica's life as its task lives it: ends and faults wherever they can come."""

import asyncio
import random
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

from isochrone.wire.assignment import Tombstone
from isochrone.wire.engine import EngineStats
from isochrone.wire.ids import Generation, ReplicaId
from isochrone.wire.report import ReplicaState
from nodeagent import supervisor as module
from nodeagent.config import NodeConfig
from nodeagent.drivers.driver import UnknownOption
from nodeagent.host.download import ArtifactError
from nodeagent.supervisor import ManagedReplica, Supervisor
from tests.builders import a_spec

SPEC = a_spec("r1")
END = Tombstone(
    replica_id=ReplicaId("r1"), generation=Generation(2), reason="test", drain_timeout_s=0.0
)
SURVIVOR: Any = object()
WARM_STATS = EngineStats(steps_total=1)


class FakeArtifacts:
    """Weights that are here at once, or not."""

    def __init__(self) -> None:
        self.errors: list[Exception] = []
        self.asked = 0

    async def ensure(self, artifact: object, pinned: Collection[str], progress: object) -> Path:
        self.asked += 1
        if self.errors:
            raise self.errors.pop()
        return Path("weights")


class FakeEngine:
    """An engine that is ready at once and does what it is told."""

    log = Path("r1")

    def __init__(self) -> None:
        self.exited = asyncio.Event()
        self.may_stop = asyncio.Event()
        self.may_stop.set()
        self.stopping = asyncio.Event()
        self.stopped = self.released = False
        self.asked = 0
        self.answers: Callable[[], EngineStats | None] = lambda: WARM_STATS

    async def is_ready(self) -> bool:
        return True

    async def stats(self) -> EngineStats | None:
        return self.answers()

    async def canary(self, kind: str) -> bool:
        self.asked += 1
        return True

    async def stop(self, *, kill: bool = False) -> None:
        self.stopping.set()
        await self.may_stop.wait()
        self.stopped = True

    async def release(self) -> None:
        self.released = True


class FakeEngines:
    """Starts engines that were laid out beforehand, then plain ones."""

    def __init__(self) -> None:
        self.started: list[FakeEngine] = []
        self.error: Exception | None = None

    async def start(self, spec: object, path: Path) -> FakeEngine:
        if self.error is not None:
            raise self.error
        self.started.append(FakeEngine())
        return self.started[-1]

    def adopt(self, survivor: object) -> FakeEngine:
        self.started.append(FakeEngine())
        return self.started[-1]


class House:
    """A supervisor between fakes, and what it told of its changes."""

    def __init__(self) -> None:
        self.artifacts = FakeArtifacts()
        self.engines = FakeEngines()
        self.changed = asyncio.Event()
        self.now_s = 0.0
        given: Any = {"artifacts": self.artifacts, "engines": self.engines}
        self.supervisor = Supervisor(
            config=NodeConfig(name="n1", schedulers=("x",), state=Path("x"), address="x"),
            clock=lambda: self.now_s,
            chance=random.Random(1),
            on_change=self.changed.set,
            **given,
        )

    @property
    def replica(self) -> ManagedReplica:
        return self.supervisor.replicas[SPEC.replica_id]

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not holds():
                self.changed.clear()
                await self.changed.wait()

    async def warm(self, engines: int = 1) -> None:
        await self.until(
            lambda: self.replica.state is ReplicaState.WARM and len(self.engines.started) == engines
        )


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch) -> House:
    monkeypatch.setattr(module, "LOOK_INTERVAL_S", 0.0)
    monkeypatch.setattr(module, "last_line", lambda log: "the last line")
    monkeypatch.setattr(module, "retry_delay_s", lambda *_: 0.0)
    return House()


def after_turns(turns: int, then: Callable[[], None]) -> None:
    """Call `then` when the event loop has turned so often."""
    loop = asyncio.get_running_loop()
    if turns:
        loop.call_soon(after_turns, turns - 1, then)
    else:
        then()


@pytest.mark.parametrize("error", [None, ArtifactError("cannot fetch")], ids=["whole", "failed"])
@pytest.mark.parametrize("turns", range(16))
async def test_an_end_may_be_ordered_at_any_moment(
    house: House, turns: int, error: Exception | None
) -> None:
    house.artifacts.errors = [error] if error else []
    house.supervisor.begin(SPEC)
    after_turns(turns, lambda: house.supervisor.end(END))
    await house.until(lambda: house.replica.state is ReplicaState.STOPPED)
    assert all(engine.stopped for engine in house.engines.started)


@pytest.mark.parametrize("turns", range(8))
async def test_the_end_of_one_that_was_left_may_be_ordered_at_any_moment(
    house: House, turns: int
) -> None:
    house.supervisor.begin(SPEC, SURVIVOR)
    after_turns(turns, lambda: house.supervisor.end(END))
    await house.until(lambda: house.replica.state is ReplicaState.STOPPED)
    assert [engine.stopped for engine in house.engines.started] == [True]


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("turns", range(8))
async def test_an_agent_may_leave_one_that_was_left_at_any_moment(
    house: House, turns: int, keeps: bool
) -> None:
    house.supervisor.begin(SPEC, SURVIVOR)
    turned = asyncio.Event()
    after_turns(turns, turned.set)
    if turns:
        await turned.wait()
    await house.supervisor.leave(keep_engines=keeps)
    assert [(one.stopped, one.released) for one in house.engines.started] == [(not keeps, keeps)]


@pytest.mark.parametrize("error", [ValueError("Invalid IPv6 URL"), ArtifactError("cannot fetch")])
async def test_a_fetch_that_fails_however_is_tried_again(house: House, error: Exception) -> None:
    house.artifacts.errors = [error]
    house.supervisor.begin(SPEC)
    await house.warm()
    assert house.artifacts.asked == 2
    assert len(house.replica.breaks) == 1


async def test_a_fault_of_ours_while_watching_costs_the_engine_alone(house: House) -> None:
    house.supervisor.begin(SPEC)
    await house.warm()
    (first,) = house.engines.started

    def fails() -> EngineStats:
        raise OverflowError("cannot convert float infinity to integer")

    first.answers = fails
    await house.warm(engines=2)
    assert first.stopped
    assert len(house.replica.breaks) == 1


async def test_an_option_that_no_try_will_make_known_is_given_up_at_once(house: House) -> None:
    house.engines.error = UnknownOption("cannot start vllm: unknown options x; it has none")
    house.supervisor.begin(SPEC)
    await house.until(lambda: house.replica.state is ReplicaState.FAILED)
    report = house.replica.report()
    assert (report.reason, report.restarts) == (str(house.engines.error), 1)
    assert house.artifacts.asked == 1
    house.supervisor.end(END)
    await house.until(lambda: house.replica.state is ReplicaState.STOPPED)


async def test_an_engine_that_broke_is_not_warm_while_it_is_ended(house: House) -> None:
    house.supervisor.begin(SPEC)
    await house.warm()
    (first,) = house.engines.started
    first.may_stop.clear()
    first.exited.set()
    await first.stopping.wait()
    assert house.replica.state is ReplicaState.WANTED
    assert house.replica.reason == "the engine ended: the last line"
    first.may_stop.set()
    await house.warm(engines=2)


async def test_one_that_is_left_to_the_next_life_is_let_go_and_not_stopped(house: House) -> None:
    house.supervisor.begin(SPEC)
    await house.warm()
    (engine,) = house.engines.started

    async def release() -> None:
        # What watches it must not take it for broken while it is let go.
        engine.exited.set()
        turned = asyncio.Event()
        after_turns(20, turned.set)
        await turned.wait()
        engine.released = True

    engine.release = release  # type: ignore[method-assign]
    await house.supervisor.leave(keep_engines=True)
    assert (engine.released, engine.stopped) == (True, False)


@pytest.mark.parametrize("gives", [True, False])
async def test_an_engine_is_asked_for_its_first_token_before_it_is_warm(
    house: House, monkeypatch: pytest.MonkeyPatch, gives: bool
) -> None:
    asked_in: list[ReplicaState] = []

    async def canary(self: FakeEngine, kind: str) -> bool:
        asked_in.append(house.replica.state)
        return gives

    monkeypatch.setattr(FakeEngine, "canary", canary)
    house.supervisor.begin(SPEC)
    await house.warm()
    assert asked_in == [ReplicaState.LOADING]


async def test_an_adopted_engine_has_given_its_first_token_long_ago(house: House) -> None:
    survivor: Any = object()
    house.supervisor.begin(SPEC, survivor)
    await house.warm()
    (engine,) = house.engines.started
    assert engine.asked == 0


async def test_an_engine_that_answers_nothing_does_not_hold_up_its_end(house: House) -> None:
    house.supervisor.begin(SPEC)
    await house.warm()
    (engine,) = house.engines.started
    asked = asyncio.Event()

    async def canary(kind: str) -> bool:
        asked.set()
        return await asyncio.Event().wait()

    engine.canary = canary  # type: ignore[method-assign]
    house.now_s += 11.0
    await asked.wait()
    house.supervisor.end(END)
    await house.until(lambda: house.replica.state is ReplicaState.STOPPED)
    assert engine.stopped


async def test_a_leave_ends_an_engine_whose_end_had_begun(house: House) -> None:
    house.supervisor.begin(SPEC)
    await house.warm()
    (engine,) = house.engines.started
    engine.may_stop.clear()
    house.supervisor.end(END)
    await engine.stopping.wait()
    after_turns(3, engine.may_stop.set)
    await house.supervisor.leave(keep_engines=False)
    assert engine.stopped


async def test_the_log_of_an_engine_that_is_never_idle_is_trimmed(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    trimmed: list[Path] = []
    monkeypatch.setattr(module, "trim_log", trimmed.append)
    house.supervisor.begin(SPEC)
    await house.warm()
    assert house.replica.in_flight.take(1, 1) is not None
    looked = asyncio.Event()

    def looks() -> EngineStats:
        if trimmed:
            looked.set()
        return EngineStats(steps_total=int(house.now_s))

    house.engines.started[0].answers = looks
    house.now_s += 11.0
    async with asyncio.timeout(30):
        await looked.wait()
    assert set(trimmed) == {Path("r1")}
    await house.supervisor.leave(keep_engines=False)
