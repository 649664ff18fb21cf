"""A late handoff counts as failed; honest nodes under overload still hand requests off.

Which of the two nodes was late is not known, so both are left out for a while. Should that befall
most honest nodes whenever queues are long, the rule would do more harm than a node that lies.
"""

import random
from collections.abc import Sequence

import pytest

from ops.sim.isochrone_policy import IsochronePolicy
from ops.sim.run import Simulation
from ops.sim.traces import TraceRequest
from ops.sim.world import LLAMA_8B, LOCAL_RTT_MS, EngineProfile, ReplicaSite, RoutingWorld

REPLICAS = 8
ROUTERS = 3
REQUESTS = 400
PROMPT_TOKENS = 2000
PROMPTS = LLAMA_8B.large
"""Requests wait until the prompts before them are read."""

SEATS = PROMPTS._replace(sequences_max=8)
"""Requests wait until running ones have ended, which is hard to predict."""


def a_world(profile: EngineProfile, slowest: float, chance: random.Random) -> RoutingWorld:
    """Return one PoP with all replicas, each at `slowest` to 1 of its speed in the route table."""
    full = profile.prefill_tokens_per_s
    sites = [
        ReplicaSite(number, 0, profile, full * chance.uniform(slowest, 1.0))
        for number in range(REPLICAS)
    ]
    cities = range(ROUTERS)
    rtt_ms = tuple(tuple(LOCAL_RTT_MS if a == b else 40.0 for b in cities) for a in cities)
    names = tuple(f"p{city}" for city in cities)
    return RoutingWorld(names, (1 / ROUTERS,) * ROUTERS, rtt_ms, tuple(sites))


def a_trace(
    per_s: float, output_tokens: float, burst: int, chance: random.Random
) -> list[TraceRequest]:
    """Return requests of unlike lengths without common prefixes, `burst` at a time."""
    at_s, trace = 0.0, []
    for number in range(REQUESTS):
        if number % burst == 0:
            at_s += chance.expovariate(per_s / burst)
        prompt = 1 + int(chance.expovariate(1 / PROMPT_TOKENS))
        output = 1 + int(chance.expovariate(1 / output_tokens))
        trace.append(TraceRequest(number, at_s, prompt, output, (), 64, "", chance.random()))
    return trace


@pytest.fixture
def left_out(monkeypatch: pytest.MonkeyPatch) -> Sequence[int]:
    """Return how many replicas each router left out of handoffs, for each request."""
    counts: list[int] = []
    handoffs_fail = IsochronePolicy.handoffs_fail

    def count(policy: IsochronePolicy) -> object:
        failing = handoffs_fail(policy)
        counts.append(len(failing))
        return failing

    monkeypatch.setattr(IsochronePolicy, "handoffs_fail", count)
    return counts


@pytest.mark.parametrize("load", [0.95, 1.1, 1.3])
@pytest.mark.parametrize(("burst", "slowest"), [(1, 1.0), (20, 0.5)], ids=["steady", "bursts"])
def test_none_is_left_out_while_prompts_queue(
    left_out: Sequence[int], load: float, burst: int, slowest: float
) -> None:
    chance = random.Random(1)
    world = a_world(PROMPTS, slowest, chance)
    # Long prompts take more than their share, because a token deep in one costs more.
    depth = 1 + PROMPT_TOKENS / PROMPTS.attention_tokens
    per_s = load * REPLICAS * PROMPTS.prefill_tokens_per_s / PROMPT_TOKENS / depth
    trace = a_trace(per_s, 20, burst, chance)
    simulation = Simulation(world, trace, 1.0, 2.0, "ours")
    assert len(simulation.run().served) == REQUESTS
    assert left_out
    assert not any(left_out)


@pytest.mark.parametrize("load", [0.95, 1.1, 1.3])
@pytest.mark.parametrize("output_tokens", [150, 600])
def test_most_hand_off_while_requests_wait_for_seats(
    left_out: Sequence[int], load: float, output_tokens: int
) -> None:
    chance = random.Random(1)
    world = a_world(SEATS, 1.0, chance)
    step_s = SEATS.step_s + SEATS.sequences_max * SEATS.step_per_sequence_s
    per_s = load * REPLICAS * SEATS.sequences_max / (output_tokens * step_s)
    simulation = Simulation(world, a_trace(per_s, output_tokens, 1, chance), 1.0, 2.0, "ours")
    assert len(simulation.run().served) == REQUESTS
    assert 2 * max(left_out) <= REPLICAS
    assert sum(left_out) < 0.25 * REPLICAS * len(left_out)
