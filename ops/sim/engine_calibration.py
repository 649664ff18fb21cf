"""Compare the simulated replica with engines that run on this machine's CPU, at several loads.

    python -m ops.sim.engine_calibration [--engine embedded vllm] [--load N ...] [--seconds S]
        [--limit S]

Each engine runs alone, without a router. The engine is profiled first: single prompts of several
lengths, then several answers at once. The simulated replica's rates are fitted to this profile
only. Then requests of drawn lengths come at random times, none with another's prefix, and the
simulated replica gets the same requests at the same times. Time to first token, and each answer's
mean time between tokens, with a row for each model of a replica (`stepped_replica.py`). Under four
minutes for both engines on an idle machine of two cores; other load makes the figures worthless, so
the average load is in the table. `make test-engines` installs vLLM.
"""

import argparse
import asyncio
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from isochrone.wire.http import headers
from isochrone.wire.ids import DeviceId
from isochrone.wire.models.model import EngineSettings
from nodeagent.drivers.driver import CHAT_PATH
from nodeagent.host.engines.engine_process import EngineProcess
from ops.bench.streamed_answer import read_chat
from ops.engines.vllm_cpu import small_chat_model
from ops.sim.calibration import ITL_TOKENS_MIN, FittedReplica, ProfileProbe, fit_replicas
from ops.sim.measure import percentile
from ops.sim.replica import ReplicaKind, SimulatedReplica
from ops.sim.replica_job import ReplicaJob
from ops.sim.stepped_replica import REPLICA_KINDS
from ops.sim.traces import TraceRequest
from ops.sim.world import ReplicaSite
from tests.builders import GIB, a_spec
from tests.engines.real_engines import MODEL, VLLM_COMMANDS, running_engine

CONTEXT_TOKENS: Final = 2048
PROFILE_WORDS: Final = (20, 60, 150, 300, 600)
PROFILE_REPEATS: Final = 3
PROFILE_TOGETHER: Final = (2, 4, 8)
PROFILE_ANSWER: Final = 12
LOADS: Final = (30, 60, 80)
SECONDS: Final = 12.0
"""Requests come for so long at each load."""
TIME_LIMIT_S: Final = 235.0
"""The time limit of all engines: on a machine that is too busy the run ends instead of hanging."""
WORDS_MEDIAN: Final = 80
WORDS_SIGMA: Final = 0.8
WORDS_MAX: Final = 900
ANSWER_TOKENS: Final = (8, 40)
SHARES: Final = (0.5, 0.9, 0.99)
VOCABULARY: Final = ("river", "stone", "cloud", "market", "winter", "letter", "garden", "silver")


class RatesUnclear(Exception):
    """The measurements of an engine are too far from the replica's model."""


class EngineUnderTest(NamedTuple):
    """An engine, the model it reads, and the limits of its steps that the profile does not show."""

    driver: str
    model: Path
    chunk_tokens: int
    sequences_max: int
    interval_s: float
    options: Mapping[str, str] = {}


class MeasuredAnswer(NamedTuple):
    """One answer's lengths and times; `sent_s` is from the beginning of the load."""

    sent_s: float
    prompt_tokens: int
    output_tokens: int
    ttft_s: float
    itl_s: float


class DrawnRequest(NamedTuple):
    """One request of a load."""

    at_s: float
    words: int
    output_tokens: int


def engines() -> Mapping[str, EngineUnderTest]:
    """Return the engines by name."""
    return {
        "embedded": EngineUnderTest(
            "embedded",
            small_chat_model().parent,
            256,
            16,
            0.25,
            # Answers to random words repeat themselves, and drafts of them would all be right.
            {"draft_tokens_max": "0", "waiting_max": "256"},
        ),
        "vllm": EngineUnderTest("vllm", MODEL, 2048, 128, float("inf")),
    }


