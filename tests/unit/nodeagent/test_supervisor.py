"""The supervisor runs replicas: orders to end and faults at every point of a replica's life."""

import asyncio
import errno
import random
from collections.abc import Callable
from functools import partial
from math import isfinite
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from isochrone.wire.engines.engine import EngineStats
from isochrone.wire.ids import Generation, ReplicaId
from isochrone.wire.models.model import EngineSettings
from isochrone.wire.peers.assignment import Tombstone
from isochrone.wire.peers.report import ReplicaReport, ReplicaState
from nodeagent import app
from nodeagent import supervisor as module
from nodeagent.config import NodeConfig
from nodeagent.decide.replicas import backoff, start_lack
from nodeagent.drivers.driver import DeviceMemory, EngineCommand, UnknownOption
from nodeagent.host.artifacts.download import ArtifactError
from nodeagent.host.engines.engine_record import EngineRecord
from nodeagent.host.memory_peaks import MemoryPeaks
from nodeagent.managed_replica import ManagedReplica
from nodeagent.supervisor import Supervisor
from tests.builders import a_spec

SPEC = a_spec("r1")
END = Tombstone(
    replica_id=ReplicaId("r1"), generation=Generation(2), reason="test", drain_timeout_s=0.0
)
SURVIVOR: Any = object()
WARM_STATS = EngineStats(steps_total=1)


class FakeArtifacts:
    """An artifact store that returns at once, or fails."""

    def __init__(self) -> None:
        self.errors: list[Exception] = []
        self.fetches = 0

    async def ensure(self, artifact: object, pinned: object, progress: object) -> Path:
        self.fetches += 1
        if self.errors:
            raise self.errors.pop()
        return Path("weights")


class FakeEngine:
    """An engine that is ready at once. Tests replace its methods."""

    exit_reason = "the engine exited"
    pid = 1
    is_adopted = False
    problem = canary_problem = ""
    stall_s = step_limit_s = 0.0
    lacks_descriptors = False
    handshake = None
    record = EngineRecord(command=EngineCommand(arguments=(), base_url=""), spec=a_spec())

    def __init__(self, folder: Path) -> None:
        self.log = folder / "log"
        self.exited = asyncio.Event()
        self.may_stop = asyncio.Event()
        self.may_stop.set()
        self.stopping = asyncio.Event()
        self.stopped = self.released = False
        self.canaries = 0
        self.current_stats: Callable[[], EngineStats | None] = lambda: WARM_STATS

    async def is_ready(self) -> bool:
        return True

    async def stats(self) -> EngineStats | None:
        return self.current_stats()

    async def canary(self, kind: str) -> bool:
        self.canaries += 1
        return True

    async def stop(self, *, kill: bool = False) -> None:
        self.stopping.set()
        await self.may_stop.wait()
        self.stopped = True

    async def release(self) -> None:
        self.released = True


