"""The fair queue: fair between tenants, bounded, and it loses no ticket."""

import heapq
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from isochrone.wire.ids import DeploymentId, TenantId
from router.decide.admission.fair_queue import (
    BytesFull,
    FairQueue,
    QueueFull,
    Ticket,
)
from router.decide.admission.retry_after import (
    RETRY_AFTER_MAX_S,
    RETRY_AFTER_MIN_S,
    RETRY_AFTER_UNKNOWN_S,
    RETRY_SPREAD,
    RETRY_SPREAD_MIN_S,
    DrainRate,
    spread_retry_after_s,
)

D = DeploymentId("d")


def a_ticket(tenant: str, tokens: int = 10, lane: DeploymentId = D, size_bytes: int = 0) -> Ticket:
    return Ticket(lane, TenantId(tenant), tokens, size_bytes)


def served(queue: FairQueue[Ticket], count: int = 10**6) -> str:
    """Serve tickets in order and return their tenants."""
    order = []
    while count and (head := queue.head(D)) is not None:
        queue.take(head, 0.0)
        order.append(head.tenant)
        count -= 1
    return "".join(order)


def a_queue(tenants: str, depth_max: int = 100) -> FairQueue[Ticket]:
    queue: FairQueue[Ticket] = FairQueue(depth_max, 1)
    for tenant in tenants:
        queue.push(a_ticket(tenant))
    return queue


def test_a_flood_of_one_tenant_waits_behind_itself() -> None:
    assert served(a_queue("aaaaab")) == "abaaaa"
    assert served(a_queue("aaabbbc")) == "abcabab"


def test_a_tenant_that_comes_during_a_flood_starts_level() -> None:
    queue = a_queue("a" * 20)
    assert served(queue, 5) == "aaaaa"
    queue.push(a_ticket("b"))
    # `a` got five turns while no other tenant waited: it owes nothing for them.
    assert served(queue, 3) == "baa"


def test_turns_are_shared_by_tokens_not_by_requests() -> None:
    queue: FairQueue[Ticket] = FairQueue(100, 1)
    for _ in range(4):
        queue.push(a_ticket("a", 300))
    for _ in range(8):
        queue.push(a_ticket("b", 100))
    assert served(queue, 9) == "abbbabbba"


def test_a_ticket_refused_after_its_turn_keeps_its_place() -> None:
    queue = a_queue("aab")
    first = queue.head(D)
    assert first is not None
    queue.take(first, 0.0)
    second = queue.head(D)
    assert second is not None
    assert second.tenant == "b"
    queue.take(second, 0.0)
    queue.put_back(second)
    queue.put_back(first)
    assert queue.head(D) is first
    queue.take(first, 0.0)
    assert queue.head(D) is second


def test_a_new_tenant_passes_a_head_that_a_node_refused() -> None:
    """The node may refuse one more request of the first tenant, and admit one of the second."""
    queue = a_queue("aaa")
    refused = queue.head(D)
    assert refused is not None
    queue.take(refused, 0.0)
    queue.put_back(refused)
    assert queue.head(D) is refused
    small = a_ticket("b")
    queue.push(small)
    assert queue.head(D) is small
    queue.take(small, 0.0)
    assert queue.head(D) is refused


def test_in_a_full_queue_the_tenant_with_most_loses_its_newest() -> None:
    queue = a_queue("aaaa", depth_max=4)
    with pytest.raises(QueueFull):
        queue.push(a_ticket("a"))
    ousted = queue.push(a_ticket("b"))
    assert ousted is not None
    assert ousted.tenant == "a"
    assert ousted.number == 4
    assert queue.push(a_ticket("b")) is not None
    # Two each: taking one more of either would only swap their places.
    for tenant in "ab":
        with pytest.raises(QueueFull):
            queue.push(a_ticket(tenant))
    assert queue.push(a_ticket("c")) is not None
    assert queue.depth == 4


def test_deployments_do_not_wait_for_each_other() -> None:
    queue = a_queue("aaa")
    other = a_ticket("a", lane=DeploymentId("e"))
    queue.push(other)
    assert queue.head(DeploymentId("e")) is other
    queue.take(other, 0.0)
    assert served(queue) == "aaa"


