"""Compares the transfers of two checkouts in turns: for machines with other work.

    python -m ops.bench.kv_against CHECKOUT [--two-nodes] [--rounds N] [--tokens N]

Two fleets of two engines each run side by side: the code of CHECKOUT and this one. The engines of a
fleet have one agent, or with `--two-nodes` one each. In each round both fleets read the same new
prompt, then each moves it once, and as many bytes are copied between two processes. What moves has
a higher priority meanwhile (root only), so that other work waits; the load is printed with each
round. The CPU time is that of engines and agents, less that of the same request once its prompt is
cached. Figures of a quiet machine come from `kv_move`.
"""

import argparse
import asyncio
import os
import tempfile
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import psutil

from ops.bench.disaggregation import bundled_model, raw_copy_s
from ops.bench.disaggregation_load import ask, random_request
from ops.bench.engine_node import NodeClient, NodeSetup, bench_node
from ops.bench.kv_move import PAUSE_S, CpuTimes, MovedBlocks, fetch
from ops.sim.measure import percentile

AHEAD: Final = -15
"""The priority of what is measured."""

KV_MEMORY_BYTES: Final = 200 * 1024 * 1024


def set_priority(value: int) -> None:
    """Set the priority of this process and of all that it started."""
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with suppress(OSError, psutil.Error):
            Path(f"/proc/{process.pid}/autogroup").write_text(str(value))
        for task in Path(f"/proc/{process.pid}/task").glob("*"):
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, int(task.name), value)


class BenchFleet(NamedTuple):
    """The engine `d`, which fetches prefixes, and `p`, which has them."""

    taking: NodeClient
    sending: NodeClient


async def start_fleet(
    stack: AsyncExitStack, folder: str, code: str, *, has_two_nodes: bool
) -> BenchFleet:
    """Run two engines with the code of a folder."""

    async def start(name: str, others: tuple[str, ...] = ()) -> NodeClient:
        setup = NodeSetup(
            name=name,
            model=str(bundled_model()),
            folder=f"{folder}/{name}",
            kv_memory_bytes=KV_MEMORY_BYTES,
            options={"interval_ms": "25", "draft_tokens_max": "0", "kv_dtype": "bf16"},
            share_kv=True,
            others=others,
        )
        return await stack.enter_async_context(bench_node(setup, code))

    if has_two_nodes:
        return BenchFleet(await start("d"), await start("p"))
    node = await start("d", ("p",))
    return BenchFleet(
        node, NodeClient(name="p", address=node.address, http=node.http, pid=node.pid)
    )


async def move(fleet: BenchFleet, number: int, tokens: int) -> MovedBlocks:
    """Have `d` fetch the prompt of a round from `p`."""
    node, address = fleet.taking, fleet.sending.address
    request = random_request(number, tokens, 2)
    set_priority(AHEAD)
    try:
        moved = await fetch(node, "p", address, request, "t")
        cached = await fetch(node, "p", address, request, "t")
    finally:
        set_priority(0)
    if not moved.count:
        raise SystemExit("cannot measure: nothing was fetched")
    return msgspec.structs.replace(moved, cpu=moved.cpu.since(cached.cpu))


async def compare(checkout: str, rounds: int, tokens: int, *, has_two_nodes: bool) -> None:
    """Move in turns, and print each round and the medians."""
    here = str(Path(__file__).parents[2])
    took_ms: dict[str, list[float]] = {"before": [], "after": [], "raw": []}
    cpu: dict[str, list[CpuTimes]] = {"before": [], "after": []}
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mv"))
        fleets = {
            name: await start_fleet(stack, f"{folder}/{name}", code, has_two_nodes=has_two_nodes)
            for name, code in (("before", checkout), ("after", here))
        }
        for number in range(rounds + 1):
            for fleet in fleets.values():
                await ask(fleet.sending, random_request(number, tokens, 2), "t", 1000)
            await asyncio.sleep(PAUSE_S)
            turns = list(fleets.items())[:: 1 if number % 2 else -1]
            count = 0
            for name, fleet in turns:
                moved = await move(fleet, number, tokens)
                count = moved.count
                took_ms[name].append(1000 * moved.took_s)
                cpu[name].append(moved.cpu)
            set_priority(AHEAD)
            took_ms["raw"].append(1000 * await asyncio.to_thread(raw_copy_s, count))
            set_priority(0)
            last = {name: round(taken[-1], 1) for name, taken in took_ms.items()}
            print(f"round {number}, load {os.getloadavg()[0]:.1f}: ms {last}", flush=True)
    print_medians(took_ms, cpu)


def print_medians(took_ms: dict[str, list[float]], cpu: dict[str, list[CpuTimes]]) -> None:
    """Print the medians of all rounds but the first, which allocates memory and connects."""
    print("\n| | best ms | p50 ms | p50 / raw | CPU ms of engines, p50 | of agents |")
    print("|---|---|---|---|---|---|")
    raw_ms = percentile(took_ms["raw"][1:], 0.5)
    for name, taken in took_ms.items():
        middle = percentile(taken[1:], 0.5)
        used = cpu.get(name, [])[1:]
        engines_ms, agents_ms = (
            f"{1000 * percentile(each, 0.5):.1f}" if each else ""
            for each in ([one.engines_s for one in used], [one.agents_s for one in used])
        )
        times = f"{min(taken[1:]):.1f} | {middle:.1f} | {middle / raw_ms:.2f}"
        print(f"| {name} | {times} | {engines_ms} | {agents_ms} |")
    pairs = zip(took_ms["before"][1:], took_ms["after"][1:], strict=True)
    ratios = sorted(before / after for before, after in pairs)
    print(f"\nbefore / after, by round: {[round(ratio, 2) for ratio in ratios]}")


def main() -> None:
    """Read the arguments and compare."""
    parser = argparse.ArgumentParser(prog="python -m ops.bench.kv_against")
    parser.add_argument("checkout", help="the folder of the other checkout")
    parser.add_argument("--two-nodes", action="store_true")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1600)
    arguments = parser.parse_args()
    checkout = str(Path(arguments.checkout).resolve())
    work = compare(checkout, arguments.rounds, arguments.tokens, has_two_nodes=arguments.two_nodes)
    asyncio.run(work)


if __name__ == "__main__":
    main()
