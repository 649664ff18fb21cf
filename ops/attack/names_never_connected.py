"""Names join and never connect; do replicas whose engines are killed still become warm again?

    python -m ops.attack.names_never_connected [--names 40] [--kills 12]

Starts a fleet of two nodes with a mock replica each, joins the names with one token, waits until a
node as silent would be lost, and kills engines as they start. Prints how long after the last kill
both replicas are warm.
"""

import argparse
import asyncio
import os
import signal
import sys
import time
from contextlib import suppress

from isochrone.service.trust.joining import join
from isochrone.wire.peers.control import PeerRole
from scheduler.decide.membership import LivenessLimits
from tests.system.harness import Fleet, a_fleet

WARM_TIMEOUT_S = 120.0
KILLS_TIMEOUT_S = 120.0
POLL_S = 0.1


async def join_names(fleet: Fleet, count: int) -> None:
    """Join `count` names that never connect afterwards."""
    body = {"pop": "ams", "role": "agent", "uses_max": count}
    token = (await fleet.ask("POST", "/v1/join-tokens", body))["token"]
    url = f"http://127.0.0.1:{fleet.ports['control-a']}"
    for number in range(count):
        name = f"never-{number}"
        folder = fleet.folder / name
        await join(urls=[url], token=token, role=PeerRole.AGENT, name=name, folder=folder)


async def kill_engines(fleet: Fleet, kills: int) -> int:
    """Kill each engine that runs, until `kills` were killed; return how many were."""
    killed: set[int] = set()
    deadline = time.monotonic() + KILLS_TIMEOUT_S
    while len(killed) < kills and time.monotonic() < deadline:
        for pid in fleet.engine_pids().values():
            if pid not in killed and len(killed) < kills:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    killed.add(pid)
        await asyncio.sleep(POLL_S)
    return len(killed)


async def attack(names: int, kills: int) -> str:
    """Return the line to print."""
    async with a_fleet() as fleet:
        await fleet.deploy(replicas=2)
        await join_names(fleet, names)
        await asyncio.sleep(LivenessLimits().lost_after_s + 5.0)
        killed = await kill_engines(fleet, kills)
        began = time.monotonic()
        while time.monotonic() - began < WARM_TIMEOUT_S:
            await asyncio.sleep(POLL_S)
            # The table still says warm for a moment after a kill.
            if time.monotonic() - began > 2.0 and await fleet.is_warm(2):
                break
        took_s = time.monotonic() - began
        frozen = (await fleet.ask("GET", "/v1/status"))["frozen"]
        warm = f"warm again after {took_s:.1f} s" if await fleet.is_warm(2) else "never warm again"
        limit = f" (waited {WARM_TIMEOUT_S:g} s)" if took_s >= WARM_TIMEOUT_S else ""
        return f"{names} names, {killed} engine kills: {warm}{limit}; frozen: {frozen or 'no'}"


def main() -> None:
    """Run the attack and print its figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--names", type=int, default=40)
    parser.add_argument("--kills", type=int, default=12)
    arguments = parser.parse_args()
    sys.stdout.write(asyncio.run(attack(arguments.names, arguments.kills)) + "\n")


if __name__ == "__main__":
    main()
