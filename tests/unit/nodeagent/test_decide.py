"""The agent's pure decisions: reconciliation, life cycle, backoff, health, eviction, admission."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from isochrone.wire.http.headers import ReportedLoad
from isochrone.wire.ids import ClusterId, DeviceId, Epoch, Generation, NodeId, ReplicaId
from isochrone.wire.models.model import EngineSettings
from isochrone.wire.peers.assignment import Assignment, ReplicaGroup, Tombstone
from isochrone.wire.peers.report import ReplicaState
from nodeagent.decide.eviction import CachedArtifact, evict
from nodeagent.decide.replicas import health
from nodeagent.decide.replicas.backoff import DELAY_MAX_S, FAILURES_MAX, retry_delay_s
from nodeagent.decide.replicas.reconcile import (
    LackingParts,
    ReconcileSteps,
    assignment_problem,
    is_same_spec,
    reconcile,
)
from nodeagent.decide.replicas.replica import (
    TRANSITIONS,
    ImpossibleReplicaEvent,
    ReplicaEvent,
    next_state,
)
from nodeagent.decide.requests.admission import ReplicaAdmission, TokenReservation
from tests.builders import a_spec

S = ReplicaState
CPU = {DeviceId("cpu"): 3 << 30}
LACKING = LackingParts({"mock": "", "vllm": "vllm is not on the PATH of the agent"})


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
    """Return the ids of the replicas that are (stopped, started)."""
    running = {ReplicaId(name): state for name, state in states.items()}
    found = reconcile(assignment, running, CPU, LACKING)
    return (
        [tombstone.replica_id for tombstone in found.stops],
        [spec.replica_id for spec in found.starts],
    )


def test_an_assigned_replica_starts_and_a_running_one_is_kept() -> None:
    assert steps(an_assignment(("a", "b")), a=S.WARM) == ([], ["b"])


def test_a_replica_absent_from_the_assignment_keeps_running() -> None:
    assert steps(an_assignment(()), a=S.WARM, b=S.LOADING) == ([], [])


def test_a_tombstone_stops_a_replica_once() -> None:
    assert steps(an_assignment((), ("a",)), a=S.WARM) == (["a"], [])
    assert steps(an_assignment((), ("a",)), a=S.DRAINING) == ([], [])
    assert steps(an_assignment((), ("a",)), a=S.STOPPED) == ([], [])
    assert steps(an_assignment((), ("a",))) == ([], [])
    assert steps(an_assignment((), ("a",)), a=S.FAILED) == (["a"], [])


def test_a_replica_that_cannot_run_here_is_refused_with_a_reason() -> None:
    here = reconcile(an_assignment(("a",)), {}, {DeviceId("gpu0"): 0}, LACKING)
    assert here.refusals[0].reason == "cannot run a: no healthy device cpu on this node"
    assert not here.starts
    for driver, words in (
        ("vllm", "cannot run a: vllm is not on the PATH of the agent"),
        ("unknown", "cannot run a: this node has no driver 'unknown'"),
    ):
        spec = a_spec("a", engine=EngineSettings(driver=driver, kv_memory_bytes=1))
        assignment = msgspec.structs.replace(an_assignment(), replicas=(spec,))
        there = reconcile(assignment, {}, CPU, LACKING)
        assert [refusal.reason for refusal in there.refusals] == [words]
        assert not there.starts


def reasons(wanted: tuple[str, ...], ending: tuple[str, ...], *running: str) -> list[str]:
    """Return the refusals of replicas of 1 GiB on a device of 3 GiB."""
    specs = [a_spec(name, memory_bytes=1 << 30) for name in wanted]
    assignment = msgspec.structs.replace(an_assignment((), ending), replicas=tuple(specs))
    states = {ReplicaId(name): S.WARM for name in running}
    taking = [a_spec(name, memory_bytes=1 << 30) for name in running]
    found = reconcile(assignment, states, CPU, LACKING, None, taking)
    assert len(found.starts) + len(found.refusals) == len({*wanted} - {*running})
    return [refusal.reason for refusal in found.refusals]


def test_a_replica_is_refused_where_one_that_is_not_assigned_uses_its_memory() -> None:
    words = "the scheduler does not know of x, which runs here and takes its memory of cpu"
    assert reasons(("a", "b"), (), "x") == []
    assert reasons(("a", "b", "c"), (), "x") == [f"cannot run c: {words}"]
    assert reasons(("a", "b", "c"), (), "a", "b", "x") == [f"cannot run c: {words}"]
    # What the assignment names is the scheduler's own count.
    assert reasons(("a", "b", "c", "d"), (), "a") == []
    assert reasons(("a", "b", "c"), ("x",), "x") == []


@pytest.mark.parametrize(
    ("place", "ports", "words"),
    [
        (0, (9400, 9401), ""),
        (0, (9500, 9501), "at port 9400: plaintext_rank_ports is 9500 to 9501 on this node"),
        # Only the leader listens.
        (1, (9500, 9501), ""),
        (1, None, "cannot run a part of lead: plaintext_rank_ports is not set on this node"),
    ],
)
def test_a_part_of_a_replica_over_nodes_needs_a_rank_port(
    place: int, ports: tuple[int, int] | None, words: str
) -> None:
    group = ReplicaGroup(
        leader_id=ReplicaId("lead"), place=place, nodes=2, host="10.0.0.7", port=9400
    )
    assignment = msgspec.structs.replace(an_assignment(), replicas=(a_spec("a", group=group),))
    found = reconcile(assignment, {}, CPU, LACKING, ports)
    assert [refusal.reason.partition(words)[1] for refusal in found.refusals] == [words] * bool(
        words
    )
    assert len(found.starts) == (not words)


@pytest.mark.parametrize(
    ("offered", "words"),
    [
        (an_assignment(generation=5, epoch=2), ""),
        (an_assignment(generation=6, epoch=2), ""),
        (an_assignment(generation=6, epoch=3), ""),
        (
            an_assignment(generation=4, epoch=2),
            "cannot accept generation 4: it is older than the current generation 5",
        ),
        (an_assignment(generation=9, epoch=1), "cannot accept epoch 1: it is older than epoch 2"),
        (an_assignment(generation=9, epoch=9, cluster="x"), "of cluster x"),
        (an_assignment(generation=9, epoch=9, node="n2"), "assignment of node n2"),
    ],
)
def test_an_older_or_foreign_assignment_is_refused(offered: Assignment, words: str) -> None:
    reason = assignment_problem(offered, an_assignment(), NodeId("n1"), ClusterId("c"))
    assert words in reason
    assert bool(reason) is bool(words)


@settings(deadline=None, max_examples=150)
@given(
    wanted=st.sets(st.sampled_from("abcdef")),
    ending=st.sets(st.sampled_from("abcdef")),
    running=st.dictionaries(st.sampled_from("abcdef"), st.sampled_from(list(S))),
)
def test_a_second_reconciliation_has_no_steps(
    wanted: set[str], ending: set[str], running: dict[str, ReplicaState]
) -> None:
    assignment = an_assignment(tuple(sorted(wanted)), tuple(sorted(ending)))
    states = {ReplicaId(name): state for name, state in running.items()}
    first = reconcile(assignment, states, CPU, LACKING)
    for tombstone in first.stops:
        states[tombstone.replica_id] = S.DRAINING
    for spec in first.starts:
        states[spec.replica_id] = S.WANTED
    assert reconcile(assignment, states, CPU, LACKING) == ReconcileSteps()
    assert not {tombstone.replica_id for tombstone in first.stops} - ending


def test_every_live_state_can_be_ended_and_an_impossible_event_raises() -> None:
    for state in S:
        if state not in (S.DRAINING, S.STOPPED):
            assert next_state(state, ReplicaEvent.END_ORDERED) is S.DRAINING
    with pytest.raises(
        ImpossibleReplicaEvent, match="cannot apply event drained to a warm replica"
    ):
        next_state(S.WARM, ReplicaEvent.DRAINED)
    assert all(before is not S.STOPPED for before, _ in TRANSITIONS)


@given(
    failure_times=st.lists(st.floats(0, 1000), max_size=20),
    jitter=st.floats(0, 1, exclude_max=True),
    failed_starts=st.integers(0, 10),
)
def test_the_retry_delay_is_bounded_or_the_replica_is_given_up(
    failure_times: list[float], jitter: float, failed_starts: int
) -> None:
    now = 1000.0
    delay_s = retry_delay_s(failure_times, now, jitter, failed_starts)
    recent = sum(now - failed_at < 600.0 for failed_at in failure_times)
    assert (delay_s is None) is (max(recent, failed_starts) >= FAILURES_MAX)
    assert delay_s is None or 0.25 <= delay_s <= DELAY_MAX_S


def observed(observations: list[tuple[bool, int, int, int]]) -> health.EngineWatch:
    watch = health.EngineWatch()
    for answered, step, bytes_out, in_flight in observations:
        watch = health.observe(
            watch,
            answered=answered,
            steps=step,
            bytes_out=bytes_out,
            in_flight=in_flight,
        )
    return watch


@pytest.mark.parametrize(
    ("observations", "in_flight", "is_unhealthy"),
    [
        ([(True, 1, 0, 1)] * 16 + [(True, 9, 0, 1)], 1, False),  # steps move: a long prefill
        ([(True, 1, 0, 1)] * 17, 1, True),  # it answers and makes no progress
        ([(True, 1, 0, 1)] * 2, 1, False),  # two observations are too few, whatever time passed
        ([(True, 1, 0, 1)] * 16 + [(True, 1, 64, 1)], 1, False),  # bytes move
        ([(True, 1, 0, 0)] * 90, 0, False),  # idle is not stalled
        ([(False, 0, 0, 0)] * 2, 0, False),
        ([(False, 0, 0, 0)] * 3, 0, True),  # it answers nothing
        ([(False, 0, 0, 0)] * 2 + [(True, 1, 0, 0)], 0, False),
    ],
)
def test_an_engine_without_progress_or_answers_is_killed(
    observations: list[tuple[bool, int, int, int]], in_flight: int, is_unhealthy: bool
) -> None:
    reason = health.kill_reason(observed(observations), stall_s=15.0, in_flight=in_flight)
    assert bool(reason) is is_unhealthy


def test_an_engine_that_waits_for_the_kv_of_others_does_not_stall() -> None:
    def after(waits: list[bool]) -> health.EngineWatch:
        watch = health.EngineWatch()
        for is_waiting in waits:
            watch = health.observe(
                watch,
                answered=True,
                steps=1,
                bytes_out=0,
                in_flight=1,
                is_waiting_for_peers=is_waiting,
            )
        return watch

    assert not health.kill_reason(after([True] * 40), stall_s=15.0, in_flight=1)
    # From then on its time counts again.
    assert not health.kill_reason(after([True] * 40 + [False] * 15), stall_s=15.0, in_flight=1)
    assert health.kill_reason(after([True] * 40 + [False] * 16), stall_s=15.0, in_flight=1)


def test_one_failed_canary_is_enough_once_requests_left_a_silent_engine() -> None:
    """A router takes a silent stream to another replica before the stall is long enough."""
    silent = [(True, 1, 9, 0), *[(True, 1, 9, 1)] * 5]
    assert not observed(silent).is_suspect
    left = observed([*silent, (True, 1, 9, 0)])
    assert left.is_suspect
    assert observed([*silent, *[(True, 1, 9, 0)] * 9]).is_suspect
    failed = health.after_canary(left, succeeded=False)
    assert "canary" in health.kill_reason(failed, stall_s=15.0, in_flight=0)
    # A canary's answer clears the suspicion, and so does any other progress.
    assert not health.after_canary(left, succeeded=True).is_suspect
    assert not observed([*silent, (True, 1, 9, 0), (True, 2, 9, 0)]).is_suspect
    assert not observed([(True, 1, 9, 1), (True, 1, 9, 0)]).is_suspect, "a client that left"
    one_failure = health.after_canary(health.EngineWatch(), succeeded=False)
    assert health.kill_reason(one_failure, stall_s=15.0, in_flight=0) == ""


def test_an_engine_whose_canaries_fail_is_killed() -> None:
    watch = msgspec.structs.replace(health.EngineWatch(), canary_failures=3)
    assert "canary" in health.kill_reason(watch, stall_s=15.0, in_flight=0)


@given(
    cached=st.lists(
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
def test_eviction_keeps_the_budget_and_the_pinned_artifacts(
    cached: list[CachedArtifact], pinned: set[str], needed: int
) -> None:
    evicted = evict(cached, pinned, budget_bytes=200, needed_bytes=needed)
    if evicted is None:
        left = sum(k.size_bytes for k in cached if k.digest in pinned)
        assert left + needed > 200
        return
    assert not set(evicted) & pinned
    assert sum(k.size_bytes for k in cached if k.digest not in evicted) + needed <= 200


ROUTERS = ["a", "b"]


def test_the_load_of_other_routers_excludes_prefill_progress() -> None:
    admission = ReplicaAdmission(10_000)
    first = admission.admit(100, 10, 60, router="a", prefill_ms=1000, now_s=5.0)
    second = admission.admit(200, 20, 200, router="b", prefill_ms=2000, now_s=5.0)
    assert first is not None and second is not None
    assert admission.load("b", 5.25) == ReportedLoad(300, 30, 2, 0, 260, 45, 10)
    assert admission.load("a", 5.25) == ReportedLoad(300, 30, 2, 0, 260, 200, 20)
    assert admission.load("c", 5.25).others_pending_prefill_tokens == 245
    # The prefill takes longer than estimated: a small part still counts as pending.
    assert admission.load("b", 9.0).others_pending_prefill_tokens == 3
    first.first_token(7.0)
    assert admission.load("a", 8.0).others_pending_prefill_tokens == 100
    assert admission.load("b", 8.0).others_pending_prefill_tokens == 0


def test_a_closed_replica_admits_nothing_and_reports_no_capacity() -> None:
    admission = ReplicaAdmission(10_000)
    reservation = admission.admit(100, 10, router="a")
    admission.is_closed = True
    assert reservation is not None
    assert admission.admit(1, 1) is None
    for router, others_tokens in (("a", 10_000), ("b", 10_010)):
        assert admission.load(router).others_decode_tokens == others_tokens
    assert admission.load().decode_tokens == 10_010
    reservation.release()
    # Closed, although it is idle.
    assert admission.admit(1, 1) is None
    admission.is_closed = False
    assert admission.load("b") == ReportedLoad(0, 0, 0, 0, 0, 0, 0)
    assert admission.admit(1, 1) is not None


class AdmissionMachine(RuleBasedStateMachine):
    """The counts equal the held reservations after any sequence of events."""

    def __init__(self) -> None:
        super().__init__()
        self.admission = ReplicaAdmission(100)
        self.reservations: list[tuple[TokenReservation, int, int]] = []
        self.now_s = 0.0

    @rule(
        prompt=st.integers(0, 80),
        output=st.integers(0, 80),
        router=st.sampled_from(ROUTERS),
        prefill_ms=st.integers(0, 2000),
    )
    def admit(self, prompt: int, output: int, router: str, prefill_ms: int) -> None:
        ahead = sum(p + o for _, p, o in self.reservations)
        reservation = self.admission.admit(
            prompt, output, router=router, prefill_ms=prefill_ms, now_s=self.now_s
        )
        fits = not self.reservations or ahead + prompt + output <= 100
        assert (reservation is not None) is fits
        if reservation is not None:
            self.reservations.append((reservation, prompt, output))

    @rule(by_s=st.floats(0, 3))
    def wait(self, by_s: float) -> None:
        self.now_s += by_s

    @precondition(lambda self: self.reservations)
    @rule(index=st.integers(0, 100))
    def first_token(self, index: int) -> None:
        position = index % len(self.reservations)
        reservation, _, output = self.reservations[position]
        reservation.first_token(self.now_s)
        self.reservations[position] = (reservation, 0, output)

    @precondition(lambda self: self.reservations)
    @rule(index=st.integers(0, 100), twice=st.booleans())
    def release(self, index: int, twice: bool) -> None:
        reservation, _, _ = self.reservations.pop(index % len(self.reservations))
        reservation.release(self.now_s)
        if twice:
            reservation.release(self.now_s)
            reservation.first_token(self.now_s)

    @invariant()
    def counts_agree(self) -> None:
        load = self.admission.load()
        assert load.prefill_tokens == sum(p for _, p, _ in self.reservations)
        assert load.decode_tokens == sum(o for _, _, o in self.reservations)
        assert load.running == len(self.reservations)
        assert load.pending_prefill_tokens == load.prefill_tokens
        for router in ROUTERS:
            load = self.admission.load(router, self.now_s)
            others = [r for r in self.reservations if r[0].router != router]
            assert load.others_decode_tokens == sum(o for _, _, o in others)
            pending = sum(p for _, p, _ in others)
            # Only the first prompt can be partly prefilled.
            assert (
                pending - max((p for _, p, _ in others), default=0)
                <= load.others_pending_prefill_tokens
            )
            assert load.others_pending_prefill_tokens <= pending


TestAdmission = AdmissionMachine.TestCase
TestAdmission.settings = settings(deadline=None, max_examples=60, stateful_step_count=30)


@pytest.mark.parametrize(
    ("changed", "is_same"),
    [
        ({}, True),
        # A newer scheduler adds fields that the agent which started the engine did not know.
        ({"kind": "chat", "seal": "s"}, True),
        ({"engine": EngineSettings(driver="mock", kv_memory_bytes=0, share_kv=True)}, True),
        ({"version": 2}, False),
        ({"memory_bytes": 7}, False),
        ({"engine": EngineSettings(driver="vllm", kv_memory_bytes=0)}, False),
    ],
)
def test_an_engine_of_another_release_is_adopted_unless_its_spec_has_changed(
    changed: dict[str, Any], is_same: bool
) -> None:
    before, after = a_spec(), a_spec(**changed)
    assert is_same_spec(before, after) is is_same
    assert is_same_spec(after, before) is is_same


def test_a_field_with_two_values_is_a_change() -> None:
    assert not is_same_spec(a_spec(kind="chat"), a_spec(kind="embedding"))
