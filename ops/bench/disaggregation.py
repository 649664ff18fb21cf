"""Engines that do both, against one that generates and others that read prompts, at equal devices.

    python -m ops.bench.disaggregation [MODEL.gguf] [--data FOLDER] [--requests N] [--load SHARE]
        [--engines N] [--device-share CORES]

Each engine has one thread, and each node is a process of its own. With `--device-share` an engine
has that share of a core and no more (ops/bench/device_shares.py), so that more engines than cores
are as fast together as alone. The requests are those of the
Mooncake conversation trace, scaled down to the model, in two mixes: mostly prompt, and mostly
output. They arrive so fast that they take `--load` of what all engines can compute. All settings
get the same requests at the same times.

Unified engines prefill in chunks beside decodes; `interval_ms` is how long a step may take, and
each value of `--intervals` is a row. A request goes to the engine whose queue of uncached prompt
tokens is shortest with its own prompt, as routers choose. With roles every request goes to the
decode node, whose agent decides per request where the prompt is read.

`auto` is what the planner chooses for as many replicas from the mix and the measured rates. Below
each table is what roles can gain at most: an engine that only generates needs its time for a token,
and prompts queue at fewer engines than before. Then a prompt that is cached at a prefill engine is
transferred, and as many bytes are copied between two processes over loopback.
"""

import argparse
import asyncio
import itertools
import multiprocessing
import platform
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from importlib import metadata
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from isochrone.wire.models.model import PlacementPolicy
from ops.bench.device_shares import device_shares
from ops.bench.disaggregation_load import (
    BenchRequest,
    MixScale,
    TimedAnswer,
    UnifiedRouter,
    ask,
    describe,
    random_request,
    read_trace,
    run,
)
from ops.bench.engine_node import NodeClient, NodeSetup, bench_node
from ops.fleet.model import FOLDER, PACKAGE
from ops.sim import data
from ops.sim.measure import percentile
from scheduler.decide.placement.roles import RoleCounts, TokenMix, role_of_next

TRACE: Final = "traces/mooncake_conversation_trace.jsonl.gz"
NAMES: Final = ("d", "p", "p2", "p3")
"""The first one generates, the others read prompts."""

ROLES_INTERVAL_MS: Final = 25
"""Steps of the decode engine, for what it reads itself."""

TRANSFER_TOKENS: Final = 1600
TRANSFERS: Final = 6
CALIBRATION_TOKENS: Final = 1000
CALIBRATION_SEQUENCES: Final = 8
HEAD: Final = "| setting | ITL p50 ms | p90 | p99 | TTFT p50 ms | p90 | output tokens/s |"


MIXES: Final = (MixScale("mostly prompt", 16, 8), MixScale("mostly output", 128, 2))


class EngineRates(NamedTuple):
    """Tokens per second of one engine: prompts alone, and outputs of several sequences. And the
    time of a token of one sequence alone."""

    prefill: float
    decode: float
    itl_ms: float

    @property
    def token_us(self) -> int:
        """Return the microseconds of one prompt token."""
        return max(1, round(1e6 / self.prefill))


class SettingFigures(NamedTuple):
    """The figures of one setting, in milliseconds."""

    itl_p50: float
    itl_p90: float
    itl_p99: float
    ttft_p50: float
    ttft_p90: float
    output_per_s: float


def figures(answers: Sequence[TimedAnswer], began_s: float) -> SettingFigures:
    """Sum up the answers of one setting."""
    gaps = [1000 * gap for answer in answers for gap in answer.gaps_s]
    ttft = [1000 * answer.ttft_s for answer in answers]
    took_s = max(answer.ended_s for answer in answers) - began_s
    return SettingFigures(
        percentile(gaps, 0.5),
        percentile(gaps, 0.9),
        percentile(gaps, 0.99),
        percentile(ttft, 0.5),
        percentile(ttft, 0.9),
        (len(gaps) + len(answers)) / took_s,
    )