def test_the_drain_rate_is_measured_only_while_full() -> None:
    drain = DrainRate()
    assert drain.wait_s(10**6, 0.0) == RETRY_AFTER_UNKNOWN_S
    drain.record_start(1000, 0.0, is_still_full=False)
    assert drain.wait_s(10**6, 0.0) == RETRY_AFTER_UNKNOWN_S
    drain.record_full(10.0)
    for n in range(1, 11):
        drain.record_start(1000, 10.0 + n, is_still_full=n < 10)
    # 1000 tokens per second; the time in which no request waited does not count.
    assert drain.wait_s(5000, 500.0) == pytest.approx(5.0, rel=0.01)
    # Full again, and no request ends: the rate falls with every second.
    drain.record_full(500.0)
    assert drain.wait_s(5000, 520.0) > 10.0
    assert drain.wait_s(10**9, 500.0) == RETRY_AFTER_MAX_S
    assert drain.wait_s(1, 500.0) == RETRY_AFTER_MIN_S


def test_requests_refused_together_are_spread_over_time() -> None:
    for after_s, range_s in ((1.0, RETRY_SPREAD_MIN_S), (40.0, 40.0 * RETRY_SPREAD)):
        times = sorted(spread_retry_after_s(after_s, f"r{n}") for n in range(1000))
        assert after_s <= times[0]
        assert times[-1] <= after_s + range_s
        # Each tenth of the range gets about a tenth of them.
        tenths = [int(10 * (time_s - after_s) / range_s) for time_s in times]
        assert all(60 < tenths.count(tenth) < 150 for tenth in range(10))
    assert spread_retry_after_s(2.0, "r1") == spread_retry_after_s(2.0, "r1")


def test_a_tenant_has_no_more_bytes_waiting_than_are_free() -> None:
    queue: FairQueue[Ticket] = FairQueue(100, 100)
    for _ in range(5):
        queue.push(a_ticket("a", size_bytes=10))
    with pytest.raises(BytesFull):
        queue.push(a_ticket("a", size_bytes=10))
    for _ in range(2):
        queue.push(a_ticket("b", size_bytes=10))
    with pytest.raises(BytesFull):
        queue.push(a_ticket("b", size_bytes=20))
    queue.push(a_ticket("c", size_bytes=15))
    assert queue.bytes == 85
    served(queue)
    assert queue.bytes == 0


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.sampled_from("fbr"), st.floats(0, 100), st.integers(1, 10**6))))
def test_retry_after_stays_within_bounds(steps: list[tuple[str, float, int]]) -> None:
    drain, now_s = DrainRate(), 0.0
    for kind, wait_s, tokens in steps:
        now_s += wait_s
        if kind == "f":
            drain.record_full(now_s)
        else:
            drain.record_start(tokens, now_s, is_still_full=kind == "b")
        assert RETRY_AFTER_MIN_S <= drain.wait_s(tokens, now_s) <= RETRY_AFTER_MAX_S


