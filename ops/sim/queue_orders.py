"""Compare orders of the queue at a replica: python -m ops.sim.queue_orders [--load N ...]

Of the requests, those in TIGHT_SHARE need a first token within TIGHT_S, the others within LOOSE_S.
Figures are means over DRAWS, none of which ranking was tuned on: times over those in order of
arrival, and the share of requests that were answered in time. The routers' choice is ours.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import Pool
from pathlib import Path
from typing import Final, NamedTuple

from ops.sim import data
from ops.sim.hard_table import TableOptions, prepare
from ops.sim.hard_worlds import WORLDS, HardWorld
from ops.sim.measure import percentile
from ops.sim.outcome import ServedRequest
from ops.sim.replica import QueueOrder, SimulatedReplica, due_order
from ops.sim.replica_job import ReplicaJob
from ops.sim.run import simulate
from ops.sim.traces import TraceRequest
from router.decide.caches.affinity import hash64

TIGHT_SHARE: Final = 0.5
TIGHT_S: Final = 1.0
LOOSE_S: Final = 10.0
AGE_S: Final = 1.0
NAMES: Final = (
    "16 cities, Azure code",
    "16 cities, 70B of today, ServeGen",
    "16 cities, cache x 1, Mooncake",
)


class Draw(NamedTuple):
    """One draw of a world, from a part of its trace."""

    seed: int
    skip: int


DRAWS: Final = (Draw(1, 0), Draw(2, 0), Draw(3, 800), Draw(4, 1600), Draw(5, 1600), Draw(6, 800))


def arrival_order(_replica: SimulatedReplica, job: ReplicaJob, _now_s: float) -> float:
    """First come, first served."""
    return job.objective.arrived_s


def strict_due_order(_replica: SimulatedReplica, job: ReplicaJob, _now_s: float) -> float:
    """Order by due time alone: a request that is too late does not make way."""
    due_s = job.objective.due_s
    return job.objective.arrived_s if due_s is None else due_s


def short_prompt_order(replica: SimulatedReplica, job: ReplicaJob, _now_s: float) -> float:
    """Order by the part of the prompt that is left to read."""
    return replica.work(job.request, replica.cached(job.request))


def short_answer_order(_replica: SimulatedReplica, job: ReplicaJob, _now_s: float) -> float:
    """Order by the length of the answer, known exactly: no prediction can do better."""
    return job.request.output_tokens


ORDERS: Final[dict[str, QueueOrder]] = {
    "arrival": arrival_order,
    "first due, late ones make way (ours)": due_order,
    "first due": strict_due_order,
    "shortest prompt": short_prompt_order,
    "shortest answer, known exactly": short_answer_order,
}


class OrderFigures(NamedTuple):
    """The figures of one order in one draw. Times in ms, shares in percent."""

    p50_ms: float
    p90_ms: float
    p99_ms: float
    max_ms: float
    tight_p99_ms: float
    tight_in_time: float
    loose_in_time: float


def with_objectives(requests: Sequence[TraceRequest], seed: int) -> list[TraceRequest]:
    """Return the requests with the objectives that a seed draws."""
    return [
        request._replace(
            ttft_s=TIGHT_S if hash64(f"{seed}/{request.number}") / 2**64 < TIGHT_SHARE else LOOSE_S
        )
        for request in requests
    ]


def figures(served: Sequence[ServedRequest], requests: Sequence[TraceRequest]) -> OrderFigures:
    """Sum up a run."""
    objective_s = {request.number: request.ttft_s for request in requests}

    def of(wanted: Callable[[float], bool]) -> list[ServedRequest]:
        return [request for request in served if wanted(objective_s[request.number])]

    def in_time(some: Sequence[ServedRequest]) -> float:
        return 100 * statistics.fmean(r.ttft_s <= objective_s[r.number] for r in some)

    tight, loose = of(lambda s: s == TIGHT_S), of(lambda s: s == LOOSE_S)
    ttft_ms = [1000 * request.ttft_s for request in served]
    return OrderFigures(
        percentile(ttft_ms, 0.5),
        percentile(ttft_ms, 0.9),
        percentile(ttft_ms, 0.99),
        max(ttft_ms),
        percentile([1000 * request.ttft_s for request in tight], 0.99),
        in_time(tight),
        in_time(loose),
    )


class OrderTask(NamedTuple):
    """One world at one load in one draw."""

    hard: HardWorld
    load: int
    draw: Draw
    folder: Path


def run_task(task: OrderTask) -> list[OrderFigures]:
    """Run all orders."""
    hard, load, draw, folder = task
    hard = hard._replace(case=hard.case._replace(skip=hard.case.skip + draw.skip))
    prepared = prepare(hard, TableOptions(folder, 800, draw.seed, (load,), (AGE_S,), ("ours",)))
    requests = with_objectives(prepared.requests, draw.seed)
    speed = prepared.speed(load)
    return [
        figures(
            simulate(
                prepared.fleet, requests, speed, AGE_S, "ours", queue_order=queue_order
            ).served,
            requests,
        )
        for queue_order in ORDERS.values()
    ]


def table_rows(
    hard: HardWorld, load: int, drawn: Sequence[Sequence[OrderFigures]]
) -> Iterator[str]:
    """Yield a row for each order: the mean over the draws."""

    def over_arrival(value: Callable[[OrderFigures], float], order: int) -> str:
        return f"{statistics.fmean(value(runs[order]) / value(runs[0]) for runs in drawn):.2f}"

    for number, name in enumerate(ORDERS):
        tight = statistics.fmean(runs[number].tight_in_time for runs in drawn)
        loose = statistics.fmean(runs[number].loose_in_time for runs in drawn)
        cells = [
            over_arrival(lambda f: f.p50_ms, number),
            over_arrival(lambda f: f.p90_ms, number),
            over_arrival(lambda f: f.p99_ms, number),
            over_arrival(lambda f: f.max_ms, number),
            over_arrival(lambda f: f.tight_p99_ms, number),
        ]
        yield (
            f"| {hard.name} | {load} % | {name} | {' | '.join(cells)} | {tight:.1f} | {loose:.1f} |"
        )


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m ops.sim.queue_orders")
    parser.add_argument("--data", help="folder of public data")
    parser.add_argument("--load", type=int, nargs="*", default=[80, 95], help="in percent")
    parser.add_argument("--world", default="", help="only worlds with this in their name")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    try:
        folder = data.folder(arguments.data)
    except data.NoData as error:
        print(error, file=sys.stderr)
        return 1
    print(
        "| world | load | order | p50 | p90 | p99 | longest | p99, tight | in time, %, tight"
        " | loose |\n|---|---|---|---|---|---|---|---|---|---|"
    )
    with Pool(arguments.processes) as pool:
        for hard in WORLDS:
            if hard.name not in NAMES or arguments.world not in hard.name:
                continue
            for load in arguments.load:
                tasks = [OrderTask(hard, load, draw, folder) for draw in DRAWS]
                for row in table_rows(hard, load, pool.map(run_task, tasks, chunksize=1)):
                    print(row, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
