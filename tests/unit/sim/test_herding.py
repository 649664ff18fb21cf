"""With load reports one second old, routers do not all send to the same replica at once."""

import random
import statistics

from ops.sim.run import simulate
from ops.sim.traces import TraceRequest
from ops.sim.world import LLAMA_8B, ReplicaSite, RoutingWorld

ROUTERS = 8
PLAIN = LLAMA_8B.large


def two_equal_cities() -> RoutingWorld:
    """Return eight cities with users, all equally far from two cities with two replicas each."""
    count = ROUTERS + 2
    rtt_ms = tuple(tuple(0.5 if a == b else 40.0 for b in range(count)) for a in range(count))
    sites = tuple(
        ReplicaSite(n, ROUTERS + n // 2, PLAIN, PLAIN.prefill_tokens_per_s) for n in range(4)
    )
    demand = (1 / ROUTERS,) * ROUTERS + (0.0, 0.0)
    return RoutingWorld(tuple(f"p{n}" for n in range(count)), demand, rtt_ms, sites)


def requests() -> list[TraceRequest]:
    """Return a minute of short prompts without common prefixes, at 80 % of capacity."""
    chance = random.Random(5)
    at_s, trace = 0.0, []
    for number in range(1500):
        at_s += chance.expovariate(25.0)
        trace.append(TraceRequest(number, at_s, 1600, 60, (), 64, "", chance.random()))
    return trace


def swing(policy: str) -> float:
    """Return the standard deviation over seconds of the first city's share of requests."""
    sends = simulate(two_equal_cities(), requests(), 1.0, 1.0, policy).sends
    shares = []
    for second in range(5, 55):
        replicas = [send.replica for send in sends if second <= send.at_s < second + 1]
        shares.append(sum(replica < 2 for replica in replicas) / max(1, len(replicas)))
    return statistics.pstdev(shares)


def test_old_reports_cause_no_herding() -> None:
    ours, herd = swing("ours"), swing("least requests")
    # Chance alone varies by a tenth: half of some 25 requests per second.
    assert ours < 0.16
    assert ours < herd
