"""Prefill and decode on different replicas, simulated over 16 cities: one table of all policies.

    python -m ops.sim.roles_table [--data FOLDER] [--out FILE.csv] [--table FILE.md]
        [--processes N] [--requests N] [--draw N] [--world WORD] [--load N ...] [--ours]

Gaps are the times between two tokens, over all tokens. Load counts the hits that our choice reaches
with unified replicas. The oracle sees everything as it is now; of its runs with the arrangements
and weights of ORACLES the one counts whose p90 time to first token times its p90 gap is lowest.
`auto by mix` is `auto` where the length of steps is not known to the planner. With `--ours` only
our choice is run, with each arrangement of roles.
"""

import argparse
import csv
import sys
from collections.abc import Sequence
from itertools import product
from math import inf
from multiprocessing import Pool
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from isochrone.wire.models.model import AUTO_ROLES, UNIFIED_ROLES
from ops.sim import data
from ops.sim.measure import summarize
from ops.sim.role_run import RoleSimulation
from ops.sim.role_worlds import CHUNKS, WORLDS, RoleWorld, speed_for, with_roles
from ops.sim.traces import TraceRequest

LOADS: Final = (50, 80, 95)
AGE_S: Final = 1.0
REQUESTS: Final = 1200
DRAW: Final = 71
GOAL: Final = 1.15
LARGE: Final = CHUNKS[-1]
HALF: Final = "prefill=1,decode=1"
BY_MIX: Final = "auto by mix"


class RolePolicyRun(NamedTuple):
    """A policy on an arrangement of roles, with steps that read so many tokens."""

    policy: str
    roles: str
    chunk_tokens: int = LARGE

    @property
    def label(self) -> str:
        """Its name in tables."""
        roles = self.roles.replace("prefill=", "").replace(",decode=", ":")
        return f"{self.policy}, {roles}, {self.chunk_tokens}"


OURS: Final = RolePolicyRun("ours", AUTO_ROLES)
RIVALS: Final = (
    *(RolePolicyRun("ours", UNIFIED_ROLES, chunk) for chunk in CHUNKS),
    *(RolePolicyRun("round robin", roles) for roles in (AUTO_ROLES, HALF)),
    *(RolePolicyRun("llm-d", roles) for roles in (AUTO_ROLES, HALF)),
    *(RolePolicyRun("llm-d 512", roles) for roles in (AUTO_ROLES, HALF)),
    RolePolicyRun("ours", BY_MIX, CHUNKS[0]),
)
ORACLES: Final = tuple(
    RolePolicyRun(f"oracle 1 {delay} {crowd}", roles)
    for roles in (UNIFIED_ROLES, AUTO_ROLES, HALF)
    for delay, crowd in ((0.0, 0.25), (0.25, 0.25), (0.5, 0.25))
)


class RoleFigures(NamedTuple):
    """The figures of a policy in one cell. Times in ms, hits and shares in percent."""

    world: str
    load: int
    policy: str
    ttft_p50_ms: float
    ttft_p90_ms: float
    ttft_p99_ms: float
    gap_p50_ms: float
    gap_p90_ms: float
    gap_p99_ms: float
    hit: float
    refused: int
    read_elsewhere: float
    """Share of requests with a prefill leg, where our own code decides."""

    @property
    def product(self) -> float:
        """The p90 of both, multiplied: what an oracle is chosen by."""
        return self.ttft_p90_ms * self.gap_p90_ms


class TableTask(NamedTuple):
    """One world at one load."""

    folder: Path
    world: RoleWorld
    load: int
    requests: int
    draw: int


class PreparedCell(NamedTuple):
    """A task with its requests, and the share of prompts that unified replicas find cached."""

    task: TableTask
    requests: Sequence[TraceRequest]
    cached_share: float

    def run(self, run: RolePolicyRun) -> RoleFigures:
        """Run one policy."""
        task = self.task
        unified = task.world.fleet(task.folder, task.draw, run.chunk_tokens)
        mix = task.world.mix(unified, self.requests, self.cached_share)
        if run.roles == BY_MIX:
            mix = msgspec.structs.replace(mix, prompt_step_s=inf)
        roles = AUTO_ROLES if run.roles == BY_MIX else run.roles
        fleet = with_roles(unified, roles, mix)
        speed = speed_for(task.load / 100, unified, self.requests, self.cached_share)
        found = RoleSimulation(fleet, self.requests, speed, AGE_S, run.policy).run_roles()
        summed = summarize(run.label, found.outcome)
        return RoleFigures(
            task.world.name,
            task.load,
            run.label,
            summed.p50_ms,
            summed.p90_ms,
            summed.p99_ms,
            found.gap_ms(0.5),
            found.gap_ms(0.9),
            found.gap_ms(0.99),
            summed.hit,
            summed.refused,
            100 * found.choices["prefill"] / len(self.requests),
        )


def prepare(task: TableTask) -> PreparedCell:
    """Read the requests, and measure the hits of our choice with unified replicas."""
    requests = task.world.requests(task.folder, task.requests, task.draw)
    nominal = PreparedCell(task, requests, task.world.case.cached_share)
    return nominal._replace(cached_share=nominal.run(RIVALS[1]).hit / 100)


