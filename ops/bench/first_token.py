"""Time to first token of many clients at once in the embedded engine, by processor time.

    python -m ops.bench.first_token [MODEL.gguf] [--clients 8 32] [--answers 2] [--rounds 3]

The engine's own steps run on one thread without a server. A clock counts their processor time, so
that other work on the machine changes little, and clients live on this clock: each sends a prompt,
and the next one some milliseconds after its answer. All answers have the same length (as in
`ops.bench.engines`), or lengths from half to one and a half of that (`--varied`). Each round runs
once with steps that take as many prompts as fit, and once with the engine's rule, which ends them
after a prompt (`PROMPTS_PER_DECODES_S`).
"""

import argparse
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from typing import Final, NamedTuple
from unittest.mock import patch

from isochrone.wire.engines.engine import EngineConfig
from nodeagent.engine.core.generation import Generation
from nodeagent.engine.loading import LoadedEngine, load_engine
from nodeagent.engine.sampling.sampler import Sampler, SamplingParams
from nodeagent.engine.scheduler import prefill_budget
from nodeagent.engine.scheduler.sequence import Sequence, StopConditions
from nodeagent.engine.tokenizer.detokenizer import StopStrings, StreamDetokenizer
from ops.engines.vllm_cpu import small_chat_model

PROMPT_TOKENS: Final = 130
ANSWER_TOKENS: Final = 64
PAUSE_S: Final = 0.02
"""From the end of an answer to the client's next prompt."""


class ClientFigures(NamedTuple):
    """The measurements of one run's clients."""

    first_s: list[float]
    between_s: list[float]
    tokens_per_s: float


class ClosedLoop:
    """Clients of one engine, each with one request at a time."""

    numbers = count(1)
    """Of the sequences of all runs: a prompt of an earlier run is not found in the prefix cache."""

    def __init__(self, loaded: LoadedEngine, seed: int, *, varied: bool) -> None:
        self._loaded = loaded
        self._draw = random.Random(seed)
        self._varied = varied
        self._born_s: dict[int, float] = {}
        self._last_s: dict[int, float] = {}

    def run(self, clients: int, answers: int) -> ClientFigures:
        """Have each client get `answers` answers, one after the other."""
        engine, now_s, tokens = self._loaded.engine, 0.0, 0
        first_s: list[float] = []
        between_s: list[float] = []
        coming = [(self._draw.random() * PAUSE_S, client) for client in range(clients)]
        left = dict.fromkeys(range(clients), answers)
        client_of: dict[int, int] = {}
        while coming or engine.has_work:
            if not engine.has_work:
                now_s = max(now_s, coming[0][0])
            while coming and coming[0][0] <= now_s:
                at_s, client = heappop(coming)
                client_of[self._submit(at_s)] = client
                left[client] -= 1
            began_s = time.process_time()
            output = engine.step(now_s)
            took_s = time.process_time() - began_s
            now_s += took_s
            budget = engine.scheduler.prefill_budget
            budget.record_step(output.prefill_tokens, output.decode_tokens, took_s)
            for delta in output.deltas:
                tokens += 1
                if delta.output_tokens == 1:
                    first_s.append(now_s - self._born_s[delta.number])
                else:
                    between_s.append(now_s - self._last_s[delta.number])
                self._last_s[delta.number] = now_s
                client = client_of[delta.number]
                if delta.finish is not None and left[client]:
                    pause_s = PAUSE_S * (0.5 + self._draw.random())
                    heappush(coming, (now_s + pause_s, client))
        return ClientFigures(first_s, between_s, tokens / now_s)

    def _submit(self, at_s: float) -> int:
        number = next(self.numbers)
        share = 0.5 + self._draw.random() if self._varied else 1.0
        prompt = [self._draw.randrange(1000, 20000) for _ in range(int(share * PROMPT_TOKENS))]
        conditions = StopConditions(int(share * ANSWER_TOKENS), frozenset())
        self._born_s[number] = at_s
        self._loaded.engine.submit(
            Generation(
                Sequence(number, prompt, conditions, salt=str(number).encode()),
                Sampler(SamplingParams(temperature=0), []),
                StreamDetokenizer(self._loaded.vocabulary),
                StopStrings(()),
            )
        )
        return number


@contextmanager
def full_steps() -> Iterator[None]:
    """Let steps take as many prompts as fit."""
    with patch.object(prefill_budget, "PROMPTS_PER_DECODES_S", float("inf")):
        yield


def row(name: str, clients: int, runs: list[ClientFigures]) -> str:
    """Return a row of the table, over all runs."""
    firsts = statistics.quantiles((s for run in runs for s in run.first_s), n=20)
    between = statistics.quantiles((s for run in runs for s in run.between_s), n=100)
    rate = statistics.mean(run.tokens_per_s for run in runs)
    most_s = max(s for run in runs for s in run.first_s)
    times = (firsts[9], firsts[17], most_s, between[49], between[98])
    cells = [f"{1000 * seconds:,.0f}" for seconds in times]
    return "| " + " | ".join((name, str(clients), f"{rate:.0f}", *cells)) + " |"


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--clients", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--answers", type=int, default=2, help="of each client")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--varied", action="store_true")
    arguments = parser.parse_args()
    config = EngineConfig(
        model_path=str(arguments.model or small_chat_model()),
        served_name="bench",
        socket="unused",
        threads=1,
        sequences_max=32,
        draft_tokens_max=0,
        kv_memory_bytes=1 << 30,
    )
    loaded = load_engine(config)
    ClosedLoop(loaded, 0, varied=False).run(2, 1)
    runs: dict[tuple[str, int], list[ClientFigures]] = defaultdict(list)
    for seed in range(arguments.rounds):
        for clients in arguments.clients:
            with full_steps():
                loop = ClosedLoop(loaded, seed, varied=arguments.varied)
                runs["full steps", clients].append(loop.run(clients, arguments.answers))
            loop = ClosedLoop(loaded, seed, varied=arguments.varied)
            runs["the rule", clients].append(loop.run(clients, arguments.answers))
    print("| | clients | tokens/s | TTFT p50 ms | p90 | most | ITL p50 ms | p99 |")
    print("|---" * 8 + "|")
    for (name, clients), of_row in runs.items():
        print(row(name, clients, of_row))


if __name__ == "__main__":
    main()
