"""What a request costs in the router, beside the routers of the field, before one same backend.

`python -m ops.bench.relay --peers FOLDER [--seconds 4] [--rounds 3]`. FOLDER holds a virtual
environment for each peer that is to take part: `vllm` (vllm-router), `sgl` (sglang-router), `smg`,
`litellm` (litellm[proxy]); those absent are left out. Needs `wrk`. The contestants take turns
within each round, so that a noisy machine is noisy for all; the figure to trust is CPU per request
(user and system time of the contestant's processes, from /proc), the median over the rounds.

Ours runs as in production: authentication, limits, choice, token accounting, usage journal and
metrics. Every contestant's answer is compared, byte for byte of its body, with the backend's own.
"""

import argparse
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

import psutil

from ops.bench import backend

ROOT = Path(__file__).parent.parent.parent
COMPILED = ROOT / "build" / "compiled"
BACKEND_PORT = 18101
PATH = "/v1/chat/completions"
MESSAGES = '"messages":[{"role":"user","content":"Hello there, how are you today?"}]'
PLAIN = f'{{"model":"bench",{MESSAGES}}}'
STREAM = f'{{"model":"bench","stream":true,"stream_options":{{"include_usage":true}},{MESSAGES}}}'
START_S = 60.0


class Contestant(NamedTuple):
    """One router: how it is called, where it listens, how and in which tree it is started."""

    name: str
    port: int
    command: list[str]
    tree: Path = ROOT
    is_ours: bool = False


class Load(NamedTuple):
    """One way of asking."""

    name: str
    body: str
    connections: int


class Seen(NamedTuple):
    """What one run showed."""

    per_s: float
    p50_ms: float
    p99_ms: float
    cpu_us: float
    rss_mib: float
    errors: int
    steal: float


LOADS = (
    Load("plain c=1", PLAIN, 1),
    Load("plain c=16", PLAIN, 16),
    Load("stream c=16", STREAM, 16),
)


def contestants(peers: Path, folder: Path) -> list[Contestant]:
    """Return ours, and whichever peers are installed."""
    target = f"http://127.0.0.1:{BACKEND_PORT}"
    found = []
    for port, name, tree, processes in (
        (18102, "isochrone", ROOT, 1),
        (18103, "isochrone, compiled", COMPILED, 1),
        (18104, "isochrone, compiled, one a core", COMPILED, os.cpu_count() or 1),
    ):
        if tree.exists():
            ours = [sys.executable, "-m", "ops.bench.bench_router", str(port), str(BACKEND_PORT)]
            ours += [str(folder / str(port)), str(processes)]
            found.append(Contestant(name, port, ours, tree, is_ours=True))
    for number, (name, venv, module, policy) in enumerate(
        (
            ("vllm-router round_robin", "vllm", ["vllm-router"], "round_robin"),
            ("vllm-router cache_aware", "vllm", ["vllm-router"], "cache_aware"),
            (
                "sglang-router cache_aware",
                "sgl",
                ["python", "-m", "sglang_router.launch_router"],
                "cache_aware",
            ),
            ("smg cache_aware", "smg", ["smg", "launch"], "cache_aware"),
        )
    ):
        binary = peers / venv / "bin" / module[0]
        if not binary.exists():
            continue
        port = 18110 + number
        listen = ["--host", "127.0.0.1", "--port", str(port), "--worker-urls", target]
        metrics = ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(port + 1000)]
        level = "warning" if venv == "vllm" else "warn"
        command = [str(binary), *module[1:], *listen, "--policy", policy, *metrics]
        found.append(Contestant(name, port, [*command, "--log-level", level]))
    litellm = peers / "litellm" / "bin" / "litellm"
    if litellm.exists():
        config = folder / "litellm.yaml"
        config.write_text(
            "model_list:\n  - model_name: bench\n    litellm_params:\n"
            f"      model: openai/bench\n      api_base: {target}/v1\n      api_key: x\n"
        )
        command = [str(litellm), "--config", str(config), "--host", "127.0.0.1"]
        found.append(
            Contestant("litellm", 18120, [*command, "--port", "18120", "--num_workers", "1"])
        )
    return found


@contextmanager
def running(command: list[str], log: Path, tree: Path = ROOT) -> Iterator[psutil.Process]:
    """Run a process and all it starts, our own code as it is in `tree`; end them."""
    environment = {
        **os.environ,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
    }
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, cwd=tree)
        try:
            yield psutil.Process(process.pid)
        finally:
            family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(True)]
            for one in family:
                one.kill()
            process.wait()


def until_open(port: int) -> None:
    """Wait until somebody listens."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise SystemExit(f"cannot measure: nobody listens on {port} after {START_S:g} s")


def cpu_s(process: psutil.Process) -> float:
    """Return the CPU time that a process and its children have used."""
    total = 0.0
    for one in (process, *process.children(recursive=True)):
        times = one.cpu_times()
        total += times.user + times.system
    return total


def rss_mib(process: psutil.Process) -> float:
    """Return the memory of a process and its children."""
    tree = (process, *process.children(recursive=True))
    return float(sum(one.memory_info().rss for one in tree)) / 2**20


def ask(port: int, key: str, body: str) -> bytes:
    """Return the body of one answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    connection.request("POST", PATH, body, headers)
    answer = connection.getresponse()
    received = answer.read()
    connection.close()
    if answer.status != 200:
        raise SystemExit(f"cannot measure: {port} answered {answer.status}: {received[:200]!r}")
    return received


