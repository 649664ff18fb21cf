"""Compares engines over HTTP without a router, in turn, many streams at once.

    python -m ops.bench.engines_alone [--folder .engines] [--engines "embedded Q4_0 int8" ...]
        [--clients 32] [--rounds 5] [--tokens 64]
    python -m ops.bench.engines_alone --engines "llama.cpp Q4_0: threads=1 OMP_WAIT_POLICY=ACTIVE"
        "llama.cpp Q4_0"

The agent's own code starts each engine as a deployment would (drivers, threads, memory), all of
them at once; in each round every one of them in turn answers the streams of all clients, and the
others are idle. No two prompts have a prefix in common, and nothing is drafted: the answers to
random words repeat themselves. Besides tokens/s it prints the processor time of the engine's
processes for each token, which other work on the machine changes less. The ratio is to the last
engine, of the same round; its median counts.

After a colon an engine gets options of its own, and environment variables in capitals: so one
engine's settings are compared with each other. If the last engine runs with several settings, the
ratio is to the best of them in each round: llama.cpp runs with the agent's setting, with which
threads that wait for each other sleep, and as OpenMP would start it, with threads that spin first.
"""

import argparse
import asyncio
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final, NamedTuple
from unittest.mock import patch

import aiohttp
import msgspec

from isochrone.wire.ids import DeviceId
from isochrone.wire.models.model import EngineSettings
from nodeagent.drivers.driver import CHAT_PATH
from nodeagent.host.engines.engine_process import EngineProcess
from nodeagent.host.processes import group_members, signal_group
from ops.engines.vllm_cpu import ROOT
from tests.builders import GIB, a_spec
from tests.engines.real_engines import running_engine

PROMPT_WORDS: Final = 12
ANSWER_TOKENS: Final = 64
CONTEXT_TOKENS: Final = 512
WORDS: Final = ("river", "stone", "cloud", "market", "winter", "letter", "garden", "silver")
SPINNING: Final = "llama.cpp Q4_0: GOMP_SPINCOUNT=300000"
"""With OpenMP's own default."""

TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


class Format(NamedTuple):
    """An engine with one format of the model."""

    driver: str
    model: Path
    options: Mapping[str, str]
    environment: Mapping[str, str] = {}


class RoundFigures(NamedTuple):
    """One engine's figures of one round."""

    tokens_per_s: float
    cpu_ms_per_token: float
    ttft_p50_ms: float


def formats(engines: Path, clients: int) -> dict[str, Format]:
    """Return the engines and formats that can run, by the name of their row."""
    published, q4_0 = engines / "smollm2-gguf" / "published", engines / "smollm2-gguf" / "q4_0"
    ours = {"sequences_max": str(clients), "draft_tokens_max": "0"}
    by_bytes = ours | {"quantisation": "int8"}
    every = {
        "embedded Q4_1": Format("embedded", published, ours),
        "embedded Q4_0": Format("embedded", q4_0, ours),
        "embedded Q4_1 int8": Format("embedded", published, by_bytes),
        "embedded Q4_0 int8": Format("embedded", q4_0, by_bytes),
        "embedded Q4_0 int8, KV fp16": Format("embedded", q4_0, by_bytes | {"kv_dtype": "fp16"}),
        "embedded Q4_0 int8, KV fp8": Format("embedded", q4_0, by_bytes | {"kv_dtype": "fp8"}),
        "vLLM bf16": Format("vllm", engines / "smollm2", {"max_num_seqs": str(clients)}),
        "llama.cpp Q4_0": Format(
            "llama_cpp", q4_0, {"parallel": str(clients), "kv_unified": "false"}
        ),
    }
    return {name: one for name, one in every.items() if one.model.exists()}


def chosen_formats(known: Mapping[str, Format], names: Sequence[str]) -> dict[str, Format]:
    """Return the formats of these rows: a known name, or one with further settings after a colon.

    Raises SystemExit if one is unknown.
    """
    chosen = {}
    for name in names:
        base, _, settings = name.partition(":")
        if base not in known:
            raise SystemExit(f"cannot run {base!r}; there are {', '.join(known)}")
        pairs = [setting.partition("=")[::2] for setting in settings.split()]
        one = known[base]
        chosen[name] = one._replace(
            options={**one.options, **{key: value for key, value in pairs if not key.isupper()}},
            environment={key: value for key, value in pairs if key.isupper()},
        )
    return chosen


