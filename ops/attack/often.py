"""The parts of attacks that do one thing very often and look for memory that is left: their command
line, the work of several clients at once, and tables.
"""

import argparse
import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from random import Random
from typing import Any, Final, TypeVar

from ops.attack.kills import exit_code

Stage = TypeVar("Stage")

AT_ONCE: Final = 8
"""Requests or transfers at a time."""

PAUSE_S_MAX: Final = 0.005
"""A client leaves at most so long after its stage was reached."""

FREE_S: Final = 60.0
"""Within this time nothing is held any more."""


def run_attack(
    program: str, count: int, attack: Callable[[int, int], Coroutine[Any, Any, None]]
) -> int:
    """Read the arguments and run `attack(count, seed)`, which prints; return the exit code."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}")
    parser.add_argument("--count", type=int, default=count)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    return exit_code(attack(arguments.count, arguments.seed))


async def do_often(
    count: int, stages: Sequence[Stage], chance: Random, do: Callable[[Stage], Awaitable[None]]
) -> None:
    """Do `count` times what ends at a drawn stage, AT_ONCE at a time."""
    left = [chance.choice(stages) for _ in range(count)]

    async def do_next() -> None:
        while left:
            await do(left.pop())

    await asyncio.gather(*(do_next() for _ in range(AT_ONCE)))


def post_bytes(path: str, fields: Mapping[str, str], content: bytes) -> bytes:
    """Return an HTTP request with a JSON body."""
    fields = {
        "host": "h",
        "content-type": "application/json",
        "content-length": str(len(content)),
        **fields,
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + content


def print_head(*names: str) -> None:
    """Print the first lines of a table."""
    print_row(*names)
    print(f"|{'---|' * len(names)}", flush=True)


def print_row(*cells: object) -> None:
    """Print a line of a table."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def in_mib(size_bytes: int) -> str:
    """Format a size."""
    return f"{size_bytes / 2**20:.1f}"
