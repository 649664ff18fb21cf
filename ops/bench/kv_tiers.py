"""Time to the next token of a session whose KV was evicted, by the tier it is restored from.

    python -m ops.bench.kv_tiers MODEL.gguf

Each round runs the same long prompt again after other prompts have evicted it from the device: with
no lower tier (its KV is computed again), with host memory, and with files alone, as a new process
finds them. All rounds must give the same output.
"""

import argparse
import platform
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median

import torch

from isochrone.wire.engines.engine import EngineConfig
from nodeagent.engine.core.generation import Generation, GenerationDelta
from nodeagent.engine.core.generation_thread import GenerationThread
from nodeagent.engine.kvcache.block_pool import BLOCK_TOKENS
from nodeagent.engine.loading import LoadedEngine, load_engine
from nodeagent.engine.sampling.sampler import Sampler, SamplingParams
from nodeagent.engine.scheduler.sequence import Sequence, StopConditions
from nodeagent.engine.tokenizer.detokenizer import StopStrings, StreamDetokenizer

PROMPT_TOKENS = (512, 1536)
DEVICE_TOKENS = 1792
OUTPUT_TOKENS = 4
MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class PromptTiming:
    """The time and the output of one prompt."""

    first_token_s: float
    cached_tokens: int
    output: tuple[int, ...]


class TieredEngine:
    """An engine with its step thread, which runs one prompt at a time."""

    def __init__(self, loaded: LoadedEngine) -> None:
        self.loaded = loaded
        self._deltas: list[float] = []
        self._finished = False
        self._number = 0
        self.worker = GenerationThread(loaded.engine, self._note, lambda: None)
        self.worker.start()

    def run(self, tokens: list[int]) -> PromptTiming:
        """Run the prompt `tokens` and wait for its end."""
        self._number += 1
        self._deltas, self._finished = [], False
        sequence = Sequence(self._number, list(tokens), StopConditions(OUTPUT_TOKENS, frozenset()))
        generation = Generation(
            sequence,
            Sampler(SamplingParams(temperature=0), []),
            StreamDetokenizer(self.loaded.vocabulary),
            StopStrings(()),
        )
        started_s = time.perf_counter()
        self.worker.submit(generation)
        while not self._finished:
            time.sleep(0.0005)
        output = tuple(sequence.tokens[sequence.prompt_tokens :])
        return PromptTiming(self._deltas[0] - started_s, sequence.cached_tokens, output)

    def end(self) -> None:
        """Stop as a draining process does: the device's prefix cache is written to files."""
        self.worker.stop(30)
        self.loaded.engine.close()

    def _note(self, deltas: list[GenerationDelta]) -> None:
        self._deltas.append(time.perf_counter())
        self._finished = len(self._deltas) == OUTPUT_TOKENS


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, nargs="*", default=PROMPT_TOKENS)
    arguments = parser.parse_args()
    print(f"Python {platform.python_version()}, torch {torch.__version__}")
    print(f"{arguments.threads} threads")
    print("| prompt tokens | KV from | first token, ms | cached tokens | relative to computing |")
    print("|---:|---|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        for tokens in arguments.tokens:
            compare(arguments.model, Path(folder), tokens, arguments.rounds, arguments.threads)


def compare(model: Path, folder: Path, tokens: int, rounds: int, threads: int) -> None:
    """Run one prompt length with every tier, in turn, and print the medians."""
    chance = Random(tokens)
    prompt = [chance.randrange(1000, 40_000) for _ in range(tokens)]
    others = [chance.randrange(1000, 40_000) for _ in range(DEVICE_TOKENS - 64)]
    shown: dict[str, list[PromptTiming]] = {"nothing": [], "memory": [], "files": []}
    folder = folder / str(tokens)
    for number in range(rounds):
        bare = TieredEngine(loaded(model, threads, 0, None))
        host = TieredEngine(loaded(model, threads, 1024 * MIB, folder))
        for name, one in (("nothing", bare), ("memory", host)):
            one.run(prompt)
            one.run(others[number:])
            shown[name].append(one.run(prompt))
        bare.end()
        host.end()
        # A new process, with the files of the one before.
        again = TieredEngine(loaded(model, threads, 1024 * MIB, folder))
        again.run(others[:64])
        shown["files"].append(again.run(prompt))
        again.end()
    outputs = {one.output for ways in shown.values() for one in ways}
    computed_s = median(one.first_token_s for one in shown["nothing"])
    for name, ways in shown.items():
        first_s = median(one.first_token_s for one in ways)
        cached = int(median(one.cached_tokens for one in ways))
        ratio = computed_s / first_s
        print(f"| {tokens} | {name} | {1000 * first_s:.0f} | {cached} | {ratio:.1f}x |", flush=True)
    print(f"{len(outputs)} distinct outputs; a block has {BLOCK_TOKENS} tokens", flush=True)


def loaded(model: Path, threads: int, host_bytes: int, folder: Path | None) -> LoadedEngine:
    """Load the model with device KV for one prompt at a time."""
    found = load_engine(
        EngineConfig(
            model_path=str(model),
            served_name="bench",
            socket="unused",
            threads=threads,
            kv_memory_bytes=DEVICE_TOKENS * 46_080,
            kv_host_bytes=host_bytes,
            kv_file_bytes=0 if folder is None else 2048 * MIB,
            kv_folder="" if folder is None else str(folder),
        )
    )
    assert found.context_tokens > PROMPT_TOKENS[-1]
    return found


if __name__ == "__main__":
    main()
