"""Outlier ejection: which replicas are ejected and for how long; and the retry budget."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from isochrone.wire.ids import NodeId, ReplicaId
from router.decide.admission.retry_budget import RetryBudget
from router.decide.liveness.outlier_ejection import (
    EJECTED_MAX_S,
    EJECTED_MIN_S,
    FAILURES_MAX,
    HALF_OPEN_S,
    REPEAT_WINDOW_S,
    UNREACHABLE_S,
    ReplicaHealth,
    lost_nodes,
    split_ejected,
)

A, B, C = ReplicaId("a"), ReplicaId("b"), ReplicaId("c")
PEERS = [A, B, C, ReplicaId("d")]


def fail_in_a_row(health: ReplicaHealth, replica: ReplicaId, now_s: float) -> None:
    assert [health.record_failure(replica, now_s) for _ in range(FAILURES_MAX)] == [
        "",
        "",
        "consecutive",
    ]


def test_consecutive_failures_eject_and_a_good_answer_between_resets_them() -> None:
    health = ReplicaHealth()
    health.record_failure(A, 0.0)
    health.record_failure(A, 0.0)
    health.record_success(A)
    fail_in_a_row(health, A, 1.0)
    assert health.ejected_until_s(1.0) == {A: 1.0 + EJECTED_MIN_S}


def test_a_request_sent_before_the_ejection_does_not_prolong_it() -> None:
    health = ReplicaHealth()
    fail_in_a_row(health, A, 0.0)
    assert {health.record_failure(A, 0.1) for _ in range(20)} == {""}
    # A good answer to such a request does not end it either.
    health.record_success(A)
    assert health.ejected_until_s(0.1) == {A: EJECTED_MIN_S}


def test_a_half_open_replica_gets_one_request_until_it_answers() -> None:
    health = ReplicaHealth()
    fail_in_a_row(health, A, 0.0)
    back_s = EJECTED_MIN_S
    assert A not in health.ejected_until_s(back_s)
    health.record_sent(A, back_s)
    assert health.ejected_until_s(back_s) == {A: back_s + HALF_OPEN_S}
    health.record_success(A)
    assert health.ejected_until_s(back_s) == {}
    assert health.unhealthy() == set()
    fail_in_a_row(health, A, back_s + 1)


def test_each_ejection_lasts_twice_as_long_until_a_long_time_without_one() -> None:
    health, now_s, lasted = ReplicaHealth(), 0.0, []
    fail_in_a_row(health, A, now_s)
    for _ in range(7):
        until_s = health.ejected_until_s(now_s)[A]
        lasted.append(until_s - now_s)
        now_s = until_s
        health.record_sent(A, now_s)
        assert health.record_failure(A, now_s) == "half_open"
    assert lasted == [2, 4, 8, 16, 32, EJECTED_MAX_S, EJECTED_MAX_S]
    now_s += EJECTED_MAX_S
    health.record_sent(A, now_s)
    health.record_success(A)
    fail_in_a_row(health, A, now_s + 1)
    assert health.ejected_until_s(now_s + 1)[A] == now_s + 1 + EJECTED_MAX_S
    health.record_sent(A, now_s + 1 + EJECTED_MAX_S)
    health.record_success(A)
    later_s = now_s + 2 + 2 * EJECTED_MAX_S + REPEAT_WINDOW_S
    fail_in_a_row(health, A, later_s)
    assert health.ejected_until_s(later_s)[A] == later_s + EJECTED_MIN_S


def test_a_half_open_request_without_an_answer_is_followed_by_another() -> None:
    health = ReplicaHealth()
    fail_in_a_row(health, A, 0.0)
    health.record_sent(A, 2.0)
    assert A not in health.ejected_until_s(2.0 + HALF_OPEN_S)
    health.record_sent(A, 2.0 + HALF_OPEN_S)
    assert A in health.ejected_until_s(2.0 + HALF_OPEN_S + 1)


def alternate(health: ReplicaHealth, replicas: list[ReplicaId], times: int) -> list[str]:
    """Let every second request fail at each of `replicas`."""
    causes = []
    for _ in range(times):
        for replica in replicas:
            causes.append(health.record_failure(replica, 0.0, PEERS))
            health.record_success(replica)
    return [cause for cause in causes if cause]


def test_a_replica_that_fails_far_more_often_than_its_peers_is_ejected() -> None:
    assert alternate(ReplicaHealth(), [A], 3) == []
    assert alternate(ReplicaHealth(), [A], 20) == ["ratio"]


def test_failures_spread_evenly_over_peers_eject_none() -> None:
    assert alternate(ReplicaHealth(), PEERS, 50) == []
    # A replica without peers has no ratio to compare with.
    only = ReplicaHealth()
    for _ in range(50):
        assert only.record_failure(A, 0.0, [A]) == ""
        only.record_success(A)


def test_unanswered_pings_postpone_the_half_open_request_up_to_a_limit() -> None:
    health = ReplicaHealth()
    health.postpone_half_open(A, 0.0)
    assert health.unhealthy() == set()
    fail_in_a_row(health, A, 0.0)
    now_s = 0.0
    while now_s < EJECTED_MAX_S - UNREACHABLE_S:
        now_s += 1.9
        health.postpone_half_open(A, now_s)
        assert A in health.ejected_until_s(now_s)
    health.postpone_half_open(A, EJECTED_MAX_S)
    assert A not in health.ejected_until_s(EJECTED_MAX_S)


def test_more_than_half_unhealthy_are_the_last_resort() -> None:
    ejected = dict.fromkeys([A, B], 9.0)
    assert split_ejected(PEERS, ejected) == (frozenset(ejected), frozenset())
    ejected[C] = 9.0
    assert split_ejected(PEERS, ejected) == (frozenset(), frozenset(ejected))
    assert split_ejected([A], {A: 9.0}).excluded == frozenset()


NAMES = [ReplicaId(f"r{n}") for n in range(7)]


class Replicas(RuleBasedStateMachine):
    """Replicas that fail and answer at random, under any traffic."""

    def __init__(self) -> None:
        super().__init__()
        self.health = ReplicaHealth()
        self.now_s = 1000.0
        self.open: list[tuple[ReplicaId, bool]] = []
        self.in_a_row: dict[ReplicaId, int] = {}

    @rule(seconds=st.floats(0, 30))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(chance=st.integers(0, 100))
    def ask(self, chance: int) -> None:
        until = self.health.ejected_until_s(self.now_s)
        excluded, last_resort = split_ejected(NAMES, until)
        usable = [
            name for name in NAMES if name not in excluded and name not in last_resort
        ] or NAMES
        chosen = usable[chance % len(usable)]
        is_half_open = chosen in self.health.unhealthy()
        self.health.record_sent(chosen, self.now_s)
        self.open.append((chosen, is_half_open))
        if is_half_open:
            assert chosen in self.health.ejected_until_s(self.now_s)

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 50), fails=st.booleans())
    def end(self, which: int, fails: bool) -> None:
        replica, is_half_open = self.open.pop(which % len(self.open))
        was_unhealthy = replica in self.health.unhealthy()
        if not fails:
            self.health.record_success(replica)
            self.in_a_row[replica] = 0
            if is_half_open:
                assert replica not in self.health.unhealthy()
            return
        cause = self.health.record_failure(replica, self.now_s, NAMES)
        self.in_a_row[replica] = self.in_a_row.get(replica, 0) + 1
        if cause:
            lasts_s = self.health.ejected_until_s(self.now_s)[replica] - self.now_s
            assert lasts_s + 1e-6 >= EJECTED_MIN_S and lasts_s <= EJECTED_MAX_S + 1e-6
        if cause == "half_open":
            assert was_unhealthy
        if not was_unhealthy and self.in_a_row[replica] >= FAILURES_MAX:
            assert cause

    @rule(which=st.integers(0, 6))
    def no_ping(self, which: int) -> None:
        before = self.health.ejected_until_s(self.now_s).get(NAMES[which], 0.0)
        self.health.postpone_half_open(NAMES[which], self.now_s)
        after = self.health.ejected_until_s(self.now_s).get(NAMES[which], 0.0)
        assert before <= after <= self.now_s + EJECTED_MAX_S

    @rule(which=st.integers(0, 6))
    def leave_the_table(self, which: int) -> None:
        self.health.remove_replicas({NAMES[which]})
        assert NAMES[which] not in self.health.unhealthy()
        self.in_a_row.pop(NAMES[which], None)
        self.open = [attempt for attempt in self.open if attempt[0] != NAMES[which]]

    @invariant()
    def never_more_than_half_are_excluded(self) -> None:
        until = self.health.ejected_until_s(self.now_s)
        excluded, last_resort = split_ejected(NAMES, until)
        assert 2 * len(excluded) <= len(NAMES)
        assert not excluded & last_resort
        assert excluded | last_resort == set(until)

    @invariant()
    def no_ejection_is_permanent(self) -> None:
        assert not self.health.ejected_until_s(self.now_s + EJECTED_MAX_S + 1e-6)


Replicas.TestCase.settings = settings(deadline=None, max_examples=60, stateful_step_count=50)
TestReplicas = Replicas.TestCase


def test_a_quiet_router_may_retry_its_reserve_and_again_later() -> None:
    budget = RetryBudget(0.2, 3)
    assert [budget.withdraw(0.0) for _ in range(4)] == [True, True, True, False]
    assert not budget.withdraw(1.0)
    assert budget.withdraw(5.0)


def test_a_busy_router_may_retry_its_share() -> None:
    budget, retries = RetryBudget(0.2, 10), 0
    for n in range(20_000):
        budget.deposit(n / 1000)
        retries += budget.withdraw(n / 1000)
    # Everything fails for twenty seconds: a fifth is retried, and the reserve of three windows.
    assert 0.19 * 20_000 < retries <= 0.2 * 20_000 + 30


@settings(deadline=None, max_examples=80)
@given(
    st.lists(st.tuples(st.booleans(), st.floats(0, 3)), max_size=200),
    st.sampled_from([0.1, 0.2]),
    st.sampled_from([0, 3, 10]),
)
def test_retries_stay_within_their_share(
    steps: list[tuple[bool, float]], ratio: float, reserve: int
) -> None:
    budget, now_s = RetryBudget(ratio, reserve), 0.0
    requests: list[float] = []
    retries: list[float] = []

    def recent(times: list[float]) -> float:
        return sum(math.exp((at_s - now_s) / RetryBudget.WINDOW_S) for at_s in times)

    for is_request, wait_s in steps:
        now_s += wait_s
        if is_request:
            budget.deposit(now_s)
            requests.append(now_s)
        elif budget.withdraw(now_s):
            retries.append(now_s)
            assert recent(retries) <= ratio * recent(requests) + reserve + 1e-6
        else:
            assert recent(retries) + 1 > ratio * recent(requests) + reserve - 1e-6


def test_a_lost_node_ejects_its_replica_once_and_a_good_answer_ends_it() -> None:
    health = ReplicaHealth()
    assert health.eject_lost(A, 0.0)
    assert not health.eject_lost(A, 1.0)
    assert health.ejected_until_s(1.0) == {A: EJECTED_MIN_S}
    health.record_sent(A, EJECTED_MIN_S)
    # Half-open, and lost again: ejected for twice as long.
    assert health.eject_lost(A, EJECTED_MIN_S + 1)
    assert health.ejected_until_s(EJECTED_MIN_S + 1) == {A: 3 * EJECTED_MIN_S + 1}
    health.record_sent(A, 10.0)
    assert health.record_success(A)
    assert not health.unhealthy()


def test_no_node_is_lost_if_most_are_silent() -> None:
    one, two, three = NodeId("1"), NodeId("2"), NodeId("3")
    assert lost_nodes({one}, 1) == set()
    assert lost_nodes({one}, 2) == {one}
    assert lost_nodes({one, two}, 4) == {one, two}
    assert lost_nodes({one, two, three}, 5) == set()
    assert lost_nodes(frozenset(), 0) == set()
