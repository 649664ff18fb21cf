"""Rivals decide as their own tests say; the source of each is named in ops/sim/rival_scores.py."""

import random

import pytest

from ops.sim.one_pop import one_pop
from ops.sim.policy_choice import RIVAL_NAMES, create_policies
from ops.sim.replica import SimulatedReplica
from ops.sim.replica_job import ReplicaJob
from ops.sim.rival_scores import (
    DynamoLoad,
    aibrix_least_loaded_if_imbalanced,
    aibrix_matched_replica,
    dynamo_cost,
    llmd_kv_score,
    llmd_prefix_score,
    llmd_queue_scores,
    llmd_saturation,
    smg_is_imbalanced,
)
from ops.sim.rivals import DynamoPolicy, ProductionStackPolicy, SkyLbSourcePolicy, SmgPolicy
from ops.sim.router import SimulatedRouter
from ops.sim.run import simulate
from ops.sim.traces import TraceRequest
from ops.sim.world import LLAMA_8B, RoutingWorld

TWO = one_pop(LLAMA_8B, 2)


def a_router(world: RoutingWorld = TWO) -> SimulatedRouter:
    replicas = [SimulatedReplica(site) for site in world.sites]
    return SimulatedRouter(0, world, replicas, 0.1)


def a_request(number: int, blocks: tuple[int, ...], prompt: int = 0) -> TraceRequest:
    prompt = prompt or 64 * len(blocks) + 1
    return TraceRequest(number, 0.0, prompt, 10, blocks, 64, "", 0.5)


def test_llmd_queue_scores() -> None:
    """queuedepth/queue_test.go: different, same and zero queue sizes."""
    assert llmd_queue_scores({0: 10, 1: 5, 2: 0}) == {0: 0.0, 1: 0.5, 2: 1.0}
    assert llmd_queue_scores({0: 5, 1: 5}) == {0: 1.0, 1: 1.0}
    assert llmd_queue_scores({0: 0, 1: 0}) == {0: 1.0, 1: 1.0}


def test_llmd_kv_and_prefix_scores() -> None:
    """kvcacheutilization/kvcache_utilization_test.go and prefix/plugin_test.go."""
    for usage, score in ((0.8, 0.2), (0.5, 0.5), (0.0, 1.0), (1.0, 0.0)):
        assert llmd_kv_score(usage) == pytest.approx(score)
    assert llmd_prefix_score(5, 10) == 0.5
    assert llmd_prefix_score(2, 10) == 0.2
    assert llmd_prefix_score(0, 0) == 0.0


def test_llmd_saturation_is_the_mean_of_the_larger_shares() -> None:
    assert llmd_saturation({0: 5, 1: 0}, {0: 0.0, 1: 0.8}) == pytest.approx(1.0)
    assert llmd_saturation({0: 10, 1: 0}, {0: 0.1, 1: 0.4}) == pytest.approx(1.25)


@pytest.mark.parametrize(
    ("credit", "scale", "is_warm_best"), [(1.0, 1.0, True), (0.0, 1.0, False), (1.0, 0.0, False)]
)
def test_dynamo_cost(credit: float, scale: float, is_warm_best: bool) -> None:
    """selector/default.rs, per_request_overrides_change_selection."""
    warm = dynamo_cost(DynamoLoad(0, 1, 2), 4, credit, scale)
    cold = dynamo_cost(DynamoLoad(0, 0, 0), 4, credit, scale)
    assert (warm < cold) == is_warm_best


@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        ((10, 10, 10, 10), set()),
        ((0, 10, 20), {0}),
        ((0, 0, 10, 20), {0, 1}),
        ((0, 8), set()),
        ((0, 9), {0}),
        ((), set()),
        ((10,), set()),
        ((0, 5, 50, 100), {0}),
        ((1, 2, 3, 9), set()),
        ((2, 2, 8, 16), {0, 1}),
    ],
)
def test_aibrix_imbalance(requests: tuple[int, ...], expected: set[int]) -> None:
    """prefix_cache_routing_test.go, TestGetTargetPodOnLoadImbalance."""
    assert aibrix_least_loaded_if_imbalanced(dict(enumerate(requests))) == expected


@pytest.mark.parametrize(
    ("requests", "matched", "deviations", "expected"),
    [
        ({1: 5, 2: 10, 3: 15}, {1: 100, 2: 50, 3: 25}, 1, {1}),
        ({1: 100, 2: 10, 3: 12}, {1: 100, 2: 80, 3: 60}, 1, {2}),
        ({1: 20, 2: 10, 3: 30}, {1: 50, 2: 50, 3: 50}, 1, {2}),
        ({1: 11, 2: 12, 3: 13}, {1: 90, 2: 80, 3: 70}, -20, {None}),
        ({1: 10, 2: 20}, {}, 1, {None}),
        ({1: 10, 2: 20}, {1: 75}, 2, {1}),
        ({1: 11, 2: 10, 3: 12}, {1: 100, 2: 90, 3: 80}, 5, {1}),
        ({1: 1, 2: 2, 3: 3, 4: 4}, {1: 50, 2: 60}, 1, {2}),
        ({1: 1, 2: 2, 3: 3, 4: 4}, {1: 50, 2: 50, 3: 50}, 1, {1}),
        ({1: 1, 2: 1, 3: 1, 4: 4}, {1: 50, 2: 50, 3: 50}, 1, {1, 2, 3}),
        ({1: 1, 2: 10, 3: 1, 4: 4}, {1: 50, 2: 100}, 1, {1}),
    ],
)
def test_aibrix_match(
    requests: dict[int, int],
    matched: dict[int, int],
    deviations: float,
    expected: set[int | None],
) -> None:
    """prefix_cache_routing_test.go, TestGetTargetPodFromMatchedPods."""
    assert aibrix_matched_replica(requests, matched, random.Random(1), deviations) in expected


