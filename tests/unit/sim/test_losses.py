"""Replicas that die during a run: no request is lost, and none goes to a replica that is down."""

from ops.sim.losses import DOWN_S, UNLISTED_AFTER_S, ReplicaLoss, draw_losses
from ops.sim.one_pop import one_pop
from ops.sim.run import simulate
from ops.sim.traces import TraceRequest
from ops.sim.world import LLAMA_8B

WORLD = one_pop(LLAMA_8B, 4)
REQUESTS = [
    TraceRequest(number, number * 0.08, 1600, 200, (), 64, "", 0.5) for number in range(800)
]
LOSSES = [ReplicaLoss(1, 10.0, 40.0), ReplicaLoss(2, 20.0, 50.0)]


def test_a_third_of_the_replicas_is_drawn_to_die_once_each() -> None:
    losses = draw_losses(one_pop(LLAMA_8B, 9), 1 / 3, 1000.0, seed=3)
    assert len({loss.replica for loss in losses}) == 3
    assert [round(loss.at_s) for loss in losses] == [100, 450, 800]
    assert all(loss.back_s == loss.at_s + DOWN_S == loss.at_s + 60 for loss in losses)


def test_every_request_is_answered_once_though_replicas_die() -> None:
    for policy in ("ours", "oracle 0.5", "least tokens", "cache aware"):
        served = simulate(WORLD, REQUESTS, 1.0, 1.0, policy, losses=LOSSES).served
        assert sorted(request.number for request in served) == list(range(len(REQUESTS)))
        assert all(request.replica >= 0 and request.ttft_s > 0 for request in served)
        # What was lost is read again, so a few wait longer; all of it within seconds.
        assert max(request.ttft_s for request in served) < 10.0


def test_a_dead_replica_gets_no_requests_until_it_is_back() -> None:
    for policy in ("ours", "least tokens"):
        sends = simulate(WORLD, REQUESTS, 1.0, 1.0, policy, losses=LOSSES).sends
        down = [s for s in sends if s.replica == 1 and 10.0 + UNLISTED_AFTER_S < s.at_s < 40.0]
        after = [s for s in sends if s.replica == 1 and s.at_s > 40.0]
        assert not down, policy
        assert after, policy


def test_the_oracle_sends_nothing_to_a_dead_replica() -> None:
    sends = simulate(WORLD, REQUESTS, 1.0, 1.0, "oracle 0", losses=LOSSES).sends
    assert not [s for s in sends if s.replica == 1 and 10.0 < s.at_s < 40.0]


def test_the_same_losses_give_the_same_outcome() -> None:
    runs = [simulate(WORLD, REQUESTS, 1.0, 1.0, "ours", losses=LOSSES) for _ in range(2)]
    assert runs[0] == runs[1]
