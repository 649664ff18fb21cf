"""Notices that the leader of a replica over several nodes has ended, for parts that do not.

A headless vLLM whose leader ends, or whose leader another part took with it, waits for messages of
the dead group forever, and the leader that starts again waits for it. torch's store listens at the
group's port on the leader's node as long as the leader's worker runs, so its end can be seen from
there. Each part keeps a connection to the store for as long as it belongs to the group. So a part
without one, while a leader listens, is of an earlier group: its leader started again in the
meantime, perhaps while this agent was down. The parts of the embedded engine end by themselves, and
their leader listens only until they have met.
"""

import asyncio
from contextlib import suppress
from typing import Final

from isochrone.service.network.shortage import lacks_descriptors
from isochrone.wire.peers.assignment import ReplicaSpec
from nodeagent.host.engines.engine_ports import is_connected_to

STORE_DRIVERS: Final = frozenset({"vllm", "sglang"})
"""The engines whose leader has torch's store at the group's port."""

FAILURES_MAX: Final = 3
"""Probes without a connection, a second apart, after which the leader has ended. A leader that
starts again takes ten times as long to listen."""

JOIN_PROBES_MAX: Final = 120
"""Probes, a second apart, that an adopted part has time to connect: the last agent may have ended
while the part was starting. One that this agent started may take longer."""

CONNECT_TIMEOUT_S: Final = 2.0


class LeaderWatch:
    """One part's view of its leader. Without a leader to watch it reports no problem."""

    def __init__(self, spec: ReplicaSpec, part: int, *, is_adopted: bool = False) -> None:
        """`part` is the process group of the part, which an earlier agent started if it is adopted.

        Its connections are read from /proc.
        """
        is_watched = spec.engine.driver in STORE_DRIVERS and not spec.leads
        self._group = spec.group if is_watched else None
        self._part = part
        self._is_adopted = is_adopted
        self._has_met = False
        self._has_joined = False
        self._failures = 0
        self._apart = 0

    async def problem(self) -> str:
        """Probe the leader once; return why this part must start again, or ""."""
        if self._group is None:
            return ""
        leader = f"the leader of the replica, at {self._group.host}:{self._group.port},"
        listens = await _listens(self._group.host, self._group.port)
        if listens is None:
            return ""
        if listens:
            self._has_met, self._failures = True, 0
            if await asyncio.to_thread(is_connected_to, self._group.port, self._part):
                self._has_joined, self._apart = True, 0
                return ""
            self._apart += 1
            return f"{leader} started again without this part" if self._is_apart() else ""
        self._failures += 1
        # Before it listens for the first time, the leader is still starting.
        if not self._has_met or self._failures < FAILURES_MAX:
            return ""
        return f"{leader} has ended"

    def _is_apart(self) -> bool:
        """Return True if the leader that listens is of another group than the part."""
        if self._has_joined:
            return self._apart >= FAILURES_MAX
        return self._is_adopted and self._apart >= JOIN_PROBES_MAX


async def _listens(host: str, port: int) -> bool | None:
    """Return whether a process listens; None if this agent cannot connect to any."""
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError) as error:
        return None if lacks_descriptors(error) else False
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return True
