"""Tokens a second of a model in two stages: a batch under way in each, and taking turns.

    python -m ops.bench.pipeline MODEL [--streams 1 8 32] [--chunks 2 4 7] [--rounds N]

Each stage is a process of one thread. All ways run on the same processes, round by round in turn,
and every output must be the same: "turns" is one batch at a time through all stages, "together" one
in each stage, and "as measured" what the engine chooses of both. On a machine without a whole core
for each stage the clock of the wall says little: the last column is what the processor's own time
allows, all stages' seconds in turns to the busiest stage's seconds together.

A long prompt flows whatever is chosen: nobody waits for a chunk that ends in no token. Its table
compares the wall's clock with all stages' processor seconds, which is what they take one after the
other, and with what so many chunks allow: the last stage has nothing to do while the first chunk is
in the first.
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
from nodeagent.engine.core.step import Generation
from nodeagent.engine.distributed.worker import follow
from nodeagent.engine.distributed.worker_group import Crew, muster
from nodeagent.engine.loading import Loaded, load
from nodeagent.engine.sampling.sampler import Sampler, SamplingParams
from nodeagent.engine.scheduler.pipeline_depth import Underway
from nodeagent.engine.scheduler.sequence import Ending, Sequence
from nodeagent.engine.tokenizer.detokenizer import StopStrings, TokenText

PROMPT_TOKENS: Final = 24


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
    outputs: list[list[list[int]]] = []
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
    """Load the front, and print the tables."""
    loaded = load(config, crew)
    bench = Bench(loaded, [os.getpid(), *(member.pid for member in crew.members)])
    words = loaded.vocabulary.encode(Path(__file__).read_text(), special=False)
    words *= max(args.chunks, default=0) * config.batch_tokens_max // len(words) + 1
    print("| a prompt of | chunks | tokens/s | one stage at a time | gain | at most |")
    print("|---|---|---|---|---|---|")
    for chunks in args.chunks:
        flow(bench, words[: chunks * config.batch_tokens_max], chunks, args)
    print("| tokens/s | turns | together | as measured | together to turns | by processor time |")
    print("|---|---|---|---|---|---|")
    # The last learns from all that it runs.
    ways = [Underway(1), Always(args.stages), Underway(args.stages)]
    for count in args.streams:
        prompts = [words[7 * n : 7 * n + PROMPT_TOKENS] for n in range(count)]
        found = compare(bench, prompts, args.tokens, args.rounds, ways)
        seconds = [median(one.seconds) for one in found]
        rates = " | ".join(f"{count * (args.tokens - 1) / one:.1f}" for one in seconds)
        gain, allowed = seconds[0] / seconds[1], sum(found[0].busy_s) / max(found[1].busy_s)
        print(f"| {count} streams | {rates} | {gain:.2f} | {allowed:.2f} |", flush=True)


def flow(bench: Bench, prompt: list[int], chunks: int, args: argparse.Namespace) -> None:
    """Print how a prompt of so many chunks flows through the stages."""
    (found,) = compare(bench, [prompt], 1, args.rounds, [Always(args.stages)])
    took_s, alone_s = median(found.seconds), sum(found.busy_s) / args.rounds
    gain, most = alone_s / took_s, args.stages * chunks / (args.stages + chunks - 1)
    rates = f"{len(prompt) / took_s:.0f} | {len(prompt) / alone_s:.0f}"
    print(f"| {len(prompt)} | {chunks} | {rates} | {gain:.2f} | {most:.2f} |", flush=True)


def main() -> None:
    """Parse the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--chunks", type=int, nargs="*", default=[2, 4, 7])
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
            sequences_max=max(args.streams, default=1),
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
