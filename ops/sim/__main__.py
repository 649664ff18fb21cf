"""The proof: every case at every load and age of information, all policies, as one table.

    python -m ops.sim [--data FOLDER] [--requests N] [--out FILE.json] [--trace WORD] [--draw N]
        [--load N ...] [--policy NAME ...]

Results are kept as JSON; `python -m ops.sim.report FILE.json` writes the tables and plots of it.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from time import process_time
from typing import Final

from ops.sim import data
from ops.sim.cases import CASES, Case, speed_for, world_of
from ops.sim.measure import Figures, figures_of
from ops.sim.run import NAMES, simulate
from ops.sim.traces import Part, Request
from ops.sim.world import World

LOADS: Final = (50, 80, 95)
AGES_S: Final = (0.1, 1.0, 5.0)
REGARDS: Final = (0.0, 0.5, 1.0, 2.0)
"""The oracle is given each of these, and the one that did best counts."""


def the_oracle(world: World, requests: Sequence[Request], speed: float) -> Figures:
    """Return the best of the oracles. How old information is does not matter to them."""
    tried = [
        figures_of(f"oracle {regard:g}", simulate(world, requests, speed, 1.0, f"oracle {regard}"))
        for regard in REGARDS
    ]
    return min(tried, key=lambda figures: figures.p90_ms)


def show(figures: Figures, took_s: float) -> None:
    """Print one row as it comes."""
    print(
        f"  {figures.policy:20} p50 {figures.p50_ms:7.0f} p90 {figures.p90_ms:8.0f} "
        f"p99 {figures.p99_ms:8.0f} hit {figures.hit:4.1f} away {figures.away:3.0f} "
        f"429 {figures.refused:5} balance {figures.balance:.2f}  ({took_s:.1f} s)",
        flush=True,
    )


def prove(
    case: Case, folder: Path, most: int, draw: int, loads: Sequence[int], names: Sequence[str]
) -> list[dict[str, object]]:
    """Run one case at all loads and ages; 0 draws what the committed tables are of."""
    requests = case.read(folder / case.path, Part(most, seed=draw))
    world = world_of(case, folder, draw or 1)
    found: list[dict[str, object]] = []
    for load in loads:
        speed = speed_for(load / 100, world, requests, case.cached_share)
        print(f"{case.name}: {len(requests)} requests, load {load} %, speed {speed:.2f}")
        oracle = the_oracle(world, requests, speed)
        show(oracle, 0.0)
        for age_s in AGES_S:
            print(f" information {age_s:g} s old")
            rows = [oracle]
            for name in names:
                began_s = process_time()
                rows.append(figures_of(name, simulate(world, requests, speed, age_s, name)))
                show(rows[-1], process_time() - began_s)
            found.append(
                {
                    "case": case.name,
                    "load": load,
                    "age_s": age_s,
                    "speed": speed,
                    "requests": len(requests),
                    "rows": [row._asdict() for row in rows],
                }
            )
    return found


def main() -> int:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(prog="python -m ops.sim")
    parser.add_argument("--data", help="folder of public data")
    parser.add_argument("--requests", type=int, default=12_000, help="of each trace, at most")
    parser.add_argument("--out", type=Path, help="where to keep the results")
    parser.add_argument("--trace", default="", help="only cases with this word in their name")
    parser.add_argument("--draw", type=int, default=0, help="another world, other sessions")
    parser.add_argument("--load", type=int, nargs="*", default=list(LOADS), help="in percent")
    parser.add_argument("--policy", nargs="*", default=list(NAMES), help="which, beside the oracle")
    asked = parser.parse_args()
    try:
        folder = data.folder(asked.data)
        found = [
            row
            for case in CASES
            if asked.trace.lower() in case.name.lower()
            for row in prove(case, folder, asked.requests, asked.draw, asked.load, asked.policy)
        ]
    except data.NoData as error:
        print(error, file=sys.stderr)
        return 1
    if asked.out:
        asked.out.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
