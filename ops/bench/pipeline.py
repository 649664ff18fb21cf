"""Tokens per second of a model in pipeline stages: one batch in all, or one in flight per stage.

    python -m ops.bench.pipeline MODEL [--streams 1 8 32] [--chunks 2 4 7] [--rounds N]

Each stage is a process with one thread. All depths run on the same processes in alternating rounds,
and must give the same output: "turns" runs one batch at a time through all stages, "together" one
in each stage, and "as measured" what the engine chooses. On a machine without a core for each stage
wall time says little, so the last column has the limit by processor time: the seconds of all stages
in turns, divided by the seconds of the busiest stage together.

The chunks of a long prompt always overlap, because no chunk waits for a token of the one before.
Its table compares wall time with the processor seconds of all stages one after the other, and with
the limit for so many chunks: the last stage is idle while the first chunk is in the first stage.
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

from isochrone.wire.engines.engine import EngineConfig
from nodeagent.engine.core.generation import Generation
from nodeagent.engine.loading import LoadedEngine, load_engine
from nodeagent.engine.sampling.sampler import Sampler, SamplingParams
from nodeagent.engine.scheduler.pipeline_depth import PipelineDepth
from nodeagent.engine.scheduler.sequence import Sequence, StopConditions
from nodeagent.engine.tokenizer.detokenizer import StopStrings, StreamDetokenizer
from nodeagent.engine.workers.worker import run_worker
from nodeagent.engine.workers.worker_group import WorkerGroup, fork_workers

PROMPT_TOKENS: Final = 24


class PipelineBench:
    """An engine whose model is split into stages."""

    def __init__(self, loaded: LoadedEngine, pids: Ordered[int]) -> None:
        self._loaded = loaded
        self._stages = [psutil.Process(pid) for pid in pids]
        self._numbers = 0

    def busy_s(self) -> list[float]:
        """Return the processor seconds of each stage so far."""
        return [sum(stage.cpu_times()[:2]) for stage in self._stages]

    def answers(
        self, prompts: Ordered[list[int]], tokens: int, pipeline_depth: PipelineDepth
    ) -> tuple[list[list[int]], float]:
        """Answer all prompts at once; return the outputs and the seconds.

        For more than one token, time starts when every answer has its first token.
        """
        engine = self._loaded.engine
        engine.scheduler.pipeline_depth = pipeline_depth
        generations = [self._generation(prompt, tokens) for prompt in prompts]
        for generation in generations:
            engine.submit(generation)
        started_s = time.perf_counter()
        while engine.has_work:
            before_s = time.perf_counter()
            stepped = engine.step()
            engine.record_timing(stepped, time.perf_counter() - before_s)
            if tokens > 1 and not all(one.sequence.output_tokens for one in generations):
                started_s = time.perf_counter()
        seconds = time.perf_counter() - started_s
        return [one.sequence.tokens[one.sequence.prompt_tokens :] for one in generations], seconds

    def _generation(self, prompt: list[int], tokens: int) -> Generation:
        self._numbers += 1
        # A new salt, so that the prefix cache of an earlier round is not used.
        salt = str(self._numbers).encode()
        return Generation(
            Sequence(self._numbers, list(prompt), StopConditions(tokens, frozenset()), salt),
            Sampler(SamplingParams(temperature=0), []),
            StreamDetokenizer(self._loaded.vocabulary),
            StopStrings(()),
        )


class FullDepth(PipelineDepth):
    """Always keeps one batch in flight per stage."""

    def choose(self, rows: int, *, has_prompts: bool) -> int:
        """Return the number of stages."""
        return self.stages


@dataclass(slots=True)
class DepthTimings:
    """The times of one pipeline depth."""

    pipeline_depth: PipelineDepth
    seconds: list[float] = field(default_factory=list)
    busy_s: list[float] = field(default_factory=list)
    """The processor seconds of each stage, prefill included."""


def compare(
    bench: PipelineBench,
    prompts: Ordered[list[int]],
    tokens: int,
    rounds: int,
    depths: Ordered[PipelineDepth],
) -> list[DepthTimings]:
    """Measure each depth in alternating rounds; all outputs must be the same."""
    timings = [DepthTimings(way) for way in depths]
    outputs: list[list[list[int]]] = []
    for number in range(rounds + 1):
        for one in timings if number % 2 else timings[::-1]:
            before = bench.busy_s()
            outputs_now, seconds = bench.answers(prompts, tokens, one.pipeline_depth)
            outputs.append(outputs_now)
            if number:
                spent = [after - at for after, at in zip(bench.busy_s(), before, strict=True)]
                known = one.busy_s or [0.0] * len(spent)
                one.seconds.append(seconds)
                one.busy_s = [a + b for a, b in zip(known, spent, strict=True)]
    assert all(outputs_now == outputs[0] for outputs_now in outputs)
    return timings


def measure(workers: WorkerGroup, config: EngineConfig, args: argparse.Namespace) -> None:
    """Load the model in this process and its workers, and print the tables."""
    loaded = load_engine(config, workers)
    bench = PipelineBench(loaded, [os.getpid(), *(worker.pid for worker in workers.workers)])
    words = loaded.vocabulary.encode(Path(__file__).read_text(), special=False)
    words *= max(args.chunks, default=0) * config.batch_tokens_max // len(words) + 1
    print("| a prompt of | chunks | tokens/s | one stage at a time | gain | at most |")
    print("|---|---|---|---|---|---|")
    for chunks in args.chunks:
        flow(bench, words[: chunks * config.batch_tokens_max], chunks, args)
    print("| tokens/s | turns | together | as measured | together to turns | by processor time |")
    print("|---|---|---|---|---|---|")
    # The last one learns over all rounds.
    depths = [PipelineDepth(1), FullDepth(args.stages), PipelineDepth(args.stages)]
    for count in args.streams:
        prompts = [words[7 * n : 7 * n + PROMPT_TOKENS] for n in range(count)]
        timings = compare(bench, prompts, args.tokens, args.rounds, depths)
        seconds = [median(one.seconds) for one in timings]
        rates = " | ".join(f"{count * (args.tokens - 1) / one:.1f}" for one in seconds)
        gain, allowed = seconds[0] / seconds[1], sum(timings[0].busy_s) / max(timings[1].busy_s)
        print(f"| {count} streams | {rates} | {gain:.2f} | {allowed:.2f} |", flush=True)


def flow(bench: PipelineBench, prompt: list[int], chunks: int, args: argparse.Namespace) -> None:
    """Print the row of a prompt with so many chunks."""
    (timings,) = compare(bench, [prompt], 1, args.rounds, [FullDepth(args.stages)])
    seconds, alone_s = median(timings.seconds), sum(timings.busy_s) / args.rounds
    gain, most = alone_s / seconds, args.stages * chunks / (args.stages + chunks - 1)
    rates = f"{len(prompt) / seconds:.0f} | {len(prompt) / alone_s:.0f}"
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
        workers = fork_workers(args.stages, lambda rank, channel: run_worker(config, rank, channel))
        try:
            measure(workers, config, args)
        finally:
            workers.shut_down()


if __name__ == "__main__":
    main()
