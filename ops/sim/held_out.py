"""The judgement: parts of the traces, and traces, that nothing was tuned on, each with three seeds.

    python -m ops.sim.held_out [--data FOLDER] [--load N] [--age S] [--trace WORD] [--out FILE.json]

A seed draws how fast each replica truly is, which city each session asks from, and ServeGen's
conversations themselves. The oracle is the best of its four, by hindsight, for each seed anew.
"""

import argparse
import json
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Final, NamedTuple

from ops.sim import data, traces
from ops.sim.__main__ import the_oracle
from ops.sim.cases import Case, speed_for, world_of
from ops.sim.measure import Figures, figures_of
from ops.sim.run import simulate
from ops.sim.traces import Part
from ops.sim.world import BIG, LLAMA_8B

REQUESTS: Final = 4000
SEEDS: Final = (21, 22, 23)
OTHERS: Final = ("SkyLB", "least tokens, near", "consistent hash", "cache aware")
"""Those that came nearest to ours where it was tuned."""

MOONCAKE: Final = "traces/mooncake_conversation_trace.jsonl.gz"
AZURE: Final = f"traces/{traces.AZURE}"


class Stretch(NamedTuple):
    """One case, and from which request on."""

    case: Case
    skip: int


HELD_OUT: Final = (
    Stretch(Case("Mooncake, 4,000 to 8,000", traces.mooncake, MOONCAKE, BIG, 0.30), 4000),
    Stretch(Case("Mooncake, 8,000 to 12,000", traces.mooncake, MOONCAKE, BIG, 0.30), 8000),
    Stretch(Case("Azure, 8,000 to 12,000", traces.azure, AZURE, LLAMA_8B, 0.0), 8000),
    Stretch(Case("Azure, from 16,000", traces.azure, AZURE, LLAMA_8B, 0.0), 16_000),
    Stretch(
        Case(
            "ServeGen m-small",
            partial(traces.sessions, model="m-small"),
            "servegen",
            LLAMA_8B,
            0.77,
        ),
        0,
    ),
    Stretch(
        Case(
            "ServeGen deepseek-r1",
            partial(traces.sessions, model="deepseek-r1"),
            "servegen",
            LLAMA_8B,
            0.77,
        ),
        0,
    ),
    Stretch(Case("arXiv summaries", traces.summaries, "traces", LLAMA_8B, 0.0), 12_000),
)


class Judged(NamedTuple):
    """One part under one seed."""

    name: str
    seed: int
    load: int
    age_s: float
    requests: int
    oracle: Figures
    ours: Figures
    best: Figures


def judge(part: Stretch, seed: int, folder: Path, load: int, age_s: float) -> Judged:
    """Run one part under one seed."""
    case = part.case
    requests = case.read(folder / case.path, Part(REQUESTS, part.skip, seed))
    world = world_of(case, folder, seed)
    speed = speed_for(load / 100, world, requests, case.cached_share)
    oracle = the_oracle(world, requests, speed)
    ours, *others = (
        figures_of(name, simulate(world, requests, speed, age_s, name))
        for name in ("ours", *OTHERS)
    )
    best = min(others, key=lambda figures: figures.p90_ms)
    return Judged(case.name, seed, load, age_s, len(requests), oracle, ours, best)


def line(of: list[Judged]) -> str:
    """Return one part's row: the mean over seeds, and from where to where."""

    def spread(values: list[float], digits: int) -> str:
        low, high = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
        return f"{fmean(values):.{digits}f} ({low} to {high})"

    first = of[0]
    cells = [
        first.name,
        f"{first.load} %",
        f"{first.age_s:g} s",
        spread([one.oracle.p90_ms for one in of], 0),
        spread([one.ours.p90_ms for one in of], 0),
        spread([one.ours.p90_ms / one.oracle.p90_ms for one in of], 2),
        spread([one.best.p90_ms / one.ours.p90_ms for one in of], 2),
        ", ".join(sorted({one.best.policy for one in of})),
        spread([one.ours.hit - one.oracle.hit for one in of], 1),
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Judge what is asked for, a row a part."""
    parser = argparse.ArgumentParser(prog="python -m ops.sim.held_out")
    parser.add_argument("--data", help="folder of public data")
    parser.add_argument("--load", type=int, nargs="*", default=[80], help="in percent")
    parser.add_argument("--age", type=float, default=1.0, help="of information, in seconds")
    parser.add_argument("--trace", default="", help="only parts with this word in their name")
    parser.add_argument("--out", type=Path, help="where to keep the results")
    asked = parser.parse_args()
    folder = data.folder(asked.data)
    print(
        "| part | load | information | oracle p90 ms | ours | ratio | best other over ours | which "
        "| hits, ours less the oracle's |\n|---|---|---|---|---|---|---|---|---|",
        flush=True,
    )
    found = []
    for part in HELD_OUT:
        if asked.trace.lower() in part.case.name.lower():
            for load in asked.load:
                of = [judge(part, seed, folder, load, asked.age) for seed in SEEDS]
                print(line(of), flush=True)
                found += of
    if asked.out:
        rows = [
            {
                **one._asdict(),
                "oracle": one.oracle._asdict(),
                "ours": one.ours._asdict(),
                "best": one.best._asdict(),
            }
            for one in found
        ]
        asked.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