class FakeEngines:
    """Starts and adopts fake engines."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.started: list[FakeEngine] = []
        self.error: Exception | None = None

    async def start(self, spec: object, path: Path) -> FakeEngine:
        if self.error is not None:
            raise self.error
        self.started.append(FakeEngine(self._folder))
        return self.started[-1]

    def adopt(self, survivor: object) -> FakeEngine:
        self.started.append(FakeEngine(self._folder))
        return self.started[-1]


class SupervisorFixture:
    """A supervisor with fake artifacts and engines."""

    def __init__(self, folder: Path) -> None:
        self.artifacts = FakeArtifacts()
        self.engines = FakeEngines(folder)
        self.changed = asyncio.Event()
        self.now_s = 0.0
        self.free_bytes = 8
        self.used_bytes: Callable[[int], int] = lambda leader: 100 * leader
        fakes: Any = {"artifacts": self.artifacts, "engines": self.engines}
        self.supervisor = Supervisor(
            config=NodeConfig(name="n1", schedulers=("x",), state=Path("x"), address="x"),
            clock=lambda: self.now_s,
            rng=random.Random(1),
            on_change=self.changed.set,
            memory_used=lambda leader, _: self.used_bytes(leader),
            device_memory=lambda _: DeviceMemory(total_bytes=8, free_bytes=self.free_bytes),
            memory_peaks=MemoryPeaks(folder, lambda driver: "1.0"),
            **fakes,
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
def fixture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SupervisorFixture:
    monkeypatch.setattr(module, "OBSERVE_INTERVAL_S", 0.0)
    monkeypatch.setattr(module, "last_error", lambda log: "the last line")
    monkeypatch.setattr(module, "retry_delay_s", lambda *_: 0.0)
    return SupervisorFixture(tmp_path)


def after_turns(turns: int, then: Callable[[], None]) -> None:
    """Call `then` after `turns` iterations of the event loop."""
    loop = asyncio.get_running_loop()
    if turns:
        loop.call_soon(after_turns, turns - 1, then)
    else:
        then()


@pytest.mark.parametrize("error", [None, ArtifactError("cannot fetch")], ids=["whole", "failed"])
@pytest.mark.parametrize("turns", range(16))
async def test_an_end_can_be_ordered_at_any_moment(
    fixture: SupervisorFixture, turns: int, error: Exception | None
) -> None:
    fixture.artifacts.errors = [error] if error else []
    fixture.supervisor.start(SPEC)
    after_turns(turns, lambda: fixture.supervisor.end(END))
    await fixture.until(lambda: fixture.replica.state is ReplicaState.STOPPED)
    assert all(engine.stopped for engine in fixture.engines.started)


@pytest.mark.parametrize("turns", range(8))
async def test_the_end_of_an_adopted_engine_can_be_ordered_at_any_moment(
    fixture: SupervisorFixture, turns: int
) -> None:
    fixture.supervisor.start(SPEC, SURVIVOR)
    after_turns(turns, lambda: fixture.supervisor.end(END))
    await fixture.until(lambda: fixture.replica.state is ReplicaState.STOPPED)
    assert [engine.stopped for engine in fixture.engines.started] == [True]


@pytest.mark.parametrize("keep_engines", [False, True])
@pytest.mark.parametrize("turns", range(8))
async def test_the_agent_can_shut_down_with_an_adopted_engine_at_any_moment(
    fixture: SupervisorFixture, turns: int, keep_engines: bool
) -> None:
    fixture.supervisor.start(SPEC, SURVIVOR)
    turned = asyncio.Event()
    after_turns(turns, turned.set)
    if turns:
        await turned.wait()
    await fixture.supervisor.shut_down(keep_engines=keep_engines)
    (engine,) = fixture.engines.started
    assert (engine.stopped, engine.released) == (not keep_engines, keep_engines)


@pytest.mark.parametrize("error", [ValueError("Invalid IPv6 URL"), ArtifactError("cannot fetch")])
async def test_a_failed_fetch_is_retried_whatever_the_error(
    fixture: SupervisorFixture, error: Exception
) -> None:
    fixture.artifacts.errors = [error]
    fixture.supervisor.start(SPEC)
    await fixture.warm()
    assert fixture.artifacts.fetches == 2
    assert len(fixture.replica.failure_times) == 1


async def test_a_bug_in_the_watch_fails_only_that_replica(fixture: SupervisorFixture) -> None:
    fixture.supervisor.start(SPEC)
    await fixture.warm()
    (first,) = fixture.engines.started

    def fails() -> EngineStats:
        raise OverflowError("cannot convert float infinity to integer")

    first.current_stats = fails
    await fixture.warm(engines=2)
    assert first.stopped
    assert len(fixture.replica.failure_times) == 1


async def test_a_step_longer_than_the_stall_time_is_no_hang(
    fixture: SupervisorFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a step nor a byte ends in twice that time, but layers do."""
    monkeypatch.setattr("nodeagent.supervisor.OBSERVE_INTERVAL_S", 0.0)
    fixture.supervisor.start(SPEC)
    await fixture.warm()
    (first,) = fixture.engines.started
    reservation = fixture.replica.admission.admit(2000, 10)
    assert reservation is not None
    observations, layers_max = 0, 40

    def stats() -> EngineStats:
        nonlocal observations
        observations += 1
        # Then it hangs in a layer.
        layers = min(observations, layers_max)
        return EngineStats(steps_total=1, layers_computed_total=layers)

    first.current_stats = stats
    await fixture.warm(engines=2)
    assert first.stopped
    assert observations > layers_max + 15
    reservation.release()
    await fixture.supervisor.shut_down(keep_engines=False)


