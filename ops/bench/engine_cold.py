"""The time to a first token of a cold process, and of a warm standby.

    python -m ops.bench.engine_cold MODEL [--quantisation file] [--rounds 2]
    python -m ops.bench.engine_cold MODEL.gguf --made-up-mb 700 [--as-folder]

MODEL is a GGUF file or a Hugging Face folder. With --made-up-mb a model of about that size is made
with random weights and the vocabulary of MODEL.gguf: another GGUF file, or a folder in bf16.

The model's pages are dropped from the page cache (posix_fadvise) before each run. The table has
wall time, and the process's processor time, which other load on the machine does not affect. The
host of a virtual machine gives it memory at the first touch, and takes free memory back after a
while. The rows "granted" run right after enough memory was touched and freed, as on a machine of
its own.
"""

import argparse
import asyncio
import mmap
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import aiohttp
import msgspec
import psutil

from isochrone.wire.engines.engine import EngineConfig
from nodeagent.engine.kernels.huge_pages import huge_page_bytes
from ops.bench.engine_made_up import write_made_up

_DEADLINE_S: Final = 120.0
_BESIDES_BYTES: Final = 512 * 1024 * 1024
"""Memory that is touched in addition to the size of the files."""
_TOUCHES: Final = 3
"""The first touch gets pages from the host; the next ones mostly get the same pages again."""


@dataclass(frozen=True, slots=True)
class Seconds:
    """The wall time and the processor time of one run."""

    wall: float
    processor: float

    def __str__(self) -> str:
        return f"{self.wall:.2f} ({self.processor:.2f})"


def files_of(model: Path) -> list[Path]:
    """Return the files with the model's weights."""
    return sorted(model.glob("*.safetensors")) if model.is_dir() else [model]


def size_of(model: Path) -> int:
    """Return the size of the model's weights in bytes."""
    return sum(file.stat().st_size for file in files_of(model))


def drop(path: Path) -> None:
    """Drop the file's pages from the page cache."""
    with path.open("rb") as file:
        os.fdatasync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def have_granted(size_bytes: int) -> None:
    """Make the host give this machine so much memory: touch it, and free it."""
    for _ in range(_TOUCHES):
        huge_page_bytes(size_bytes)[:: mmap.PAGESIZE] = 1


def raw_read(model: Path, *, granted: bool) -> Seconds:
    """Read the model's files from the disk once."""
    for path in files_of(model):
        drop(path)
    if granted:
        have_granted(size_of(model) + _BESIDES_BYTES)
    buffer = bytearray(8 * 1024 * 1024)
    wall_s, processor_s = time.perf_counter(), time.process_time()
    for path in files_of(model):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return Seconds(time.perf_counter() - wall_s, time.process_time() - processor_s)


