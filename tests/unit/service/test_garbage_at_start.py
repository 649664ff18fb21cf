"""A service's full garbage collections do not wait for as many new objects as were imported."""

import subprocess
import sys

KEPT = 5_000
DEAD = 200_000
"""Cycles, so many that Python considers a full collection twice."""

SERVICE = f"""
import asyncio, gc, sys
import nodeagent.app
from isochrone.service.run import run_service

async def main(stopping):
    before = gc.get_stats()[2]["collections"]
    kept = [[] for _ in range({KEPT})]
    for _ in range({DEAD}):
        cycle = []
        cycle.append(cycle)
    return 0 if gc.get_stats()[2]["collections"] > before else 7

run_service(main)
"""


def test_full_collections_do_not_wait_for_many_new_objects() -> None:
    """An agent kept the garbage of 10,000 requests whose clients had left, some 10 MiB."""
    ended = subprocess.run([sys.executable, "-c", SERVICE], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