async def test_an_answer_without_a_stream_is_no_hang_where_no_counter_moves_meanwhile(
    fixture: SupervisorFixture,
) -> None:
    """TensorRT-LLM's move when a request ends, and this one takes twice the stall time."""
    fixture.supervisor.start(a_spec("r1", engine=EngineSettings(driver="tensorrt_llm")))
    await fixture.warm()
    (first,) = fixture.engines.started
    whole = fixture.replica.admission.admit(2000, 4000)
    assert whole is not None
    observations = 0
    long_enough = asyncio.Event()

    def stats() -> EngineStats:
        nonlocal observations
        observations += 1
        if observations == 40:
            long_enough.set()
        return WARM_STATS

    first.current_stats = stats
    async with asyncio.timeout(10):
        await long_enough.wait()
    assert not first.stopped
    # A stream that has begun and does not go on is a hang.
    stream = fixture.replica.admission.admit(10, 10)
    assert stream is not None
    stream.first_token()
    await fixture.warm(engines=2)
    assert first.stopped
    stream.release()
    whole.release()
    await fixture.supervisor.shut_down(keep_engines=False)


async def test_the_reach_of_the_prefix_cache_is_part_of_the_load(
    fixture: SupervisorFixture,
) -> None:
    fixture.now_s = 50.0
    fixture.supervisor.start(SPEC)
    await fixture.warm()
    admission = fixture.replica.admission
    assert admission.load("r", fixture.now_s).cache_age_ms == -1
    was_read = asyncio.Event()

    def stats() -> EngineStats:
        if admission.cache_since_s is not None:
            was_read.set()
        return EngineStats(steps_total=1, prefix_evicted_age_s=30.0)

    fixture.engines.started[0].current_stats = stats
    async with asyncio.timeout(30):
        await was_read.wait()
    assert admission.load("r", fixture.now_s + 1.0).cache_age_ms == 31_000
    await fixture.supervisor.shut_down(keep_engines=False)


@pytest.mark.parametrize("rate", [-1.0, 1e13, 1e300, float("inf"), float("nan"), 17.5])
async def test_impossible_statistics_of_an_engine_leave_the_report_readable(
    fixture: SupervisorFixture, rate: float
) -> None:
    """The scheduler refuses a report with such a value, and with it all that the node says."""
    fixture.supervisor.start(SPEC)
    await fixture.warm()
    weights_bytes = int(rate) if isfinite(rate) else 1 << 70
    fixture.replica.take_stats(
        EngineStats(
            prefill_tokens_per_s=rate, decode_tokens_per_s=rate, weights_bytes=weights_bytes
        )
    )
    sent = msgspec.msgpack.encode(fixture.replica.report())
    profile = msgspec.msgpack.decode(sent, type=ReplicaReport).profile
    expected = (17.5, 17.5, 17) if rate == 17.5 else (0.0, 0.0, profile.memory_bytes)
    assert expected == (
        profile.prefill_tokens_per_s,
        profile.decode_tokens_per_s,
        profile.memory_bytes,
    )
    await fixture.supervisor.shut_down(keep_engines=False)


