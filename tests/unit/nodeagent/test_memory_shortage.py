"""Which replica ends when a node is short of memory."""

import pytest

from isochrone.wire.ids import ReplicaId
from nodeagent.decide.replicas.memory_shortage import ReplicaMemory, is_short, replica_to_end

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
