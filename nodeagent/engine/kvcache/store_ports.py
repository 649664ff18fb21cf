"""The ports at which the members of the store on this machine listen, and when one was last left.

The master names the memory of a member that died for a while, by the port at which it listened. No
other process may listen there in that time, because it would get requests for that memory.
"""

from collections.abc import Set
from pathlib import Path
from typing import Final

LISTENING: Final = "0A"
"""As /proc/net/tcp writes it (proc_pid_net(5))."""


def listening_ports(first: int, last: int) -> frozenset[int]:
    """Return the ports from `first` to `last` at which a process of this machine listens."""
    found = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            _, local, _, state, *_ = line.split()
            port = int(local.rpartition(":")[2], 16)
            if state == LISTENING and first <= port <= last:
                found.add(port)
    return frozenset(found)


class LeftPorts:
    """The time at which a port was last left, as far as looks could see."""

    def __init__(self, listening: Set[int], now_s: float) -> None:
        """One may have been left just before."""
        self._listening = listening
        self._left_at_s = now_s

    def look(self, listening: Set[int], now_s: float) -> float:
        """Note at which ports processes listen now; return for how long none has been left."""
        if self._listening - listening:
            self._left_at_s = now_s
        self._listening = listening
        return now_s - self._left_at_s