async def test_an_engine_without_statistics_generates_a_first_token_all_the_same(
    fixture: SupervisorFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([None, WARM_STATS])
    canary_states: list[ReplicaState] = []

    async def stats(self: FakeEngine) -> EngineStats | None:
        return next(answers, WARM_STATS)

    async def canary(self: FakeEngine, kind: str) -> bool:
        canary_states.append(fixture.replica.state)
        return True

    monkeypatch.setattr(FakeEngine, "stats", stats)
    monkeypatch.setattr(FakeEngine, "canary", canary)
    fixture.supervisor.start(SPEC)
    await fixture.warm()
    assert canary_states == [ReplicaState.LOADING]
    await fixture.supervisor.shut_down(keep_engines=False)


async def test_an_unknown_option_is_not_retried(fixture: SupervisorFixture) -> None:
    fixture.engines.error = UnknownOption("cannot start vllm: unknown options x; it has none")
    fixture.supervisor.start(SPEC)
    await fixture.until(lambda: fixture.replica.state is ReplicaState.FAILED)
    report = fixture.replica.report()
    assert (report.reason, report.restarts) == (str(fixture.engines.error), 1)
    assert fixture.artifacts.fetches == 1
    fixture.supervisor.end(END)
    await fixture.until(lambda: fixture.replica.state is ReplicaState.STOPPED)


async def test_a_failed_engine_is_not_warm_while_it_is_stopped(fixture: SupervisorFixture) -> None:
    fixture.supervisor.start(SPEC)
    await fixture.warm()
    (first,) = fixture.engines.started
    first.may_stop.clear()
    first.exited.set()
    await first.stopping.wait()
    assert fixture.replica.state is ReplicaState.WANTED
    assert fixture.replica.reason == "the engine exited: the last line"
    first.may_stop.set()
    await fixture.warm(engines=2)


async def test_a_restarted_replica_reports_why_as_long_as_that_counts(
    fixture: SupervisorFixture,
) -> None:
    fixture.supervisor.start(SPEC)
    await fixture.warm()
    reasons: list[tuple[ReplicaState, str]] = []

    async def is_ready(self: FakeEngine) -> bool:
        reasons.append((fixture.replica.state, fixture.replica.report().reason))
        return True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeEngine, "is_ready", is_ready)
        fixture.engines.started[0].exited.set()
        await fixture.warm(engines=2)
    restarted = "restarted after: the engine exited: the last line"
    assert reasons == [(ReplicaState.LOADING, restarted)]
    fixture.now_s += backoff.WINDOW_S - 1.0
    assert fixture.replica.report().reason == restarted
    fixture.replica.admission.sleep_reason = lambda: "asleep"
    assert fixture.replica.report().reason == f"asleep; {restarted}"
    fixture.now_s += 1.0
    assert fixture.replica.report().reason == "asleep"
    fixture.replica.admission.sleep_reason = lambda: ""
    assert fixture.replica.report().reason == ""


async def test_a_replica_that_refuses_requests_for_lack_of_memory_says_so(
    fixture: SupervisorFixture,
) -> None:
    """It stays warm, and reported nothing: its clients were refused without a reason to be seen."""
    fixture.supervisor.start(SPEC)
    await fixture.warm()
    fixture.replica.take_stats(EngineStats(memory_full=True))
    assert fixture.replica.report().reason.startswith("takes no new requests: its engine is close")
    fixture.replica.take_stats(EngineStats())
    assert fixture.replica.report().reason == ""


