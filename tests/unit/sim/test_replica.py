"""A replica in the simulator: time, cache and tokens come out as by hand."""

from hypothesis import given, settings
from hypothesis import strategies as st

from isochrone.wire.headers import ReportedLoad
from ops.sim.replica import Job, Replica
from ops.sim.traces import Request
from ops.sim.world import Profile, Site

PLAIN = Profile("plain", 1000.0, 0.01, 0.001, 1e12, 100_000, 5_000, chunk_tokens=1000)


def a_replica(profile: Profile = PLAIN) -> Replica:
    return Replica(Site(0, 0, profile, profile.prefill_tokens_per_s))


def a_job(number: int, prompt: int, output: int = 1, blocks: tuple[int, ...] = ()) -> Job:
    request = Request(number, 0.0, prompt, output, blocks, 100, "", 0.0)
    return Job(request, prompt + output, prompt, 0, 0.0)


def run(replica: Replica) -> dict[int, tuple[float, float]]:
    """Let it finish; return when each got its first token and when it ended."""
    first: dict[int, float] = {}
    ended: dict[int, tuple[float, float]] = {}
    while (at_s := replica.next_at()) < float("inf"):
        begun, over = replica.settle(at_s)
        first.update((job.request.number, at_s) for job in begun)
        ended.update((job.request.number, (first[job.request.number], at_s)) for job in over)
    return ended


def test_prompts_are_read_one_after_the_other_and_decodes_go_on_beside_them() -> None:
    replica = a_replica()
    assert replica.take(a_job(0, 1000, 11), 0.0)
    assert replica.take(a_job(1, 1000, 1), 0.0)
    ended = run(replica)
    assert abs(ended[0][0] - 1.0) < 1e-9
    # Beside one sequence a chunk takes 1 s + 1 ms, and that sequence gets one token meanwhile.
    assert abs(ended[1][0] - 2.001) < 1e-6
    # Then nine more, at 11 ms a step.
    assert abs(ended[0][1] - (2.001 + 9 * 0.011)) < 1e-6


def test_with_a_bound_between_tokens_a_prompt_gets_what_decodes_leave() -> None:
    replica = a_replica(PLAIN._replace(interval_s=0.1))
    assert replica.take(a_job(0, 1000, 100), 0.0)
    assert replica.take(a_job(1, 890, 1), 0.0)
    ended = run(replica)
    # Alone the first is read in a second; beside it 89 ms of each 100 are the second prompt's.
    assert abs(ended[0][0] - 1.0) < 1e-9
    assert abs(ended[1][0] - 2.0) < 1e-6


def test_each_router_hears_of_others_alone_and_what_is_left_of_the_prompt_being_read() -> None:
    replica = a_replica()
    request = Request(0, 0.0, 1000, 1, (), 100, "", 0.0)
    replica.take(Job(request, 1010, 800, 3, 1000.0), 0.0)
    replica.take(Job(request._replace(number=1), 1020, 500, 4, 600.0), 0.1)
    told = [replica.load_at(0.25, pop) for pop in (3, 4, 5)]
    assert [one.pending_prefill_tokens for one in told] == [1300] * 3
    assert [one.others_pending_prefill_tokens for one in told] == [500, 600, 1100]
    assert [one.others_decode_tokens for one in told] == [20, 10, 30]


def test_a_prompt_that_was_read_before_costs_only_what_is_new() -> None:
    replica = a_replica()
    replica.take(a_job(0, 1000, 1, tuple(range(10))), 0.0)
    replica.take(a_job(1, 1200, 1, (*range(10), 77, 78)), 0.0)
    ended = run(replica)
    assert abs(ended[1][0] - ended[0][0] - 0.2) < 1e-9
    # The cache holds 5,000 tokens: forty other blocks later the first are gone, the last not.
    replica.take(a_job(2, 4000, 1, tuple(range(100, 140))), 9.0)
    run(replica)
    assert replica.cached(a_job(3, 1200, 1, (*range(10), 77, 78)).request) == 1000


def test_the_door_refuses_what_does_not_fit_or_would_wait_too_long() -> None:
    replica = a_replica()
    assert replica.take(a_job(0, 200_000), 0.0)
    assert not replica.take(a_job(1, 10), 0.0)
    other = a_replica()
    assert other.take(a_job(0, 500), 0.0, queue_tokens_max=100)
    assert not other.take(a_job(1, 10), 0.0, queue_tokens_max=100)
    assert other.take(a_job(2, 10), 0.0, queue_tokens_max=500)


JOBS = st.lists(
    st.tuples(st.floats(0, 5), st.integers(1, 3000), st.integers(1, 50)), min_size=1, max_size=12
)


@settings(deadline=None, max_examples=50)
@given(JOBS)
def test_everybody_is_answered_and_nothing_is_left(jobs: list[tuple[float, int, int]]) -> None:
    replica = a_replica()
    ended: set[int] = set()
    arrivals = sorted(enumerate(jobs), key=lambda job: job[1][0])
    work_s = 0.0
    while arrivals or replica.next_at() < float("inf"):
        at_s = replica.next_at()
        if arrivals and arrivals[0][1][0] <= at_s:
            number, (arrives_s, prompt, output) = arrivals.pop(0)
            assert replica.take(a_job(number, prompt, output), arrives_s)
            work_s += max(prompt / 1000, 0.01)
            continue
        ended |= {job.request.number for job in replica.settle(at_s)[1]}
    assert ended == set(range(len(jobs)))
    assert replica.load_at(1e9, 1) == ReportedLoad(0, 0, 0, 0, 0, 0, 0)
    assert work_s - 1e-6 <= replica.busy_s <= 1.2 * work_s + 1e-6
