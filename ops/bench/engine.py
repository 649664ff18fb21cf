"""Compares the embedded engine with transformers and llama.cpp, alternating on one machine.

    python -m ops.bench.engine MODEL.gguf [--f16 MODEL-F16.gguf] [--only ours-fp32,transformers]

Needs the other engines beside this project (`pip install transformers llama-cpp-python`). Every
round runs each measurement with each engine in turn. The table shows the best of the rounds,
because other load on the machine only makes a run slower. With `--threads 1` the seconds are the
engine's own processor time, which other load does not affect.
"""

import argparse
import json
import platform
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final

import torch

from ops.bench.engine_machine import bandwidth_bytes_per_s

PROMPT_TOKENS: Final = 16
PREFILL_TOKENS: Final = 256
CACHED_TOKENS: Final = 1843
LONG_TOKENS: Final = 2048
BATCHES: Final = (1, 8, 32)
ALONE: Final = 4
"""Runs with one stream per round: they vary most, with the memory bandwidth that is left."""
VOCABULARY: Final = 49_152


@dataclass(slots=True)
class ContestantProcess:
    """The process of one engine, and the best seconds of each measurement."""

    name: str
    process: subprocess.Popen[str]
    load_s: float = 0.0
    weights_bytes: int = 0
    best: dict[str, float] = field(default_factory=dict)

    def ask(self, *call: Any) -> Any:
        """Make one call and wait for its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(call) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> Any:
        """Read lines up to the answer; libraries may print others before it."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("ANSWER "):
                return json.loads(line.removeprefix("ANSWER "))
        raise RuntimeError(f"cannot measure {self.name}: its process ended")

    def note(self, measure: str, seconds: float) -> None:
        """Keep the best time."""
        self.best[measure] = min(seconds, self.best.get(measure, seconds))
        print(f"{self.name} {measure}: {seconds:.3f} s", file=sys.stderr, flush=True)


def start(name: str, model: Path, threads: int, python: str = sys.executable) -> ContestantProcess:
    """Start the process of engine `name` in `python` and wait until it has loaded."""
    process = subprocess.Popen(
        [python, "-m", "ops.bench.engine_contestants", name, str(model), str(threads)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    runner = ContestantProcess(name, process)
    loaded = runner.answer()
    runner.load_s, runner.weights_bytes = loaded["load_s"], loaded["bytes"]
    return runner


def measure(runner: ContestantProcess, random: Random, tokens: int) -> None:
    """Run one round of every measurement."""

    def prompts(count: int, length: int) -> list[list[int]]:
        return [[random.randrange(100, VOCABULARY) for _ in range(length)] for _ in range(count)]

    runner.note("prefill", runner.ask("generate", prompts(1, PREFILL_TOKENS), 1))
    for batch in (1,) * (ALONE - 1) + BATCHES:
        batch_prompts = prompts(batch, PROMPT_TOKENS)
        runner.note(f"short{batch}", runner.ask("generate", batch_prompts, 1))
        runner.note(f"long{batch}", runner.ask("generate", batch_prompts, 1 + tokens))
    long = prompts(1, LONG_TOKENS)[0]
    runner.ask("prime", long[:CACHED_TOKENS])
    runner.note("ttft", runner.ask("first_token", long))


def table(runners: list[ContestantProcess], tokens: int, copy_bytes_per_s: float) -> str:
    """Return the results as a Markdown table."""
    lines = [
        "| engine | prefill tok/s | decode tok/s at 1 | at 8 | at 32 | TTFT ms, 2k 90 % cached"
        " | peak RSS MiB | weights read MB/token | share of copy bandwidth at 1 | load s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for runner in runners:
        best = runner.best
        # The best of each, not the best difference: a slow short answer would improve the rate.
        decode = {
            batch: batch * tokens / (best[f"long{batch}"] - best[f"short{batch}"])
            for batch in BATCHES
        }
        share = decode[1] * runner.weights_bytes / copy_bytes_per_s
        lines.append(
            f"| {runner.name} | {PREFILL_TOKENS / best['prefill']:.0f} | {decode[1]:.1f} |"
            f" {decode[8]:.1f} | {decode[32]:.1f} | {best['ttft'] * 1e3:.0f} |"
            f" {runner.ask('peak') / 2**20:.0f} | {runner.weights_bytes / 1e6:.0f} |"
            f" {share:.0%} | {runner.load_s:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Start the engines, alternate between them, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--f16", type=Path, help="the same weights as a GGUF file in F16")
    parser.add_argument("--folder", type=Path, help="the same as transformers saves them")
    parser.add_argument(
        "--only", default="ours-fp32,ours-f16,ours-packed,transformers,llama.cpp,llama.cpp-f16"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    names = [
        name
        for name in arguments.only.split(",")
        if arguments.f16 is not None or not name.endswith("f16")
    ]
    copy_bytes_per_s = 0.0
    runners: list[ContestantProcess] = []
    try:
        for name in names:
            model = arguments.f16 if name.endswith("f16") else arguments.model
            if name == "transformers" and arguments.folder is not None:
                model = arguments.folder
            runners.append(start(name, model, arguments.threads))
        for number in range(arguments.rounds):
            for runner in runners:
                measure(runner, Random(number), arguments.tokens)
                copied = bandwidth_bytes_per_s(arguments.threads)
                copy_bytes_per_s = max(copy_bytes_per_s, copied)
            print(
                f"round {number + 1}; Python {platform.python_version()}, torch"
                f" {torch.__version__}; {arguments.threads} threads; copy"
                f" {copy_bytes_per_s / 1e9:.1f} GB/s read + written\n"
                + table(runners, arguments.tokens, copy_bytes_per_s),
                flush=True,
            )
    finally:
        for runner in runners:
            runner.process.kill()
            runner.process.wait()


if __name__ == "__main__":
    main()
