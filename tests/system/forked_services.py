"""The services of a fleet, forked from processes that have imported them.

A service imports for most of the processor time of its start, and tests start hundreds.
"""

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Final

from ops.fleet.processes import Processes
from tests.nursery import Forked, fork_service

READ_BEFORE_IMPORTS: Final = frozenset({"LD_PRELOAD", "PYTHONPATH", "PYTHONSAFEPATH"})


class ForkedServices(Processes):
    """Processes of services.

    With a command before it, or an environment that changes what is loaded, a service is started
    as users start it.
    """

    async def start(
        self,
        name: str,
        arguments: Sequence[str],
        env: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        """Start `PREFIX python -m ARGUMENTS` with its output in `LOGS/NAME.log`."""
        program, *rest = arguments
        if prefix or READ_BEFORE_IMPORTS.intersection(env or {}):
            await super().start(name, arguments, env, prefix)
            return
        with (self._logs / f"{name}.log").open("ab") as log:
            forked = fork_service(program, rest, {**os.environ, **(env or {})}, log.fileno())
        self._running[name] = ForkedService(forked)


class ForkedService:
    """A forked service, with what `asyncio.subprocess.Process` has."""

    def __init__(self, forked: Forked) -> None:
        self._forked = forked
        self.pid = forked.pid

    @property
    def returncode(self) -> int | None:
        return self._forked.poll()

    def send_signal(self, signal: int) -> None:
        self._forked.send_signal(signal)

    async def wait(self) -> int:
        return await asyncio.to_thread(self._forked.wait)
