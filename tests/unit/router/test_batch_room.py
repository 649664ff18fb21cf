"""Requests of batches take only what interactive requests leave free."""

import pytest

from router.decide.batch_room import ReplicaRoom, per_replica_limit, requests_max


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
def test_how_many_items_may_run(in_flight: list[int], running: int, expected: int) -> None:
    rooms = [ReplicaRoom(10_000, tokens) for tokens in in_flight]
    assert requests_max(rooms, running, 1_000, 4) == expected


def test_without_a_replica_nothing_runs() -> None:
    assert requests_max([], 0, 1_000, 4) == 0
    assert requests_max([ReplicaRoom(10_000, 0)], 0, 0, 4) == 4


def test_items_that_do_not_yield_are_few() -> None:
    assert [per_replica_limit(most, yields=True) for most in (0, 2, 64)] == [0, 2, 64]
    assert [per_replica_limit(most, yields=False) for most in (0, 2, 64)] == [0, 2, 4]
