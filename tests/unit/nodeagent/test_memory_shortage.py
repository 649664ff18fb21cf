"""Which replica ends when a node is short of memory."""

from pathlib import Path

import pytest

from isochrone.service import machine_share
from isochrone.wire.ids import ReplicaId
from nodeagent.decide.replicas.memory_shortage import ReplicaMemory, is_short, replica_to_end
from nodeagent.host.devices import CPU, DeviceReader
from nodeagent.host.memory_guard import MemoryGuard, RunningReplica
from tests.builders import a_spec

MIB = 1 << 20
PLAN = 4096


@pytest.mark.parametrize(
    ("used_mib", "ended"),
    [
        ({"a": 4000, "b": 4096}, None),
        ({"a": 4300, "b": 3000}, None),  # about what was planned
        ({"a": 4600, "b": 3000}, "a"),
        ({"a": 4600, "b": 6000, "c": 5000}, "b"),
        ({}, None),
    ],
)
def test_the_replica_that_exceeds_its_plan_the_most_ends(
    used_mib: dict[str, int], ended: str | None
) -> None:
    replicas = [
        ReplicaMemory(ReplicaId(name), PLAN * MIB, used * MIB) for name, used in used_mib.items()
    ]
    found = replica_to_end(replicas)
    assert (found.replica_id if found else None) == ended


def test_a_small_replica_may_exceed_its_plan_by_much() -> None:
    small = ReplicaMemory(ReplicaId("a"), 10 * MIB, 200 * MIB)
    assert replica_to_end([small]) is None


def test_a_machine_is_short_of_memory_when_almost_all_is_used() -> None:
    assert not is_short(4 * MIB, 100 * MIB)
    assert is_short(2 * MIB, 100 * MIB)


async def test_an_agent_near_the_limit_of_its_cgroup_is_short_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine had memory, so that the kernel ended some engine of the cgroup."""
    files = {"memory.max": 1000 * MIB, "memory.current": 990 * MIB}
    for name, value in {**files, "memory.stat": "active_file 0\n"}.items():
        (tmp_path / name).write_text(str(value))
    monkeypatch.setattr(machine_share, "own_cgroups", lambda *_: [tmp_path])
    devices = DeviceReader(0, open_nvml=lambda: None)
    guard = MemoryGuard(devices.usable_memory, lambda _pid, _devices: 900 * MIB)
    spec = a_spec("large", memory_bytes=100 * MIB, device_ids=(CPU,))
    problem = await guard.problem(spec, [RunningReplica(spec, 1)])
    assert problem.startswith("the node has 10 MiB of memory left, and this engine takes 900 MiB")
    (tmp_path / "memory.current").write_text(str(500 * MIB))
    assert not await guard.problem(spec, [RunningReplica(spec, 1)])
    # vLLM's share is of all that the machine has.
    machine = devices.memory([CPU])
    assert machine is not None
    assert machine.total_bytes > 1000 * MIB