async def test_a_replica_whose_engine_is_never_ready_is_given_up(
    fixture: SupervisorFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each start takes half an hour: fewer than two failures are within the window of backoff."""
    monkeypatch.setattr(backoff, "DELAY_MAX_S", 0.0)
    monkeypatch.setattr(module, "retry_delay_s", backoff.retry_delay_s)

    async def never_ready(*_: object) -> str:
        fixture.now_s += 1800.0
        return "the engine was not ready after 1800 s"

    monkeypatch.setattr(module, "wait_ready", never_ready)
    fixture.supervisor.start(SPEC)
    await fixture.until(lambda: fixture.replica.state is ReplicaState.FAILED)
    assert len(fixture.engines.started) == backoff.FAILURES_MAX
    assert all(engine.stopped for engine in fixture.engines.started)
    assert fixture.replica.reason.startswith("failed 6 times: the engine was not ready")


OUT_OF_MEMORY = "the engine exited while loading: torch.OutOfMemoryError: CUDA out of memory"
LARGE = a_spec("r1", memory_bytes=4)


@pytest.fixture
def starts_without_memory(fixture: SupervisorFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines die while less than the planned memory is free, which is read all the time."""
    monkeypatch.setattr(backoff, "DELAY_MAX_S", 0.0)
    monkeypatch.setattr(module, "retry_delay_s", backoff.retry_delay_s)
    monkeypatch.setattr(module, "RESOURCE_POLL_S", 0.0)

    async def wait_ready(*_: object) -> str:
        return OUT_OF_MEMORY if fixture.free_bytes < LARGE.memory_bytes else ""

    monkeypatch.setattr(module, "wait_ready", wait_ready)


async def test_a_start_without_memory_waits_for_it_and_is_no_failure(
    fixture: SupervisorFixture, starts_without_memory: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_lack, "MEMORY_RETRY_S", 10.0)
    fixture.free_bytes = 3
    fixture.supervisor.start(LARGE)
    for starts in range(1, backoff.FAILURES_MAX + 2):
        await fixture.until(partial(is_waiting_for_memory, fixture, starts))
        report = fixture.replica.report()
        assert (report.state, report.restarts) == (ReplicaState.WANTED, 0)
        assert OUT_OF_MEMORY in report.reason
        fixture.now_s += 10.0
    fixture.free_bytes = 4
    await fixture.until(lambda: fixture.replica.state is ReplicaState.WARM)
    assert all(engine.stopped for engine in fixture.engines.started[:-1])
    assert fixture.replica.report().reason == ""
    await fixture.supervisor.shut_down(keep_engines=False)


def is_waiting_for_memory(fixture: SupervisorFixture, starts: int) -> bool:
    is_waiting = fixture.replica.report().reason.startswith("waits for memory: ")
    return is_waiting and len(fixture.engines.started) == starts


async def test_a_replica_that_waits_long_for_memory_is_given_up_for_other_nodes(
    fixture: SupervisorFixture, starts_without_memory: None
) -> None:
    fixture.free_bytes = 3
    fixture.supervisor.start(LARGE)
    await fixture.until(lambda: "waits for memory" in fixture.replica.reason)
    fixture.now_s += start_lack.MEMORY_RETRY_S
    await fixture.until(lambda: len(fixture.engines.started) == 2)
    fixture.now_s += start_lack.WAIT_MAX_S - start_lack.MEMORY_RETRY_S
    await fixture.until(lambda: fixture.replica.state is ReplicaState.FAILED)
    report = fixture.replica.report()
    assert report.reason.startswith("no memory for 300 s: ")
    # The scheduler counts a failed replica against its version only after restarts.
    assert report.restarts == 0
    fixture.supervisor.end(END)
    await fixture.until(lambda: fixture.replica.state is ReplicaState.STOPPED)


@pytest.mark.parametrize("turns", range(24))
async def test_the_end_of_a_replica_that_waits_for_memory_can_be_ordered_at_any_moment(
    fixture: SupervisorFixture, starts_without_memory: None, turns: int
) -> None:
    fixture.free_bytes = 3
    fixture.supervisor.start(LARGE)
    after_turns(turns, lambda: fixture.supervisor.end(END))
    await fixture.until(lambda: fixture.replica.state is ReplicaState.STOPPED)
    assert all(engine.stopped for engine in fixture.engines.started)


NO_DESCRIPTOR = OSError(errno.EMFILE, "Too many open files")


def caused_by(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [NO_DESCRIPTOR, caused_by(ArtifactError("cannot store m"), NO_DESCRIPTOR)],
    ids=["start", "fetch"],
)
async def test_a_start_without_a_descriptor_of_the_agent_is_no_failure(
    fixture: SupervisorFixture, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each was counted against the replica's version, and six gave the replica up."""
    monkeypatch.setattr(module, "RESOURCE_POLL_S", 0.0)
    monkeypatch.setattr(module, "retry_delay_s", backoff.retry_delay_s)
    fixture.engines.error = error
    fixture.supervisor.start(SPEC)
    for fetches in range(1, backoff.FAILURES_MAX + 2):
        await fixture.until(partial(is_waiting_for_descriptors, fixture, fetches))
        assert fixture.replica.report().restarts == 0
        fixture.now_s += start_lack.DESCRIPTORS_RETRY_S
    fixture.engines.error = None
    await fixture.warm()
    assert fixture.replica.report().reason == ""
    await fixture.supervisor.shut_down(keep_engines=False)


def is_waiting_for_descriptors(fixture: SupervisorFixture, fetches: int) -> bool:
    is_waiting = fixture.replica.reason.startswith("waits for a free file descriptor")
    return is_waiting and fixture.artifacts.fetches >= fetches


async def test_a_start_that_lacks_descriptors_for_long_is_given_up_for_other_nodes(
    fixture: SupervisorFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RESOURCE_POLL_S", 0.0)
    fixture.engines.error = NO_DESCRIPTOR
    fixture.supervisor.start(SPEC)
    await fixture.until(partial(is_waiting_for_descriptors, fixture, 1))
    fixture.now_s += start_lack.WAIT_MAX_S
    await fixture.until(lambda: fixture.replica.state is ReplicaState.FAILED)
    report = fixture.replica.report()
    assert report.reason.startswith("no free file descriptor for 300 s: ")
    assert report.restarts == 0
    fixture.supervisor.end(END)
    await fixture.until(lambda: fixture.replica.state is ReplicaState.STOPPED)


async def test_a_first_request_without_a_descriptor_of_the_agent_is_no_failure(
    fixture: SupervisorFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_lack, "DESCRIPTORS_RETRY_S", 0.0)

    async def wait_ready(engine: FakeEngine, *_: object) -> str:
        engine.lacks_descriptors = len(fixture.engines.started) == 1
        return "the engine was not ready after 600 s" if engine.lacks_descriptors else ""

    monkeypatch.setattr(module, "wait_ready", wait_ready)
    fixture.supervisor.start(SPEC)
    await fixture.warm(engines=2)
    assert fixture.replica.report().restarts == 0
    await fixture.supervisor.shut_down(keep_engines=False)


async def test_an_engine_that_needs_more_than_its_plan_is_given_up(
    fixture: SupervisorFixture, starts_without_memory: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def wait_ready(*_: object) -> str:
        return OUT_OF_MEMORY

    monkeypatch.setattr(module, "wait_ready", wait_ready)
    fixture.supervisor.start(LARGE)
    await fixture.until(lambda: fixture.replica.state is ReplicaState.FAILED)
    assert fixture.replica.reason.startswith(f"failed 6 times: {OUT_OF_MEMORY}")


async def test_an_engine_kept_at_shutdown_is_released_and_not_stopped(
    fixture: SupervisorFixture,
) -> None:
    fixture.supervisor.start(SPEC)
    await fixture.warm()
    (engine,) = fixture.engines.started

    async def release() -> None:
        # The watch must not take the released engine for a failed one.
        engine.exited.set()
        turned = asyncio.Event()
        after_turns(20, turned.set)
        await turned.wait()
        engine.released = True

    engine.release = release  # type: ignore[method-assign]
    await fixture.supervisor.shut_down(keep_engines=True)
    assert (engine.released, engine.stopped) == (True, False)


@pytest.mark.parametrize("succeeds", [True, False])
async def test_an_engine_generates_a_first_token_before_it_is_warm(
    fixture: SupervisorFixture, monkeypatch: pytest.MonkeyPatch, succeeds: bool
) -> None:
    canary_states: list[ReplicaState] = []

    async def canary(self: FakeEngine, kind: str) -> bool:
        canary_states.append(fixture.replica.state)
        return succeeds

    monkeypatch.setattr(FakeEngine, "canary", canary)
    fixture.supervisor.start(SPEC)
    await fixture.warm()
    assert canary_states == [ReplicaState.LOADING]


async def test_an_engine_without_a_first_token_is_not_warm(
    fixture: SupervisorFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def canary(self: FakeEngine, kind: str) -> bool:
        self.canaries += 1
        self.problem = "" if len(fixture.engines.started) > 1 else "status 200 without 'choices'"
        return not self.problem

    monkeypatch.setattr(FakeEngine, "canary", canary)
    fixture.supervisor.start(SPEC)
    await fixture.warm(engines=2)
    assert [engine.canaries for engine in fixture.engines.started] == [3, 1]
    assert len(fixture.replica.failure_times) == 1


async def test_the_memory_of_an_adopted_engine_is_known_before_it_answers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its plan counts for the replicas that start here, and what it takes for the scheduler."""

    async def is_ready(self: FakeEngine) -> bool:
        return await asyncio.Event().wait()

    monkeypatch.setattr(FakeEngine, "is_ready", is_ready)
    fixture = SupervisorFixture(tmp_path)
    shared = a_spec("r1", memory_bytes=4, overcommit=2.0)
    survivor = EngineRecord(pid=7, command=FakeEngine.record.command, spec=shared)
    node: Any = SimpleNamespace(assignment=None)
    signers: Any = SimpleNamespace(problem=lambda artifact: "")
    engines: Any = fixture.engines
    engines.survivors = lambda: [survivor]
    await app._adopt_survivors(node, engines, fixture.supervisor, signers)
    report = fixture.replica.report()
    assert (report.state, report.profile.used_bytes) == (ReplicaState.WANTED, 700)
    (awake,) = fixture.supervisor.awake._awake_replicas()
    assert (awake.memory_bytes, awake.may_sleep) == (4, False)
    await fixture.supervisor.shut_down(keep_engines=True)


async def test_the_most_memory_that_an_engine_took_outlives_the_agent(
    fixture: SupervisorFixture, tmp_path: Path
) -> None:
    """Later replicas were placed as if it never took more than when it starts."""
    used = iter([500, 900, 100])
    fixture.used_bytes = lambda leader: next(used, 100)
    fixture.supervisor.start(SPEC)
    await fixture.warm()
    await observed(fixture, 6)
    await fixture.supervisor.shut_down(keep_engines=False)
    later = SupervisorFixture(tmp_path)
    later.used_bytes = lambda leader: 100
    later.supervisor.start(SPEC)
    await later.warm()
    assert later.replica.report().profile.used_bytes == 900
    await later.supervisor.shut_down(keep_engines=False)


async def test_an_adopted_engine_gets_no_warm_up_request(fixture: SupervisorFixture) -> None:
    survivor: Any = object()
    fixture.supervisor.start(SPEC, survivor)
    await fixture.warm()
    (engine,) = fixture.engines.started
    assert engine.canaries == 0


async def observed(fixture: SupervisorFixture, count: int) -> None:
    """Wait until the last engine was observed this often."""
    observations = 0
    was_observed = asyncio.Event()

    def stats() -> EngineStats | None:
        nonlocal observations
        observations += 1
        # Each time a canary is due.
        fixture.now_s += 11.0
        if observations > count:
            was_observed.set()
        return None if fixture.engines.started[-1].lacks_descriptors else WARM_STATS

    fixture.engines.started[-1].current_stats = stats
    async with asyncio.timeout(30):
        await was_observed.wait()


async def test_an_agent_that_cannot_reach_its_engine_for_lack_of_descriptors_does_not_end_it(
    fixture: SupervisorFixture,
) -> None:
    fixture.supervisor.start(SPEC)
    await fixture.warm()
    (engine,) = fixture.engines.started
    engine.lacks_descriptors = True

    async def canary(kind: str) -> bool:
        return not engine.lacks_descriptors

    engine.canary = canary  # type: ignore[method-assign]
    await observed(fixture, 10)
    engine.lacks_descriptors = False
    await observed(fixture, 10)
    assert fixture.replica.failure_times == []
    # An engine that does not answer an agent with descriptors is ended as before.
    engine.current_stats = lambda: None
    await fixture.warm(engines=2)
    await fixture.supervisor.shut_down(keep_engines=False)


async def test_a_hanging_canary_does_not_delay_the_end(fixture: SupervisorFixture) -> None:
    fixture.supervisor.start(SPEC)
    await fixture.warm()
    (engine,) = fixture.engines.started
    has_canary = asyncio.Event()

    async def canary(kind: str) -> bool:
        has_canary.set()
        return await asyncio.Event().wait()

    engine.canary = canary  # type: ignore[method-assign]
    fixture.now_s += 11.0
    await has_canary.wait()
    fixture.supervisor.end(END)
    await fixture.until(lambda: fixture.replica.state is ReplicaState.STOPPED)
    assert engine.stopped


async def test_a_shutdown_waits_for_an_engine_that_is_being_stopped(
    fixture: SupervisorFixture,
) -> None:
    fixture.supervisor.start(SPEC)
    await fixture.warm()
    (engine,) = fixture.engines.started
    engine.may_stop.clear()
    fixture.supervisor.end(END)
    await engine.stopping.wait()
    after_turns(3, engine.may_stop.set)
    await fixture.supervisor.shut_down(keep_engines=False)
    assert engine.stopped


async def test_the_log_of_a_busy_engine_is_trimmed(
    fixture: SupervisorFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    trimmed: list[Path] = []
    monkeypatch.setattr(module, "trim_log", trimmed.append)
    fixture.supervisor.start(SPEC)
    await fixture.warm()
    assert fixture.replica.admission.admit(1, 1) is not None
    was_trimmed = asyncio.Event()

    def moving_stats() -> EngineStats:
        if trimmed:
            was_trimmed.set()
        return EngineStats(steps_total=int(fixture.now_s))

    fixture.engines.started[0].current_stats = moving_stats
    fixture.now_s += 11.0
    async with asyncio.timeout(30):
        await was_trimmed.wait()
    assert set(trimmed) == {fixture.engines.started[0].log}
    await fixture.supervisor.shut_down(keep_engines=False)
