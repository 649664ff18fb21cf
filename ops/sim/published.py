"""The simulated replica against the throughput that NVIDIA publishes for Llama 3.3 70B.

    python -m ops.sim.published [--replica flowing|boundaries|stepped]

Source: TensorRT-LLM 1.0, docs/source/performance/perf-overview.md (commit 00f37686): FP8, no limit
on the arrival rate, output tokens per second of the whole replica. Each row has 3,000 requests; the
time in which the first third and the last ones run does not count.
"""

import argparse
from typing import Final, NamedTuple

from ops.sim.replica import ReplicaKind
from ops.sim.replica_job import ReplicaJob
from ops.sim.stepped_replica import REPLICA_KINDS
from ops.sim.traces import TraceRequest
from ops.sim.world import LLAMA_70B_TODAY, EngineProfile, ReplicaSite

REQUESTS: Final = 3000
WARM_UP: Final = 1000


class PublishedThroughput(NamedTuple):
    """Output tokens per second at one length of prompts and answers."""

    prompt_tokens: int
    output_tokens: int
    h100x2: float
    h200x1: float


PUBLISHED: Final = (
    PublishedThroughput(128, 2048, 6651, 4336),
    PublishedThroughput(500, 2000, 5222, 3666),
    PublishedThroughput(1000, 1000, 4205, 2909),
    PublishedThroughput(1000, 2000, 4146, 2994),
    PublishedThroughput(2048, 128, 762, 442),
    PublishedThroughput(2048, 2048, 3082, 2003),
    PublishedThroughput(5000, 500, 898, 566),
    PublishedThroughput(20_000, 2000, 437, 283),
)


def output_tokens_per_s(
    profile: EngineProfile, prompt_tokens: int, output_tokens: int, kind: ReplicaKind
) -> float:
    """Return the throughput of a replica that always has requests waiting."""
    replica = kind(ReplicaSite(0, 0, profile, profile.prefill_tokens_per_s), None)
    waiting = [
        ReplicaJob(
            TraceRequest(number, 0.0, prompt_tokens, output_tokens, (), 64, "", 0.0),
            prompt_tokens + output_tokens,
            prompt_tokens,
            0,
            0.0,
        )
        for number in range(REQUESTS)
    ]
    now_s, ended, counted_from_s = 0.0, 0, 0.0
    while waiting:
        while waiting and replica.admit(waiting[-1], now_s):
            waiting.pop()
        now_s = replica.next_event_s()
        ended += len(replica.settle(now_s).ended)
        if ended <= WARM_UP:
            counted_from_s = now_s
    return (ended - WARM_UP) * output_tokens / (now_s - counted_from_s)


def main() -> None:
    """Print a row for each length."""
    parser = argparse.ArgumentParser(prog="python -m ops.sim.published")
    parser.add_argument("--replica", choices=REPLICA_KINDS, default="flowing", help="its model")
    kind = REPLICA_KINDS[parser.parse_args().replica]
    print("| prompt, answer | 2 x H100, published | simulated | 1 x H200, published | simulated |")
    print("|---|---|---|---|---|")
    for row in PUBLISHED:
        large, small = (
            output_tokens_per_s(profile, row.prompt_tokens, row.output_tokens, kind)
            for profile in LLAMA_70B_TODAY
        )
        print(
            f"| {row.prompt_tokens}, {row.output_tokens} "
            f"| {row.h100x2:.0f} | {large:.0f} ({large / row.h100x2:.2f}) "
            f"| {row.h200x1:.0f} | {small:.0f} ({small / row.h200x1:.2f}) |"
        )


if __name__ == "__main__":
    main()
