"""Let clients leave ten thousand streams of a whole fleet with two legs: does it keep anything?

    python -m ops.attack.leaving_fleet [--count 10000] [--seed 1]

A scheduler, a router and four nodes, with their own processes; one node has a prefill replica and
one a decode replica of a tiny model. The clients leave as in leaving_streams. The table
shows after each tenth the memory of the router, of the agents of both nodes, and of one without a
replica (rss; anon, its own; shmem, shared with engines), and their descriptors. The run fails if
blocks of KV are still held at a tenth, or if an agent's own memory grows by more than
GROWTH_BYTES_MAX after the first two tenths. The table that one run printed is in two_leg_kills.md.
"""

import random
from functools import partial
from typing import Final

import aiohttp
import msgspec

from ops.attack.kills import AttackFailed
from ops.attack.leaving_clients import GROWTH_BYTES_MAX
from ops.attack.leaving_streams import LeavingStreams
from ops.attack.often import FREE_S, in_mib, post_bytes, print_head, print_row, run_attack
from ops.bench.memory_counts import process_sizes
from tests.system.harness import ROOT, Fleet, a_fleet, until
from tests.system.test_roles import (
    NODES,
    deploy,
    holds_nothing,
    process_of,
    start,
    until_both,
)

PROMPT_LETTERS: Final = 300
OUTPUT_TOKENS: Final = 32
ROUTER: Final = "router-ams"
LEGS: Final = "isochrone_node_prefill_legs_total"


def a_completion(key: str, chance: random.Random) -> bytes:
    """Return a request with a new prompt."""
    body = {
        "model": "counting",
        "prompt": "".join(chr(chance.randrange(ord("A"), ord("Z"))) for _ in range(PROMPT_LETTERS)),
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    fields = {"authorization": f"Bearer {key}"}
    return post_bytes("/v1/completions", fields, msgspec.json.encode(body))


async def attack(count: int, seed: int) -> None:
    """Have `count` clients leave, and print the table. Raises AttackFailed."""
    async with a_fleet(comes_up=False) as fleet:
        agents = [process_of(f"ams-{number}") for number in NODES]
        for name in (ROUTER, *agents):
            # So that none is forked from a process of the tests, whose memory it would have, too.
            fleet.environment[name] = {"PYTHONPATH": str(ROOT)}
        await start(fleet)
        await deploy(fleet)
        by_role = {role: process_of(node) for role, node in (await until_both(fleet)).items()}
        idle = next(name for name in agents if name not in by_role.values())
        shown = {
            "router": ROUTER,
            "decode agent": by_role["generates"],
            "prefill agent": by_role["prefill"],
            "agent without a replica": idle,
        }
        await _leave_and_print(fleet, shown, count, seed)


async def _leave_and_print(fleet: Fleet, shown: dict[str, str], count: int, seed: int) -> None:
    clients = LeavingStreams(fleet.ports[ROUTER], seed, partial(a_completion, fleet.key))
    pids = {role: fleet.processes.pid(name) for role, name in shown.items()}
    own: dict[str, list[int]] = {role: [] for role in shown}
    print_head("left", "process", "rss MiB", "anon", "shmem", "descriptors")
    for tenth in range(1, 11):
        await clients.leave_often(count // 10)
        try:
            await until("nothing is held", partial(holds_nothing, fleet), FREE_S)
        except AssertionError as error:
            raise AttackFailed(str(error)) from error
        for role, pid in pids.items():
            sizes = process_sizes(pid)
            own[role].append(sizes.anon)
            memory = map(in_mib, (sizes.rss, sizes.anon, sizes.shmem))
            print_row(tenth * (count // 10), role, *memory, sizes.descriptors)
    print("\n" + ", ".join(f"{stage} {times}" for stage, times in clients.reached.items()))
    print(await _outcomes(fleet, shown["decode agent"]))
    for role, sizes_seen in own.items():
        grown = sizes_seen[-1] - sizes_seen[1]
        if role != "router" and grown > GROWTH_BYTES_MAX:
            raise AttackFailed(f"the {role} has {grown} bytes more")


async def _outcomes(fleet: Fleet, agent: str) -> dict[str, float]:
    """Return how many prompts were read where and why, as the decode agent counts them."""
    async with (
        aiohttp.ClientSession() as http,
        http.get(f"{fleet.url(agent)}/metrics") as page,
    ):
        lines = (await page.text()).splitlines()
    samples = [line.rpartition(" ") for line in lines if line.startswith(LEGS)]
    return {name.removeprefix(LEGS): float(value) for name, _, value in samples}


if __name__ == "__main__":
    raise SystemExit(run_attack("ops.attack.leaving_fleet", 10_000, attack))
