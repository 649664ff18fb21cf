"""A replica that works step by step: times as computed by hand, and nothing left behind."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.sim.published_latency import PublishedLatency, simulate_clients
from ops.sim.stepped_replica import REPLICA_KINDS, SteppedReplica
from ops.sim.world import LLAMA_70B_TODAY, EngineProfile, ReplicaSite
from tests.unit.sim.test_replica import JOBS, PLAIN, a_job, run
from tests.unit.sim.test_replica_memory import POOL


def a_stepped_replica(profile: EngineProfile = PLAIN) -> SteppedReplica:
    return SteppedReplica(ReplicaSite(0, 0, profile, profile.prefill_tokens_per_s))


def test_a_prompt_begins_at_a_steps_boundary_and_is_answered_at_the_end_of_a_step() -> None:
    replica = a_stepped_replica()
    second = a_job(1, 100)
    assert replica.admit(a_job(0, 1000, 100), 0.0)
    replica.settle(1.0)
    # Steps of 11 ms: the third one ends at 1.033 s. Then 100 tokens are read beside a sequence.
    assert replica.admit(second, 1.025)
    while not second.first_token_at_s:
        replica.settle(replica.next_event_s())
    assert second.first_token_at_s == pytest.approx(1.033 + 0.1 + 0.001)


def test_its_node_knows_that_a_prompt_that_began_at_a_boundary_is_being_read() -> None:
    replica = a_stepped_replica()
    second = a_job(1, 100)
    second.prefill_ms = 100.0
    assert replica.admit(a_job(0, 1000, 100), 0.0)
    replica.settle(1.0)
    assert replica.admit(second, 1.025)
    replica.settle(replica.next_event_s())  # It begins, and nothing else happens.
    assert replica.queued_tokens(1.075) == pytest.approx(50, abs=1)
    assert replica.load_at(1.075, pop=3).others_pending_prefill_tokens == replica.queued_tokens(
        1.075
    )


def test_a_step_reads_several_prompts_and_answers_them_together() -> None:
    replica = a_stepped_replica()
    for number in range(3):
        assert replica.admit(a_job(number, 400), 0.0)
    # The first began alone. A step takes 1,000 tokens.
    ended = run(replica)
    assert [ended[number][0] for number in range(3)] == pytest.approx([0.4, 1.2, 1.2])


def test_with_one_prompt_a_step_the_second_waits_for_the_next() -> None:
    replica = REPLICA_KINDS["boundaries"](ReplicaSite(0, 0, PLAIN, 1000.0), None)
    for number in range(3):
        assert replica.admit(a_job(number, 400), 0.0)
    ended = run(replica)
    assert [ended[number][0] for number in range(3)] == pytest.approx([0.4, 0.8, 1.2])


def test_a_prompt_finds_what_an_earlier_one_of_the_same_step_reads() -> None:
    replica = a_stepped_replica()
    assert replica.admit(a_job(0, 10), 0.0)
    for number in (1, 2):
        assert replica.admit(a_job(number, 500, 1, (1, 2, 3, 4)), 0.0)
    # 500 tokens, and 100 of the second one's own.
    assert run(replica)[2][0] == pytest.approx(0.01 + 0.6)


def test_a_replica_that_dies_while_it_reads_returns_all_requests_and_serves_again() -> None:
    replica = a_stepped_replica()
    for number in range(4):
        assert replica.admit(a_job(number, 400, 50), 0.0)
    replica.settle(replica.next_event_s())
    assert sorted(job.request.number for job in replica.lose()) == [0, 1, 2, 3]
    replica.restart(10.0)
    assert replica.admit(a_job(4, 400), 10.0)
    assert run(replica)[4][0] == pytest.approx(10.4)


@settings(deadline=None, max_examples=50)
@given(JOBS, st.sampled_from((PLAIN, PLAIN._replace(interval_s=0.1), POOL)))
def test_every_request_is_answered(
    jobs: list[tuple[float, int, int]], profile: EngineProfile
) -> None:
    replica = a_stepped_replica(profile)
    ended: set[int] = set()
    arrivals = sorted(enumerate(jobs), key=lambda job: job[1][0])
    fitting = {n for n, (_, prompt, output) in arrivals if prompt + output <= 900}
    arrivals = [(n, job) for n, job in arrivals if n in fitting]
    while arrivals or replica.next_event_s() < float("inf"):
        at_s = replica.next_event_s()
        if arrivals and arrivals[0][1][0] <= at_s:
            number, (arrives_s, prompt, output) = arrivals.pop(0)
            if not replica.admit(a_job(number, prompt, output), arrives_s):
                fitting.remove(number)
            continue
        ended |= {job.request.number for job in replica.settle(at_s).ended}
    assert ended == fitting
    load = replica.load_at(1e9, 1)
    assert (load.prefill_tokens, load.decode_tokens, load.running, load.waiting) == (0, 0, 0, 0)


def test_short_prompts_beside_many_answers_wait_as_long_as_published() -> None:
    row = PublishedLatency(200, 200, 25, 138.98, 20.61)
    profile = LLAMA_70B_TODAY.large
    flowing, stepped = (
        simulate_clients(profile, row, REPLICA_KINDS[kind]).ttft_ms / row.ttft_ms
        for kind in ("flowing", "stepped")
    )
    assert flowing < 0.2
    assert 0.8 < stepped < 1.25
