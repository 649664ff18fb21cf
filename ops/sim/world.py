"""The world of a simulation: cities, the round trips between them, and what is installed where.

Round trips are measured ones between cloud regions of those cities (Microsoft's network latency
table, medians in ms). Rates are those measured in `perf/` of the public data (SageServe, MIT): an
A100 and an H100 server of eight for a large model, and of two A100s for Llama-3.1-8B.
"""

import random
from math import inf
from pathlib import Path
from typing import Final, NamedTuple

from ops.sim import data

CITIES: Final = {
    # PoP: (region of the latency table, share of demand, large replicas, small ones)
    "iad": ("East US", 14, 3, 1),
    "sjc": ("West US", 10, 2, 1),
    "dfw": ("South Central US", 7, 1, 1),
    "yyz": ("Canada Central", 4, 0, 1),
    "gru": ("Brazil South", 8, 0, 2),
    "lhr": ("UK South", 9, 2, 1),
    "ams": ("West Europe", 6, 1, 1),
    "fra": ("Germany West Central", 8, 2, 0),
    "mad": ("France South", 4, 0, 0),
    "dxb": ("UAE North", 3, 0, 0),
    "bom": ("Central India", 11, 1, 1),
    "sin": ("Southeast Asia", 6, 1, 1),
    "nrt": ("Japan East", 7, 2, 0),
    "icn": ("Korea Central", 3, 0, 0),
    "syd": ("Australia East", 3, 0, 1),
    "jnb": ("South Africa North", 2, 0, 0),
}
LOCAL_RTT_MS: Final = 0.6
"""Within a PoP."""


class EngineProfile(NamedTuple):
    """What one kind of replica can do with the model."""

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
    """Beside decodes, a step takes only so much of a prompt that it lasts no longer than this."""


class SimulatedModel(NamedTuple):
    """A model as two kinds of replica serve it."""

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


class ReplicaSite(NamedTuple):
    """One replica's place and kind."""

    replica: int
    pop: int
    profile: EngineProfile
    true_rate: float
    """How fast it really is: a tenth above or below what its table says."""


class RoutingWorld(NamedTuple):
    """Everything that does not change during a run."""

    pops: tuple[str, ...]
    demand: tuple[float, ...]
    rtt_ms: tuple[tuple[float, ...], ...]
    """Between PoPs."""
    sites: tuple[ReplicaSite, ...]

    def rtt_to(self, pop: int, replica: int) -> float:
        """Return the round trip in ms from a PoP to a replica."""
        return self.rtt_ms[pop][self.sites[replica].pop]


def build_world(latencies: Path, model: SimulatedModel, seed: int = 1) -> RoutingWorld:
    """Build the world from the table of round trips."""
    pops = tuple(CITIES)
    regions = [CITIES[pop][0] for pop in pops]
    table: dict[tuple[str, str], float] = {}
    for row in data.rows(latencies):
        for region in regions:
            if row["Source"] in regions and row.get(region):
                table[row["Source"], region] = float(row[region])
    rtt_ms = tuple(
        tuple(_between(table, a, b) if a != b else LOCAL_RTT_MS for b in regions) for a in regions
    )
    chance = random.Random(seed)
    sites: list[ReplicaSite] = []
    for at, pop in enumerate(pops):
        _, _, large, small = CITIES[pop]
        for profile in [model.large] * large + [model.small] * small:
            sites.append(
                ReplicaSite(
                    len(sites), at, profile, profile.prefill_tokens_per_s * chance.uniform(0.9, 1.1)
                )
            )
    shares = [CITIES[pop][1] for pop in pops]
    return RoutingWorld(pops, tuple(share / sum(shares) for share in shares), rtt_ms, tuple(sites))


def _between(table: dict[tuple[str, str], float], a: str, b: str) -> float:
    there, back = table.get((a, b)), table.get((b, a))
    found = [value for value in (there, back) if value is not None]
    if not found:
        raise data.NoData(f"cannot place {a} and {b}: the latency table has no round trip between")
    return sum(found) / len(found)
