"""With load words a second old, routers do not all run to the same replica and back."""

import random
import statistics

from ops.sim.run import simulate
from ops.sim.traces import TraceRequest
from ops.sim.world import LLAMA_8B, ReplicaSite, RoutingWorld

ROUTERS = 8
PLAIN = LLAMA_8B.large


def two_equal_cities() -> RoutingWorld:
    """Eight cities that ask, all as far from two cities with two replicas each."""
    count = ROUTERS + 2
    rtt_ms = tuple(tuple(0.5 if a == b else 40.0 for b in range(count)) for a in range(count))
    sites = tuple(
        ReplicaSite(n, ROUTERS + n // 2, PLAIN, PLAIN.prefill_tokens_per_s) for n in range(4)
    )
    demand = (1 / ROUTERS,) * ROUTERS + (0.0, 0.0)
    return RoutingWorld(tuple(f"p{n}" for n in range(count)), demand, rtt_ms, sites)


def requests() -> list[TraceRequest]:
    """A minute of short prompts without a common word, at four fifths of what fits."""
    chance = random.Random(5)
    at_s, asked = 0.0, []
    for number in range(1500):
        at_s += chance.expovariate(25.0)
        asked.append(TraceRequest(number, at_s, 1600, 60, (), 64, "", chance.random()))
    return asked


def swing(policy: str) -> float:
    """Return how the first city's share of sends varies by second: a standard deviation."""
    sends = simulate(two_equal_cities(), requests(), 1.0, 1.0, policy).sends
    shares = []
    for second in range(5, 55):
        to = [replica for at_s, _, replica in sends if second <= at_s < second + 1]
        shares.append(sum(replica < 2 for replica in to) / max(1, len(to)))
    return statistics.pstdev(shares)


def test_old_words_make_no_herd() -> None:
    ours, herd = swing("ours"), swing("least requests")
    # Chance alone swings by a tenth: half of some 25 requests a second.
    assert ours < 0.16
    assert ours < herd
