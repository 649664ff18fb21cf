"""How long a small tenant waits for its first token in an engine that another tenant floods.

    python -m ops.bench.small_tenant [--rounds 6] [--seconds 8] [--flood 50]

Steps the embedded engine in this process, without a server around it, with the demo's model and
settings. The rules of its batch scheduler are compared in alternating rounds of one run, on the
same engine: with `never`, prompts of a small tenant wait for the decodes and prompts of the other;
with `long`, they go first, but a short step may take a fifth of the interval for prompts (both as
in earlier releases). Time is the processor time of this process, which has one thread, so that
other load on the machine matters little. Probes come at times that do not depend on the answers, so
that every rule computes equally many. Prints the small tenant's time to first token, alone and
beside the flood, and the tokens per second of both. Two virtual processors (AVX-512) with a load of
about ten, torch 2.13, `--rounds 4 --seconds 6` (in a run that alternated two more rules):

| | probes | TTFT p50 | p99 | of alone, p50 | tokens/s of both |
|---|---|---|---|---|---|
| alone | 31 | 30 ms | (188 ms) | | |
| never | 60 | 100 ms | 409 ms | 3.3x | 535 |
| long | 61 | 42 ms | 93 ms | 1.4x | 532 |
| now | 64 | 39 ms | 62 ms | 1.3x | 532 |

The slowest probe alone was held up by the machine; nine of ten took 32 ms at most, of which 62 ms
are 1.9 times. The rounds of one rule differ by 5 %, more than the rules do.
"""

import argparse
import random
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Final

from isochrone.wire.engines.engine import EngineConfig
from nodeagent.engine.core.generation import Generation
from nodeagent.engine.kvcache.block_pool import BLOCK_TOKENS
from nodeagent.engine.loading import LoadedEngine, load_engine
from nodeagent.engine.sampling.sampler import Sampler, SamplingParams
from nodeagent.engine.scheduler.batch_scheduler import BatchScheduler
from nodeagent.engine.scheduler.fair_queue import SchedulingParams
from nodeagent.engine.scheduler.prefill_budget import SHORT_STEP_SHARE, PrefillBudget
from nodeagent.engine.scheduler.sequence import Sequence, StopConditions
from nodeagent.engine.tokenizer.detokenizer import StopStrings, StreamDetokenizer
from ops.bench.processor_time import ProcessorTime
from ops.bench.stepped_vllm import quantile_ms
from ops.fleet.model import FOLDER, PACKAGE

PROMPT_TOKENS: Final = 40
FLOOD_TOKENS: Final = 64
PROBE_TOKENS: Final = 4
PROBE_INTERVAL_S: Final = 0.4
SETTLE_S: Final = 2.0
RULES: Final = ("never", "long", "now")


@dataclass
class RuleResult:
    """The figures of one rule, over all its rounds."""

    ttft_s: list[float] = field(default_factory=list)
    flood_tokens: int = 0
    probe_tokens: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """The tokens that the engine generated for both tenants."""
        return (self.flood_tokens + self.probe_tokens) / self.seconds


class LongStepBudget(PrefillBudget):
    """Allows a short step a fifth of the interval, however little is pending."""

    def prompt_tokens_allowed(
        self, decodes: int, tokens_max: int, *, short_step_of: int | None = None
    ) -> int:
        """Return how many prompt tokens fit beside `decodes` decodes."""
        allowed = super().prompt_tokens_allowed(decodes, tokens_max)
        if short_step_of is None or not self.prefill_token_s or not decodes:
            return allowed
        fifth_s = SHORT_STEP_SHARE * self.interval_s
        return min(allowed, int(max(fifth_s / self.prefill_token_s, BLOCK_TOKENS)))


