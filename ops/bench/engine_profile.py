"""Profiles a decode step: matrix products, attention, and everything else.

    python -m ops.bench.engine_profile MODEL.gguf [--quantisation file] [--batch 8] [--threads 1]

torch's profiler measures each operator, and a clock around each call the engine's own kernels.
While profiled, the layers run one by one; the step measured without the profiler runs them in one
call if it can. The rest of the step's time is Python and dispatch. With one thread the step's time
is processor time, so other load on the machine does not change it.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from isochrone.wire.engines.engine import EngineConfig
from nodeagent.engine.core.generation import Generation
from nodeagent.engine.core.step import EngineCore
from nodeagent.engine.kernels.cpu.library import cpu_kernels
from nodeagent.engine.loading import load_engine
from nodeagent.engine.sampling.sampler import Sampler, SamplingParams
from nodeagent.engine.scheduler.sequence import Sequence, StopConditions
from nodeagent.engine.tokenizer.detokenizer import StopStrings, StreamDetokenizer

STEPS: Final = 12
PROMPT_TOKENS: Final = 64
PRODUCTS: Final = ("linear", "pack_mm", "::mm", "::addmm", "::bmm", "own multiply")
ATTENTION: Final = ("scaled_dot_product", "index_select", "own attend", "own store_kv")
OWN: Final = (
    "multiply",
    "rms_norm",
    "silu_gate",
    "rotate",
    "store_kv",
    "attend",
)


def part_of(operator: str) -> str:
    """Return the part of a step that an operator belongs to."""
    if any(word in operator for word in ATTENTION):
        return "attention"
    return "products" if any(word in operator for word in PRODUCTS) else "other operators"


def clock_own() -> dict[str, float]:
    """Measure each call of the engine's own kernels; return their seconds by name.

    Must be called before a model is loaded: matrices keep references to the functions.
    """
    spent_s: dict[str, float] = {}
    own = cpu_kernels()
    if own is not None:
        for name in OWN:
            setattr(own.library, name, clocked(getattr(own.library, name), name, spent_s))
    return spent_s


def clocked(function: Callable[..., Any], name: str, spent_s: dict[str, float]) -> Any:
    """Return `function` with a clock around it."""

    def call(*arguments: Any) -> Any:
        started_s = time.thread_time()
        answer = function(*arguments)
        spent_s[name] = spent_s.get(name, 0.0) + time.thread_time() - started_s
        return answer

    return call


def run(engine: EngineCore, steps: int) -> float:
    """Run `steps` steps and return the seconds per step."""
    started_s = time.process_time()
    for _ in range(steps):
        engine.step()
    return (time.process_time() - started_s) / steps


def main() -> None:
    """Profile and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--quantisation", default="none")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, default=12)
    arguments = parser.parse_args()
    values = {
        "model_path": str(arguments.model),
        "served_name": "profile",
        "socket": "unused",
        "threads": arguments.threads,
        "quantisation": arguments.quantisation,
        "sequences_max": max(arguments.batch, 2),
    }
    spent_s = clock_own()
    loaded = load_engine(msgspec.convert(values, EngineConfig))
    engine = loaded.engine
    for number in range(arguments.batch):
        tokens = [100 + number * 7 + index for index in range(PROMPT_TOKENS)]
        engine.submit(
            Generation(
                Sequence(number, tokens, StopConditions(1000, frozenset())),
                Sampler(SamplingParams(temperature=0), []),
                StreamDetokenizer(loaded.vocabulary),
                StopStrings(()),
            )
        )
    run(engine, 6)
    step_s = min(run(engine, STEPS) for _ in range(3))
    report(engine, spent_s, step_s, arguments.batch, arguments.rows)


def report(
    engine: EngineCore, spent_s: dict[str, float], step_s: float, batch: int, rows: int
) -> None:
    """Profile more steps and print the shares."""
    import torch.profiler

    spent_s.clear()
    runner: Any = engine._executor
    runner._model.record_states = lambda layer, x: None
    with torch.profiler.profile() as profile:
        run(engine, STEPS)
    averages: Any = profile.key_averages()
    own = {one.key: one.self_cpu_time_total / STEPS / 1e3 for one in averages}
    own |= {f"own {name}": one_s / STEPS * 1e3 for name, one_s in spent_s.items()}
    parts: dict[str, float] = {}
    for name, own_ms in own.items():
        parts[part_of(name)] = parts.get(part_of(name), 0.0) + own_ms
    print(f"batch {batch}: {step_s * 1e3:.2f} ms per step without the profiler")
    print("\n| part | ms per step, profiled |\n|---|---|")
    for name, part_ms in sorted(parts.items(), key=lambda item: -item[1]):
        print(f"| {name} | {part_ms:.2f} |")
    print("\n| operator | ms per step, own |\n|---|---|")
    for name, own_ms in sorted(own.items(), key=lambda item: -item[1])[:rows]:
        print(f"| {name} | {own_ms:.2f} |")


if __name__ == "__main__":
    main()
