"""The engine's side of a warm standby: imports done, it waits to be told which engine it becomes.

One JSON line on standard input says that. Where the input ends first, whoever kept the standby is
gone, and so is its use. An order of one who has gone since is not taken up: a later life of that
agent knows its engines by the logs that they write.
"""

import os
import sys
from typing import Final

import msgspec

_ORDER_BYTES_MAX: Final = 64 * 1024


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """Which engine to become: its arguments, what it may see, where it writes, whose it is."""

    arguments: tuple[str, ...]
    environment: dict[str, str]
    log: str
    agent: int
    """The process that keeps it."""


def wait_for_order() -> Order | None:
    """Wait for the order and take it up; None where none came."""
    line = sys.stdin.buffer.readline(_ORDER_BYTES_MAX)
    if not line:
        return None
    order = msgspec.json.decode(line, type=Order)
    os.environ.update(order.environment)
    log = os.open(order.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, number in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(descriptor, number)
    os.close(log)
    os.close(nothing)
    return order if os.getppid() == order.agent else None
