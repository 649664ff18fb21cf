"""The engine's side of a warm standby: it has done its imports and waits for its configuration.

The agent writes one JSON line to standard input, which says which engine to become. If the input
ends first, the agent is gone and the standby ends. An order from an agent that has died meanwhile
is not followed either: after a restart the agent recognises its engines by the logs they write.
"""

import os
import sys
from typing import Final

import msgspec

from isochrone.service.trust.landlock import FileRule, open_ruleset, restrict

_ORDER_BYTES_MAX: Final = 4 * 1024 * 1024


class StandbyOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The engine to become: its arguments and environment, its log file, and its agent."""

    arguments: tuple[str, ...]
    environment: dict[str, str]
    log: str
    agent: int
    """The process id of the agent."""
    rules: tuple[FileRule, ...] = ()
    """The files it may use from then on; all if there are no rules."""


def wait_for_order() -> StandbyOrder | None:
    """Wait for the order and apply its environment, log file and rules.

    Return None if there is nothing to do. Raises CannotConfine.
    """
    line = sys.stdin.buffer.readline(_ORDER_BYTES_MAX)
    if not line:
        return None
    order = msgspec.json.decode(line, type=StandbyOrder)
    os.environ.update(order.environment)
    log = os.open(order.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for descriptor, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(descriptor, target)
    os.close(log)
    os.close(null)
    if order.rules:
        restrict(open_ruleset(order.rules))
    return order if os.getppid() == order.agent else None
