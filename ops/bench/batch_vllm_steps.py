"""How long a client waits for its first token in a vLLM that computes items of batches, too.

    .engines/vllm/bin/python -m ops.bench.batch_vllm_steps [--rounds 4] [--seconds 20]
        [--rules before paced now] [--items 16 8 4 2 1]

Steps a real vLLM in this process, without a server around it, as `stepped_vllm.py` does.
Requests wait for a seat as they do on a node, whose rules are compared in alternating rounds on the
same engine: `before`, items begin as soon as a seat is free (as in earlier releases); `paced`, they
begin at the pace of `nodeagent/decide/requests/item_pace.py`; `now`, a client's request also ends
the last item if its prompt is not read. `--items` limits how many items are there at once, by the
rules of `now`: fewer make shorter steps and answer less.

Time is the processor time of this process, so that other load on the machine matters little.
Clients' requests come at times that do not depend on the answers. Idle capacity is the rate at
which the engine answers items alone, less the share of the time that clients alone take of it.
"""

import argparse
import random
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any, Final

from isochrone.ttft_order import TtftObjective
from nodeagent.decide.requests.item_pace import ItemPace
from nodeagent.decide.requests.preemption import BatchItem
from nodeagent.decide.requests.seats import SeatRequest, Seats, spare_seats
from ops.bench.processor_time import ProcessorTime
from ops.bench.stepped_vllm import (
    SEATS,
    TOKEN_IDS,
    SteppedRequest,
    SteppedVllm,
    load,
    quantile_ms,
)

STEP_TOKENS_MAX: Final = 2048
"""vLLM's default on CPUs."""

CLIENT_PROMPT_TOKENS: Final = (100, 300)
CLIENT_TOKENS: Final = 4
ITEM_PROMPT_TOKENS: Final = 85
ITEM_TOKENS: Final = 24
CLIENT_INTERVAL_S: Final = 1.2
SETTLE_S: Final = 3.0
RESEND_S: Final = 0.5
"""After so long a router sends an item again that was preempted."""
SHARES: Final = (0.5, 0.9, 0.99)
ALONE: Final = "clients alone"
IDLE: Final = "items alone"


class NoPace(ItemPace):
    """Lets items begin at any time."""

    def due_s(self, now_s: float) -> float:
        """Return `now_s`."""
        return now_s


class SeatsBefore(Seats):
    """Seats as they were before items had a pace."""

    def __init__(self, seats_max: int, spare: int = 0) -> None:
        super().__init__(seats_max, spare)
        self._item_pace = NoPace(seats_max)

    def unread_item(self, request: SeatRequest, now_s: float) -> BatchItem | None:
        """Return none."""
        return None


class SeatsPaced(Seats):
    """Seats that keep items whose prompt is not read."""

    def unread_item(self, request: SeatRequest, now_s: float) -> BatchItem | None:
        """Return none."""
        return None


RULES: Final[dict[str, type[Seats]]] = {"before": SeatsBefore, "paced": SeatsPaced, "now": Seats}


@dataclass
class StepFigures:
    """The figures of one rule, over all its rounds."""

    ttft_s: list[float] = field(default_factory=list)
    steps_s: list[float] = field(default_factory=list)
    items: int = 0
    preempted: int = 0
    idle_s: float = 0.0
    seconds: float = 0.0

    @property
    def items_per_s(self) -> float:
        """The items answered each second."""
        return self.items / self.seconds

    @property
    def idle_share(self) -> float:
        """The share of the time in which the engine had nothing to do."""
        return self.idle_s / self.seconds