class FloodedEngine:
    """An engine whose queue one tenant keeps at a constant length."""

    def __init__(self, loaded: LoadedEngine, flood: int, rng: random.Random) -> None:
        self._loaded = loaded
        self._flood = flood
        self._rng = rng
        self._number = 0
        self._flood_numbers: set[int] = set()
        self._clock = ProcessorTime()

    def run(self, seconds: float, found: RuleResult) -> None:
        """Step the engine for some seconds, with a probe from time to time.

        Probes are sent at times that do not depend on the answers, so that every rule computes
        equally many of them.
        """
        engine = self._loaded.engine
        sent_at_s: dict[int, float] = {}
        now_s = started_s = next_probe_s = self._clock.now_s()
        while now_s - started_s < seconds:
            while len(self._flood_numbers) < self._flood:
                self._flood_numbers.add(self._submit(b"flood", FLOOD_TOKENS))
            while now_s >= next_probe_s:
                # It arrives at any moment of a step, and is seen after it.
                sent_at_s[self._submit(b"small", PROBE_TOKENS)] = next_probe_s
                next_probe_s += PROBE_INTERVAL_S * self._rng.uniform(0.5, 1.5)
            if not engine.has_work:
                self._clock.idle(0.001)
            before_s = self._clock.now_s()
            output = engine.step(before_s)
            now_s = self._clock.now_s()
            engine.scheduler.prefill_budget.record_step(
                output.prefill_tokens, output.decode_tokens, now_s - before_s
            )
            for delta in output.deltas:
                if delta.number in self._flood_numbers:
                    found.flood_tokens += 1
                    if delta.finish is not None:
                        self._flood_numbers.discard(delta.number)
                    continue
                found.probe_tokens += 1
                if delta.number in sent_at_s and delta.output_tokens == 1:
                    found.ttft_s.append(now_s - sent_at_s.pop(delta.number))
        found.seconds += now_s - started_s

    def drain(self) -> None:
        """Drop the flood."""
        for number in self._flood_numbers:
            self._loaded.engine.cancel(number)
        self._flood_numbers.clear()

    def _submit(self, tenant: bytes, tokens: int) -> int:
        self._number += 1
        prompt = [self._rng.randrange(100, 20_000) for _ in range(PROMPT_TOKENS)]
        sequence = Sequence(
            self._number,
            prompt,
            StopConditions(tokens, frozenset()),
            tenant,
            scheduling=SchedulingParams(tenant=tenant),
        )
        self._loaded.engine.submit(
            Generation(
                sequence,
                Sampler(SamplingParams(temperature=0), []),
                StreamDetokenizer(self._loaded.vocabulary),
                StopStrings(()),
            )
        )
        return self._number


def set_rule(scheduler: BatchScheduler, rule: str) -> None:
    """Let the scheduler decide as it does now, or as it did before."""
    kind = LongStepBudget if rule == "long" else PrefillBudget
    scheduler.prefill_budget = kind(scheduler.prefill_budget.interval_s)
    scheduler.favours_small_tenants = rule != "never"


def load() -> LoadedEngine:
    """Load the demo's model with the demo's settings."""
    package = metadata.distribution(PACKAGE)
    (path,) = Path(str(package.locate_file(FOLDER))).glob("*.gguf")
    return load_engine(
        EngineConfig(
            model_path=str(path),
            served_name="bench",
            socket="unused",
            threads=1,
            sequences_max=16,
            batch_tokens_max=256,
            draft_tokens_max=0,
        )
    )


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--flood", type=int, default=50)
    given = parser.parse_args()
    loaded = load()
    rng = random.Random(1)
    found = {name: RuleResult() for name in ("alone", *RULES)}
    for _ in range(given.rounds):
        quiet = FloodedEngine(loaded, 0, rng)
        quiet.run(given.seconds / 2, found["alone"])
        for rule in rng.sample(RULES, len(RULES)):
            set_rule(loaded.engine.scheduler, rule)
            flooded = FloodedEngine(loaded, given.flood, rng)
            flooded.run(SETTLE_S, RuleResult())
            flooded.run(given.seconds, found[rule])
            flooded.drain()
    print("| | probes | TTFT p50 | p99 | of alone, p50 | p99 | tokens/s of both |")
    print("|---|---|---|---|---|---|---|")
    alone = found["alone"].ttft_s
    for name, measured in found.items():
        p50, p99 = (quantile_ms(measured.ttft_s, share) for share in (0.5, 0.99))
        print(
            f"| {name} | {len(measured.ttft_s)} | {p50:.0f} ms | {p99:.0f} ms"
            f" | {p50 / quantile_ms(alone, 0.5):.1f}x | {p99 / quantile_ms(alone, 0.99):.1f}x"
            f" | {measured.tokens_per_s:.0f} |"
        )


if __name__ == "__main__":
    main()
