"""Faults of replicas that sleep, on a real agent's node: kills, hangs, cancellations, restarts.

The tests share one node. Each leaves its three models serving, of which one sleeps.
"""

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from isochrone.wire.ids import Generation, ReplicaId
from isochrone.wire.peers.assignment import Tombstone
from isochrone.wire.peers.report import ReplicaState
from nodeagent.decide.replicas import sleep
from nodeagent.host.awake_memory import AwakeMemory
from nodeagent.host.engines.engine_process import EngineProcess, EngineProcesses
from nodeagent.host.resident import Resident
from nodeagent.managed_replica import ManagedReplica
from nodeagent.supervisor import Supervisor
from tests.integration.nodeagent.test_data_plane import Node, a_node
from tests.integration.nodeagent.test_sleeping_replicas import NAMES, answered, budgets
from tests.system.harness import until

pytestmark = pytest.mark.asyncio(loop_scope="module")
LIMIT_S = 60.0


class SharingNode:
    """A node whose device holds two of its three models."""

    def __init__(self, node: Node, memory: AwakeMemory) -> None:
        self.node, self.memory = node, memory

    def replica(self, name: str) -> ManagedReplica:
        return self.node.supervisor.replicas[ReplicaId(name)]

    def engine(self, name: str) -> EngineProcess:
        engine = self.replica(name).engine
        assert engine is not None
        return engine

    def names(self, *, awake: bool) -> list[str]:
        return [name for name in NAMES if self.is_awake(name) is awake]

    def is_awake(self, name: str) -> bool:
        return self.memory.is_awake(ReplicaId(name))

    def resident(self, name: str) -> Resident:
        return self.memory._residents[ReplicaId(name)]

    def signal(self, name: str, number: signal.Signals) -> None:
        os.kill(self.engine(name).pid, number)

    async def start(self, *names: str) -> None:
        for name in names:
            spec = msgspec.structs.replace(self.node.spec(name), memory_bytes=4, overcommit=2.0)
            self.node.supervisor.start(spec)
        replicas = [self.replica(name) for name in names]
        await self.until("warm", lambda: all(replica.is_serving for replica in replicas))

    def end(self, name: str) -> None:
        tombstone = Tombstone(
            replica_id=ReplicaId(name), generation=Generation(2), reason="", drain_timeout_s=20.0
        )
        self.node.supervisor.end(tombstone)

    async def ended(self, name: str) -> None:
        replica = self.replica(name)
        await self.until("stopped", lambda: replica.state is ReplicaState.STOPPED)
        self.node.supervisor.forget([ReplicaId(name)])
        await self.until("forgotten", lambda: ReplicaId(name) not in self.memory._residents)

    async def restarted(self, name: str, before: EngineProcess) -> str:
        """Wait until an engine was started again; return why."""
        replica = self.replica(name)
        await self.until(
            "started again", lambda: replica.engine not in (None, before) and replica.is_serving
        )
        return replica.last_failure

    async def all_answer(self) -> None:
        for name in NAMES:
            await answered(self.node, name)
        assert self.memory.asleep_count() == 1
        assert all(not self.replica(name).admission.running for name in NAMES)

    async def status(self, name: str) -> int:
        async with self.node.ask(name) as response:
            await response.read()
            return int(response.status)

    async def until(self, what: str, holds: Callable[[], Any]) -> None:
        async def condition() -> Any:
            return holds()

        await until(what, condition, LIMIT_S)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sharing() -> AsyncIterator[SharingNode]:
    async with a_node() as node:
        memory = node.supervisor.awake = AwakeMemory(budgets, time.monotonic)
        shared = SharingNode(node, memory)
        await shared.start(*NAMES)
        yield shared


@pytest.mark.parametrize("does", ["wakes", "falls asleep"])
async def test_an_engine_that_is_killed_while_it_switches_is_started_again(
    sharing: SharingNode, does: str
) -> None:
    (asleep,) = sharing.names(awake=False)
    demand = {name: sharing.resident(name).demand.at(time.monotonic()) for name in NAMES}
    victim = min(sharing.names(awake=True), key=lambda name: demand[name])
    name = asleep if does == "wakes" else victim
    killed = sharing.engine(name)
    sharing.signal(name, signal.SIGSTOP)
    request = asyncio.create_task(sharing.status(asleep))
    # A replica that is ordered to sleep counts as asleep, and the other one sleeps before a wake.
    await sharing.until("the switch has begun", lambda: not sharing.is_awake(victim))
    if does == "wakes":
        await sharing.until("the wake has begun", lambda: sharing.resident(asleep).is_switching)
    sharing.signal(name, signal.SIGKILL)
    assert await request == (503 if does == "wakes" else 200)
    assert "SIGKILL" in await sharing.restarted(name, killed)
    await sharing.all_answer()


