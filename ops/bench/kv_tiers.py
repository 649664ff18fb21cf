"""A session that the device gave up: time to its next token, by where its KV comes back from.

    python -m ops.bench.kv_tiers MODEL.gguf

Each round asks the same long prompt anew after other prompts have pushed it out of the device, in
turn with nothing below it (all is computed again), with the host's memory, and with files alone, as
a new process finds them. The output tokens are compared: each way must answer alike.
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

from isochrone.wire.engine import EngineConfig
from nodeagent.engine.core.generation_thread import Worker
from nodeagent.engine.core.step import Delta, Generation
from nodeagent.engine.loading import Loaded, load
from nodeagent.engine.sampling.sampler import Sampler, SamplingParams
from nodeagent.engine.scheduler.sequence import BLOCK_TOKENS, Ending, Sequence
from nodeagent.engine.tokenizer.detokenizer import StopStrings, TokenText

PROMPT_TOKENS = (512, 1536)
DEVICE_TOKENS = 1792
OUTPUT_TOKENS = 4
MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Asked:
    """How one prompt went."""

    first_token_s: float
    cached_tokens: int
    output: tuple[int, ...]


class Contestant:
    """An engine with its step thread, asked one prompt at a time."""

    def __init__(self, loaded: Loaded) -> None:
        self.loaded = loaded
        self._deltas: list[float] = []
        self._finished = False
        self._number = 0
        self.worker = Worker(loaded.engine, self._note, lambda: None)
        self.worker.start()

    def ask(self, tokens: list[int]) -> Asked:
        """Ask `tokens` and wait for the end."""
        self._number += 1
        self._deltas, self._finished = [], False
        sequence = Sequence(self._number, list(tokens), Ending(OUTPUT_TOKENS, frozenset()))
        generation = Generation(
            sequence,
            Sampler(SamplingParams(temperature=0), []),
            TokenText(self.loaded.vocabulary),
            StopStrings(()),
        )
        started_s = time.perf_counter()
        self.worker.submit(generation)
        while not self._finished:
            time.sleep(0.0005)
        output = tuple(sequence.tokens[sequence.prompt_tokens :])
        return Asked(self._deltas[0] - started_s, sequence.cached_tokens, output)

    def end(self) -> None:
        """Stop as a process that is told to does: what the device remembers goes to files."""
        self.worker.stop(30)
        self.loaded.engine.close()

    def _note(self, deltas: list[Delta]) -> None:
        self._deltas.append(time.perf_counter())
        self._finished = len(self._deltas) == OUTPUT_TOKENS


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, nargs="*", default=PROMPT_TOKENS)
    asked = parser.parse_args()
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {asked.threads} threads")
    print("| prompt tokens | KV from | first token, ms | cached tokens | against computing |")
    print("|---:|---|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as room:
        for tokens in asked.tokens:
            compare(asked.model, Path(room), tokens, asked.rounds, asked.threads)


def compare(model: Path, room: Path, tokens: int, rounds: int, threads: int) -> None:
    """Ask one prompt length by every way, in turn, and print the medians."""
    chance = Random(tokens)
    prompt = [chance.randrange(1000, 40_000) for _ in range(tokens)]
    others = [chance.randrange(1000, 40_000) for _ in range(DEVICE_TOKENS - 64)]
    shown: dict[str, list[Asked]] = {"nothing": [], "memory": [], "files": []}
    folder = room / str(tokens)
    for number in range(rounds):
        bare = Contestant(loaded(model, threads, 0, None))
        host = Contestant(loaded(model, threads, 1024 * MIB, folder))
        for name, one in (("nothing", bare), ("memory", host)):
            one.ask(prompt)
            one.ask(others[number:])
            shown[name].append(one.ask(prompt))
        bare.end()
        host.end()
        # A process that begins anew, with what the one before left behind it.
        again = Contestant(loaded(model, threads, 1024 * MIB, folder))
        again.ask(others[:64])
        shown["files"].append(again.ask(prompt))
        again.end()
    outputs = {one.output for ways in shown.values() for one in ways}
    computed_s = median(one.first_token_s for one in shown["nothing"])
    for name, ways in shown.items():
        first_s = median(one.first_token_s for one in ways)
        cached = int(median(one.cached_tokens for one in ways))
        ratio = computed_s / first_s
        print(f"| {tokens} | {name} | {1000 * first_s:.0f} | {cached} | {ratio:.1f}x |", flush=True)
    print(f"{len(outputs)} kind of output; a block of {BLOCK_TOKENS} tokens", flush=True)


def loaded(model: Path, threads: int, host_bytes: int, folder: Path | None) -> Loaded:
    """Load the model with a device's KV for one of the prompts at a time."""
    found = load(
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
