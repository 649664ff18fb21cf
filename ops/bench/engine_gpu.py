"""Compares the embedded engine on a GPU with transformers, alternating on one machine.

    python -m ops.bench.engine_gpu FOLDER [--quick] [--only ours,transformers] [--out RAW.json]
    python -m ops.bench.engine_gpu FOLDER --tiny

A Llama of 8B's shape with random bf16 weights (16 GB) is written to FOLDER unless it exists. First
a cold start is measured and compared with reading the same, uncached files; then every engine runs
each measurement in turn, round by round. Tables show the best of the rounds and are printed after
each; RAW.json has every measured time. `--tiny` runs the same code with a tiny model on the CPU, to
test this program; its figures mean nothing.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib import metadata, util
from pathlib import Path
from random import Random
from typing import Any, Final

import torch

from ops.bench.engine import ContestantProcess
from ops.bench.engine_cold import drop
from ops.bench.engine_gpu_model import LLAMA_8B, TOY, LlamaSizes, write_model

GROUPS: Final = (("ours", "transformers"), ("ours-eager", "ours-sdpa"))
"""The engines that alternate. All of them at once would not fit into the device memory."""
ASKED_FOR: Final = ("transformers-static",)
"""Added to the first group if `--only` names it."""
_READERS: Final = 8
_READ_BYTES: Final = 8 * 1024 * 1024
_CACHED_SHARE: Final = 0.9


@dataclass(frozen=True, slots=True)
class GpuBenchScale:
    """The model, the device and the sizes of the measurements."""

    plan: LlamaSizes
    device: str
    dtype: torch.dtype
    batches: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int
    prefill_tokens: int
    long_tokens: int
    copied_bytes: int
    rounds: int


def scale_of(*, tiny: bool, quick: bool) -> GpuBenchScale:
    """Return the scale for the 8B model on a GPU, or for the tiny model on the CPU."""
    if tiny:
        return GpuBenchScale(TOY, "cpu", torch.float32, (1, 2), 8, 2, 32, 64, 1 << 20, 1)
    rounds = 1 if quick else 3
    batches, tokens = (1, 8, 64, 256), 32 if quick else 128
    return GpuBenchScale(
        LLAMA_8B, "cuda:0", torch.bfloat16, batches, 128, tokens, 4096, 2048, 4 << 30, rounds
    )


@dataclass(slots=True)
class GpuBenchResults:
    """Every measured time, for RAW.json and the tables."""

    machine: dict[str, Any]
    seconds: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    weights_bytes: dict[str, int] = field(default_factory=dict)
    cold: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def note(self, name: str, measure: str, seconds: float) -> None:
        """Store one measurement of one round."""
        self.seconds.setdefault(name, {}).setdefault(measure, []).append(seconds)
        print(f"{name} {measure}: {seconds:.4f} s", file=sys.stderr, flush=True)

    def best(self, name: str, measure: str) -> float | None:
        """Return the best time of all rounds."""
        return min(self.seconds.get(name, {}).get(measure, []), default=None)

    def decode_s(self, name: str, batch: int) -> float | None:
        """Return the best time of long answers minus the best of short ones.

        The best difference would be too low: it would come from a slow short answer.
        """
        long, short = (self.best(name, f"{length}{batch}") for length in ("long", "short"))
        return None if long is None or short is None else long - short

    def save(self, path: Path | None) -> None:
        """Write the results so far."""
        if path is not None:
            path.write_text(json.dumps(asdict(self), indent=1))


def machine_of(scale: GpuBenchScale) -> dict[str, Any]:
    """Return the device, the versions, and the bandwidth to compare decode rates with."""
    names = ("torch", "triton", "transformers")
    versions = {name: metadata.version(name) for name in names if util.find_spec(name)}
    device = platform.processor() or "CPU"
    if scale.device != "cpu":
        device = torch.cuda.get_device_name(scale.device)
    return {
        "device": device,
        "python": platform.python_version(),
        "versions": versions,
        "copy_bytes_per_s": copy_bytes_per_s(scale),
    }


def copy_bytes_per_s(scale: GpuBenchScale) -> float:
    """Return bytes read and written per second by a copy on the device, best of a few runs."""
    source = torch.ones(scale.copied_bytes // 8, dtype=torch.int64, device=scale.device)
    target = torch.zeros_like(source)
    best_s = float("inf")
    for _ in range(6):
        settle(scale.device)
        started_s = time.perf_counter()
        target.copy_(source)
        settle(scale.device)
        best_s = min(best_s, time.perf_counter() - started_s)
    del source, target
    free_device_cache(scale.device)
    return 2 * scale.copied_bytes / best_s


def settle(device: str) -> None:
    """Wait until the device has finished its queued work."""
    if device != "cpu":
        torch.cuda.synchronize(device)


def free_device_cache(device: str) -> None:
    """Return unused device memory of this process."""
    if device != "cpu":
        torch.cuda.empty_cache()


def read_files(folder: Path, readers: int) -> float:
    """Return the seconds to read all weights, uncached, with `readers` threads."""
    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        drop(file)
    parts = [
        (file, start, min(start + _READ_BYTES, file.stat().st_size))
        for file in files
        for start in range(0, file.stat().st_size, _READ_BYTES)
    ]
    started_s = time.perf_counter()
    with ThreadPoolExecutor(readers) as pool:
        list(pool.map(_read_part, parts))
    return time.perf_counter() - started_s


def _read_part(part: tuple[Path, int, int]) -> None:
    path, start, end = part
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        buffer = bytearray(end - start)
        while start < end:
            start += os.preadv(descriptor, [memoryview(buffer)[: end - start]], start)
    finally:
        os.close(descriptor)


def start(name: str, folder: Path, scale: GpuBenchScale) -> ContestantProcess:
    """Start an engine's process and wait until it has loaded."""
    command = [sys.executable, "-m", "ops.bench.engine_gpu_contestants", name, str(folder)]
    process = subprocess.Popen(
        [*command, scale.device, str(max(scale.batches))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    runner = ContestantProcess(name, process)
    loaded = runner.answer()
    runner.load_s, runner.weights_bytes = loaded["load_s"], scale.plan.read_bytes(scale.dtype)
    return runner


def measure_cold(folder: Path, scale: GpuBenchScale, results: GpuBenchResults) -> None:
    """Measure the time from a new process to its first token, and the load within it."""
    results.cold["read_s"] = read_files(folder, 1)
    results.cold[f"read_by_{_READERS}_s"] = read_files(folder, _READERS)
    for file in folder.glob("*.safetensors"):
        drop(file)
    started_s = time.perf_counter()
    runner = start("ours", folder, scale)
    try:
        results.cold["load_s"] = runner.load_s
        runner.ask("generate", [[1] * scale.prompt_tokens], 1)
        results.cold["first_token_s"] = time.perf_counter() - started_s
    finally:
        end(runner)
    for name, seconds in results.cold.items():
        print(f"cold {name}: {seconds:.2f} s", file=sys.stderr, flush=True)


def end(runner: ContestantProcess) -> None:
    """End an engine's process."""
    assert runner.process.stdin is not None
    runner.process.stdin.close()
    try:
        runner.process.wait(60)
    except subprocess.TimeoutExpired:
        runner.process.kill()
        runner.process.wait()


def measure(
    runner: ContestantProcess, random: Random, scale: GpuBenchScale, results: GpuBenchResults
) -> None:
    """Run one round of every measurement."""
    most = scale.plan.vocabulary

    def prompts(count: int, length: int) -> list[list[int]]:
        return [[random.randrange(300, most) for _ in range(length)] for _ in range(count)]

    name, tokens = runner.name, scale.output_tokens
    results.note(name, "prefill", runner.ask("generate", prompts(1, scale.prefill_tokens), 1))
    for batch in scale.batches:
        batch_prompts = prompts(batch, scale.prompt_tokens)
        results.note(name, f"short{batch}", runner.ask("generate", batch_prompts, 1))
        results.note(name, f"long{batch}", runner.ask("generate", batch_prompts, 1 + tokens))
    whole = prompts(1, scale.long_tokens)[0]
    runner.ask("prime", whole[: int(len(whole) * _CACHED_SHARE)])
    results.note(name, "ttft", runner.ask("first_token", whole))
    results.peak_bytes[name] = runner.ask("peak")


def table(scale: GpuBenchScale, results: GpuBenchResults) -> str:
    """Return the results so far as a Markdown table."""
    heads = "".join(f" decode tok/s at {batch} |" for batch in scale.batches)
    lines = [
        f"| engine | prefill tok/s |{heads} share of copy bandwidth at 1"
        f" | TTFT ms, {scale.long_tokens} tokens, {_CACHED_SHARE:.0%} cached | peak GiB |",
        "|---" * (len(scale.batches) + 5) + "|",
    ]
    for name in results.seconds:
        prefill, ttft = results.best(name, "prefill"), results.best(name, "ttft")
        cells = [rate(scale.prefill_tokens, prefill)]
        cells += [
            rate(batch * scale.output_tokens, results.decode_s(name, batch))
            for batch in scale.batches
        ]
        one = results.decode_s(name, 1)
        share = "–"
        if one is not None and one > 0:
            read = scale.output_tokens * results.weights_bytes[name] / one
            share = f"{read / results.machine['copy_bytes_per_s']:.0%}"
        cells += [share, "–" if ttft is None else f"{1000 * ttft:.1f}"]
        cells.append(f"{results.peak_bytes.get(name, 0) / 2**30:.1f}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def rate(tokens: int, seconds: float | None) -> str:
    """Return tokens per second as a table cell."""
    return "–" if seconds is None or seconds <= 0 else f"{tokens / seconds:.0f}"


def cold_table(folder: Path, results: GpuBenchResults) -> str:
    """Return the cold start as a Markdown table."""
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    cells = " | ".join(f"{seconds:.2f}" for seconds in results.cold.values())
    return (
        f"| weights GB | {' | '.join(results.cold)} |\n"
        + "|---" * (len(results.cold) + 1)
        + f"|\n| {size / 1e9:.1f} | {cells} |"
    )


def compare(
    names: list[str], folder: Path, scale: GpuBenchScale, results: GpuBenchResults, out: Path | None
) -> None:
    """Alternate the engines round by round. An engine that fails is left out after that."""
    runners: list[ContestantProcess] = []
    random = Random(7)
    try:
        for name in names:
            try:
                runners.append(start(name, folder, scale))
                results.weights_bytes[name] = runners[-1].weights_bytes
                # The first round is not counted: kernels are built at their first use.
                measure(runners[-1], random, scale, GpuBenchResults(results.machine))
            except (RuntimeError, OSError) as error:
                results.failed[name] = str(error)
                runners = [runner for runner in runners if runner.name != name]
        for number in range(scale.rounds if runners else 0):
            for runner in list(runners):
                try:
                    measure(runner, random, scale, results)
                except (RuntimeError, OSError) as error:
                    results.failed[runner.name] = str(error)
                    runners.remove(runner)
                results.save(out)
            print(
                f"\nround {number + 1} of {scale.rounds}\n\n{table(scale, results)}\n", flush=True
            )
    finally:
        for runner in runners:
            end(runner)


def main() -> None:
    """Write the model, measure, print tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tiny", action="store_true", help="run a tiny model on the CPU")
    parser.add_argument("--quick", action="store_true", help="one round of short answers")
    parser.add_argument("--only", default="", help="engines to run, separated by commas")
    parser.add_argument("--out", type=Path, help="file for the raw times")
    arguments = parser.parse_args()
    scale = scale_of(tiny=arguments.tiny, quick=arguments.quick)
    names = [name for name in arguments.only.split(",") if name]
    names = names or [name for group in GROUPS for name in group]
    if util.find_spec("transformers") is None:
        names = [name for name in names if not name.startswith("transformers")]
        print("transformers is not installed: it is left out", file=sys.stderr)
    write_model(arguments.folder, scale.plan, scale.device, scale.dtype)
    free_device_cache(scale.device)
    results = GpuBenchResults(machine_of(scale))
    print(json.dumps(results.machine), flush=True)
    try:
        measure_cold(arguments.folder, scale, results)
        print(f"\n{cold_table(arguments.folder, results)}\n", flush=True)
    except (RuntimeError, OSError) as error:
        results.failed["cold start"] = str(error)
    for group in (GROUPS[0] + ASKED_FOR, *GROUPS[1:]):
        taking_part = [name for name in group if name in names]
        compare(taking_part, arguments.folder, scale, results, arguments.out)
    results.save(arguments.out)
    for name, why in results.failed.items():
        print(f"{name} failed: {why}", flush=True)


if __name__ == "__main__":
    main()
