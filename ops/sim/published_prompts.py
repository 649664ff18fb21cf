"""The simulated replica against single runs that SageServe published of Llama 2 70B on eight H100.

    python -m ops.sim.published_prompts [--data FOLDER] [--replica flowing|boundaries|stepped]

Source: shashwatj07/SageServe 0b95ca2d (MIT), from Splitwise: a batch of equal prompts is read at
once and answered with 128 tokens, five runs or more of each size. So these have percentiles, which
NVIDIA's means (`published_latency.py`) do not. The rates of `BIG` come from the same source: this
says how well one rate, one depth cost and one step describe it, not how well they predict it.
"""

import argparse
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from ops.sim import data
from ops.sim.replica import ReplicaKind
from ops.sim.replica_job import ReplicaJob
from ops.sim.stepped_replica import REPLICA_KINDS
from ops.sim.traces import TraceRequest
from ops.sim.world import BIG, ReplicaSite

MEASURED: Final = "perf/sageserve_perf_model.csv.gz"
MODEL: Final = "llama2-70b"
HARDWARE: Final = "h100-80gb"
DEVICES: Final = "8"
ANSWER_TOKENS: Final = 128


class BatchSize(NamedTuple):
    """How many prompts are read at once, and how long each is."""

    prompt_tokens: int
    prompts: int


class BatchTimes(NamedTuple):
    """The times to the first token and between tokens in ms: one of each run or request."""

    ttft_ms: list[float]
    itl_ms: list[float]


def measured(folder: Path) -> dict[BatchSize, BatchTimes]:
    """Return the published runs by size."""
    found: dict[BatchSize, BatchTimes] = defaultdict(lambda: BatchTimes([], []))
    for row in data.rows(folder / MEASURED):
        kind = (row["model"], row["hardware"], row["tensor_parallel"], row["token_size"])
        if kind == (MODEL, HARDWARE, DEVICES, str(ANSWER_TOKENS)):
            size = BatchSize(int(row["prompt_size"]), int(row["batch_size"]))
            found[size].ttft_ms.append(float(row["prompt_time"]))
            found[size].itl_ms.append(float(row["token_time"]))
    return dict(sorted(found.items()))


def simulated(size: BatchSize, kind: ReplicaKind) -> BatchTimes:
    """Return the times of each request of a batch that reaches an idle replica at once."""
    profile = BIG.large
    replica = kind(ReplicaSite(0, 0, profile, profile.prefill_tokens_per_s), None)
    for number in range(size.prompts):
        request = TraceRequest(number, 0.0, size.prompt_tokens, ANSWER_TOKENS, (), 64, "", 0.0)
        job = ReplicaJob(request, size.prompt_tokens + ANSWER_TOKENS, size.prompt_tokens, 0, 0.0)
        if not replica.admit(job, 0.0):
            raise RuntimeError(f"cannot admit {size.prompts} prompts of {size.prompt_tokens}")
    times = BatchTimes([], [])
    while replica.running:
        now_s = replica.next_event_s()
        for job in replica.settle(now_s).ended:
            times.ttft_ms.append(1000 * job.first_token_at_s)
            generating_s = now_s - job.first_token_at_s
            times.itl_ms.append(1000 * generating_s / (ANSWER_TOKENS - 1))
    return times


def compared(published: Sequence[float], found: Sequence[float]) -> str:
    """Return p50, p90 and p99, each published / simulated."""
    cells = []
    for percent in (50, 90, 99):
        there, here = np.percentile(published, percent), np.percentile(found, percent)
        cells.append(f"{there:.0f} / {here:.0f} ({here / there:.2f})")
    return " | ".join(cells)


def main() -> None:
    """Print a row for each size of batch."""
    parser = argparse.ArgumentParser(prog="python -m ops.sim.published_prompts")
    parser.add_argument("--data", help="folder of public data")
    parser.add_argument("--replica", choices=REPLICA_KINDS, default="flowing", help="its model")
    arguments = parser.parse_args()
    kind = REPLICA_KINDS[arguments.replica]
    print("| prompt | at once | runs | TTFT ms p50 | p90 | p99 | ITL ms p50 |")
    print("|---|---|---|---|---|---|---|")
    for size, runs in measured(data.folder(arguments.data)).items():
        found = simulated(size, kind)
        there, here = statistics.median(runs.itl_ms), statistics.median(found.itl_ms)
        print(
            f"| {size.prompt_tokens} | {size.prompts} | {len(runs.ttft_ms)} "
            f"| {compared(runs.ttft_ms, found.ttft_ms)} | {there:.1f} / {here:.1f} |"
        )


if __name__ == "__main__":
    main()