async def test_an_engine_that_hangs_as_it_wakes_is_started_again(
    sharing: SharingNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sleep, "WAKE_LIMIT_MIN_S", 1.0)
    monkeypatch.setattr(sleep, "WAKE_SLOWER_MAX", 0.01)
    monkeypatch.setattr(sleep, "START_SLOWER_MAX", 0.01)
    (asleep,) = sharing.names(awake=False)
    hung = sharing.engine(asleep)
    stop, had_memory = hung.stop, []

    async def note_stop(*, kill: bool) -> None:
        had_memory.append(ReplicaId(asleep) in sharing.memory._residents)
        await stop(kill=kill)

    monkeypatch.setattr(hung, "stop", note_stop)
    sharing.signal(asleep, signal.SIGSTOP)
    assert await sharing.status(asleep) == 503
    for name in NAMES:
        if name != asleep:
            await answered(sharing.node, name)
    assert "did not wake up" in await sharing.restarted(asleep, hung)
    assert had_memory == [True]
    await sharing.all_answer()


@pytest.mark.parametrize("does", ["wakes", "falls asleep"])
async def test_an_engine_that_loads_or_copies_large_weights_is_not_taken_for_hung(
    sharing: SharingNode, monkeypatch: pytest.MonkeyPatch, does: str
) -> None:
    """The limits were 120 and 30 s for any model."""
    (asleep,) = sharing.names(awake=False)
    demand = {name: sharing.resident(name).demand.at(time.monotonic()) for name in NAMES}
    victim = min(sharing.names(awake=True), key=lambda name: demand[name])
    slow = asleep if does == "wakes" else victim
    size_bytes = sharing.resident(slow).spec.artifact.size_bytes
    for name in ("READ_BYTES_PER_S_MIN", "COPY_BYTES_PER_S_MIN"):
        monkeypatch.setattr(sleep, name, size_bytes / 60.0)
    for name in ("WAKE_LIMIT_MIN_S", "WAKE_LIMIT_MAX_S", "SLEEP_LIMIT_MIN_S"):
        monkeypatch.setattr(sleep, name, 0.5)
    engine = sharing.engine(slow)
    # Else another one would sleep instead of the victim.
    woke_s = sharing.resident(victim).awake_since_s
    await sharing.until("it may sleep", lambda: time.monotonic() > woke_s + sleep.AWAKE_MIN_S)
    sharing.signal(slow, signal.SIGSTOP)
    request = asyncio.create_task(sharing.status(asleep))
    await sharing.until("it switches", lambda: sharing.resident(slow).is_switching)
    await asyncio.sleep(1.0)
    sharing.signal(slow, signal.SIGCONT)
    assert await request == 200
    assert sharing.engine(slow) is engine
    await sharing.all_answer()


@pytest.mark.parametrize("client", ["waits", "has gone"])
async def test_an_engine_that_hangs_as_it_wakes_does_not_hold_up_others(
    sharing: SharingNode, monkeypatch: pytest.MonkeyPatch, client: str
) -> None:
    monkeypatch.setattr(sleep, "WAKE_LIMIT_MIN_S", sleep.WAKE_LIMIT_MAX_S)
    monkeypatch.setattr(sleep, "LATE_MIN_S", 0.5)
    (asleep,) = sharing.names(awake=False)
    hung, resident = sharing.engine(asleep), sharing.resident(asleep)
    sharing.signal(asleep, signal.SIGSTOP)
    request = asyncio.create_task(sharing.status(asleep))
    await sharing.until("the wake has begun", lambda: resident.is_switching)
    if client == "has gone":
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        await sharing.until("it has gone", lambda: not resident.waiters)
    others = [name for name in NAMES if name != asleep]
    for name in (*others, *others):
        await answered(sharing.node, name)
    assert resident.is_switching
    assert not hung.exited.is_set()
    sharing.signal(asleep, signal.SIGCONT)
    if client == "waits":
        assert await request == 200
    await sharing.until("it is awake", lambda: sharing.is_awake(asleep))
    assert sharing.engine(asleep) is hung
    await sharing.all_answer()


