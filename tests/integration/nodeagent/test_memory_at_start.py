"""A replica whose device's memory another one still takes, on a real agent's node."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from isochrone.wire.ids import DeviceId, Generation, ReplicaId
from isochrone.wire.peers.assignment import Tombstone
from isochrone.wire.peers.report import ReplicaState
from nodeagent.decide.replicas import start_lack
from nodeagent.decide.replicas.backoff import FAILURES_MAX
from nodeagent.drivers.driver import DeviceMemory
from tests.integration.nodeagent.test_data_plane import a_node
from tests.system.harness import until

LIMIT_S = 60.0


async def test_a_replica_that_lacks_memory_starts_once_its_neighbour_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More of its starts fail than a broken replica has."""
    monkeypatch.setattr(start_lack, "MEMORY_RETRY_S", 0.5)
    async with a_node() as node:
        supervisor = node.supervisor
        await node.warm(node.spec("neighbour"))
        neighbour = supervisor.replicas[ReplicaId("neighbour")].engine
        assert neighbour is not None
        socket = Path(neighbour.record.command.socket)

        def memory(_devices: Sequence[DeviceId]) -> DeviceMemory:
            return DeviceMemory(total_bytes=8, free_bytes=2 if socket.exists() else 6)

        monkeypatch.setattr(supervisor, "_device_memory", memory)
        starts = []
        start = supervisor._engines.start

        async def counted(spec: object, path: Path) -> object:
            starts.append(spec)
            return await start(spec, path)  # type: ignore[arg-type]

        monkeypatch.setattr(supervisor._engines, "start", counted)
        spec = node.spec("late", out_of_memory_beside=str(socket))
        supervisor.start(msgspec.structs.replace(spec, memory_bytes=4))
        replica = supervisor.replicas[spec.replica_id]

        async def has_waited() -> bool:
            is_waiting = replica.report().reason.startswith("waits for memory: cpu has 0 MiB free")
            return is_waiting and len(starts) > FAILURES_MAX

        await until("it waits for memory", has_waited, LIMIT_S)
        assert (replica.state, replica.report().restarts) == (ReplicaState.WANTED, 0)
        assert "CUDA out of memory" in replica.report().reason

        async def is_warm() -> bool:
            return replica.state is ReplicaState.WARM

        supervisor.end(
            Tombstone(
                replica_id=ReplicaId("neighbour"),
                generation=Generation(2),
                reason="",
                drain_timeout_s=0.0,
            )
        )
        await until("it has started", is_warm, LIMIT_S)
        assert not replica.failure_times
