"""Notices that the leader of a replica over several nodes has ended, for parts that do not.

A headless vLLM whose leader ends, or whose leader another part took with it, waits for messages of
the dead group forever, and the leader that starts again waits for it. torch's store listens at the
group's port on the leader's node as long as the leader's worker runs, so its end can be seen from
there. The parts of the embedded engine end by themselves, and their leader listens only until they
have met.
"""

import asyncio
from contextlib import suppress
from typing import Final

from isochrone.wire.assignment import ReplicaSpec

STORE_DRIVERS: Final = frozenset({"vllm", "sglang"})
"""The engines whose leader has torch's store at the group's port."""

FAILURES_MAX: Final = 3
"""Probes without a connection, a second apart, after which the leader has ended. A leader that
starts again takes ten times as long to listen."""

CONNECT_TIMEOUT_S: Final = 2.0


class LeaderWatch:
    """What one part knows of its leader. Without a leader to watch it reports no problem."""

    def __init__(self, spec: ReplicaSpec) -> None:
        is_watched = spec.engine.driver in STORE_DRIVERS and not spec.leads
        self._group = spec.group if is_watched else None
        self._has_met = False
        self._failures = 0

    async def problem(self) -> str:
        """Probe the leader once; return why this part must start again, or ""."""
        if self._group is None:
            return ""
        if await _listens(self._group.host, self._group.port):
            self._has_met, self._failures = True, 0
            return ""
        self._failures += 1
        # Before it listens for the first time, the leader is still starting.
        if not self._has_met or self._failures < FAILURES_MAX:
            return ""
        return f"the leader of the replica, at {self._group.host}:{self._group.port}, has ended"


async def _listens(host: str, port: int) -> bool:
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return True