@asynccontextmanager
async def engines(
    arguments: argparse.Namespace, interval_ms: int, count: int
) -> AsyncIterator[list[NodeClient]]:
    """Run nodes with one engine each."""
    kv_dtype, model = arguments.kv_dtype, arguments.model
    options = {"interval_ms": str(interval_ms), "draft_tokens_max": "0", "kv_dtype": kv_dtype}
    with tempfile.TemporaryDirectory(prefix="dis") as folder:
        async with AsyncExitStack() as stack:
            setups = [
                NodeSetup(name=name, model=str(model), folder=f"{folder}/{name}", options=options)
                for name in NAMES[:count]
            ]
            contexts = [stack.enter_async_context(bench_node(setup)) for setup in setups]
            nodes = [await context for context in contexts]
            if arguments.device_share:
                pids = [node.pid for node in nodes]
                stack.enter_context(device_shares(pids, arguments.device_share))
            for node in nodes:
                await ask(node, random_request(1, CALIBRATION_TOKENS, 8), "warm", 1000)
            yield nodes


async def measure_rates(arguments: argparse.Namespace) -> EngineRates:
    """Measure one engine alone: the best of three prompts, and of two batches of sequences."""
    async with engines(arguments, ROLES_INTERVAL_MS, 1) as (node,):
        prompts = [random_request(10 + seed, CALIBRATION_TOKENS, 2) for seed in range(3)]
        prefill_s = min([(await ask(node, prompt, "c", 1000)).ttft_s for prompt in prompts])
        decode_s = float("inf")
        for seed in (20, 40):
            batch = [random_request(seed + n, 32, 64) for n in range(CALIBRATION_SEQUENCES)]
            answers = await asyncio.gather(*[ask(node, one, "c", 1000) for one in batch])
            gaps = [sum(answer.gaps_s) / len(answer.gaps_s) for answer in answers]
            decode_s = min(decode_s, percentile(gaps, 0.5))
        alone = await ask(node, random_request(60, CALIBRATION_TOKENS // 2, 64), "c", 1000)
    return EngineRates(
        CALIBRATION_TOKENS / prefill_s,
        CALIBRATION_SEQUENCES / decode_s,
        1000 * percentile(alone.gaps_s, 0.5),
    )


def auto_roles(
    requests: Sequence[BenchRequest], rates: EngineRates, engine_count: int
) -> list[str]:
    """Return the roles that the planner gives the replicas of a deployment with `auto`."""
    mix = TokenMix(
        uncached_per_s=sum(len(request.prompt) for request in requests),
        output_per_s=sum(request.output_tokens for request in requests),
        prefill_rate=rates.prefill,
        decode_rate=rates.decode,
    )
    counts, roles = RoleCounts(), []
    for _ in range(engine_count):
        role = role_of_next(PlacementPolicy(roles="auto"), mix, counts)
        counts = msgspec.structs.replace(counts, **{role: getattr(counts, role) + 1})
        roles.append(role.value)
    return roles


def print_row(name: str, row: SettingFigures) -> None:
    """Print the figures of one setting."""
    print(f"| {name} | {' | '.join(f'{cell:.0f}' for cell in row)} |", flush=True)


async def compare(
    arguments: argparse.Namespace, scale: MixScale, rates: EngineRates, intervals: Sequence[int]
) -> None:
    """Run all settings of one mix, and print their table."""
    path = data.folder(arguments.data) / TRACE
    requests = read_trace(path, arguments.requests, scale)
    prompt = sum(len(request.prompt) for request in requests)
    output = sum(request.output_tokens for request in requests)
    work_s = prompt / rates.prefill + output / rates.decode
    count = arguments.engines
    wanted_s = work_s / count / arguments.load
    speed = max(1e-9, requests[-1].at_s) / wanted_s
    print(
        f"\n## {scale.name}: {prompt / len(requests):.0f} prompt and {output / len(requests):.0f}"
        f" output tokens on average, {len(requests)} requests in {wanted_s:.0f} s;"
        f" auto: {', '.join(auto_roles(requests, rates, count))}"
        f"\n\n{HEAD}\n|---|---|---|---|---|---|---|"
    )
    rows: list[tuple[SettingFigures, list[TimedAnswer]]] = []
    for interval_ms in intervals:
        async with engines(arguments, interval_ms, count) as nodes:
            router = UnifiedRouter(nodes, "unified", rates.token_us, scale.prompt)
            began_s = time.monotonic()
            answers = await run(requests, speed, router.send)
        rows.append((figures(answers, began_s), answers))
        print_row(f"{count} unified, steps of {interval_ms} ms", rows[-1][0])
    async with engines(arguments, ROLES_INTERVAL_MS, count) as nodes:

        async def send(request: BenchRequest) -> TimedAnswer:
            readers = describe(nodes, len(request.prompt), rates.token_us)
            return await ask(nodes[0], request, "roles", rates.token_us, readers)

        began_s = time.monotonic()
        answers = await run(requests, speed, send)
        split = figures(answers, began_s)
        print_row(f"{count - 1} prefill, 1 decode", split)
        legs = await nodes[0].counters("isochrone_node_prefill_")
        print_comparison(split, answers, rows)
        print_limits(rates, prompt / rates.prefill / work_s, arguments, [row for row, _ in rows])
        for name, value in sorted(legs.items()):
            if "_legs_total" in name or "failed_total" in name:
                print(f"{name.removeprefix('isochrone_node_')} {value:.0f}")
        if scale is MIXES[0]:
            await measure_transfer(nodes[:2], rates.token_us)


def print_comparison(
    split: SettingFigures,
    answers: Sequence[TimedAnswer],
    rows: Sequence[tuple[SettingFigures, list[TimedAnswer]]],
) -> None:
    """Print the ratios to the unified setting with the lowest p90 ITL, and compare the texts."""
    best, best_answers = min(rows, key=lambda row: row[0].itl_p90)
    same = _same_texts(answers, best_answers)
    print(
        f"\nbest unified / roles: ITL p90 {best.itl_p90 / split.itl_p90:.1f},"
        f" p99 {best.itl_p99 / split.itl_p99:.1f}, TTFT p90 {best.ttft_p90 / split.ttft_p90:.2f};"
        f" identical answers: {same} of {len(answers)}"
    )
    for (_, first), (_, second) in itertools.pairwise(rows):
        # KV in bf16 is rounded between chunks, so that a text may depend on their sizes.
        print(f"identical answers of two unified settings: {_same_texts(first, second)}")


def print_limits(
    rates: EngineRates,
    prompt_share: float,
    arguments: argparse.Namespace,
    rows: Sequence[SettingFigures],
) -> None:
    """Print what roles could gain at most. `prompt_share` is the prompts' share of the work."""
    best = min(rows, key=lambda row: row.itl_p90)
    readers = arguments.engines - 1
    work = arguments.load * arguments.engines
    print(
        f"at most: a token of one sequence on an engine that only generates takes"
        f" {rates.itl_ms:.1f} ms, so ITL p90 {best.itl_p90 / rates.itl_ms:.1f} and p99"
        f" {best.itl_p99 / rates.itl_ms:.1f} times lower than unified. Unified engines are busy for"
        f" {arguments.load:.0%} of the time; if others read all prompts, {readers} prefill for"
        f" {work * prompt_share / readers:.0%} and the decode engine for"
        f" {work * (1 - prompt_share):.0%}"
    )


def _same_texts(first: Sequence[TimedAnswer], second: Sequence[TimedAnswer]) -> int:
    return sum(a.text == b.text for a, b in zip(first, second, strict=True))


def _send_bytes(port: int, count: int) -> None:
    """Send `count` bytes to a listener of this machine."""
    content = bytearray(count)
    content[::4096] = b"x" * len(content[::4096])
    with socket.create_connection(("127.0.0.1", port)) as link:
        link.recv(1)
        link.sendall(content)


def raw_copy_s(count: int) -> float:
    """Return how long another process takes to send `count` bytes to this one over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        sender = multiprocessing.get_context("fork").Process(target=_send_bytes, args=(port, count))
        sender.start()
        link, _ = server.accept()
        buffer, left = bytearray(1 << 20), count
        with link:
            began_s = time.monotonic()
            link.sendall(b"x")
            while left:
                left -= link.recv_into(buffer)
            took_s = time.monotonic() - began_s
        sender.join()
        return took_s


async def measure_transfer(nodes: Sequence[NodeClient], token_us: int) -> None:
    """Transfer a prompt that the prefill engine has cached, some times; print the best."""
    byte_name = "isochrone_node_kv_transfer_bytes_total"
    time_name = "isochrone_node_prefill_leg_seconds_sum"
    best_s, count = float("inf"), 0.0
    for number in range(TRANSFERS):
        request = random_request(100 + number, TRANSFER_TOKENS, 2)
        await ask(nodes[1], request, f"t{number}", token_us)
        before = await nodes[0].counters("isochrone_node_")
        readers = describe(nodes, len(request.prompt), token_us, 20)
        await ask(nodes[0], request, f"t{number}", token_us, readers)
        after = await nodes[0].counters("isochrone_node_")
        count = max(count, after[byte_name] - before[byte_name])
        if after[time_name] > before[time_name]:
            best_s = min(best_s, after[time_name] - before[time_name])
    if not count:
        print("\ntransfer: none was made")
        return
    raw_s = min([await asyncio.to_thread(raw_copy_s, int(count)) for _ in range(TRANSFERS)])
    print(
        f"\ntransfer of {count / 1e6:.0f} MB, from the request until all of it is on the device:"
        f" {best_s:.3f} s ({count / best_s / 1e6:.0f} MB/s); raw copy {raw_s:.3f} s"
        f" ({count / raw_s / 1e6:.0f} MB/s): {best_s / raw_s:.1f}x"
    )


async def measure(arguments: argparse.Namespace) -> None:
    """Measure the rates of one engine, then run the settings of each mix."""
    if arguments.transfer_only:
        async with engines(arguments, ROLES_INTERVAL_MS, 2) as nodes:
            await measure_transfer(nodes, 1000)
        return
    rates = await measure_rates(arguments)
    print(
        f"{platform.machine()}, Python {platform.python_version()}, torch"
        f" {metadata.version('torch')}, {arguments.model.name}, KV in {arguments.kv_dtype}; one"
        f" engine of one thread: {rates.prefill:.0f} prompt tokens/s, {rates.decode:.0f} output"
        f" tokens/s of {CALIBRATION_SEQUENCES} sequences, {rates.itl_ms:.1f} ms a token of one;"
        f" load {arguments.load:g}"
    )
    await compare(arguments, MIXES[0], rates, arguments.intervals)
    if not arguments.prompts_only:
        await compare(arguments, MIXES[1], rates, [ROLES_INTERVAL_MS])


def bundled_model() -> Path:
    """Return the demo's model."""
    package = metadata.distribution(PACKAGE)
    (weights,) = Path(str(package.locate_file(FOLDER))).glob("*.gguf")
    return weights


def main() -> None:
    """Read the arguments and measure."""
    parser = argparse.ArgumentParser(prog="python -m ops.bench.disaggregation")
    parser.add_argument("model", type=Path, nargs="?", default=None)
    parser.add_argument("--data", help="folder of public data")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--load", type=float, default=0.3)
    parser.add_argument("--engines", type=int, choices=(2, 3, 4), default=2)
    parser.add_argument("--device-share", type=float, default=0.0, help="of a core; 0: no limit")
    parser.add_argument("--prompts-only", action="store_true", help="the first mix alone")
    parser.add_argument("--kv-dtype", default="bf16", help="of both settings")
    parser.add_argument(
        "--intervals",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[25, 100],
        help="milliseconds that a step of a unified engine may take, separated by commas",
    )
    parser.add_argument(
        "--transfer-only", action="store_true", help="transfer a cached prompt, and no more"
    )
    arguments = parser.parse_args()
    arguments.model = arguments.model or bundled_model()
    asyncio.run(measure(arguments))


if __name__ == "__main__":
    main()
