"""Replicas that refused are asked again when they may admit again, and not without end."""

import random

import pytest

from isochrone.wire.ids import ReplicaId
from router.decide.replicas.full_replicas import ASK_AGAIN_S, FORGET_S, FullReplicas

R = ReplicaId("r1")
MINE, ITEMS, OTHERS = ("acme", False), ("acme", True), ("other", False)


def is_full(full: FullReplicas, requests: int, now_s: float) -> bool:
    return bool(full.full_for(MINE, lambda replica_id: requests, now_s))


def test_a_replica_that_refused_is_asked_when_it_has_fewer_requests_or_after_a_while() -> None:
    full = FullReplicas()
    assert not is_full(full, 20, 100.0)
    full.record_refusal(MINE, R, 20, 100.0)
    assert is_full(full, 20, 100.0)
    assert is_full(full, 23, 100.0), "with those that were sent and are not refused yet"
    assert not is_full(full, 19, 100.0)
    assert not is_full(full, 20, 100.0 + ASK_AGAIN_S)
    # One asks, and the others wait for what becomes of it.
    full.record_sent(MINE, R, 20, 100.0 + ASK_AGAIN_S)
    assert is_full(full, 21, 100.0 + ASK_AGAIN_S)
    # One that takes the place of another does not postpone that.
    full.record_sent(MINE, R, 19, 100.0 + 1.9 * ASK_AGAIN_S)
    assert not is_full(full, 20, 100.0 + 2 * ASK_AGAIN_S)


def test_an_answer_of_a_replica_with_more_requests_lets_in_as_many() -> None:
    full = FullReplicas()
    full.record_refusal(MINE, R, 20, 100.0)
    full.record_answer(MINE, R, 12)
    assert is_full(full, 20, 100.0)
    full.record_answer(MINE, R, 25)
    assert not is_full(full, 24, 100.0)
    assert is_full(full, 25, 100.0)


@pytest.mark.parametrize("group", [ITEMS, OTHERS])
def test_refusals_of_others_do_not_count(group: tuple[str, bool]) -> None:
    full = FullReplicas()
    full.record_refusal(group, R, 20, 100.0)
    assert not is_full(full, 20, 100.0)


def test_old_refusals_are_dropped() -> None:
    full = FullReplicas()
    for number in range(1000):
        full.record_refusal((f"t{number}", False), R, 20, 100.0 + number)
    assert len(full._refusals) <= 2 * FORGET_S + 2


@pytest.mark.parametrize("seed", range(20))
def test_a_node_is_asked_in_vain_a_few_times_and_its_capacity_is_used(seed: int) -> None:
    """A node with a limit, a queue that looks at every end, and answers of random length."""
    rng, full = random.Random(seed), FullReplicas()
    capacity, waiting, step_s, seconds = rng.randint(1, 40), 10_000, 0.01, 60.0
    running: list[float] = []
    refusals = served = 0
    for step in range(int(seconds / step_s)):
        now_s = 100.0 + step * step_s
        if step == 3000:
            capacity += 10
        running = [until_s for until_s in running if until_s > now_s]
        while waiting and not is_full(full, len(running), now_s):
            full.record_sent(MINE, R, len(running), now_s)
            if len(running) >= capacity:
                full.record_refusal(MINE, R, len(running), now_s)
                refusals += 1
                continue
            running.append(now_s + rng.uniform(0.5, 3.0))
            full.record_answer(MINE, R, len(running))
            served, waiting = served + 1, waiting - 1
        if step % 1000 == 999:
            assert len(running) == capacity, "no place stays free"
    assert served > 100
    assert refusals <= seconds / ASK_AGAIN_S + 1
