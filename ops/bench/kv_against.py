"""Compares the transfers of two checkouts on one node, in turns: for machines with other work.

    python -m ops.bench.kv_against CHECKOUT [--rounds N] [--tokens N]

Two fleets of one agent and two engines each run side by side: the code of CHECKOUT and this one. In
each round both read the same new prompt, then each moves it once, and as many bytes are copied
between two processes. What moves has a higher priority meanwhile (root only), so that other work
waits; the load is printed with each round. Figures of a quiet machine come from `kv_move`.
"""

import argparse
import asyncio
import os
import tempfile
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Final

import psutil

from ops.bench.disaggregation import bundled_model, raw_copy_s
from ops.bench.disaggregation_load import ask, random_request
from ops.bench.engine_node import NodeClient, NodeSetup, bench_node
from ops.bench.kv_move import PAUSE_S, fetch
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


async def move(node: NodeClient, number: int, tokens: int) -> tuple[float, int]:
    """Have `d` fetch the prompt of a round from `p`; return its time and bytes."""
    set_priority(AHEAD)
    try:
        request = random_request(number, tokens, 2)
        moved = await fetch(node, "p", node.address, request, "t")
    finally:
        set_priority(0)
    if not moved.count:
        raise SystemExit("cannot measure: nothing was fetched")
    return moved.took_s, moved.count


async def compare(checkout: str, rounds: int, tokens: int) -> None:
    """Move in turns, and print each round and the medians."""
    here = str(Path(__file__).parents[2])
    options = {"interval_ms": "25", "draft_tokens_max": "0", "kv_dtype": "bf16"}
    took_ms: dict[str, list[float]] = {"before": [], "after": [], "raw": []}
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mv"))
        fleets = {
            name: await stack.enter_async_context(
                bench_node(
                    NodeSetup(
                        name="d",
                        model=str(bundled_model()),
                        folder=f"{folder}/{name}",
                        kv_memory_bytes=KV_MEMORY_BYTES,
                        options=options,
                        share_kv=True,
                        others=("p",),
                    ),
                    code,
                )
            )
            for name, code in (("before", checkout), ("after", here))
        }
        for number in range(rounds + 1):
            for node in fleets.values():
                source = NodeClient(name="p", address=node.address, http=node.http, pid=node.pid)
                await ask(source, random_request(number, tokens, 2), "t", 1000)
            await asyncio.sleep(PAUSE_S)
            turns = list(fleets.items())[:: 1 if number % 2 else -1]
            count = 0
            for name, node in turns:
                took_s, count = await move(node, number, tokens)
                took_ms[name].append(1000 * took_s)
            set_priority(AHEAD)
            took_ms["raw"].append(1000 * await asyncio.to_thread(raw_copy_s, count))
            set_priority(0)
            last = {name: round(taken[-1], 1) for name, taken in took_ms.items()}
            print(f"round {number}, load {os.getloadavg()[0]:.1f}: ms {last}", flush=True)
    print_medians(took_ms)


def print_medians(took_ms: dict[str, list[float]]) -> None:
    """Print the medians of all rounds but the first, which allocates memory and connects."""
    print("\n| | best ms | p50 ms | p50 / raw |\n|---|---|---|---|")
    raw_ms = percentile(took_ms["raw"][1:], 0.5)
    for name, taken in took_ms.items():
        middle = percentile(taken[1:], 0.5)
        print(f"| {name} | {min(taken[1:]):.1f} | {middle:.1f} | {middle / raw_ms:.2f} |")
    pairs = zip(took_ms["before"][1:], took_ms["after"][1:], strict=True)
    ratios = sorted(before / after for before, after in pairs)
    print(f"\nbefore / after, by round: {[round(ratio, 2) for ratio in ratios]}")


def main() -> None:
    """Read the arguments and compare."""
    parser = argparse.ArgumentParser(prog="python -m ops.bench.kv_against")
    parser.add_argument("checkout", help="the folder of the other checkout")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1600)
    arguments = parser.parse_args()
    checkout = str(Path(arguments.checkout).resolve())
    asyncio.run(compare(checkout, arguments.rounds, arguments.tokens))


if __name__ == "__main__":
    main()
