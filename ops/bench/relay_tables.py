"""Measures everything that ops/bench/relay.md quotes, in one run of ten minutes for each round.

    python -m ops.bench.relay_tables --peers FOLDER [--rounds 1] [--only TITLE ...]

It writes ops/bench/relay_tables.md: requests of five sizes before 1, 8 and 64 replicas (relay.py),
the same without a C compiler, streams that an engine writes at once, the latency at a fixed rate
below capacity (half_load.py), and paced streams (paced_streams.py). The routers take
turns in each, and in each round of it; a figure is the median of its rounds. Run it where nothing
else runs. A part that fails, or that does not end in its time,
is named in the output; the others still run. With `--only` the parts whose title has one of these
words run again, and their sections, with the date of that run, take the places of the old ones.
"""

import argparse
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Final, NamedTuple

PEERS: Final = ("vllm-router", "sglang-router", "smg")
ROUTERS: Final = ("isochrone, compiled", "round_robin", "cache_aware")
FLOOR: Final = "floor"


class Part(NamedTuple):
    """A section of the output: its title, its benchmark's arguments, and a round's time limit."""

    title: str
    arguments: tuple[str, ...]
    limit_s: float


def parts(peers: str, rounds: int) -> Iterator[Part]:
    """Yield the parts in their order, each of so many rounds."""
    chosen = ("--peers", peers, "--only", *ROUTERS)
    of_rounds = ("--rounds", str(rounds), "--seconds", "2")
    yield Part(
        "Real request sizes",
        ("relay", *chosen, FLOOR, "--replicas", "1", "8", "64", *of_rounds),
        400.0,
    )
    few = ("relay", "--peers", peers, *of_rounds, "--replicas", "8")
    yield Part("Uncompiled", (*few, "--only", "uncompiled", "--sizes", "0", "4", "16", "100"), 60.0)
    yield Part(
        "Streams of 100 tokens that are written at once",
        (*few, "--stream", "--sizes", "0", "4", "--only", *ROUTERS),
        120.0,
    )
    for kib, rate in ((0, 3000), (4, 2000), (100, 400)):
        size = f"{kib} KiB" if kib else "0.1 KiB"
        load = (str(rate), "3", str(rounds), "--kib", str(kib), "--replicas", "8")
        yield Part(
            f"Half load: {rate} requests a second of {size}", ("half_load", *load, *chosen), 70
        )
    paced = ("paced_streams", "--peers", peers, "--seconds", "3", "--rounds", str(rounds))
    yield Part("Paced streams", (*paced, "--only", FLOOR, *ROUTERS[:2]), 280.0)


def machine(peers: Path) -> str:
    """Return what the figures were taken with, the routers in `peers` included."""
    names = ("uvloop", "httptools", "msgspec")
    versions = [f"{name} {version(name)}" for name in names]
    folders = [str(folder) for folder in peers.glob("*/lib/python3*/site-packages")]
    routers = (found for found in distributions(path=folders) if found.name in PEERS)
    versions += sorted(f"{router.name} {router.version}" for router in routers)
    libraries = ", ".join(versions)
    return (
        f"{time.strftime('%Y-%m-%d')}: {os.cpu_count()} processors, {platform.machine()}, Linux"
        f" {platform.release()}, Python {platform.python_version()}, {libraries}; load before the"
        f" run {os.getloadavg()[0]:.1f}"
    )


def run(part: Part, peers: str, rounds: int) -> str:
    """Run one part and return its section, which names the folder `peers` as FOLDER."""
    limit_s = part.limit_s * rounds
    command = [sys.executable, "-m", f"ops.bench.{part.arguments[0]}", *part.arguments[1:]]
    began_s = time.monotonic()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            # As Ctrl-C does, so that it ends the routers that it has started.
            process.send_signal(2)
            output, _ = process.communicate()
            output += f"\n**Cut off after {limit_s:g} s.**\n"
        if process.returncode > 0:
            output += f"\n**Failed with exit status {process.returncode}.**\n"
    shown = " ".join(("python -m", f"ops.bench.{part.arguments[0]}", *part.arguments[1:]))
    shown = shown.replace(peers, "FOLDER")
    took_s = time.monotonic() - began_s
    return f"## {part.title}\n\n`{shown}` ({took_s:.0f} s)\n\n{output.strip()}\n"


def replace_sections(text: str, sections: dict[str, str]) -> str:
    """Return the file with some sections, by title, in the places of those that it has."""
    head, *old = text.split("\n## ")
    parts = [sections.pop(part.partition("\n")[0], f"## {part}\n").rstrip() for part in old]
    return "\n\n".join([head.rstrip(), *parts, *map(str.rstrip, sections.values())]) + "\n"


def main() -> None:
    """Run all parts, or some again, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", default="peers")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".md"))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", nargs="+", default=[], help="run these parts again")
    arguments = parser.parse_args()
    if arguments.only:
        machine_line = machine(Path(arguments.peers))
        for part in parts(arguments.peers, arguments.rounds):
            if any(word in part.title for word in arguments.only):
                print(f"{part.title} ...", file=sys.stderr, flush=True)
                title, _, body = run(part, arguments.peers, arguments.rounds).partition("\n\n")
                section = f"{title}\n\n{machine_line}\n\n{body}"
                text = replace_sections(arguments.out.read_text(), {part.title: section})
                arguments.out.write_text(text)
        return
    sections = [machine(Path(arguments.peers)) + "\n"]
    for part in parts(arguments.peers, arguments.rounds):
        print(f"{part.title} ...", file=sys.stderr, flush=True)
        sections.append(run(part, arguments.peers, arguments.rounds))
        # Written as they come: a run that is interrupted keeps what it has.
        arguments.out.write_text("\n".join(sections))


if __name__ == "__main__":
    main()
