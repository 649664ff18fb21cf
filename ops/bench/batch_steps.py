"""Clients beside items of batches: the scheduler, stepped with a model of the steps' times.

    python -m ops.bench.batch_steps [--requests 500] [--rounds 2]

No model runs, so that nothing but the scheduler's decisions differs between clients alone and
clients beside a backlog of items (`ops.bench.batch_engine` measures a real engine). The load is
that of `batch_engine`: clients at random times, and as many items as the engine has sequences
always in flight, of the clients' tenant or of another one. A step takes the times of a small model
on two cores; a client interrupts a step of items after one of its layers.
"""

import argparse
import random
from collections.abc import Iterator
from itertools import count
from typing import Final, NamedTuple

from nodeagent.engine.kvcache.block_pool import BlockPool
from nodeagent.engine.scheduler.batch import Batch, StepLimits
from nodeagent.engine.scheduler.batch_scheduler import BatchScheduler
from nodeagent.engine.scheduler.fair_queue import PRIORITY_LOWEST, SchedulingParams
from nodeagent.engine.scheduler.prefill_budget import PrefillBudget
from nodeagent.engine.scheduler.sequence import FinishReason, Sequence, StopConditions
from ops.bench.batch import PERCENTILES, percentiles
from ops.bench.batch_engine import CLIENT_TOKENS, ITEM_TOKENS, RATE_PER_S, SEQUENCES

PROMPT_TOKEN_S: Final = 1 / 1800
DECODE_S: Final = 0.001
STEP_S: Final = 0.004
"""The time of a prompt's token, of a decode, and of a step beside both."""
LAYERS: Final = 30
CLIENT_PROMPT: Final = range(190, 211)
ITEM_PROMPT: Final = range(75, 96)
CLIENT, ITEM = SchedulingParams(b"client"), SchedulingParams(b"client", PRIORITY_LOWEST)
OTHERS_ITEM: Final = SchedulingParams(b"batches", PRIORITY_LOWEST)


class LoadTimes(NamedTuple):
    """The clients' times to the first token, and how many items were answered a second."""

    first_s: list[float]
    items_per_s: float


class BatchLoad:
    """The scheduler of one engine, and what it has to do."""

    def __init__(self, seed: int, items: SchedulingParams | None) -> None:
        self._draw = random.Random(seed)
        self._items = items
        self._numbers = count(1)
        self._born_s: dict[int, float] = {}
        """When the requests of clients came that have no token yet."""
        self._first_s: list[float] = []
        self._items_done = 0
        budget = PrefillBudget(0.25)
        budget.record_step(200, 0, 200 * PROMPT_TOKEN_S)
        budget.record_step(0, 1, STEP_S + DECODE_S)
        self._scheduler = BatchScheduler(StepLimits(256, SEQUENCES), BlockPool(2000), budget)

    def run(self, requests: int) -> LoadTimes:
        """Serve so many requests of clients."""
        scheduler, now_s, was_interrupted = self._scheduler, 0.0, False
        coming = list(self._arrivals(requests))[::-1]
        while coming or self._born_s:
            self._submit_items()
            if not scheduler.has_work:
                now_s = max(now_s, coming[-1])
            while coming and coming[-1] <= now_s:
                self._born_s[self._submit(CLIENT, CLIENT_PROMPT, CLIENT_TOKENS)] = coming.pop()
            batch = scheduler.next_batch(now_s)
            took_s = STEP_S + batch.prefill_tokens * PROMPT_TOKEN_S + len(batch.decodes) * DECODE_S
            may_stop = batch.may_be_interrupted and not was_interrupted
            was_interrupted = may_stop and bool(coming) and coming[-1] < now_s + took_s
            if was_interrupted:
                now_s = min(now_s + took_s, coming[-1] + took_s / LAYERS)
                continue
            now_s += took_s
            scheduler.prefill_budget.record_step(batch.prefill_tokens, len(batch.decodes), took_s)
            self._commit(batch, now_s)
        return LoadTimes(self._first_s, self._items_done / now_s)

    def _arrivals(self, requests: int) -> Iterator[float]:
        at_s = 0.0
        for _ in range(requests):
            at_s += self._draw.expovariate(RATE_PER_S)
            yield at_s

    def _submit_items(self) -> None:
        scheduler = self._scheduler
        in_flight = sum(sequence.yields for sequence in (*scheduler.running, *scheduler.waiting))
        for _ in range(SEQUENCES - in_flight if self._items else 0):
            assert self._items is not None
            self._submit(self._items, ITEM_PROMPT, ITEM_TOKENS)

    def _submit(self, params: SchedulingParams, prompt: range, tokens: int) -> int:
        ids = [self._draw.randrange(1_000_000) for _ in range(self._draw.choice(prompt))]
        number = next(self._numbers)
        stops = StopConditions(tokens, frozenset())
        self._scheduler.submit(Sequence(number, ids, stops, scheduling=params))
        return number

    def _commit(self, batch: Batch, now_s: float) -> None:
        for chunk in batch.chunks:
            self._scheduler.mark_computed(chunk)
        for sequence in [chunk.sequence for chunk in batch.chunks if chunk.samples]:
            finish = sequence.append(7)
            born_s = self._born_s.pop(sequence.number, None)
            if born_s is not None:
                self._first_s.append(now_s - born_s)
            if finish is FinishReason.LENGTH:
                self._scheduler.remove(sequence)
                self._items_done += sequence.yields


def main() -> None:
    """Run the loads and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    loads = {
        "clients alone": None,
        "with items of the same tenant": ITEM,
        "with items of another tenant": OTHERS_ITEM,
    }
    head = [f"p{percentile} ms" for percentile in PERCENTILES]
    print("| | " + " | ".join((*head, "of alone", "items/s")) + " |")
    print("|---" * (len(head) + 3) + "|")
    alone: list[float] = []
    for name, items in loads.items():
        runs = [BatchLoad(seed, items).run(arguments.requests) for seed in range(arguments.rounds)]
        times = percentiles([1000 * first_s for run in runs for first_s in run.first_s])
        alone = alone or times
        ratios = ", ".join(f"{one / other:.2f}" for one, other in zip(times, alone, strict=True))
        rate = sum(run.items_per_s for run in runs) / len(runs)
        cells = [f"{one:.0f}" for one in times]
        print(f"| {name} | " + " | ".join((*cells, ratios, f"{rate:.1f}")) + " |", flush=True)


if __name__ == "__main__":
    main()