class BatchedVllm(SteppedVllm):
    """A vLLM with clients and a backlog of items, `items_max` of which are there at once."""

    def __init__(self, engine: Any, seats: Seats, items_max: int, clock: ProcessorTime) -> None:
        super().__init__(engine, seats, clock)
        self._items_max = items_max
        self._rng = random.Random(1)
        self._items_here = 0
        self._resend: deque[tuple[float, list[int], int]] = deque()
        self._found = StepFigures()

    def run(self, seconds: float, found: StepFigures, *, has_clients: bool) -> None:
        """Step the engine for some seconds of processor time."""
        self._found = found
        began_s = now_s = self._clock.now_s()
        next_client_s = began_s + CLIENT_INTERVAL_S * self._rng.uniform(0, 1)
        while now_s - began_s < seconds:
            while has_clients and now_s >= next_client_s:
                # It arrives at any moment of a step, and is seen after it.
                prompt = self._prompt(self._rng.randint(*CLIENT_PROMPT_TOKENS))
                self._ask(prompt, CLIENT_TOKENS, next_client_s, None)
                next_client_s += CLIENT_INTERVAL_S * self._rng.uniform(0.5, 1.5)
            self._add_items(now_s)
            self._pass_time(now_s)
            if not self._engine.has_unfinished_requests():
                self._clock.idle(0.001)
                found.idle_s += 0.001
            outputs = self._step(found.steps_s)
            now_s = self._clock.now_s()
            for output in outputs:
                self._take(output, now_s)
        found.seconds += now_s - began_s

    def _add_items(self, now_s: float) -> None:
        """Keep items here, those that were preempted a while ago first."""
        while self._items_here < self._items_max:
            prompt, preemptions = self._prompt(ITEM_PROMPT_TOKENS), 0
            if self._resend and self._resend[0][0] <= now_s:
                _, prompt, preemptions = self._resend.popleft()
            self._ask(prompt, ITEM_TOKENS, now_s, BatchItem(preemptions))

    def _ask(
        self, prompt: list[int], tokens: int, sent_at_s: float, item: BatchItem | None
    ) -> None:
        now_s = self._clock.now_s()
        yields = item is not None
        seat = self._seats.request("tenant", TtftObjective(now_s), now_s, yields=yields, item=item)
        request_id = self._open_request(SteppedRequest(seat, prompt, tokens, sent_at_s))
        if item is not None:
            self._items_here += 1
            item.on_preempt(lambda: self._preempt(request_id, item))
        self._send([seat] if seat.is_seated else [])
        for which in (self._seats.unread_item, self._seats.item_to_preempt):
            ended = which(seat, now_s)
            if ended is not None:
                ended.preempt()

    def _preempt(self, request_id: str, item: BatchItem) -> None:
        now_s = self._clock.now_s()
        prompt = self._open[request_id].prompt
        self._engine.abort_request([request_id])
        self._found.preempted += 1
        self._items_here -= 1
        self._resend.append((now_s + RESEND_S, prompt, item.preemptions + 1))
        self._close(request_id, now_s)

    def _pass_time(self, now_s: float) -> None:
        """Do what the node's timers do."""
        self._start_overdue(now_s)
        due_s = self._seats.next_fill_s
        if due_s is not None and due_s <= now_s:
            self._send(self._seats.fill(now_s))

    def _take(self, output: Any, now_s: float) -> None:
        """Count what a step generated for a request."""
        request = self._open.get(output.request_id)
        if request is None:  # it was preempted
            return
        is_item = request.seat.yields
        if not is_item and not request.has_token:
            request.has_token = True
            self._found.ttft_s.append(now_s - request.sent_at_s)
            self._send(self._seats.record_start(request.seat, now_s))
        if output.finished:
            self._found.items += is_item
            self._items_here -= is_item
            self._close(output.request_id, now_s)

    def _prompt(self, tokens: int) -> list[int]:
        return [self._rng.randrange(*TOKEN_IDS) for _ in range(tokens)]


def measure(rounds: int, seconds: float, rules: list[str], limits: list[int]) -> None:
    """Run all cases in turn, and print the table after each of them."""
    engine, clock, rng = load(STEP_TOKENS_MAX), ProcessorTime(), random.Random(1)
    surplus = SEATS // 8
    cases = {rule: (RULES[rule], SEATS + surplus) for rule in rules}
    cases |= {f"{limit} items": (Seats, limit) for limit in limits}
    figures: defaultdict[str, StepFigures] = defaultdict(StepFigures)
    for number in range(rounds):
        for name in (ALONE, IDLE, *rng.sample(list(cases), len(cases))):
            kind, items_max = cases.get(name, (Seats, 0 if name == ALONE else SEATS + surplus))
            stepped = BatchedVllm(engine, kind(SEATS, spare_seats(SEATS)), items_max, clock)
            has_clients = name != IDLE
            stepped.run(SETTLE_S, StepFigures(), has_clients=has_clients)
            stepped.run(seconds, figures[name], has_clients=has_clients)
            stepped.drain()
            if number or len(figures) > 2:
                print(f"\nin round {number + 1}\n{table(figures)}", flush=True)


def table(figures: dict[str, StepFigures]) -> str:
    """Return a row for each case."""
    alone = figures[ALONE].ttft_s
    idle_per_s = figures[IDLE].items_per_s * figures[ALONE].idle_share
    lines = [
        "| | requests | TTFT p50 | p90 | p99 | of alone, p50 | p90 | p99 | step p50 | p99 |"
        " items/s | of idle | preempted |",
        "|---" * 13 + "|",
    ]
    for name, found in figures.items():
        times = [quantile_ms(found.ttft_s, share) for share in SHARES] if found.ttft_s else []
        ratios = [
            f"{time_ms / quantile_ms(alone, share):.2f}x"
            for time_ms, share in zip(times, SHARES, strict=False)
        ]
        cells = [
            name,
            str(len(found.ttft_s)),
            *([f"{time_ms:.0f} ms" for time_ms in times] or [""] * 3),
            *(ratios or [""] * 3),
            *[f"{quantile_ms(found.steps_s, share):.0f} ms" for share in (0.5, 0.99)],
            f"{found.items_per_s:.2f}",
            f"{100 * found.items_per_s / idle_per_s:.0f} %",
            str(found.preempted),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines.append(f"\nClients alone leave {100 * figures[ALONE].idle_share:.0f} % of the time idle.")
    return "\n".join(lines)


def main() -> None:
    """Read the arguments, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rules", nargs="*", choices=RULES, default=list(RULES))
    parser.add_argument("--items", nargs="*", type=int, default=[])
    given = parser.parse_args()
    measure(given.rounds, given.seconds, given.rules, given.items)


if __name__ == "__main__":
    main()