def test_smg_imbalance() -> None:
    """cache_aware.rs, test_cache_aware_with_imbalanced_load: limits 5 and 2.0, loads 20 and 0."""
    assert smg_is_imbalanced([20, 0], 5, 2.0)
    assert not smg_is_imbalanced([5, 0], 5, 2.0)
    assert not smg_is_imbalanced([20, 11], 5, 2.0)
    assert not smg_is_imbalanced([32, 0])
    assert smg_is_imbalanced([33, 0])


def test_smg_sends_a_known_prompt_where_it_was_sent_before() -> None:
    """cache_aware.rs, test_cache_aware_with_balanced_load: the same text, and its beginning."""
    policy, router = SmgPolicy(0), a_router()
    first = policy.choose(router, a_request(0, (1, 2, 3, 4)), frozenset(), 1.0)
    assert first is not None
    policy.record_sent(a_request(0, (1, 2, 3, 4)), first, 1.0)
    assert policy.choose(router, a_request(1, (1, 2, 3, 4)), frozenset(), 1.0) == first
    assert policy.choose(router, a_request(2, (1, 2)), frozenset(), 1.0) == first
    # Another prompt goes to the one that has processed fewer.
    assert policy.choose(router, a_request(3, (9,)), frozenset(), 1.0) == 1 - first


def test_production_stack_pins_a_prompt_to_the_replica_that_had_it() -> None:
    """test_prefixaware_router.py, test_below_threshold_seeding_enables_later_pinning."""
    policy, router = ProductionStackPolicy(0), a_router()
    policy.record_sent(a_request(0, (1, 2)), 1, 0.0)
    for number in range(8):
        assert policy.choose(router, a_request(number, (1, 3)), frozenset(), 1.0) == 1


def test_dynamo_books_a_request_until_its_tokens_and_its_answer_are_there() -> None:
    router = a_router()
    policy = DynamoPolicy(0, router.replicas)
    request = a_request(0, (1, 2, 3, 4))
    policy.record_sent(request, 0, 0.0)
    assert policy.choose(router, a_request(1, (9, 8, 7)), frozenset(), 0.0) == 1
    # Its own decision counts as cached: with the prompt read there, 0 is as good but for decoding.
    policy.record_first_token(request, 0)
    assert policy.choose(router, a_request(2, (1, 2, 3, 4)), frozenset(), 0.0) in (0, 1)
    policy.record_end(request, 0)
    chosen = {policy.choose(router, a_request(n, (9, 8)), frozenset(), 0.0) for n in range(30)}
    assert chosen == {0, 1}


def test_skylb_takes_a_replica_that_reads_for_free_and_one_with_a_queue_not() -> None:
    router, policy = a_router(), SkyLbSourcePolicy(0)
    replica = router.replicas[0]
    job = ReplicaJob(a_request(0, (1, 2, 3)), 200, 200, 0, 0.0)
    assert replica.admit(job, 0.0)
    # Held by the first, though its prompt is being read: nothing waits there.
    policy.record_sent(a_request(0, (1, 2, 3)), 0, 0.0)
    assert policy.choose(router, a_request(1, (1, 2, 3)), frozenset(), 1.0) == 0
    assert replica.admit(ReplicaJob(a_request(2, (4,)), 200, 200, 0, 0.0), 0.0)
    assert policy.choose(router, a_request(3, (1, 2, 3)), frozenset(), 1.0) == 1
    assert router.replicas[1].admit(ReplicaJob(a_request(4, (5,)), 200, 200, 0, 0.0), 0.0)
    assert router.replicas[1].admit(ReplicaJob(a_request(5, (6,)), 200, 200, 0, 0.0), 0.0)
    assert policy.choose(router, a_request(6, (1, 2, 3)), frozenset(), 1.0) is None


@pytest.mark.parametrize("name", RIVAL_NAMES)
def test_every_request_of_a_rival_ends_once(name: str) -> None:
    requests = [
        a_request(number, (number % 7, 100 + number), 400)._replace(at_s=number * 0.01)
        for number in range(300)
    ]
    served = simulate(one_pop(LLAMA_8B, 4), requests, 1.0, 1.0, name).served
    assert sorted(request.number for request in served) == list(range(300))
    assert all(request.replica >= 0 for request in served)


def test_an_unknown_policy_is_an_error() -> None:
    router = a_router()
    with pytest.raises(KeyError):
        create_policies("best of all", [router], router.replicas, [], lambda: 0.0)
