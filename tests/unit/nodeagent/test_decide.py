"""A replica's life, reconciliation, backoff, health, admission and eviction, by rows and laws."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from isochrone.wire.assignment import Assignment, ReplicaGroup, Tombstone
from isochrone.wire.headers import ReportedLoad
from isochrone.wire.ids import ClusterId, DeviceId, Epoch, Generation, NodeId, ReplicaId
from isochrone.wire.model import EngineSettings
from isochrone.wire.report import ReplicaState
from nodeagent.decide import health
from nodeagent.decide.admission import ReplicaAdmission, TokenReservation
from nodeagent.decide.backoff import BREAKS_MAX, MOST_S, retry_delay_s
from nodeagent.decide.eviction import CachedArtifact, evict
from nodeagent.decide.reconcile import ReconcileSteps, assignment_problem, reconcile
from nodeagent.decide.replica import TRANSITIONS, ImpossibleReplicaEvent, ReplicaEvent, after
from tests.builders import a_spec

S = ReplicaState
CPU = [DeviceId("cpu")]
DRIVERS = {"mock": "", "vllm": "vllm is not on the PATH of the agent"}


def an_assignment(
    replicas: tuple[str, ...] = (),
    tombstones: tuple[str, ...] = (),
    generation: int = 5,
    epoch: int = 2,
    cluster: str = "c",
    node: str = "n1",
) -> Assignment:
    return Assignment(
        cluster_id=ClusterId(cluster),
        node_id=NodeId(node),
        generation=Generation(generation),
        epoch=Epoch(epoch),
        replicas=tuple(a_spec(name) for name in replicas),
        tombstones=tuple(
            Tombstone(replica_id=ReplicaId(name), generation=Generation(generation), reason="test")
            for name in tombstones
        ),
    )


def steps(assignment: Assignment, **states: ReplicaState) -> tuple[list[str], list[str]]:
    """Return (ended, begun)."""
    running = {ReplicaId(name): state for name, state in states.items()}
    found = reconcile(assignment, running, CPU, DRIVERS)
    return (
        [tombstone.replica_id for tombstone in found.endings],
        [spec.replica_id for spec in found.beginnings],
    )


def test_what_is_assigned_begins_and_what_runs_goes_on() -> None:
    assert steps(an_assignment(("a", "b")), a=S.WARM) == ([], ["b"])


def test_absence_ends_nothing() -> None:
    assert steps(an_assignment(()), a=S.WARM, b=S.LOADING) == ([], [])


def test_a_tombstone_ends_and_ends_once() -> None:
    assert steps(an_assignment((), ("a",)), a=S.WARM) == (["a"], [])
    assert steps(an_assignment((), ("a",)), a=S.DRAINING) == ([], [])
    assert steps(an_assignment((), ("a",)), a=S.STOPPED) == ([], [])
    assert steps(an_assignment((), ("a",))) == ([], [])
    assert steps(an_assignment((), ("a",)), a=S.FAILED) == (["a"], [])


def test_what_cannot_be_done_is_refused_with_its_reason() -> None:
    here = reconcile(an_assignment(("a",)), {}, [DeviceId("gpu0")], DRIVERS)
    assert here.refusals[0].reason == "cannot seat a: no device cpu here"
    assert not here.beginnings
    for driver, words in (
        ("vllm", "cannot run a: vllm is not on the PATH of the agent"),
        ("nobody", "cannot run a: no driver 'nobody' here"),
    ):
        spec = a_spec("a", engine=EngineSettings(driver=driver, kv_memory_bytes=1))
        assignment = msgspec.structs.replace(an_assignment(), replicas=(spec,))
        there = reconcile(assignment, {}, CPU, DRIVERS)
        assert [refusal.reason for refusal in there.refusals] == [words]
        assert not there.beginnings


@pytest.mark.parametrize(
    ("place", "ports", "words"),
    [
        (0, (9400, 9401), ""),
        (0, (9500, 9501), "at port 9400: plaintext_rank_ports are 9500 to 9501 here"),
        # Only who leads listens.
        (1, (9500, 9501), ""),
        (1, None, "cannot hold a part of lead: plaintext_rank_ports is not set here"),
    ],
)
def test_a_part_of_a_replica_over_nodes_begins_only_where_that_is_allowed(
    place: int, ports: tuple[int, int] | None, words: str
) -> None:
    group = ReplicaGroup(
        leader_id=ReplicaId("lead"), place=place, nodes=2, host="10.0.0.7", port=9400
    )
    assignment = msgspec.structs.replace(an_assignment(), replicas=(a_spec("a", group=group),))
    found = reconcile(assignment, {}, CPU, DRIVERS, ports)
    assert [refusal.reason.partition(words)[1] for refusal in found.refusals] == [words] * bool(
        words
    )
    assert len(found.beginnings) == (not words)


@pytest.mark.parametrize(
    ("offered", "words"),
    [
        (an_assignment(generation=5, epoch=2), ""),
        (an_assignment(generation=6, epoch=2), ""),
        (an_assignment(generation=6, epoch=3), ""),
        (an_assignment(generation=4, epoch=2), "cannot take generation 4: 5 is held"),
        (an_assignment(generation=9, epoch=1), "cannot take epoch 1: 2 was seen"),
        (an_assignment(generation=9, epoch=9, cluster="x"), "of cluster x"),
        (an_assignment(generation=9, epoch=9, node="n2"), "assignment of node n2"),
    ],
)
def test_an_older_or_foreign_assignment_changes_nothing(offered: Assignment, words: str) -> None:
    reason = assignment_problem(offered, an_assignment(), NodeId("n1"), ClusterId("c"))
    assert words in reason
    assert bool(reason) is bool(words)


@settings(deadline=None, max_examples=150)
@given(
    wanted=st.sets(st.sampled_from("abcdef")),
    ending=st.sets(st.sampled_from("abcdef")),
    running=st.dictionaries(st.sampled_from("abcdef"), st.sampled_from(list(S))),
)
def test_reconciling_twice_adds_nothing(
    wanted: set[str], ending: set[str], running: dict[str, ReplicaState]
) -> None:
    assignment = an_assignment(tuple(sorted(wanted)), tuple(sorted(ending)))
    states = {ReplicaId(name): state for name, state in running.items()}
    first = reconcile(assignment, states, CPU, DRIVERS)
    for tombstone in first.endings:
        states[tombstone.replica_id] = S.DRAINING
    for spec in first.beginnings:
        states[spec.replica_id] = S.WANTED
    assert reconcile(assignment, states, CPU, DRIVERS) == ReconcileSteps()
    assert not {tombstone.replica_id for tombstone in first.endings} - ending


def test_every_state_but_the_last_can_be_ended_and_what_is_impossible_is_an_error() -> None:
    for state in S:
        if state not in (S.DRAINING, S.STOPPED):
            assert after(state, ReplicaEvent.END_ORDERED) is S.DRAINING
    with pytest.raises(ImpossibleReplicaEvent, match="cannot take drained while warm"):
        after(S.WARM, ReplicaEvent.DRAINED)
    assert all(before is not S.STOPPED for before, _ in TRANSITIONS)


@given(
    breaks=st.lists(st.floats(0, 1000), max_size=20),
    chance=st.floats(0, 1, exclude_max=True),
)
def test_backoff_waits_within_bounds_or_gives_up(breaks: list[float], chance: float) -> None:
    now = 1000.0
    wait_s = retry_delay_s(breaks, now, chance)
    recent = sum(now - at < 600.0 for at in breaks)
    assert (wait_s is None) is (recent >= BREAKS_MAX)
    assert wait_s is None or 0.25 <= wait_s <= MOST_S


def looked(looks: list[tuple[bool, int, int, int]]) -> health.EngineWatch:
    watch = health.EngineWatch()
    for answered, step, bytes_out, in_flight in looks:
        watch = health.observe(
            watch,
            answered=answered,
            steps=step,
            bytes_out=bytes_out,
            in_flight=in_flight,
        )
    return watch


@pytest.mark.parametrize(
    ("looks", "in_flight", "is_sick"),
    [
        ([(True, 1, 0, 1)] * 16 + [(True, 9, 0, 1)], 1, False),  # steps move: a long prefill
        ([(True, 1, 0, 1)] * 17, 1, True),  # a zombie: it answers
        ([(True, 1, 0, 1)] * 2, 1, False),  # looked at twice, however long that took
        ([(True, 1, 0, 1)] * 16 + [(True, 1, 64, 1)], 1, False),  # bytes move
        ([(True, 1, 0, 0)] * 90, 0, False),  # idle is no stall
        ([(False, 0, 0, 0)] * 2, 0, False),
        ([(False, 0, 0, 0)] * 3, 0, True),  # stopped: it answers nothing
        ([(False, 0, 0, 0)] * 2 + [(True, 1, 0, 0)], 0, False),
    ],
)
def test_health_means_progress(
    looks: list[tuple[bool, int, int, int]], in_flight: int, is_sick: bool
) -> None:
    verdict = health.kill_reason(looked(looks), stall_s=15.0, in_flight=in_flight)
    assert bool(verdict) is is_sick


def test_canaries_that_fail_are_a_verdict() -> None:
    watch = msgspec.structs.replace(health.EngineWatch(), canaries_failed=3)
    assert "canary" in health.kill_reason(watch, stall_s=15.0, in_flight=0)


@given(
    kept=st.lists(
        st.builds(
            CachedArtifact,
            digest=st.text("abcdef", min_size=3, max_size=3),
            size_bytes=st.integers(0, 100),
            used_at=st.floats(0, 100),
        ),
        unique_by=lambda k: k.digest,
        max_size=8,
    ),
    pinned=st.sets(st.text("abcdef", min_size=3, max_size=3), max_size=3),
    needed=st.integers(0, 150),
)
def test_eviction_keeps_the_budget_and_what_is_pinned(
    kept: list[CachedArtifact], pinned: set[str], needed: int
) -> None:
    dropped = evict(kept, pinned, budget_bytes=200, needed_bytes=needed)
    if dropped is None:
        left = sum(k.size_bytes for k in kept if k.digest in pinned)
        assert left + needed > 200
        return
    assert not set(dropped) & pinned
    assert sum(k.size_bytes for k in kept if k.digest not in dropped) + needed <= 200


ROUTERS = ["a", "b"]


def test_of_what_others_have_the_prompt_being_read_is_less_by_what_is_read() -> None:
    counted = ReplicaAdmission(10_000)
    first = counted.take(100, 10, 60, router="a", prefill_ms=1000, now_s=5.0)
    second = counted.take(200, 20, 200, router="b", prefill_ms=2000, now_s=5.0)
    assert first is not None and second is not None
    assert counted.load("b", 5.25) == ReportedLoad(300, 30, 2, 0, 260, 45, 10)
    assert counted.load("a", 5.25) == ReportedLoad(300, 30, 2, 0, 260, 200, 20)
    assert counted.load("c", 5.25).others_pending_prefill_tokens == 245
    # It takes longer than was thought: a little of it is left all the same.
    assert counted.load("b", 9.0).others_pending_prefill_tokens == 3
    first.first_token(7.0)
    assert counted.load("a", 8.0).others_pending_prefill_tokens == 100
    assert counted.load("b", 8.0).others_pending_prefill_tokens == 0


def test_where_the_engine_refuses_nothing_is_taken_and_every_router_sees_no_room() -> None:
    counted = ReplicaAdmission(10_000)
    held = counted.take(100, 10, router="a")
    counted.is_shut = True
    assert held is not None
    assert counted.take(1, 1) is None
    for router, others in (("a", 10_000), ("b", 10_010)):
        assert counted.load(router).others_decode_tokens == others
    assert counted.load().decode_tokens == 10_010
    held.release()
    # Idle, and shut all the same.
    assert counted.take(1, 1) is None
    counted.is_shut = False
    assert counted.load("b") == ReportedLoad(0, 0, 0, 0, 0, 0, 0)
    assert counted.take(1, 1) is not None


class Admission(RuleBasedStateMachine):
    """Whatever happens to requests, what is in flight is what is held, and never negative."""

    def __init__(self) -> None:
        super().__init__()
        self.counted = ReplicaAdmission(100)
        self.held: list[tuple[TokenReservation, int, int]] = []
        self.now_s = 0.0

    @rule(
        prompt=st.integers(0, 80),
        output=st.integers(0, 80),
        router=st.sampled_from(ROUTERS),
        prefill_ms=st.integers(0, 2000),
    )
    def take(self, prompt: int, output: int, router: str, prefill_ms: int) -> None:
        ahead = sum(p + o for _, p, o in self.held)
        held = self.counted.take(
            prompt, output, router=router, prefill_ms=prefill_ms, now_s=self.now_s
        )
        fits = not self.held or ahead + prompt + output <= 100
        assert (held is not None) is fits
        if held is not None:
            self.held.append((held, prompt, output))

    @rule(by_s=st.floats(0, 3))
    def wait(self, by_s: float) -> None:
        self.now_s += by_s

    @precondition(lambda self: self.held)
    @rule(index=st.integers(0, 100))
    def first_token(self, index: int) -> None:
        position = index % len(self.held)
        held, _, output = self.held[position]
        held.first_token(self.now_s)
        self.held[position] = (held, 0, output)

    @precondition(lambda self: self.held)
    @rule(index=st.integers(0, 100), twice=st.booleans())
    def release(self, index: int, twice: bool) -> None:
        held, _, _ = self.held.pop(index % len(self.held))
        held.release(self.now_s)
        if twice:
            held.release(self.now_s)
            held.first_token(self.now_s)

    @invariant()
    def counts_agree(self) -> None:
        load = self.counted.load()
        assert load.prefill_tokens == sum(p for _, p, _ in self.held)
        assert load.decode_tokens == sum(o for _, _, o in self.held)
        assert load.running == len(self.held)
        assert load.pending_prefill_tokens == load.prefill_tokens
        for router in ROUTERS:
            told = self.counted.load(router, self.now_s)
            others = [one for one in self.held if one[0].router != router]
            assert told.others_decode_tokens == sum(o for _, _, o in others)
            unread = sum(p for _, p, _ in others)
            # Only of the first prompt part may be read.
            assert (
                unread - max((p for _, p, _ in others), default=0)
                <= told.others_pending_prefill_tokens
            )
            assert told.others_pending_prefill_tokens <= unread


TestAdmission = Admission.TestCase
TestAdmission.settings = settings(deadline=None, max_examples=60, stateful_step_count=30)
