"""Measures what a token costs in a router while many streams run at an engine's pace.

    python -m ops.bench.paced_streams [--peers FOLDER] [--seconds 5] [--rounds 1]
        [--streams 64 512 4000] [--rates 20 50] [--only NAME ...]

Every stream gets a token at a time, 20 or 50 a second, each stream at its own phase. The backend
and the clients are one C program (paced_streams.c, built with the C compiler), so the time each
token spends on its way is known. The routers take turns, each freshly started. It measures from a
second after the last stream has begun: hundreds of streams that begin at once are not what a token
costs. The figures: CPU of the router's processes per token, by their clocks; how long a token takes
from the backend to the client; how late the backend was itself. A row whose backend was late, or
with fewer tokens than requested, ran on a machine without CPU to spare, where only CPU per token
counts.

With one core for the load and the rest for the router, a token costs at least one read and one
write: every stream has connections of its own on both sides. `floor` is what these two system calls
and the waiting for events cost, measured with a relay that only copies (ops/bench/copy_relay.c).
"""

import argparse
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import IO, NamedTuple

from ops.bench.relay import (
    BACKEND_PORT,
    PATH,
    RouterContestant,
    build_program,
    chosen,
    contestants,
    cpu_s,
    router_key,
    running,
    until_idle,
)

BODY = (
    b'{"model":"bench","stream":true,"stream_options":{"include_usage":true},"max_tokens":10000,'
    b'"messages":[{"role":"user","content":"Hello there, how are you today?"}]}'
)


class PacedMeasurement(NamedTuple):
    """The results of one run; latencies in us."""

    tokens: int
    tokens_due: float
    cpu_us: float
    p50_us: float
    p99_us: float
    max_us: float
    late_us: float


class PacedLoad(NamedTuple):
    """How many streams run, and how many tokens a second each gets."""

    streams: int
    tokens_per_s: int


def line_of(output: IO[str]) -> str:
    """Return the load's next line. Raises SystemExit if it has ended without one."""
    line = output.readline()
    if not line:
        raise SystemExit("cannot measure: the load has ended, see its message above")
    return line.strip()


def measure(
    program: str, router: RouterContestant, folder: Path, load: PacedLoad, seconds: float
) -> PacedMeasurement:
    """Start a backend, then a router before it, then the streams; return what they measured."""
    request_file = folder / "request"
    command = [program, str(BACKEND_PORT), str(router.port), str(load.streams)]
    command += [str(1_000_000 // load.tokens_per_s), str(seconds), str(request_file)]
    log = folder / f"{router.port}.log"
    # Each run starts without state; our router keeps its state there.
    shutil.rmtree(folder / str(router.port), ignore_errors=True)
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as generator:
        assert generator.stdin is not None and generator.stdout is not None
        try:
            assert line_of(generator.stdout) == "listening"
            with running(router.command, log, router.port, router.environment) as process:
                until_idle(process)
                key = router_key(router, folder)
                head = (
                    f"POST {PATH} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
                    f"content-type: application/json\r\ncontent-length: {len(BODY)}\r\n\r\n"
                )
                request_file.write_bytes(head.encode() + BODY)
                generator.stdin.write("\n")
                generator.stdin.flush()
                assert line_of(generator.stdout) == "running"
                before_s = cpu_s(process)
                figures = [float(figure) for figure in line_of(generator.stdout).split()]
                after_s = cpu_s(process)
        finally:
            generator.kill()
    tokens, p50_us, _, p99_us, max_us, late_us = figures
    due = load.streams * load.tokens_per_s * seconds
    cpu_us = 1e6 * (after_s - before_s) / max(1.0, tokens)
    return PacedMeasurement(int(tokens), due, cpu_us, p50_us, p99_us, max_us, late_us)


def table(rows: dict[tuple[str, PacedLoad], list[PacedMeasurement]]) -> Iterator[str]:
    """Yield the lines of a Markdown table with the medians."""
    yield (
        "| streams x tokens/s | router | CPU us/token | tokens of those due | p50 us | p99 us "
        "| highest us | backend late p99 us |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for (name, load), runs in rows.items():
        tokens, due, cpu, p50, p99, highest, late = (
            median(getattr(run, field) for run in runs) for field in PacedMeasurement._fields
        )
        yield (
            f"| {load.streams:,} x {load.tokens_per_s} | {name} | {cpu:.1f} | {tokens / due:.0%} "
            f"| {p50:,.0f} | {p99:,.0f} | {highest:,.0f} | {late:,.0f} |"
        )


def main() -> None:
    """Measure all routers in turn and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=Path, default=Path("peers"))
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 512, 4000])
    parser.add_argument("--rates", type=int, nargs="+", default=[20, 50])
    parser.add_argument("--only", nargs="+", default=[], help="routers whose name has one of these")
    arguments = parser.parse_args()
    files_max = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files_max, files_max))
    rows: dict[tuple[str, PacedLoad], list[PacedMeasurement]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = build_program("paced_streams", folder)
        routers = chosen(contestants(arguments.peers.absolute(), folder), arguments.only)
        for rate in arguments.rates:
            for streams in arguments.streams:
                load = PacedLoad(streams, rate)
                for round_ in range(arguments.rounds):
                    for router in routers:
                        try:
                            run = measure(program, router, folder, load, arguments.seconds)
                        except SystemExit as failure:
                            print(f"\n{router.name}, {load}: {failure}\n", flush=True)
                            continue
                        rows.setdefault((router.name, load), []).append(run)
                        print(f"{round_} {router.name} {load} {run}", file=sys.stderr, flush=True)
    print("\n".join(table(rows)))
    print(f"\n{arguments.rounds} rounds of {arguments.seconds:g} s")


if __name__ == "__main__":
    main()
