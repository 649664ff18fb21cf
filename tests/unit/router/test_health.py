"""Who is left alone, for how long, and who never is; and how much may be retried."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from isochrone.wire.ids import NodeId, ReplicaId
from router.decide.health import (
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
from router.decide.retry_budget import RetryBudget

A, B, C = ReplicaId("a"), ReplicaId("b"), ReplicaId("c")
PEERS = [A, B, C, ReplicaId("d")]


def fall_ill(health: ReplicaHealth, replica: ReplicaId, now_s: float) -> None:
    assert [health.failed(replica, now_s) for _ in range(FAILURES_MAX)] == ["", "", "consecutive"]


def test_failures_in_a_row_eject_and_a_good_answer_between_forgives() -> None:
    health = ReplicaHealth()
    health.failed(A, 0.0)
    health.failed(A, 0.0)
    health.answered(A)
    fall_ill(health, A, 1.0)
    assert health.ejected_until(1.0) == {A: 1.0 + EJECTED_MIN_S}


def test_what_was_on_its_way_before_does_not_prolong_an_ejection() -> None:
    health = ReplicaHealth()
    fall_ill(health, A, 0.0)
    assert {health.failed(A, 0.1) for _ in range(20)} == {""}
    # Nor is an answer to what was sent before a recovery.
    health.answered(A)
    assert health.ejected_until(0.1) == {A: EJECTED_MIN_S}


def test_one_request_is_the_trial_and_the_others_wait_for_it() -> None:
    health = ReplicaHealth()
    fall_ill(health, A, 0.0)
    back_s = EJECTED_MIN_S
    assert A not in health.ejected_until(back_s)
    health.picked(A, back_s)
    assert health.ejected_until(back_s) == {A: back_s + HALF_OPEN_S}
    health.answered(A)
    assert health.ejected_until(back_s) == {}
    assert health.ejected() == set()
    fall_ill(health, A, back_s + 1)


def test_each_ejection_lasts_twice_as_long_and_a_long_peace_is_a_new_beginning() -> None:
    health, now_s, lasted = ReplicaHealth(), 0.0, []
    fall_ill(health, A, now_s)
    for _ in range(7):
        until_s = health.ejected_until(now_s)[A]
        lasted.append(until_s - now_s)
        now_s = until_s
        health.picked(A, now_s)
        assert health.failed(A, now_s) == "trial"
    assert lasted == [2, 4, 8, 16, 32, EJECTED_MAX_S, EJECTED_MAX_S]
    now_s += EJECTED_MAX_S
    health.picked(A, now_s)
    health.answered(A)
    fall_ill(health, A, now_s + 1)
    assert health.ejected_until(now_s + 1)[A] == now_s + 1 + EJECTED_MAX_S
    health.picked(A, now_s + 1 + EJECTED_MAX_S)
    health.answered(A)
    peace_s = now_s + 2 + 2 * EJECTED_MAX_S + REPEAT_WINDOW_S
    fall_ill(health, A, peace_s)
    assert health.ejected_until(peace_s)[A] == peace_s + EJECTED_MIN_S


def test_a_trial_that_comes_to_nothing_is_followed_by_another() -> None:
    health = ReplicaHealth()
    fall_ill(health, A, 0.0)
    health.picked(A, 2.0)
    assert A not in health.ejected_until(2.0 + HALF_OPEN_S)
    health.picked(A, 2.0 + HALF_OPEN_S)
    assert A in health.ejected_until(2.0 + HALF_OPEN_S + 1)


def alternate(health: ReplicaHealth, replicas: list[ReplicaId], times: int) -> list[str]:
    """Let every second request fail at each of `replicas`."""
    causes = []
    for _ in range(times):
        for replica in replicas:
            causes.append(health.failed(replica, 0.0, PEERS))
            health.answered(replica)
    return [cause for cause in causes if cause]


def test_one_that_fails_far_more_often_than_its_peers_is_ejected() -> None:
    assert alternate(ReplicaHealth(), [A], 3) == []
    assert alternate(ReplicaHealth(), [A], 20) == ["ratio"]


def test_what_fails_everywhere_alike_ejects_nobody() -> None:
    assert alternate(ReplicaHealth(), PEERS, 50) == []
    # Without peers there is nothing to be worse than.
    lonely = ReplicaHealth()
    for _ in range(50):
        assert lonely.failed(A, 0.0, [A]) == ""
        lonely.answered(A)


def test_a_node_that_answers_no_ping_is_spared_its_trial_but_not_for_ever() -> None:
    health = ReplicaHealth()
    health.unreachable(A, 0.0)
    assert health.ejected() == set()
    fall_ill(health, A, 0.0)
    now_s = 0.0
    while now_s < EJECTED_MAX_S - UNREACHABLE_S:
        now_s += 1.9
        health.unreachable(A, now_s)
        assert A in health.ejected_until(now_s)
    health.unreachable(A, EJECTED_MAX_S)
    assert A not in health.ejected_until(EJECTED_MAX_S)


def test_too_many_ill_are_none() -> None:
    ill = dict.fromkeys([A, B], 9.0)
    assert split_ejected(PEERS, ill) == (frozenset(ill), frozenset())
    ill[C] = 9.0
    assert split_ejected(PEERS, ill) == (frozenset(), frozenset(ill))
    assert split_ejected([A], {A: 9.0}).alone == frozenset()


NAMES = [ReplicaId(f"r{n}") for n in range(7)]


class Replicas(RuleBasedStateMachine):
    """Replicas that fail and answer as they like, under any traffic."""

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
        until = self.health.ejected_until(self.now_s)
        alone, last = split_ejected(NAMES, until)
        usable = [name for name in NAMES if name not in alone and name not in last] or NAMES
        chosen = usable[chance % len(usable)]
        is_trial = chosen in self.health.ejected()
        self.health.picked(chosen, self.now_s)
        self.open.append((chosen, is_trial))
        if is_trial:
            assert chosen in self.health.ejected_until(self.now_s)

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 50), fails=st.booleans())
    def end(self, which: int, fails: bool) -> None:
        replica, is_trial = self.open.pop(which % len(self.open))
        was_ill = replica in self.health.ejected()
        if not fails:
            self.health.answered(replica)
            self.in_a_row[replica] = 0
            if is_trial:
                assert replica not in self.health.ejected()
            return
        cause = self.health.failed(replica, self.now_s, NAMES)
        self.in_a_row[replica] = self.in_a_row.get(replica, 0) + 1
        if cause:
            lasts_s = self.health.ejected_until(self.now_s)[replica] - self.now_s
            assert lasts_s + 1e-6 >= EJECTED_MIN_S and lasts_s <= EJECTED_MAX_S + 1e-6
        if cause == "trial":
            assert was_ill
        if not was_ill and self.in_a_row[replica] >= FAILURES_MAX:
            assert cause

    @rule(which=st.integers(0, 6))
    def no_ping(self, which: int) -> None:
        before = self.health.ejected_until(self.now_s).get(NAMES[which], 0.0)
        self.health.unreachable(NAMES[which], self.now_s)
        after = self.health.ejected_until(self.now_s).get(NAMES[which], 0.0)
        assert before <= after <= self.now_s + EJECTED_MAX_S

    @rule(which=st.integers(0, 6))
    def leave_the_table(self, which: int) -> None:
        self.health.forget({NAMES[which]})
        assert NAMES[which] not in self.health.ejected()
        self.in_a_row.pop(NAMES[which], None)
        self.open = [one for one in self.open if one[0] != NAMES[which]]

    @invariant()
    def never_more_than_half_are_left_alone(self) -> None:
        until = self.health.ejected_until(self.now_s)
        alone, last = split_ejected(NAMES, until)
        assert 2 * len(alone) <= len(NAMES)
        assert not alone & last
        assert alone | last == set(until)

    @invariant()
    def nobody_is_left_alone_for_ever(self) -> None:
        assert not self.health.ejected_until(self.now_s + EJECTED_MAX_S + 1e-6)


Replicas.TestCase.settings = settings(deadline=None, max_examples=60, stateful_step_count=50)
TestReplicas = Replicas.TestCase


def test_a_quiet_router_may_retry_a_little_and_again_later() -> None:
    budget = RetryBudget(0.2, 3)
    assert [budget.withdraw(0.0) for _ in range(4)] == [True, True, True, False]
    assert not budget.withdraw(1.0)
    assert budget.withdraw(5.0)


def test_a_busy_router_may_retry_its_share() -> None:
    budget, retries = RetryBudget(0.2, 10), 0
    for n in range(20_000):
        budget.deposit(n / 1000)
        retries += budget.withdraw(n / 1000)
    # Everything fails for twenty seconds: a fifth, and the reserve of three windows.
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


def test_a_gone_node_ejects_its_replica_once_and_a_good_answer_brings_it_back() -> None:
    health = ReplicaHealth()
    assert health.gone(A, 0.0)
    assert not health.gone(A, 1.0)
    assert health.ejected_until(1.0) == {A: EJECTED_MIN_S}
    health.picked(A, EJECTED_MIN_S)
    # On trial, and gone again: for twice as long.
    assert health.gone(A, EJECTED_MIN_S + 1)
    assert health.ejected_until(EJECTED_MIN_S + 1) == {A: 3 * EJECTED_MIN_S + 1}
    health.picked(A, 10.0)
    assert health.answered(A)
    assert not health.ejected()


def test_where_most_nodes_are_silent_none_is_gone() -> None:
    one, two, three = NodeId("1"), NodeId("2"), NodeId("3")
    assert lost_nodes({one}, 1) == set()
    assert lost_nodes({one}, 2) == {one}
    assert lost_nodes({one, two}, 4) == {one, two}
    assert lost_nodes({one, two, three}, 5) == set()
    assert lost_nodes(frozenset(), 0) == set()
