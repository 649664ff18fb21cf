"""Worlds that nothing was tuned on: fleets drawn at random, and other prompts.

    python -m ops.sim.unseen_worlds --draw 240 [--world WORD] [--load N ...] [--age S ...]
        [--replica flowing|boundaries|stepped]

Prints our choice and some rivals over the oracle, as `ops.sim.hard_table` does. A draw decides the
PoPs and their round trips, where replicas are and how fast, where demand comes from, and which part
of a trace is read.
"""

import argparse
import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from time import process_time
from typing import Final, NamedTuple

from ops.sim import data
from ops.sim.cases import AZURE, MOONCAKE, SERVEGEN, SimulationCase
from ops.sim.hard_table import REQUESTS, PreparedWorld, TableOptions, print_cells, run_load
from ops.sim.hard_worlds import SERVEGEN_70B, HardWorld
from ops.sim.stepped_replica import REPLICA_KINDS
from ops.sim.traces import SESSION_BLOCK, TraceRequest, TraceSlice, sessions
from ops.sim.world import LOCAL_RTT_MS, EngineProfile, ReplicaSite, RoutingWorld

RoundTrips = dict[tuple[str, str], float]
ChangePrompt = Callable[[TraceRequest, random.Random], TraceRequest]

SKIPPED_MAX: Final = 10_000
"""A part of a trace begins with one of its first so many requests."""

LONG_TOKENS: Final = (24_000, 60_000)
LONG_SHARE: Final = 1 / 30
POLICIES: Final = ("ours", "llm-d", "SkyLB, its source", "Dynamo")


class UnseenWorld(NamedTuple):
    """A fleet to draw, and requests. The slowest replica may be `slowest` times slower; a share of
    the demand comes from the first PoP, in which only with `is_near` any replica is."""

    name: str
    case: SimulationCase
    pops: int
    replicas: int
    slowest: float = 1.0
    rtt_factor: float = 1.0
    first_share: float = 0.0
    is_near: bool = True
    change: ChangePrompt | None = None

    def fleet(self, table: RoundTrips, chance: random.Random) -> RoutingWorld:
        """Draw a fleet."""
        regions = _draw_regions(table, self.pops, chance)
        demand = [chance.expovariate(1.0) + 0.05 for _ in regions]
        if self.first_share:
            others = sum(demand[1:])
            demand[0] = others * self.first_share / (1 - self.first_share)
        sites = []
        for number in range(self.replicas):
            profile = chance.choice(self.case.model)
            profile = _slower(profile, self.slowest ** chance.random())
            pop = chance.randrange(0 if self.is_near else 1, self.pops)
            rate = profile.prefill_tokens_per_s * chance.uniform(0.9, 1.1)
            sites.append(ReplicaSite(number, pop, profile, rate))
        return RoutingWorld(
            tuple(f"p{number:02}" for number in range(self.pops)),
            tuple(share / sum(demand) for share in demand),
            tuple(
                tuple(table[a, b] * self.rtt_factor if a != b else LOCAL_RTT_MS for b in regions)
                for a in regions
            ),
            tuple(sites),
        )

    def requests(self, folder: Path, count: int, draw: int) -> list[TraceRequest]:
        """Return the requests of a draw."""
        chance = random.Random(draw)
        part = TraceSlice(count, chance.randrange(SKIPPED_MAX), draw)
        requests = self.case.read(folder / self.case.path, part)
        return [self.change(request, chance) for request in requests] if self.change else requests


def _slower(profile: EngineProfile, factor: float) -> EngineProfile:
    return profile._replace(
        prefill_tokens_per_s=profile.prefill_tokens_per_s / factor,
        step_s=profile.step_s * factor,
        step_per_sequence_s=profile.step_per_sequence_s * factor,
        step_per_context_token_s=profile.step_per_context_token_s * factor,
    )


def _draw_regions(table: RoundTrips, count: int, chance: random.Random) -> Sequence[str]:
    """Draw regions with a known round trip between each two."""
    names = sorted({region for region, _ in table})
    while True:
        regions = chance.sample(names, count)
        if all(pair in table for pair in product(regions, regions) if pair[0] != pair[1]):
            return regions


def read_round_trips(folder: Path) -> RoundTrips:
    """Read the round trips between all cloud regions, in both directions."""
    rows = list(data.rows(folder / "rtt" / "azure_region_rtt_matrix.csv"))
    known = {
        (row["Source"], to): float(ms)
        for row in rows
        for to, ms in row.items()
        if to != "Source" and ms
    }
    return {(to, source): ms for (source, to), ms in known.items()} | known


