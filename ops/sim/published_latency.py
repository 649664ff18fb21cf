"""The simulated replica against the latencies that NVIDIA publishes for Llama 3.3 70B.

    python -m ops.sim.published_latency [--replica flowing|boundaries|stepped]

Source: NVIDIA NIM LLM benchmarking guide 1.0.0, "Performance" (docs.nvidia.com/nim/benchmarking/
llm/1.0.0/performance): Llama-3.3-70b-instruct, NIM 1.8.0, two H100 80G, fp8, TP2, means by the
number of requests at once: a client sends a request as soon as its last one has ended. The rates of
the simulated replica are those of `LLAMA_70B_TODAY`, which were not fitted to these figures.
"""

import argparse
import statistics
from collections import deque
from typing import Final, NamedTuple

from ops.sim.replica import ReplicaKind
from ops.sim.replica_job import ReplicaJob
from ops.sim.stepped_replica import REPLICA_KINDS
from ops.sim.traces import TraceRequest
from ops.sim.world import LLAMA_70B_TODAY, EngineProfile, ReplicaSite

ROUNDS: Final = 8
"""Requests of each client. The first of each is not counted: they come all at once."""


class PublishedLatency(NamedTuple):
    """Mean times at one length of prompts and answers, and so many requests at once."""

    prompt_tokens: int
    output_tokens: int
    clients: int
    ttft_ms: float
    itl_ms: float


PUBLISHED: Final = (
    PublishedLatency(200, 200, 1, 31.22, 18.8),
    PublishedLatency(200, 200, 25, 138.98, 20.61),
    PublishedLatency(200, 200, 100, 176.8, 29.87),
    PublishedLatency(200, 200, 250, 264.22, 48.16),
    PublishedLatency(500, 2000, 1, 47.77, 18.91),
    PublishedLatency(500, 2000, 25, 147.63, 21.69),
    PublishedLatency(500, 2000, 100, 229.77, 29.98),
    PublishedLatency(1000, 1000, 1, 82.46, 18.67),
    PublishedLatency(1000, 1000, 25, 250.49, 22.45),
    PublishedLatency(1000, 1000, 100, 334.23, 34.21),
    PublishedLatency(1000, 1000, 200, 558.23, 50.66),
    PublishedLatency(5000, 500, 1, 406.77, 18.58),
    PublishedLatency(5000, 500, 5, 546.7, 21.83),
    PublishedLatency(5000, 500, 25, 688.69, 38.75),
    PublishedLatency(5000, 500, 50, 834.51, 59.73),
    PublishedLatency(20_000, 2000, 1, 1833.01, 19.58),
    PublishedLatency(20_000, 2000, 5, 2910.33, 25.24),
)
"""Without the rows in which requests wait for memory or a limit of the server."""


class SimulatedLatency(NamedTuple):
    """Mean times of one simulated run."""

    ttft_ms: float
    itl_ms: float


def simulate_clients(
    profile: EngineProfile, row: PublishedLatency, kind: ReplicaKind
) -> SimulatedLatency:
    """Return the mean times of a replica with so many clients."""
    replica = kind(ReplicaSite(0, 0, profile, profile.prefill_tokens_per_s), None)
    waiting: deque[tuple[int, float]] = deque((number, 0.0) for number in range(row.clients))
    sent_s: dict[int, float] = {}
    ttft_s: list[float] = []
    itl_s: list[float] = []
    now_s, next_number = 0.0, row.clients
    while waiting or replica.running:
        while waiting:
            number, since_s = waiting[0]
            request = TraceRequest(
                number, 0.0, row.prompt_tokens, row.output_tokens, (), 64, "", 0.0
            )
            tokens = row.prompt_tokens + row.output_tokens
            if not replica.admit(ReplicaJob(request, tokens, tokens, 0, 0.0), now_s):
                break
            waiting.popleft()
            sent_s[number] = since_s
        now_s = replica.next_event_s()
        for job in replica.settle(now_s).ended:
            number = job.request.number
            if number >= row.clients:
                ttft_s.append(job.first_token_at_s - sent_s[number])
                itl_s.append((now_s - job.first_token_at_s) / (row.output_tokens - 1))
            if next_number < ROUNDS * row.clients:
                waiting.append((next_number, now_s))
                next_number += 1
    return SimulatedLatency(1000 * statistics.fmean(ttft_s), 1000 * statistics.fmean(itl_s))


def main() -> None:
    """Print a row for each length and number of clients."""
    parser = argparse.ArgumentParser(prog="python -m ops.sim.published_latency")
    parser.add_argument("--replica", choices=REPLICA_KINDS, default="flowing", help="its model")
    kind = REPLICA_KINDS[parser.parse_args().replica]
    print("| prompt, answer | at once | TTFT ms, published | simulated | ITL ms | simulated |")
    print("|---|---|---|---|---|---|")
    for row in PUBLISHED:
        found = simulate_clients(LLAMA_70B_TODAY.large, row, kind)
        print(
            f"| {row.prompt_tokens}, {row.output_tokens} | {row.clients} "
            f"| {row.ttft_ms:.0f} | {found.ttft_ms:.0f} ({found.ttft_ms / row.ttft_ms:.2f}) "
            f"| {row.itl_ms:.1f} | {found.itl_ms:.1f} ({found.itl_ms / row.itl_ms:.2f}) |"
        )


if __name__ == "__main__":
    main()
