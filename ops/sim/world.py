"""The world of a routing simulation: cities, the round trips between them, and their replicas.

Round trips are measured ones between cloud regions of those cities (Microsoft's network latency
table, medians in ms). Rates are those measured in `perf/` of the public data (SageServe, MIT): an
A100 and an H100 server of eight for a large model, and of two A100s for Llama-3.1-8B.
"""

import random
from bisect import bisect_right
from itertools import accumulate
from math import inf
from pathlib import Path
from typing import Final, NamedTuple

from isochrone.wire.peers.assignment import Role
from ops.sim import data
from ops.sim.traces import TraceRequest


class SimulatedCity(NamedTuple):
    """A city's region in the latency table, its share of demand, and its replicas."""

    region: str
    demand: int
    large_replicas: int
    small_replicas: int


CITIES: Final = {
    "iad": SimulatedCity("East US", 14, 3, 1),
    "sjc": SimulatedCity("West US", 10, 2, 1),
    "dfw": SimulatedCity("South Central US", 7, 1, 1),
    "yyz": SimulatedCity("Canada Central", 4, 0, 1),
    "gru": SimulatedCity("Brazil South", 8, 0, 2),
    "lhr": SimulatedCity("UK South", 9, 2, 1),
    "ams": SimulatedCity("West Europe", 6, 1, 1),
    "fra": SimulatedCity("Germany West Central", 8, 2, 0),
    "mad": SimulatedCity("France South", 4, 0, 0),
    "dxb": SimulatedCity("UAE North", 3, 0, 0),
    "bom": SimulatedCity("Central India", 11, 1, 1),
    "sin": SimulatedCity("Southeast Asia", 6, 1, 1),
    "nrt": SimulatedCity("Japan East", 7, 2, 0),
    "icn": SimulatedCity("Korea Central", 3, 0, 0),
    "syd": SimulatedCity("Australia East", 3, 0, 1),
    "jnb": SimulatedCity("South Africa North", 2, 0, 0),
}
LOCAL_RTT_MS: Final = 0.6
"""Round trip within a PoP."""


class EngineProfile(NamedTuple):
    """The speed and the capacity of one kind of replica for a model."""

    name: str
    prefill_tokens_per_s: float
    step_s: float
    step_per_sequence_s: float
    attention_tokens: float
    """A prompt token at this depth costs twice one at the beginning."""
    kv_tokens_max: int
    cache_tokens: int
    sequences_max: int = 256
    chunk_tokens: int = 1024
    interval_s: float = inf
    """Limit on a step that decodes: it reads only as much of a prompt as fits into this time."""
    step_per_context_token_s: float = 0.0
    """The time that each token of context of the running sequences adds to a step: its KV is
    read."""
    pool_tokens: int = 0
    """KV memory in one pool for cached prefixes and running sequences; with 0 the cache has
    `cache_tokens` of its own, and running sequences are limited by `kv_tokens_max` alone."""


class SimulatedModel(NamedTuple):
    """A model on two kinds of replica."""

    large: EngineProfile
    small: EngineProfile


BIG: Final = SimulatedModel(
    EngineProfile("h100x8", 9650.0, 0.0295, 0.0003, 54_000, 900_000, 2_000_000),
    EngineProfile("a100x8", 5300.0, 0.0445, 0.0004, 54_000, 600_000, 1_200_000),
)
LLAMA_8B: Final = SimulatedModel(
    EngineProfile("a100x2", 16_500.0, 0.0083, 0.00024, 31_000, 700_000, 900_000),
    EngineProfile("a100x1", 9_000.0, 0.0125, 0.0004, 31_000, 350_000, 450_000),
)

LLAMA_70B_TODAY: Final = SimulatedModel(
    EngineProfile(
        "h100x2", 13_800.0, 0.013, 0.00005, 54_000, 450_000, 450_000,
        sequences_max=512, chunk_tokens=2048, step_per_context_token_s=3.1e-8, pool_tokens=450_000,
    ),
    EngineProfile(
        "h200x1", 7_900.0, 0.018, 0.00005, 54_000, 335_000, 335_000,
        sequences_max=512, chunk_tokens=2048, step_per_context_token_s=4.3e-8, pool_tokens=335_000,
    ),
)  # fmt: skip
"""Llama 3.3 70B with FP8 weights and KV on two H100 or one H200, from NVIDIA's published throughput
(TensorRT-LLM 1.0, perf-overview.md) and 80 % of the memory's bandwidth; `ops.sim.published` has the
comparison."""


class ReplicaSite(NamedTuple):
    """One replica: its PoP and its kind."""

    replica: int
    pop: int
    profile: EngineProfile
    true_rate: float
    """Its real prefill rate: within a tenth of the rate in the route table."""
    role: Role = Role.UNIFIED


class RoutingWorld(NamedTuple):
    """The constant inputs of a run."""

    pops: tuple[str, ...]
    demand: tuple[float, ...]
    rtt_ms: tuple[tuple[float, ...], ...]
    """Round trips from PoP to PoP."""
    sites: tuple[ReplicaSite, ...]

    def rtt_to(self, pop: int, replica: int) -> float:
        """Return the round trip in ms from a PoP to a replica."""
        return self.rtt_ms[pop][self.sites[replica].pop]


def pop_of_request(world: RoutingWorld, request: TraceRequest) -> int:
    """Return the PoP that a request comes to, by the shares of demand."""
    ends = list(accumulate(world.demand))
    return min(len(ends) - 1, bisect_right(ends, request.place))


def build_world(latencies: Path, model: SimulatedModel, seed: int = 1) -> RoutingWorld:
    """Build the world from the table of round trips; `seed` draws the real rates."""
    pops = tuple(CITIES)
    regions = [CITIES[pop].region for pop in pops]
    table: dict[tuple[str, str], float] = {}
    for row in data.rows(latencies):
        for region in regions:
            if row["Source"] in regions and row.get(region):
                table[row["Source"], region] = float(row[region])
    rtt_ms = tuple(
        tuple(_round_trip(table, a, b) if a != b else LOCAL_RTT_MS for b in regions)
        for a in regions
    )
    chance = random.Random(seed)
    sites: list[ReplicaSite] = []
    for number, city in enumerate(CITIES.values()):
        large, small = [model.large] * city.large_replicas, [model.small] * city.small_replicas
        for profile in large + small:
            sites.append(
                ReplicaSite(
                    len(sites),
                    number,
                    profile,
                    profile.prefill_tokens_per_s * chance.uniform(0.9, 1.1),
                )
            )
    shares = [city.demand for city in CITIES.values()]
    return RoutingWorld(pops, tuple(share / sum(shares) for share in shares), rtt_ms, tuple(sites))


def _round_trip(table: dict[tuple[str, str], float], a: str, b: str) -> float:
    there, back = table.get((a, b)), table.get((b, a))
    found = [value for value in (there, back) if value is not None]
    if not found:
        raise data.NoData(f"cannot simulate: the latency table has no round trip from {a} to {b}")
    return sum(found) / len(found)