async def test_a_request_that_is_cancelled_while_its_model_wakes_leaves_nothing(
    sharing: SharingNode,
) -> None:
    (asleep,) = sharing.names(awake=False)
    sharing.signal(asleep, signal.SIGSTOP)
    request = asyncio.create_task(sharing.status(asleep))
    resident = sharing.resident(asleep)
    await sharing.until("it waits", lambda: resident.waiters)
    request.cancel()
    with suppress(asyncio.CancelledError):
        await request
    await sharing.until("it has gone", lambda: not resident.waiters)
    assert sharing.replica(asleep).admission.running == 0
    sharing.signal(asleep, signal.SIGCONT)
    await sharing.all_answer()


async def test_a_sleeping_replica_that_ends_refuses_the_requests_that_wait(
    sharing: SharingNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sleep, "WAKE_LIMIT_MIN_S", sleep.WAKE_LIMIT_MAX_S)
    (asleep,) = sharing.names(awake=False)
    engine = sharing.engine(asleep)
    sharing.signal(asleep, signal.SIGSTOP)
    request = asyncio.create_task(sharing.status(asleep))
    await sharing.until("it waits", lambda: sharing.resident(asleep).waiters)
    sharing.end(asleep)
    assert await request == 503
    assert not engine.exited.is_set()
    sharing.signal(asleep, signal.SIGCONT)
    await sharing.ended(asleep)
    await sharing.start(asleep)
    await sharing.all_answer()


async def test_a_rollout_of_a_sleeping_model_puts_another_to_sleep(sharing: SharingNode) -> None:
    (asleep,) = sharing.names(awake=False)
    await sharing.start("next")
    assert sharing.memory.asleep_count() == 2
    sharing.end(asleep)
    await sharing.ended(asleep)
    assert sharing.memory.asleep_count() == 1
    await answered(sharing.node, "next")
    sharing.end("next")
    await sharing.ended("next")
    await sharing.start(asleep)
    await sharing.all_answer()


async def test_an_agent_that_starts_again_knows_which_of_its_engines_sleep(
    sharing: SharingNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last test: it ends the engines."""
    (asleep,) = sharing.names(awake=False)
    old = sharing.node.supervisor
    kept = {name: sharing.engine(name) for name in NAMES}
    await old.shut_down(keep_engines=True)
    engines = EngineProcesses(old._engines._folder, 1)
    new = Supervisor(
        config=old._config,
        artifacts=old._artifacts,
        engines=engines,
        clock=time.monotonic,
        rng=random.Random(1),
        on_change=lambda: None,
        device_budgets=budgets,
    )
    # The machine is busy: at first no engine says in time whether it sleeps.
    unanswered, request = set(NAMES), EngineProcess._request

    async def answer(self: EngineProcess, method: str, path: str, *more: Any) -> tuple[int, bytes]:
        name = self.record.spec.replica_id
        if path == "/is_sleeping" and name in unanswered:
            unanswered.remove(name)
            return 0, b""
        return await request(self, method, path, *more)

    monkeypatch.setattr(EngineProcess, "_request", answer)
    try:
        for record in engines.survivors():
            assert record.was_ready
            new.start(record.spec, record)
        # Until the engines have answered, all of them may be awake.
        assert len(new.awake._awake_replicas()) == len(NAMES)
        await sharing.until(
            "adopted", lambda: all(replica.is_serving for replica in new.replicas.values())
        )
        found = {name: replica.engine for name, replica in new.replicas.items()}
        assert {name: engine.pid for name, engine in found.items() if engine is not None} == {
            name: engine.pid for name, engine in kept.items()
        }
        assert [name for name in NAMES if not new.awake.is_awake(ReplicaId(name))] == [asleep]
        engine = found[ReplicaId(asleep)]
        assert engine is not None
        assert await engine.is_asleep()
        async with new.awake.use(ReplicaId(asleep)):
            assert not await engine.is_asleep()
        assert new.awake.asleep_count() == 1
    finally:
        await new.shut_down(keep_engines=False)
        for left in kept.values():
            if left._child is not None:
                left._child.wait()
