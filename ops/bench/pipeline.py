"""Tokens a second of a model in two stages: a batch under way in each, and taking turns.

    python -m ops.bench.pipeline MODEL [--streams 1 8 32] [--rounds N] [--tokens N] [--stages N]

Each stage is a process of one thread. All ways run on the same processes, round by round in turn,
and every output must be the same: "turns" is one batch at a time through all stages, "together" one
in each stage, and "as measured" what the engine chooses of both. On a machine without a whole core
for each stage the clock of the wall says little: the last column is what the processor's own time
allows, all stages' seconds in turns to the busiest stage's seconds together.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Final

import psutil

from isochrone.wire.engine import EngineConfig
from nodeagent.engine.decide.sequence import Ending, Sequence
from nodeagent.engine.decide.underway import Underway
from nodeagent.engine.loading import Loaded, load
from nodeagent.engine.parallel.crew import Crew, muster
from nodeagent.engine.parallel.follower import follow
from nodeagent.engine.sampling import Sampler, SamplingParams
from nodeagent.engine.step import Generation
from nodeagent.engine.text import StopStrings, TokenText

PROMPT_TOKENS: Final = 24
LONG_TOKENS: Final = 1024


class Bench:
    """One split engine."""

    def __init__(self, loaded: Loaded, pids: Ordered[int]) -> None:
        self._loaded = loaded
        self._stages = [psutil.Process(pid) for pid in pids]
        self._numbers = 0

    def busy_s(self) -> list[float]:
        """Return the processor seconds that each stage has taken."""
        return [sum(stage.cpu_times()[:2]) for stage in self._stages]

    def answers(
        self, prompts: Ordered[list[int]], tokens: int, underway: Underway
    ) -> tuple[list[list[int]], float]:
        """Answer all prompts at once; return the outputs, and the seconds that they took.

        Where tokens are drawn, those of the prompts are not counted: from the first that all have.
        """
        engine = self._loaded.engine
        engine.batching.underway = underway
        held = [self._generation(prompt, tokens) for prompt in prompts]
        for generation in held:
            engine.submit(generation)
        started_s = time.perf_counter()
        while engine.busy:
            before_s = time.perf_counter()
            stepped = engine.step()
            engine.timed(stepped, time.perf_counter() - before_s)
            if tokens > 1 and not all(one.sequence.output_tokens for one in held):
                started_s = time.perf_counter()
        seconds = time.perf_counter() - started_s
        return [one.sequence.tokens[one.sequence.prompt_tokens :] for one in held], seconds

    def _generation(self, prompt: list[int], tokens: int) -> Generation:
        self._numbers += 1
        # A salt of its own: what an earlier round read is no help.
        salt = str(self._numbers).encode()
        return Generation(
            Sequence(self._numbers, list(prompt), Ending(tokens, frozenset()), salt),
            Sampler(SamplingParams(temperature=0), []),
            TokenText(self._loaded.vocabulary),
            StopStrings(()),
        )


class Always(Underway):
    """A batch in each stage, whatever that costs."""

    def choose(self, rows: int, *, prompts: bool) -> int:
        """Choose as many as there are stages."""
        return self.most


@dataclass(slots=True)
class Measured:
    """What one way has cost."""

    underway: Underway
    seconds: list[float] = field(default_factory=list)
    busy_s: list[float] = field(default_factory=list)
    """Processor seconds of each stage, prompts included."""


def compare(
    bench: Bench, prompts: Ordered[list[int]], tokens: int, rounds: int, ways: Ordered[Underway]
) -> list[Measured]:
    """Return what each way has cost; all outputs must be the same."""
    found = [Measured(way) for way in ways]
    outputs = []
    for number in range(rounds + 1):
        for one in found if number % 2 else found[::-1]:
            before = bench.busy_s()
            said, took_s = bench.answers(prompts, tokens, one.underway)
            outputs.append(said)
            if number:
                spent = [after - at for after, at in zip(bench.busy_s(), before, strict=True)]
                known = one.busy_s or [0.0] * len(spent)
                one.seconds.append(took_s)
                one.busy_s = [a + b for a, b in zip(known, spent, strict=True)]
    assert all(said == outputs[0] for said in outputs)
    return found


def measure(crew: Crew, config: EngineConfig, args: argparse.Namespace) -> None:
    """Load the front, and print the table."""
    loaded = load(config, crew)
    bench = Bench(loaded, [os.getpid(), *(member.pid for member in crew.members)])
    words = loaded.vocabulary.encode(Path(__file__).read_text(), special=False)
    words *= LONG_TOKENS // len(words) + 1
    # The last learns from all that it runs.
    ways = [Underway(1), Always(args.stages), Underway(args.stages)]
    print("| tokens/s | turns | together | as measured | together to turns | by processor time |")
    print("|---|---|---|---|---|---|")

    def row(name: str, tokens: int, found: list[Measured]) -> None:
        seconds = [median(one.seconds) for one in found]
        rates = " | ".join(f"{tokens / one:.1f}" for one in seconds)
        allowed = sum(found[0].busy_s) / max(found[1].busy_s)
        print(f"| {name} | {rates} | {seconds[0] / seconds[1]:.2f} | {allowed:.2f} |", flush=True)

    for count in args.streams:
        prompts = [words[7 * n : 7 * n + PROMPT_TOKENS] for n in range(count)]
        drawn = count * (args.tokens - 1)
        row(f"{count} streams", drawn, compare(bench, prompts, args.tokens, args.rounds, ways))
    long = words[:LONG_TOKENS]
    row(f"a prompt of {LONG_TOKENS}", LONG_TOKENS, compare(bench, [long], 1, args.rounds, ways))


def main() -> None:
    """Parse the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--quantisation", choices=("none", "file"), default="none")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = EngineConfig(
            model_path=str(args.model),
            served_name="bench",
            socket=f"{folder}/engine.sock",
            quantisation=args.quantisation,
            pipeline_parallel=args.stages,
            threads=1,
            sequences_max=max(args.streams),
            batch_tokens_max=256,
            draft_tokens_max=0,
        )
        crew = muster(args.stages, lambda rank, channel: follow(config, rank, channel))
        try:
            measure(crew, config, args)
        finally:
            crew.end()


if __name__ == "__main__":
    main()
