"""Postgres hangs: how much does the scheduler write to its log?

    python -m ops.attack.hung_postgres [--seconds 60]

Starts a scheduler, stops every process of its Postgres by SIGSTOP, and counts what the scheduler
logs meanwhile.
"""

import argparse
import asyncio
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from tests.system.harness import Fleet, a_fleet, until


def postgres_pids(fleet: Fleet) -> list[int]:
    """Return the pids of the Postgres server and of its children."""
    lock = fleet.folder / "pg" / "data" / "postmaster.pid"
    server = int(lock.read_text().split()[0])
    children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    return [server, *map(int, children)]


async def attack(seconds: float) -> str:
    """Return the line to print."""
    async with a_fleet(comes_up=False) as fleet:
        await fleet.start_postgres()
        await fleet.start_scheduler("a")
        await until("scheduler a is active", fleet.acts)
        log = fleet.folder / "logs" / "scheduler-a.log"
        before = len(log.read_bytes())
        pids = postgres_pids(fleet)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        text = log.read_bytes()[before:].decode(errors="replace")
    lines, traces = len(text.splitlines()), text.count("Traceback (most recent call last)")
    return f"{seconds:g} s without Postgres: {lines} lines, {traces} tracebacks, {len(text)} bytes"


def main() -> None:
    """Run the attack and print its figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    sys.stdout.write(asyncio.run(attack(parser.parse_args().seconds)) + "\n")


if __name__ == "__main__":
    main()