def with_prompt(request: TraceRequest, tokens: int) -> TraceRequest:
    """Return the request with a prompt of this length, without a common prefix."""
    blocks = tuple(request.number * 10_000 + n for n in range(tokens // SESSION_BLOCK))
    return request._replace(prompt_tokens=tokens, blocks=blocks)


def sometimes_long(request: TraceRequest, chance: random.Random) -> TraceRequest:
    """Make one in 30 prompts long."""
    is_long = chance.random() < LONG_SHARE
    return with_prompt(request, chance.randint(*LONG_TOKENS)) if is_long else request


def tiny(request: TraceRequest, chance: random.Random) -> TraceRequest:
    """Make the prompt tiny."""
    return with_prompt(request, chance.randint(5, 90))


def heavy_tailed(request: TraceRequest, chance: random.Random) -> TraceRequest:
    """Draw the length of the answer from a Pareto distribution without a mean."""
    return request._replace(output_tokens=min(20_000, int(30 * chance.paretovariate(0.9))))


M_MID: Final = SERVEGEN._replace(name="ServeGen m-mid", read=partial(sessions, model="m-mid"))
REASONING: Final = SERVEGEN_70B._replace(
    name="ServeGen deepseek-r1, 70B", read=partial(sessions, model="deepseek-r1")
)

WORLDS: Final = (
    UnseenWorld("3 replicas in 2 PoPs, Mooncake", MOONCAKE, 2, 3),
    UnseenWorld("60 replicas in 40 PoPs, Mooncake", MOONCAKE, 40, 60),
    UnseenWorld("12 replicas in 40 PoPs, Azure", AZURE, 40, 12),
    UnseenWorld("30 replicas in 12 PoPs, speeds 1:8, Mooncake", MOONCAKE, 12, 30, slowest=8.0),
    UnseenWorld("12 replicas in 3 PoPs, speeds 1:8, Azure", AZURE, 3, 12, slowest=8.0),
    UnseenWorld("8 replicas in one PoP, speeds 1:8, ServeGen", M_MID, 1, 8, slowest=8.0),
    UnseenWorld("20 in 8, 90 % from one PoP, Mooncake", MOONCAKE, 8, 20, first_share=0.9),
    UnseenWorld(
        "16 in 8, 99 % from a PoP without any", AZURE, 8, 16, first_share=0.99, is_near=False
    ),
    UnseenWorld("20 in 10, round trips x 4, Mooncake", MOONCAKE, 10, 20, rtt_factor=4.0),
    UnseenWorld("20 in 10, round trips x 4, Azure", AZURE, 10, 20, rtt_factor=4.0),
    UnseenWorld("20 in 8, one prompt in 30 long", AZURE, 8, 20, change=sometimes_long),
    UnseenWorld("20 in 8, tiny prompts", AZURE, 8, 20, change=tiny),
    UnseenWorld("20 in 8, heavy-tailed answers", AZURE, 8, 20, change=heavy_tailed),
    UnseenWorld("20 in 8, ServeGen m-mid", M_MID, 8, 20),
    UnseenWorld("20 in 8, ServeGen deepseek-r1, 70B", REASONING, 8, 20),
)


def main() -> None:
    """Run each world at each load."""
    parser = argparse.ArgumentParser(prog="python -m ops.sim.unseen_worlds")
    parser.add_argument("--data", type=data.folder_argument, default=None)
    parser.add_argument("--draw", type=int, nargs="*", default=[240])
    parser.add_argument("--world", default="", help="only worlds with this in their name")
    parser.add_argument("--load", type=int, nargs="*", default=[80], help="in percent")
    parser.add_argument("--age", type=float, nargs="*", default=[1.0], help="in seconds")
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--policy", nargs="*", default=list(POLICIES))
    parser.add_argument("--replica", choices=REPLICA_KINDS, default="flowing", help="its model")
    arguments = parser.parse_args()
    folder = arguments.data or data.folder()
    table = read_round_trips(folder)
    worlds = [world for world in WORLDS if arguments.world in world.name]
    for world, draw, load in product(worlds, arguments.draw, arguments.load):
        began_s = process_time()
        prepared = PreparedWorld(
            HardWorld(f"{world.name} {draw}", world.case),
            world.fleet(table, random.Random(f"{world.name} {draw}")),
            world.requests(folder, arguments.requests, draw),
            world.case.cached_share,
            arguments.replica,
        )
        options = TableOptions(
            folder, arguments.requests, draw, [load], arguments.age, arguments.policy
        )
        runs = run_load(prepared.with_oracle_hits(draw), load, options)
        print_cells(list(runs), process_time() - began_s)


if __name__ == "__main__":
    main()
