"""A simulated replica: times, cache and tokens as computed by hand."""

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from isochrone.wire.http.headers import ReportedLoad
from ops.sim.replica import SimulatedReplica
from ops.sim.replica_job import ReplicaJob
from ops.sim.traces import TraceRequest
from ops.sim.world import EngineProfile, ReplicaSite

PLAIN = EngineProfile("plain", 1000.0, 0.01, 0.001, 1e12, 100_000, 5_000, chunk_tokens=1000)


def a_replica(profile: EngineProfile = PLAIN) -> SimulatedReplica:
    return SimulatedReplica(ReplicaSite(0, 0, profile, profile.prefill_tokens_per_s))


def a_job(number: int, prompt: int, output: int = 1, blocks: tuple[int, ...] = ()) -> ReplicaJob:
    request = TraceRequest(number, 0.0, prompt, output, blocks, 100, "", 0.0)
    return ReplicaJob(request, prompt + output, prompt, 0, 0.0)


def run(replica: SimulatedReplica) -> dict[int, tuple[float, float]]:
    """Run all events; return when each request got its first token and when it ended."""
    first: dict[int, float] = {}
    ended: dict[int, tuple[float, float]] = {}
    while (at_s := replica.next_event_s()) < float("inf"):
        events = replica.settle(at_s)
        first.update((job.request.number, at_s) for job in events.first_tokens)
        ended.update(
            (job.request.number, (first[job.request.number], at_s)) for job in events.ended
        )
    return ended


def test_prompts_are_read_one_after_the_other_beside_decoding() -> None:
    replica = a_replica()
    assert replica.admit(a_job(0, 1000, 11), 0.0)
    assert replica.admit(a_job(1, 1000, 1), 0.0)
    ended = run(replica)
    assert abs(ended[0][0] - 1.0) < 1e-9
    # Beside one sequence a chunk takes 1 s + 1 ms, in which that sequence gets one token.
    assert abs(ended[1][0] - 2.001) < 1e-6
    # Then nine more, at 11 ms a step.
    assert abs(ended[0][1] - (2.001 + 9 * 0.011)) < 1e-6


def test_a_limit_on_the_step_leaves_a_prompt_the_time_that_decoding_does_not_take() -> None:
    replica = a_replica(PLAIN._replace(interval_s=0.1))
    assert replica.admit(a_job(0, 1000, 100), 0.0)
    assert replica.admit(a_job(1, 890, 1), 0.0)
    ended = run(replica)
    # The first is read alone in 1 s. Beside it, the second gets 89 ms of each 100.
    assert abs(ended[0][0] - 1.0) < 1e-9
    assert abs(ended[1][0] - 2.0) < 1e-6


def test_each_router_is_told_the_others_load_less_what_is_read_of_the_current_prompt() -> None:
    replica = a_replica()
    request = TraceRequest(0, 0.0, 1000, 1, (), 100, "", 0.0)
    replica.admit(ReplicaJob(request, 1010, 800, 3, 1000.0), 0.0)
    replica.admit(ReplicaJob(request._replace(number=1), 1020, 500, 4, 600.0), 0.1)
    loads = [replica.load_at(0.25, pop) for pop in (3, 4, 5)]
    assert [load.pending_prefill_tokens for load in loads] == [1300] * 3
    assert [load.others_pending_prefill_tokens for load in loads] == [500, 600, 1100]
    assert [load.others_decode_tokens for load in loads] == [20, 10, 30]


def test_a_cached_prompt_costs_only_its_new_tokens() -> None:
    replica = a_replica()
    replica.admit(a_job(0, 1000, 1, tuple(range(10))), 0.0)
    replica.admit(a_job(1, 1200, 1, (*range(10), 77, 78)), 0.0)
    ended = run(replica)
    assert abs(ended[1][0] - ended[0][0] - 0.2) < 1e-9
    # The cache holds 5,000 tokens: forty other blocks evict some of the prompt, from its end.
    replica.admit(a_job(2, 4000, 1, tuple(range(100, 140))), 9.0)
    run(replica)
    assert replica.cached(a_job(3, 1200, 1, (*range(10), 77, 78)).request) == 1000


def test_a_request_that_does_not_fit_or_would_wait_too_long_is_refused() -> None:
    replica = a_replica()
    assert replica.admit(a_job(0, 200_000), 0.0)
    assert not replica.admit(a_job(1, 10), 0.0)
    other = a_replica()
    assert other.admit(a_job(0, 500), 0.0, queue_tokens_max=100)
    assert not other.admit(a_job(1, 10), 0.0, queue_tokens_max=100)
    assert other.admit(a_job(2, 10), 0.0, queue_tokens_max=500)


JOBS = st.lists(
    st.tuples(st.floats(0, 5), st.integers(1, 3000), st.integers(1, 50)), min_size=1, max_size=12
)


@settings(deadline=None, max_examples=50)
@given(JOBS)
def test_every_request_is_answered_and_no_load_is_left(jobs: list[tuple[float, int, int]]) -> None:
    replica = a_replica()
    ended: set[int] = set()
    arrivals = sorted(enumerate(jobs), key=lambda job: job[1][0])
    work_s = 0.0
    while arrivals or replica.next_event_s() < float("inf"):
        at_s = replica.next_event_s()
        if arrivals and arrivals[0][1][0] <= at_s:
            number, (arrives_s, prompt, output) = arrivals.pop(0)
            assert replica.admit(a_job(number, prompt, output), arrives_s)
            work_s += max(prompt / 1000, 0.01)
            continue
        ended |= {job.request.number for job in replica.settle(at_s).ended}
    assert ended == set(range(len(jobs)))
    load = structs.replace(replica.load_at(1e9, 1), cache_age_ms=-1, prefill_ns_per_token=0)
    assert load == ReportedLoad(0, 0, 0, 0, 0, 0, 0)
    assert work_s - 1e-6 <= replica.busy_s <= 1.2 * work_s + 1e-6
