"""Poison requests: one tenant's request makes each engine fail that processes it.

    python -m ops.attack.poison

Starts a fleet with two mock engines. One tenant streams answers
without pause; another sends the same poison request every few seconds, which kills the engine at
its first token. A third tenant's request kills in the middle of its stream, and that of a fourth
goes to two routers in turn. Prints how many engines were lost and how many of the other tenant's
answers failed. Takes about two minutes.
"""

import argparse
import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import aiohttp

from tests.system.harness import Fleet, a_fleet, until
from tests.system.load import Load, one_stream, under_load

POISONS: Final = 10
POISON_INTERVAL_S: Final = 4.0
ENGINES: Final = 2
STREAMS: Final = 4
SUSPENDED_MESSAGE: Final = "engines failed while they processed"
WATCH_INTERVAL_S: Final = 0.02
ATTACK_S_MAX: Final = 300.0


class LostEngines:
    """Counts the engine processes of a fleet that ended."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._seen: set[int] = set()

    async def watch(self) -> None:
        """Note each engine that runs, until cancelled."""
        while True:
            self._seen.update(self._fleet.engine_pids().values())
            await asyncio.sleep(WATCH_INTERVAL_S)

    @property
    def count(self) -> int:
        """How many engines were replaced."""
        return max(0, len(self._seen - {0}) - ENGINES)


async def poison(
    fleet: Fleet,
    key: str,
    times: int,
    tokens: int,
    at_token: int,
    pops: Sequence[str] = ("ams",),
) -> Counter[str]:
    """Send one and the same poison request several times, to each of the routers in turn.

    Return how the answers ended.
    """
    ends: Counter[str] = Counter()
    fault: dict[str, Any] = {"mock": {"crash_at_token": at_token}}
    timeout = aiohttp.ClientTimeout(total=60.0)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        for number in range(times):
            pop = pops[number % len(pops)]
            ended = await one_stream(fleet, http, pop, tokens, key=key, **fault)
            code = "suspended" if SUSPENDED_MESSAGE in ended.detail else ended.how
            ends[code] += 1
            await asyncio.sleep(POISON_INTERVAL_S)
    return ends


async def attack(fleet: Fleet) -> tuple[str, LostEngines, Load]:
    """Poison the fleet at the first token, then in the middle of a stream."""
    lost = LostEngines(fleet)
    keys = [
        (await fleet.ask("POST", "/v1/keys", {"tenant_id": name}))["key"]
        for name in ("first-token", "mid-stream", "two-routers")
    ]
    await fleet.routers_know()
    watching = asyncio.create_task(lost.watch())
    try:
        async with (
            asyncio.timeout(ATTACK_S_MAX),
            under_load(fleet, ["ams"], streams=STREAMS) as load,
        ):
            await asyncio.sleep(1.0)
            first = await poison(fleet, keys[0], POISONS, tokens=8, at_token=0)
            lost_first = lost.count
            await until("two warm engines", lambda: fleet.is_warm(ENGINES))
            mid = await poison(fleet, keys[1], POISONS // 2, tokens=8, at_token=5)
            await until("two warm engines", lambda: fleet.is_warm(ENGINES))
            lost_two = lost.count
            both = await poison(fleet, keys[2], POISONS, tokens=8, at_token=0, pops=("ams", "sin"))
            await until("two warm engines", lambda: fleet.is_warm(ENGINES))
    finally:
        watching.cancel()
    summary = (
        f"killing at the first token: {POISONS} requests {dict(first)}, engines lost {lost_first};"
        f" in mid-stream: {POISONS // 2} requests {dict(mid)},"
        f" engines lost {lost_two - lost_first}; by turns at two routers: {POISONS} requests"
        f" {dict(both)}, engines lost {lost.count - lost_two}"
    )
    return summary, lost, load


async def run() -> None:
    """Start a fleet, attack it and print one line."""
    async with a_fleet() as fleet:
        await fleet.deploy(replicas=ENGINES, options={"itl_ms": "10", "ttft_ms": "50"})
        summary, _, load = await attack(fleet)
    failed = len(load.failures())
    print(f"{summary}; the other tenant: {failed} of {len(load.ended)} answers failed")


def main() -> None:
    """Read the arguments and attack."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    asyncio.run(run())


if __name__ == "__main__":
    main()