def best_oracle(runs: Sequence[RoleFigures]) -> RoleFigures:
    """Return the oracle whose p90 of both figures is lowest, multiplied."""
    best = min(runs, key=lambda run: run.product)
    return best._replace(policy=f"oracle ({best.policy})")


def run_task(task: TableTask) -> list[RoleFigures]:
    """Run all policies at one load: the oracle, ours, and the others."""
    cell = prepare(task)
    oracle = best_oracle([cell.run(run) for run in ORACLES])
    return [oracle, cell.run(OURS), *(cell.run(run) for run in RIVALS)]


def run_ours(task: TableTask) -> list[RoleFigures]:
    """Run our choice alone at one load, with each arrangement of roles."""
    cell = prepare(task)
    return [cell.run(run) for run in (OURS, *RIVALS) if run.policy == OURS.policy]


def misses(runs: Sequence[RoleFigures]) -> list[str]:
    """Return which goals our choice misses in a cell; `runs` are the oracle's, ours and others."""
    oracle, ours, *others = runs
    found = []
    for name, ratio in (
        ("TTFT", ours.ttft_p90_ms / oracle.ttft_p90_ms),
        ("gap", ours.gap_p90_ms / oracle.gap_p90_ms),
    ):
        if ratio > GOAL:
            found.append(f"{name} {ratio:.2f} of the oracle's")
    for other in others:
        is_sooner = other.ttft_p90_ms < ours.ttft_p90_ms / 1.01
        is_steadier = other.gap_p90_ms < ours.gap_p90_ms / 1.01
        if is_sooner:
            found.append(f"TTFT behind {other.policy} (gap {other.gap_p90_ms:.0f})")
        if is_steadier:
            found.append(f"gap behind {other.policy} (TTFT {other.ttft_p90_ms:.0f})")
    return found


def table_lines(cells: Sequence[Sequence[RoleFigures]]) -> list[str]:
    """Return the table in Markdown."""
    lines = [
        "| world | load | policy, roles, chunk | TTFT p50 | p90 | p99 | gap p50 | p90 | p99 "
        "| hits | legs | 429 |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {run.world} | {run.load} % | {run.policy} | {run.ttft_p50_ms:.0f} "
        f"| {run.ttft_p90_ms:.0f} | {run.ttft_p99_ms:.0f} | {run.gap_p50_ms:.1f} "
        f"| {run.gap_p90_ms:.1f} | {run.gap_p99_ms:.1f} | {run.hit:.1f} "
        f"| {run.read_elsewhere:.0f} | {run.refused} |"
        for cell in cells
        for run in cell
    ]
    lines += ["", "| world | load | TTFT p90 | gap p90 | missed |", "|---|---|---|---|---|"]
    for cell in cells:
        oracle, ours = cell[0], cell[1]
        lines.append(
            f"| {ours.world} | {ours.load} % | {ours.ttft_p90_ms / oracle.ttft_p90_ms:.2f} "
            f"| {ours.gap_p90_ms / oracle.gap_p90_ms:.2f} | {'; '.join(misses(cell)) or '-'} |"
        )
    return lines


def write_csv(path: Path, cells: Sequence[Sequence[RoleFigures]]) -> None:
    """Write all figures, one run per line."""
    with path.open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(RoleFigures._fields)
        for run in (run for cell in cells for run in cell):
            rows.writerow([f"{value:.6g}" if isinstance(value, float) else value for value in run])


def main() -> int:
    """Run all worlds at all loads."""
    parser = argparse.ArgumentParser(prog="python -m ops.sim.roles_table")
    parser.add_argument("--data", help="folder of public data")
    parser.add_argument("--out", type=Path, help="CSV file for all figures")
    parser.add_argument("--table", type=Path, help="Markdown file for the table")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--requests", type=int, default=REQUESTS, help="of each trace, at most")
    parser.add_argument("--draw", type=int, default=DRAW, help="seed of what traces do not have")
    parser.add_argument("--world", default="", help="only worlds with this in their name")
    parser.add_argument("--load", type=int, nargs="*", default=list(LOADS), help="in percent")
    parser.add_argument("--ours", action="store_true", help="no oracle, no other policies")
    arguments = parser.parse_args()
    try:
        folder = data.folder(arguments.data)
    except data.NoData as error:
        print(error, file=sys.stderr)
        return 1
    worlds = [world for world in WORLDS if arguments.world in world.name]
    tasks = [
        TableTask(folder, world, load, arguments.requests, arguments.draw)
        for world, load in product(worlds, arguments.load)
    ]
    cells = []
    with Pool(arguments.processes) as pool:
        for cell in pool.imap(run_ours if arguments.ours else run_task, tasks):
            cells.append(cell)
            rows = table_lines([cell])[2:]
            print("\n".join(rows[: len(cell)] if arguments.ours else rows), flush=True)
    if arguments.out:
        write_csv(arguments.out, cells)
    if arguments.table:
        arguments.table.write_text("\n".join(table_lines(cells)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
