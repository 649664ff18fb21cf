"""Requests of batches take only what interactive requests leave free."""

import asyncio

import pytest

from isochrone.wire.peers.batches import ItemRef
from router.decide.admission.batch_capacity import ReplicaOccupancy, requests_max
from router.loops.answer_batches import DeploymentWork


@pytest.mark.parametrize(
    ("in_flight", "running", "expected"),
    [
        ([0], 0, 4),
        ([0, 0], 0, 8),
        ([0, 0], 3, 8),
        ([6_500, 0], 0, 7),
        ([6_999, 7_100], 0, 0),
        ([6_999, 7_100], 2, 2),
        ([10_000], 0, 0),
    ],
)
def test_items_leave_tokens_free(in_flight: list[int], running: int, expected: int) -> None:
    replicas = [ReplicaOccupancy(10_000, tokens) for tokens in in_flight]
    assert requests_max(replicas, running, 1_000) == expected
    assert requests_max(replicas, running, 1_000, per_replica_max=4) == expected


def test_without_a_replica_nothing_runs() -> None:
    assert requests_max([], 0, 1_000) == 0
    assert requests_max([ReplicaOccupancy(10_000, 0)], 0, 0) == 4


@pytest.mark.parametrize(
    ("sequences", "requests", "running", "expected"),
    [
        (16, 0, 0, 18),
        (16, 10, 6, 14),
        (16, 15, 15, 18),
        (16, 18, 12, 12),
        (16, 40, 0, 0),
        (64, 0, 0, 72),
        (1, 0, 0, 2),
        (1, 1, 0, 1),
    ],
)
def test_items_take_the_sequences_that_are_free(
    sequences: int, requests: int, running: int, expected: int
) -> None:
    replicas = [ReplicaOccupancy(1_000_000, 0, sequences, requests)]
    assert requests_max(replicas, running, 10) == expected


def test_a_busy_replica_takes_nothing_from_another_one() -> None:
    replicas = [ReplicaOccupancy(1_000_000, 0, 16, 30), ReplicaOccupancy(1_000_000, 0, 16, 5)]
    assert requests_max(replicas, 3, 10) == 16


def test_an_operators_limit_replaces_that_of_the_sequences() -> None:
    replicas = [ReplicaOccupancy(1_000_000, 0, 16, 30)] * 2
    assert requests_max(replicas, 0, 10, per_replica_max=3) == 6
    assert requests_max(replicas, 0, 10, per_replica_max=0) == 0


async def test_an_item_that_is_dropped_before_its_task_began_is_not_held() -> None:
    async def answer() -> None:
        raise AssertionError("it does not begin")

    work, ref = DeploymentWork(), ItemRef("batch", 1, "lease")
    task = work.running[ref] = asyncio.create_task(answer())
    work.drop({ref})
    await asyncio.wait({task})
    assert task.cancelled()
    assert work.refs == []