class Turns(RuleBasedStateMachine):
    """Tickets arrive, are served, leave and are refused in any order, over two lanes."""

    TENANTS = "abcde"
    TOKENS_MAX = 50
    BYTES_MAX = 40

    @initialize(depth_max=st.integers(1, 12))
    def begin(self, depth_max: int) -> None:
        self.depth_max = depth_max
        self.queue: FairQueue[Ticket] = FairQueue(depth_max, self.BYTES_MAX)
        self.waiting: list[Ticket] = []
        self.taken: list[Ticket] = []
        # For each tenant's first ticket, the tokens that each other tenant got meanwhile.
        self.passed: dict[tuple[int, str], int] = {}

    @rule(
        tenant=st.sampled_from(TENANTS),
        tokens=st.integers(1, TOKENS_MAX),
        lane=st.sampled_from("de"),
        size_bytes=st.integers(0, 12),
    )
    def arrive(self, tenant: str, tokens: int, lane: str, size_bytes: int) -> None:
        ticket = a_ticket(tenant, tokens, DeploymentId(lane), size_bytes)
        free = self.BYTES_MAX - sum(waiting.bytes for waiting in self.waiting)
        is_heavy = sum(waiting.bytes for waiting in self._flow(ticket)) + size_bytes > free
        depth = len(self._flow(ticket))
        longest = max((len(self._flow(waiting)) for waiting in self.waiting), default=0)
        try:
            ousted = self.queue.push(ticket)
        except BytesFull:
            assert is_heavy
            return
        except QueueFull:
            assert len(self.waiting) == self.depth_max
            assert depth + 1 >= longest
            return
        assert not is_heavy
        if ousted is not None:
            assert len(self._flow(ousted)) == longest > depth + 1
            assert ousted is self._flow(ousted)[-1]
            self.waiting.remove(ousted)
        self.waiting.append(ticket)

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 20))
    def serve(self, which: int) -> None:
        lane = self.waiting[which % len(self.waiting)].lane
        head = self.queue.head(lane)
        assert head is not None
        assert head is self._flow(head)[0]
        self.queue.take(head, 0.0)
        self.waiting.remove(head)
        self.taken.append(head)
        for other in self.waiting:
            if other.lane == lane and other.tenant != head.tenant and self._flow(other)[0] is other:
                passed = self.passed.get((other.number, head.tenant), 0) + head.tokens
                # What it still owes for its last turn, and one turn of the other tenant.
                assert passed <= 2 * self.TOKENS_MAX
                self.passed[other.number, head.tenant] = passed

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 20))
    def leave(self, which: int) -> None:
        ticket = self.waiting.pop(which % len(self.waiting))
        self.queue.remove(ticket)
        self.queue.remove(ticket)

    @precondition(lambda self: self.taken)
    @rule(which=st.integers(0, 20))
    def refused(self, which: int) -> None:
        ticket = self.taken.pop(which % len(self.taken))
        try:
            ousted = self.queue.put_back(ticket)
        except (QueueFull, BytesFull):
            return
        if ousted is not None:
            self.waiting.remove(ousted)
        self.waiting.append(ticket)
        # The ticket that passed the others was not served after all.
        self.passed.clear()

    def _flow(self, ticket: Ticket) -> list[Ticket]:
        return sorted(
            (
                other
                for other in self.waiting
                if (other.lane, other.tenant) == (ticket.lane, ticket.tenant)
            ),
            key=lambda other: other.number,
        )

    @invariant()
    def its_counts_are_right(self) -> None:
        if not hasattr(self, "queue"):
            return
        assert self.queue.depth == len(self.waiting) <= self.depth_max
        assert self.queue.bytes == sum(waiting.bytes for waiting in self.waiting) <= self.BYTES_MAX
        for lane in {ticket.lane for ticket in self.waiting}:
            assert self.queue.head(lane) is not None


Turns.TestCase.settings = settings(deadline=None, max_examples=40, stateful_step_count=30)
TestTurns = Turns.TestCase


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
    st.integers(1, 200),
    st.integers(1, 200),
)
def test_a_newcomer_is_passed_by_each_other_at_most_once(
    flood_tokens: list[int], before: int, tokens: int
) -> None:
    queue: FairQueue[Ticket] = FairQueue(10**6, 1)
    for n, size in enumerate(flood_tokens):
        for _ in range(60):
            queue.push(a_ticket(f"flood-{n}", size))
    for _ in range(before % (50 * len(flood_tokens))):
        head = queue.head(D)
        assert head is not None
        queue.take(head, 0.0)
    newcomer = a_ticket("newcomer", tokens)
    queue.push(newcomer)
    passed: list[str] = []
    while (head := queue.head(D)) is not newcomer:
        assert head is not None
        queue.take(head, 0.0)
        passed.append(head.tenant)
    assert len(passed) == len(set(passed))


@pytest.mark.parametrize("slots", [2, 16])
def test_retry_after_is_close_to_the_real_wait(slots: int) -> None:
    """Serve requests of random length on `slots` slots, with others always waiting."""
    chance = random.Random(slots)
    queue: FairQueue[Ticket] = FairQueue(1000, 1)
    ends_s = [0.0] * slots
    queue.note_full(D, 0.0)
    now_s, given, pushed, predictions = 0.0, 0, 0, []
    drained: list[tuple[float, int]] = []
    while now_s < 600:
        while queue.depth < 40:
            ticket = a_ticket(chance.choice("abc"), chance.randint(10, 400))
            queue.push(ticket)
            pushed += ticket.tokens
        now_s = heapq.heappop(ends_s)
        head = queue.head(D)
        assert head is not None
        queue.take(head, now_s)
        given += head.tokens
        drained.append((now_s, given))
        # A slot serves about a hundred tokens per second.
        heapq.heappush(ends_s, now_s + head.tokens / chance.uniform(70, 130))
        if len(drained) % 50 == 0:
            predictions.append((now_s, pushed + 100, queue.retry_after_s(D, 100, now_s)))
    misses = []
    for at_s, tokens, wait_s in predictions:
        until_s = next((when_s for when_s, total in drained if total >= tokens), None)
        if until_s is not None and wait_s < RETRY_AFTER_MAX_S:
            misses.append(abs(wait_s / (until_s - at_s) - 1))
    assert len(misses) >= 5
    assert sorted(misses)[len(misses) // 2] < 0.1
    assert max(misses) < 0.3