def load_weights(model: Path, quantisation: str, threads: int, *, granted: bool) -> Seconds:
    """Measure the load in a process that is as far as a standby: imports and kernels are done."""
    for path in files_of(model):
        drop(path)
    code = (
        "import gc, sys, time, msgspec; from isochrone.wire.engines.engine import EngineConfig;"
        "from nodeagent.engine.loading import load_engine; "
        "from nodeagent.engine.kernels.cpu.library import kernels; "
        "from ops.bench.engine_cold import have_granted; kernels(); gc.freeze();"
        "config = msgspec.json.decode(sys.argv[1], type=EngineConfig);"
        "have_granted(int(sys.argv[2])) if int(sys.argv[2]) else None;"
        "w, p = time.perf_counter(), time.process_time(); load_engine(config);"
        "print(time.perf_counter() - w, time.process_time() - p)"
    )
    config = msgspec.json.encode(config_of(model, Path("unused"), quantisation, threads)).decode()
    need_bytes = size_of(model) + _BESIDES_BYTES if granted else 0
    told = subprocess.run(
        [sys.executable, "-c", code, config, str(need_bytes)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    return Seconds(float(told[0]), float(told[1]))


def config_of(model: Path, folder: Path, quantisation: str, threads: int) -> EngineConfig:
    """Return the engine's config; its socket lies in `folder`."""
    values = {
        "model_path": str(model),
        "served_name": "m",
        "socket": str(folder / "engine.sock"),
        "quantisation": quantisation,
        "threads": threads,
        "kv_memory_bytes": 64 * 1024 * 1024,
    }
    return msgspec.convert(values, EngineConfig)


async def first_token(model: Path, quantisation: str, threads: int, *, standby: bool) -> Seconds:
    """Start an engine, or give a standby its order, and wait for the first token of a prompt."""
    with tempfile.TemporaryDirectory(prefix="cold") as name:
        folder = Path(name)
        config = config_of(model, folder, quantisation, threads)
        (folder / "config.json").write_bytes(msgspec.json.encode(config))
        arguments = ["--config", str(folder / "config.json")]
        command = [sys.executable, "-m", "nodeagent.engine"]
        log = folder / "log"
        for path in files_of(model):
            drop(path)
        if standby:
            process = _spawn([*command, "--standby"], folder / "standby.log")
            await asyncio.to_thread(_wait_idle, process.pid)
        wall_s, processor_s = time.perf_counter(), _processor_s(process.pid) if standby else 0.0
        if standby:
            order = {
                "arguments": arguments,
                "environment": {},
                "log": str(log),
                "agent": os.getpid(),
            }
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(order) + b"\n")
            process.stdin.close()
        else:
            process = _spawn([*command, *arguments], log)
        try:
            await _ask(config.socket)
            return Seconds(time.perf_counter() - wall_s, _processor_s(process.pid) - processor_s)
        finally:
            process.terminate()
            await asyncio.to_thread(process.wait)


def _spawn(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, stderr=out)


async def _ask(socket: str) -> None:
    body = {"prompt": "The capital of France is", "max_tokens": 1, "temperature": 0}
    async with asyncio.timeout(_DEADLINE_S):
        while True:
            connector = aiohttp.UnixConnector(socket)
            async with aiohttp.ClientSession("http://engine", connector=connector) as http:
                try:
                    async with http.post("/v1/completions", json=body) as response:
                        await response.read()
                        assert response.status == 200
                        return
                except aiohttp.ClientConnectionError:
                    await asyncio.sleep(0.01)


def _processor_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def _wait_idle(pid: int) -> None:
    """Wait until the standby has done its imports and uses no more processor time."""
    deadline_s = time.monotonic() + _DEADLINE_S
    before = -1.0
    while time.monotonic() < deadline_s and (before < 1.0 or _processor_s(pid) > before):
        before = _processor_s(pid)
        time.sleep(2.0)


def main() -> None:
    """Read the arguments, write a made-up model if requested, and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--quantisation", default="file")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--made-up-mb", type=int)
    parser.add_argument("--as-folder", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="cold", dir="/var/tmp") as folder:
        if arguments.made_up_mb:
            made_up = Path(folder) / ("made-up" if arguments.as_folder else "made-up.gguf")
            write_made_up(made_up, arguments.model, arguments.made_up_mb * 1_000_000)
            arguments.model = made_up
        measure(arguments.model, arguments.quantisation, arguments.threads, arguments.rounds)


def measure(model: Path, quantisation: str, threads: int, rounds: int) -> None:
    """Measure and print, the best of the rounds."""
    best: dict[str, Seconds] = {}
    for _ in range(rounds):
        found = {}
        for granted, how in ((False, "cold"), (True, "granted")):
            found[f"raw read, {how}"] = raw_read(model, granted=granted)
            found[f"load, {how}"] = load_weights(model, quantisation, threads, granted=granted)
        for name, standby in (("first token, cold process", False), ("from a standby", True)):
            found[name] = asyncio.run(first_token(model, quantisation, threads, standby=standby))
        for name, one in found.items():
            known = best.get(name, one)
            best[name] = Seconds(min(known.wall, one.wall), min(known.processor, one.processor))
            print(f"{name}: {one}", file=sys.stderr, flush=True)
    print(f"{model.name}, {size_of(model) / 1e6:.0f} MB")
    print("| what | wall seconds (processor seconds) |\n|---|---|")
    for name, one in best.items():
        print(f"| {name} | {one} |")


if __name__ == "__main__":
    main()
