"""Replicas of a real agent's node that share a device: a request wakes the one it names."""

import asyncio
import os
import signal
import time
from collections.abc import Mapping

import msgspec
import pytest

from isochrone.wire.http import headers
from isochrone.wire.ids import DeviceId, ReplicaId
from nodeagent.api.peer_replicas import PeerReplicaClient
from nodeagent.decide.replicas.sleep import WakeOutcome
from nodeagent.host.awake_memory import AwakeMemory
from tests.integration.nodeagent.test_data_plane import Node, a_node
from tests.system.harness import until

NAMES = ("r1", "r2", "r3")


async def budgets() -> Mapping[DeviceId, int]:
    return {DeviceId("cpu"): 8}


async def does_not_wake(timeout_s: float) -> WakeOutcome:
    return WakeOutcome.FAILED


async def answered(node: Node, name: str) -> None:
    async with node.ask(name) as response:
        assert response.status == 200, await response.text()
        assert b"t0" in await response.read()


async def test_a_request_wakes_a_sleeping_replica_and_answers_tell_of_it() -> None:
    async with a_node() as node:
        memory = node.supervisor.awake = AwakeMemory(budgets, time.monotonic)
        for name in NAMES:
            spec = msgspec.structs.replace(node.spec(name), memory_bytes=4, overcommit=2.0)
            await node.warm(spec)
        assert memory.asleep_count() == 1
        async with node.http.get("/ping") as response:
            loads = headers.parse_loads(response.headers[headers.LOADS])
        asleep = [name for name in NAMES if loads[ReplicaId(name)].wake_ms]
        assert asleep == [name for name in NAMES if not memory.is_awake(ReplicaId(name))]
        reasons = {
            name: node.supervisor.replicas[ReplicaId(name)].report().reason for name in NAMES
        }
        assert [name for name in NAMES if reasons[name].startswith("asleep")] == asleep
        for name in (*asleep, *NAMES):
            await answered(node, name)
        await asyncio.gather(*(answered(node, name) for name in NAMES * 3))
        assert memory.asleep_count() == 1
        async with node.http.get("/metrics") as response:
            page = await response.text()
        assert "isochrone_node_replicas_asleep 1.0" in page
        assert 'isochrone_node_sleep_switch_seconds_count{kind="wake"}' in page


async def test_a_request_for_a_sleeping_replica_goes_to_a_peer_that_is_awake() -> None:
    async with a_node() as node:
        memory = node.supervisor.awake = AwakeMemory(budgets, time.monotonic)
        for name in NAMES:
            spec = msgspec.structs.replace(node.spec(name), memory_bytes=4, overcommit=2.0)
            await node.warm(spec)
        (asleep,) = [name for name in NAMES if not memory.is_awake(ReplicaId(name))]
        (awake, _) = [name for name in NAMES if memory.is_awake(ReplicaId(name))]
        async with node.ask(asleep, peers=[node.peer(asleep), node.peer(awake)]) as response:
            assert response.headers[headers.HANDOFF_REPLICA] == awake
            assert b"t0" in await response.read()
        # Not the other way round: a queue of 50 ms is shorter than a wake.
        queued = node.supervisor.replicas[ReplicaId(awake)].admission.admit(50, 1, 50)
        assert queued is not None
        async with node.ask(awake, peers=[node.peer(awake), node.peer(asleep)]) as response:
            assert headers.HANDOFF_REPLICA not in response.headers
        queued.release()
        assert not memory.is_awake(ReplicaId(asleep))

        # Nodes of the PoP learn it from a ping.
        client = PeerReplicaClient(None, time.monotonic)
        peers = [node.peer(asleep), node.peer(awake)]
        found = await client.queued_tokens(peers, timeout_s=5.0)
        await client.close()
        assert found[ReplicaId(asleep)] == memory.wake_ms(ReplicaId(asleep)) > 0
        assert found[ReplicaId(awake)] == 0


@pytest.mark.parametrize("fault", ["killed while asleep", "does not wake"])
async def test_a_sleeping_engine_that_cannot_wake_is_started_again(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_node() as node:
        memory = node.supervisor.awake = AwakeMemory(budgets, time.monotonic)
        for name in NAMES:
            spec = msgspec.structs.replace(node.spec(name), memory_bytes=4, overcommit=2.0)
            await node.warm(spec)
        (asleep,) = [name for name in NAMES if not memory.is_awake(ReplicaId(name))]
        replica = node.supervisor.replicas[ReplicaId(asleep)]
        engine = replica.engine
        assert engine is not None
        if fault == "killed while asleep":
            os.kill(engine.pid, signal.SIGKILL)
        else:
            monkeypatch.setattr(engine, "wake_up", does_not_wake)
        async with node.ask(asleep) as response:
            assert response.status == 503

        async def is_started_again() -> bool:
            return replica.engine not in (None, engine) and replica.is_serving

        await until("started again", is_started_again, 15.0)
        for name in (asleep, *NAMES):
            await answered(node, name)
        assert memory.asleep_count() == 1


async def test_an_engine_without_memory_to_wake_is_not_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with a_node() as node:
        memory = node.supervisor.awake = AwakeMemory(budgets, time.monotonic)
        for name in NAMES:
            spec = msgspec.structs.replace(node.spec(name), memory_bytes=4, overcommit=2.0)
            await node.warm(spec)
        (asleep,) = [name for name in NAMES if not memory.is_awake(ReplicaId(name))]
        replica = node.supervisor.replicas[ReplicaId(asleep)]
        engine = replica.engine
        assert engine is not None
        # The mock engine never lacks memory.
        answers = iter([429, 429, 200])
        order = engine._order

        async def refused(path: str, timeout_s: float) -> int:
            status = next(answers)
            return await order(path, timeout_s) if status == 200 else status

        monkeypatch.setattr(engine, "_order", refused)
        request = asyncio.create_task(answered(node, asleep))

        async def says_why() -> bool:
            return "less free memory than planned" in replica.report().reason

        await until("it says why", says_why, 15.0)
        await request
        assert replica.engine is engine
        assert not replica.failure_times
        assert replica.report().reason == ""