def is_same(port: int, key: str) -> str:
    """Say whether a contestant passes answers on byte for byte."""
    plain = ask(port, key, PLAIN) == backend.WHOLE
    stream = ask(port, key, STREAM) == b"".join([*backend.FRAMES, *backend.TAIL])
    return "yes" if plain and stream else f"plain {plain}, stream {stream}".lower()


def measure(one: Contestant, process: psutil.Process, load: Load, key: str, seconds: float) -> Seen:
    """Let wrk ask for a while."""
    script = Path(tempfile.gettempdir()) / f"relay-{os.getpid()}.lua"
    script.write_text(
        'wrk.method="POST"\nwrk.headers["Content-Type"]="application/json"\n'
        f'wrk.headers["Authorization"]="Bearer {key}"\nwrk.body={json.dumps(load.body)}\n'
    )
    before_s, before = cpu_s(process), psutil.cpu_times()
    output = subprocess.run(
        [
            *("wrk", "-t1", f"-c{load.connections}", f"-d{seconds:g}s", "--latency"),
            *("-s", str(script), f"http://127.0.0.1:{one.port}{PATH}"),
        ],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    after_s, after = cpu_s(process), psutil.cpu_times()
    script.unlink()
    found = re.search(r"(\d+) requests in", output)
    requests = int(found.group(1)) if found else 0
    bad = re.search(r"Non-2xx or 3xx responses: (\d+)", output)
    spent = sum(after) - sum(before)
    return Seen(
        per_s=_number(output, r"Requests/sec:\s+([0-9.]+)"),
        p50_ms=_time_ms(output, "50%"),
        p99_ms=_time_ms(output, "99%"),
        cpu_us=1e6 * (after_s - before_s) / max(1, requests),
        rss_mib=rss_mib(process),
        errors=int(bad.group(1)) if bad else 0,
        steal=(after.steal - before.steal) / spent if spent else 0.0,
    )


def _number(text: str, pattern: str) -> float:
    found = re.search(pattern, text)
    return float(found.group(1)) if found else 0.0


def _time_ms(text: str, label: str) -> float:
    found = re.search(rf"{label}\s+([0-9.]+)(us|ms|s)", text)
    if not found:
        return 0.0
    return float(found.group(1)) * {"us": 0.001, "ms": 1.0, "s": 1000.0}[found.group(2)]


def table(rows: dict[tuple[str, str], list[Seen]], same: dict[str, str]) -> Iterator[str]:
    """Write the medians as a Markdown table."""
    yield "| router | load | req/s | p50 ms | p99 ms | CPU us/req | RSS MiB | errors | bytes |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for (name, load), seen in rows.items():
        mid = [median(getattr(one, field) for one in seen) for field in Seen._fields]
        per_s, p50, p99, cpu, rss, _, _ = mid
        errors = sum(one.errors for one in seen)
        yield (
            f"| {name} | {load} | {per_s:,.0f} | {p50:.2f} | {p99:.2f} | {cpu:.0f} | {rss:.0f} "
            f"| {errors} | {same.get(name, '-')} |"
        )


def main() -> None:
    """Run every contestant in turn and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=Path, default=Path("peers"))
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    rows: dict[tuple[str, str], list[Seen]] = {}
    same: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        started: list[tuple[Contestant, psutil.Process]] = []
        server = [sys.executable, "-m", "ops.bench.backend", str(BACKEND_PORT)]
        direct = stack.enter_context(running(server, folder / "backend.log"))
        until_open(BACKEND_PORT)
        started.append((Contestant("direct", BACKEND_PORT, []), direct))
        for one in contestants(arguments.peers.absolute(), folder):
            log = folder / f"{one.port}.log"
            process = stack.enter_context(running(one.command, log, one.tree))
            until_open(one.port)
            started.append((one, process))
        time.sleep(5)
        keys = {one.name: _key(one, folder) for one, _ in started}
        same = {one.name: is_same(one.port, keys[one.name]) for one, _ in started}
        for round_ in range(arguments.rounds):
            for load in LOADS:
                for one, process in started:
                    seen = measure(one, process, load, keys[one.name], arguments.seconds)
                    rows.setdefault((one.name, load.name), []).append(seen)
                    print(f"{round_} {one.name} {load.name} {seen}", file=sys.stderr, flush=True)
    steal = median(one.steal for seen in rows.values() for one in seen)
    print("\n".join(table(rows, same)))
    print(f"\nmedian steal {steal:.1%}, {arguments.rounds} rounds of {arguments.seconds:g} s")


def _key(one: Contestant, folder: Path) -> str:
    return (folder / f"{one.port}.log").read_text().split()[0] if one.is_ours else "x"


if __name__ == "__main__":
    main()
