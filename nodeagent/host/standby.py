"""A spare engine process with its imports behind it: half of a cold start is over before it begins.

Rule 1: at most one spare waits, and only where an engine of its kind has been started before.
Rule 2: a spare that does not answer for itself (it is gone, its pipe is closed), or cannot be had,
is no loss: the engine is then started as usual.
Rule 3: a spare ends with its pipe, so that none outlives the agent.
"""

import logging
import os
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from nodeagent.drivers.driver import EngineCommand
from nodeagent.host.processes import Child, spawn

log = logging.getLogger(__name__)

_END_S: Final = 5.0


class StandbyProcess:
    """The spare, if there is one. Every call may block for a moment: call from a thread."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._spare: Child | None = None
        self._kind: tuple[str, ...] = ()

    def keep_for(self, command: EngineCommand) -> None:
        """Have a spare for the next engine like this one."""
        if not command.standby or (self._kind == command.standby and self._alive()):
            return
        self.end()
        self._kind = command.standby
        try:
            self._log.unlink(missing_ok=True)
            self._spare = spawn(command.standby, self._log, stdin=subprocess.PIPE)
        except OSError as error:
            log.warning("no spare", extra={"fields": {"reason": str(error)}})

    def hand_over(self, command: EngineCommand, engine_log: Path) -> Child | None:
        """Make the spare the engine of `command`; None where there is none that can be."""
        if not command.standby or self._kind != command.standby or not self._alive():
            return None
        spare, self._spare = self._spare, None
        assert spare is not None
        assert spare.stdin is not None
        order = {
            "arguments": command.arguments[len(command.standby) - 1 :],
            "environment": command.environment,
            "log": str(engine_log),
            "agent": os.getpid(),
        }
        with suppress(BrokenPipeError):
            spare.stdin.write(msgspec.json.encode(order) + b"\n")
            spare.stdin.close()
            return spare
        _reap(spare)
        return None

    def end(self) -> None:
        """Let the spare go."""
        spare, self._spare = self._spare, None
        if spare is not None:
            assert spare.stdin is not None
            with suppress(BrokenPipeError):
                spare.stdin.close()
            _reap(spare)

    def _alive(self) -> bool:
        return self._spare is not None and self._spare.poll() is None


def _reap(spare: Child) -> None:
    try:
        spare.wait(_END_S)
    except subprocess.TimeoutExpired:
        spare.kill()
        spare.wait()