async def answer(
    engine: EngineProcess, words: int, tokens: int, chance: random.Random, began_s: float
) -> MeasuredAnswer:
    """Stream one answer to a prompt that no other begins like."""
    text = " ".join(chance.choice(VOCABULARY) for _ in range(words))
    body: dict[str, Any] = {
        "model": engine.record.spec.name,
        "messages": [{"role": "user", "content": f"{chance.random()} {text}"}],
        "temperature": 0,
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    salt = str(chance.random())
    data = engine.salted(CHAT_PATH, msgspec.json.encode(body), salt)
    sent = {"content-type": "application/json", headers.CACHE_SALT: salt}
    sent_s = time.monotonic()
    async with engine.http.post(CHAT_PATH, data=data, headers=sent) as response:
        response.raise_for_status()
        first_at_s, last_at_s, usage = await read_chat(response.content)
    generated = usage["completion_tokens"]
    itl_s = (last_at_s - first_at_s) / max(1, generated - 1)
    ttft_s = first_at_s - sent_s
    return MeasuredAnswer(sent_s - began_s, usage["prompt_tokens"], generated, ttft_s, itl_s)


async def profile(engine: EngineProcess, name: str, chance: random.Random) -> list[ProfileProbe]:
    """Measure single prompts, then answers at once."""
    for words in (PROFILE_WORDS[0], PROFILE_WORDS[-1]):
        await answer(engine, words, 8, chance, 0.0)
    probes = []
    for words in PROFILE_WORDS:
        found = [
            await answer(engine, words, PROFILE_ANSWER, chance, 0.0) for _ in range(PROFILE_REPEATS)
        ]
        # The median, so that one that was held up does not count.
        one = sorted(found, key=lambda measured: measured.ttft_s)[PROFILE_REPEATS // 2]
        probes.append(
            ProfileProbe(name, 1, one.prompt_tokens, one.ttft_s, one.itl_s, one.output_tokens)
        )
    for together in PROFILE_TOGETHER:
        # Short prompts: while one is read the others' tokens come more slowly.
        found = await asyncio.gather(
            *(answer(engine, 4, 2 * PROFILE_ANSWER, chance, 0.0) for _ in range(together))
        )
        probes += [
            ProfileProbe(name, together, one.prompt_tokens, one.ttft_s, one.itl_s,
                         one.output_tokens)
            for one in found
        ]  # fmt: skip
    return probes


def fit(probes: Sequence[ProfileProbe], engine: EngineUnderTest) -> FittedReplica:
    """Fit the replica's rates, with the limits of the engine's steps."""
    (fitted,) = fit_replicas(probes)
    rates = fitted.profile
    if rates.prefill_tokens_per_s <= 0 or rates.step_s <= 0:
        raise RatesUnclear(
            f"cannot fit the rates of {engine.driver}: longer prompts were not read for longer, or "
            "answers took no time; run it again on an idle machine"
        )
    if rates.step_per_sequence_s <= 0:
        # More sequences do not slow a step that is as long as reading the weights takes.
        itl_s = statistics.median(p.itl_s for p in probes if p.output_tokens >= ITL_TOKENS_MIN)
        rates = rates._replace(step_s=itl_s, step_per_sequence_s=0.0)
    limits = rates._replace(
        chunk_tokens=engine.chunk_tokens,
        sequences_max=engine.sequences_max,
        interval_s=engine.interval_s,
    )
    return fitted._replace(profile=limits)


def draw_requests(
    fitted: FittedReplica, load: int, seconds: float, tokens_per_word: float, seed: int
) -> list[DrawnRequest]:
    """Draw the requests that keep a replica busy for `load` percent of the time."""
    chance = random.Random(seed)
    sizes = [
        (
            max(4, min(WORDS_MAX, int(chance.lognormvariate(0.0, WORDS_SIGMA) * WORDS_MEDIAN))),
            chance.randint(*ANSWER_TOKENS),
        )
        for _ in range(400)
    ]
    rates = fitted.profile
    busy_s = sum(
        words * tokens_per_word / rates.prefill_tokens_per_s + output * rates.step_per_sequence_s
        for words, output in sizes
    ) / len(sizes)
    requests, at_s = [], 0.0
    for words, output in sizes:
        at_s += chance.expovariate(load / 100 / busy_s)
        if at_s > seconds:
            break
        requests.append(DrawnRequest(at_s, words, output))
    return requests


async def play(
    engine: EngineProcess, requests: Sequence[DrawnRequest], chance: random.Random
) -> list[MeasuredAnswer]:
    """Send each request at its time, whether or not earlier ones have been answered."""
    began_s = time.monotonic()

    async def send(request: DrawnRequest) -> MeasuredAnswer:
        await asyncio.sleep(max(0.0, began_s + request.at_s - time.monotonic()))
        return await answer(engine, request.words, request.output_tokens, chance, began_s)

    return list(await asyncio.gather(*(send(request) for request in requests)))


def simulate_answers(
    fitted: FittedReplica,
    measured: Sequence[MeasuredAnswer],
    kind: ReplicaKind = SimulatedReplica,
) -> list[MeasuredAnswer]:
    """Give a simulated replica the same requests at the same times."""
    rates = fitted.profile
    replica = kind(ReplicaSite(0, 0, rates, rates.prefill_tokens_per_s), None)
    coming = sorted(measured, key=lambda one: one.sent_s, reverse=True)
    sent_s: list[float] = []
    found = []
    while coming or replica.running:
        event_s = replica.next_event_s()
        if coming and coming[-1].sent_s <= event_s:
            one = coming.pop()
            request = TraceRequest(
                len(sent_s), one.sent_s, one.prompt_tokens, one.output_tokens, (), 16, "", 0.0
            )
            tokens = one.prompt_tokens + one.output_tokens
            sent_s.append(one.sent_s)
            if not replica.admit(ReplicaJob(request, tokens, tokens, 0, 0.0), one.sent_s):
                raise RatesUnclear("cannot simulate: the requests do not fit into the replica")
            continue
        for job in replica.settle(event_s).ended:
            request = job.request
            began_s = sent_s[request.number]
            found.append(
                MeasuredAnswer(
                    began_s,
                    request.prompt_tokens,
                    request.output_tokens,
                    job.first_token_at_s - began_s + fitted.overhead_s,
                    (event_s - job.first_token_at_s) / max(1, request.output_tokens - 1),
                )
            )
    return found


def row(label: str, measured: Sequence[MeasuredAnswer], simulated: Sequence[MeasuredAnswer]) -> str:
    """Return a row of the table."""

    def itl_ms(answers: Sequence[MeasuredAnswer], share: float) -> float:
        return 1000 * percentile(
            [one.itl_s for one in answers if one.output_tokens >= ITL_TOKENS_MIN], share
        )

    cells = []
    for share in SHARES:
        real = 1000 * percentile([one.ttft_s for one in measured], share)
        ours = 1000 * percentile([one.ttft_s for one in simulated], share)
        cells.append(f"{real:.0f} / {ours:.0f} ({ours / max(1e-9, real):.2f})")
    for share in SHARES:
        real, ours = itl_ms(measured, share), itl_ms(simulated, share)
        cells.append(f"{real:.1f} / {ours:.1f} ({ours / max(1e-9, real):.2f})")
    return f"| {label} | {len(measured)} | {' | '.join(cells)} | {os.getloadavg()[0]:.1f} |"


async def compare(name: str, engine: EngineUnderTest, loads: Sequence[int], seconds: float) -> None:
    """Run one engine, and print its rows."""
    spec = a_spec(
        name="smol",
        context_tokens=CONTEXT_TOKENS,
        device_ids=(DeviceId("cpu"),),
        memory_bytes=3 * GIB,
        engine=EngineSettings(
            driver=engine.driver, kv_memory_bytes=GIB // 2, options=dict(engine.options)
        ),
    )
    chance = random.Random(5)
    with tempfile.TemporaryDirectory() as folder:
        async with running_engine(spec, engine.model, Path(folder) / "e") as process:
            probes = await profile(process, name, chance)
            fitted = fit(probes, engine)
            longest = max(probe.prompt_tokens for probe in probes)
            rates = fitted.profile
            print(
                f"{name}: {rates.prefill_tokens_per_s:.0f} tokens/s read, step "
                f"{1000 * rates.step_s:.1f} + {1000 * rates.step_per_sequence_s:.2f} ms for each "
                f"sequence, {1000 * fitted.overhead_s:.0f} ms constant",
                file=sys.stderr,
            )
            for number, load in enumerate(loads):
                requests = draw_requests(
                    fitted, load, seconds, longest / PROFILE_WORDS[-1], 11 + number
                )
                measured = await play(process, requests, chance)
                for model, kind in REPLICA_KINDS.items():
                    simulated = simulate_answers(fitted, measured, kind)
                    print(row(f"{name}, {model} | {load} %", measured, simulated), flush=True)


def main() -> int:
    """Run each engine in turn."""
    parser = argparse.ArgumentParser(prog="python -m ops.sim.engine_calibration")
    parser.add_argument("--engine", nargs="*", default=["embedded", "vllm"])
    parser.add_argument("--load", type=int, nargs="*", default=list(LOADS), help="in percent")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each load")
    parser.add_argument("--limit", type=float, default=TIME_LIMIT_S, help="of all, in seconds")
    arguments = parser.parse_args()
    found, ends_s, status = engines(), time.monotonic() + arguments.limit, 0
    os.environ["PATH"] = os.pathsep.join([str(VLLM_COMMANDS), os.environ["PATH"]])
    titles = [f"{what} p{share * 100:.0f}" for what in ("TTFT ms", "ITL ms") for share in SHARES]
    print(f"| engine | load | requests | {' | '.join(titles)} | machine's load |")
    print("|---" * (4 + len(titles)) + "|", flush=True)
    for name in arguments.engine:
        if name not in found:
            print(f"cannot run {name!r}: choose of {', '.join(found)}", file=sys.stderr)
            return 2
        if not found[name].model.exists():
            print(f"(without {name}: run `make test-engines`)", file=sys.stderr)
            continue
        run = compare(name, found[name], arguments.load, arguments.seconds)
        try:
            asyncio.run(asyncio.wait_for(run, ends_s - time.monotonic()))
        except TimeoutError:
            print(
                f"cannot finish {name} within {arguments.limit:.0f} s of all: the machine is busy",
                file=sys.stderr,
            )
            return 1
        except RatesUnclear as error:
            print(error, file=sys.stderr)
            status = 1
    print(f"\nMeasured / simulated. {os.cpu_count()} cores, Python {platform.python_version()}")
    return status


if __name__ == "__main__":
    sys.exit(main())
