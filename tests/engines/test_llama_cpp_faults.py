"""Faults of a real llama.cpp under our agent: it takes all memory, or does not end at SIGTERM.

An operator's own wrapper, first on the PATH, makes it do so.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import pytest
import pytest_asyncio

from isochrone.wire.ids import DeviceId, Generation, ReplicaId
from isochrone.wire.models.model import EngineSettings
from isochrone.wire.peers.assignment import Tombstone
from isochrone.wire.peers.report import ReplicaState
from nodeagent.drivers.driver import DeviceMemory
from nodeagent.host.devices import DeviceReader
from nodeagent.host.engines.engine_process import IGNORES_SIGTERM, EngineProcess
from nodeagent.host.memory_guard import MemoryGuard
from tests.builders import GIB, a_spec
from tests.engines.real_engines import (
    EXIT_S,
    LLAMA_CPP_COMMANDS,
    LLAMA_CPP_MODEL,
    READY_S,
    group_members,
    installed,
    needs_llama_cpp,
)
from tests.integration.nodeagent.test_data_plane import Node, a_node
from tests.integration.nodeagent.test_two_legs import artifact_of
from tests.system.harness import until

pytestmark = [needs_llama_cpp, pytest.mark.asyncio(loop_scope="session")]

MIB: Final = 1 << 20
PLANNED_BYTES: Final = 840 * MIB
WRAPPER: Final = f"""\
#!/bin/sh
real={LLAMA_CPP_COMMANDS / "llama-server"}
case " $* " in
*" --alias large "*) exec "$real" "$@" --ctx-size 65536 ;;
*" --alias restarted "*) trap '' TERM; while :; do "$real" "$@"; done ;;
esac
exec "$real" "$@"
"""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def node(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Node]:
    """A node with one good replica."""
    commands = tmp_path_factory.mktemp("bin")
    (commands / "llama-server").write_text(WRAPPER)
    (commands / "llama-server").chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
        await installed("llama_cpp")
        async with a_node(READY_S, stall_s=60.0) as node:
            await start(node, "good")
            yield node


async def start(node: Node, name: str) -> EngineProcess:
    """Return the warm engine of a new replica."""
    spec = a_spec(
        name,
        name=name,
        engine=EngineSettings(driver="llama_cpp", kv_memory_bytes=4 * 2048 * 23_040),
        device_ids=(DeviceId("cpu"),),
        memory_bytes=PLANNED_BYTES,
        context_tokens=2048,
        artifact=artifact_of(LLAMA_CPP_MODEL),
    )
    node.supervisor.start(spec)
    await until(f"{name} is warm", partial(is_warm, node, name), READY_S)
    return engine_of(node, name)


async def is_warm(node: Node, name: str) -> bool:
    return node.supervisor.states()[ReplicaId(name)] is ReplicaState.WARM


def engine_of(node: Node, name: str) -> EngineProcess:
    engine = node.supervisor.replicas[ReplicaId(name)].engine
    assert engine is not None
    return engine


async def end(node: Node, name: str) -> None:
    """Order the end of a replica, and wait for it."""
    replica_id = ReplicaId(name)
    node.supervisor.end(
        Tombstone(replica_id=replica_id, generation=Generation(2), reason="", drain_timeout_s=0.0)
    )

    async def has_ended() -> bool:
        return node.supervisor.states()[replica_id] is ReplicaState.STOPPED

    await until(f"{name} has ended", has_ended, EXIT_S)


async def test_one_that_takes_more_than_planned_ends_when_memory_is_short(node: Node) -> None:
    large, good = await start(node, "large"), engine_of(node, "good")
    replica = node.supervisor.replicas[ReplicaId("large")]
    devices = DeviceReader(0, open_nvml=lambda: None)

    def short(_devices: Sequence[DeviceId]) -> DeviceMemory:
        """Say that the machine has no memory left, as long as the large one runs."""
        free_bytes = 0 if group_members(large.pid) else 8 * GIB
        return DeviceMemory(total_bytes=64 * GIB, free_bytes=free_bytes)

    node.supervisor._memory_guard = MemoryGuard(short, devices.used_by)

    async def is_replaced() -> bool:
        return large.exited.is_set() and await is_warm(node, "large")

    await until("it was ended and started again", is_replaced, READY_S)
    reason = replica.report().reason
    assert reason.startswith("restarted after: the node has 0 MiB of memory left"), reason
    assert "of 840 planned: raise the extra_bytes of its model" in reason, reason
    assert not group_members(large.pid)
    assert engine_of(node, "good") is good
    assert await good.canary("chat")
    await end(node, "large")


async def stopped(node: Node) -> EngineProcess:
    """Return an engine that does nothing, not even at SIGTERM."""
    engine = await start(node, "stopped")
    os.killpg(engine.pid, signal.SIGSTOP)
    return engine


async def restarted(node: Node) -> EngineProcess:
    """Return an engine that its wrapper starts again when it ends."""
    return await start(node, "restarted")


@pytest.mark.parametrize("make", [stopped, restarted])
async def test_one_that_does_not_end_at_sigterm_is_killed(
    node: Node, caplog: pytest.LogCaptureFixture, make: Callable[[Node], Awaitable[EngineProcess]]
) -> None:
    good = engine_of(node, "good")
    engine = await make(node)
    await end(node, engine.record.spec.name)
    assert not group_members(engine.pid)
    assert not Path(engine.log).exists()
    assert IGNORES_SIGTERM in caplog.messages
    assert engine_of(node, "good") is good
    async with asyncio.timeout(EXIT_S):
        assert await good.canary("chat")