async def first_token_s(engine: EngineProcess, prompt: str, answer_tokens: int) -> float:
    """Stream one answer of so many tokens to its end; return the seconds to its first token."""
    body = {
        "model": engine.record.spec.name,
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": answer_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    data = engine.salted(CHAT_PATH, msgspec.json.encode(body), "bench")
    sent = {"content-type": "application/json"}
    started_s, first_s, tokens = time.monotonic(), 0.0, 0
    async with engine.http.post(CHAT_PATH, data=data, headers=sent) as response:
        response.raise_for_status()
        async for line in response.content:
            if not first_s and b'"content":"' in line and b'"content":""' not in line:
                first_s = time.monotonic() - started_s
            if b'"completion_tokens":' in line:
                usage = msgspec.json.decode(line[6:])["usage"] or {}
                tokens = usage.get("completion_tokens", tokens)
    if tokens != answer_tokens or not first_s:
        raise SystemExit(f"cannot measure: an answer has {tokens} tokens instead of all")
    return first_s


async def one_round(
    engine: EngineProcess, clients: int, answer_tokens: int, draw: random.Random
) -> RoundFigures:
    """Have an engine answer all clients at once."""
    prompts = [
        f"{draw.random()} {' '.join(draw.choice(WORDS) for _ in range(PROMPT_WORDS))}"
        for _ in range(clients)
    ]
    cpu_s, started_s = processor_s(engine.pid), time.monotonic()
    firsts_s = await asyncio.gather(
        *(first_token_s(engine, prompt, answer_tokens) for prompt in prompts)
    )
    took_s = time.monotonic() - started_s
    tokens = clients * answer_tokens
    return RoundFigures(
        tokens / took_s,
        1000 * (processor_s(engine.pid) - cpu_s) / tokens,
        1000 * statistics.median(firsts_s),
    )


def processor_s(group: int) -> float:
    """Return the processor time of a process group so far."""
    ticks = 0
    for pid in group_members(group):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / TICKS_PER_S


async def compare(
    every: Mapping[str, Format], clients: int, rounds: int, answer_tokens: int
) -> None:
    """Run the rounds and print the table."""
    draw = random.Random(7)
    engines: dict[str, EngineProcess] = {}

    def kill_all() -> None:
        # All at once: there may be little time, and each is cleaned up after the one before.
        for engine in engines.values():
            signal_group(engine.pid, engine.record.started, signal.SIGKILL)

    async with AsyncExitStack() as stack:
        for name, one in every.items():
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="alone"))
            spec = a_spec(
                name="bench",
                context_tokens=CONTEXT_TOKENS,
                device_ids=(DeviceId("cpu"),),
                memory_bytes=3 * GIB,
                engine=EngineSettings(
                    driver=one.driver, kv_memory_bytes=GIB, options=dict(one.options)
                ),
            )
            running = running_engine(spec, one.model.resolve(), Path(folder))
            with patch.dict(os.environ, one.environment):
                engines[name] = await stack.enter_async_context(running)
            stack.callback(kill_all)
            await one_round(engines[name], clients, answer_tokens, draw)
        seen: dict[str, list[RoundFigures]] = {name: [] for name in engines}
        for _ in range(rounds):
            for name, engine in engines.items():
                seen[name].append(await one_round(engine, clients, answer_tokens, draw))
                print(name, seen[name][-1], file=sys.stderr, flush=True)
        print(table(seen))


def table(seen: Mapping[str, Sequence[RoundFigures]]) -> str:
    """Return the medians of the rounds as a Markdown table.

    Ratios are to the last engine, to the best of its settings in each round.
    """
    last = list(seen)[-1].partition(":")[0]
    rivals = [rounds for name, rounds in seen.items() if name.partition(":")[0] == last]
    fastest = [max(one.tokens_per_s for one in at_once) for at_once in zip(*rivals, strict=True)]
    cheapest = [
        min(one.cpu_ms_per_token for one in at_once) for at_once in zip(*rivals, strict=True)
    ]
    lines = [
        "| | tokens/s | ratio | processor ms a token | ratio | TTFT p50 ms |",
        "|---|---|---|---|---|---|",
    ]
    for name, rounds in seen.items():
        faster = statistics.median(
            one.tokens_per_s / most for one, most in zip(rounds, fastest, strict=True)
        )
        cheaper = statistics.median(
            least / one.cpu_ms_per_token for one, least in zip(rounds, cheapest, strict=True)
        )
        middle = [statistics.median(values) for values in zip(*rounds, strict=True)]
        lines.append(
            f"| {name} | {middle[0]:.0f} | {faster:.2f} | {middle[1]:.2f} | {cheaper:.2f} |"
            f" {middle[2]:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Read the arguments and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / ".engines")
    parser.add_argument(
        "--engines",
        nargs="+",
        default=["embedded Q4_0", "embedded Q4_0 int8, KV fp16", SPINNING, "llama.cpp Q4_0"],
    )
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=ANSWER_TOKENS, help="of each answer")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    commands = [str(folder / engine / "bin") for engine in ("vllm", "llama_cpp")]
    os.environ["PATH"] = os.pathsep.join([*commands, os.environ["PATH"]])
    every = chosen_formats(formats(folder, arguments.clients), arguments.engines)
    # One that is stopped must end its engines, which outlive it otherwise.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        asyncio.run(compare(every, arguments.clients, arguments.rounds, arguments.tokens))
    except aiohttp.ClientError as error:
        raise SystemExit(f"cannot measure: {error}") from error
    print(f"\n{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
