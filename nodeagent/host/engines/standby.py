"""A spare engine process that has done its imports, which halves a cold start.

Rule 1: at most one spare waits, and only after an engine of its kind has been started.
Rule 2: without a usable spare (none could start, it exited, its pipe closed) an engine starts as
usual.
Rule 3: a spare exits when its pipe closes, so that none outlives the agent.
"""

import logging
import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from isochrone.service.trust.landlock import FileRule
from nodeagent.drivers.driver import EngineCommand
from nodeagent.host.processes import LOG_VARIABLE, Child, spawn

log = logging.getLogger(__name__)

EXIT_TIMEOUT_S: Final = 5.0
ONE_THREAD: Final = {"OPENBLAS_NUM_THREADS": "1"}
"""Keeps numpy from starting threads: a process confines itself while it has only one."""


class StandbyProcess:
    """Holds the spare, if there is one. Its methods may block: call them from a thread."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._spare: Child | None = None
        self._kind: tuple[str, ...] = ()

    def prepare_for(self, command: EngineCommand) -> None:
        """Start a spare for the next engine with the same standby command."""
        if not command.standby or (self._kind == command.standby and self._is_alive()):
            return
        self.stop()
        self._kind = command.standby
        try:
            self._log.unlink(missing_ok=True)
            self._spare = spawn(command.standby, self._log, ONE_THREAD, stdin=subprocess.PIPE)
        except OSError as error:
            log.warning("cannot start a standby process", extra={"fields": {"reason": str(error)}})

    def take_for(
        self, command: EngineCommand, engine_log: Path, rules: Sequence[FileRule] = ()
    ) -> Child | None:
        """Turn the spare into the engine of `command`, confined to `rules` if there are any.

        Return None if there is no usable spare.
        """
        if not command.standby or self._kind != command.standby or not self._is_alive():
            return None
        if rules and not self._has_one_thread():
            # Its other threads would stay unconfined.
            log.warning("cannot use the standby process: it has several threads")
            return None
        spare, self._spare = self._spare, None
        assert spare is not None
        assert spare.stdin is not None
        instructions = {
            "arguments": command.arguments[len(command.standby) - 1 :],
            "environment": {**command.environment, LOG_VARIABLE: str(engine_log.resolve())},
            "log": str(engine_log),
            "agent": os.getpid(),
            "rules": rules,
        }
        with suppress(BrokenPipeError):
            spare.stdin.write(msgspec.json.encode(instructions) + b"\n")
            spare.stdin.close()
            return spare
        _wait_or_kill(spare)
        return None

    def stop(self) -> None:
        """End the spare, if there is one."""
        spare, self._spare = self._spare, None
        if spare is not None:
            assert spare.stdin is not None
            with suppress(BrokenPipeError):
                spare.stdin.close()
            _wait_or_kill(spare)

    def _has_one_thread(self) -> bool:
        assert self._spare is not None
        return len(list(Path(f"/proc/{self._spare.pid}/task").iterdir())) == 1

    def _is_alive(self) -> bool:
        return self._spare is not None and self._spare.poll() is None


def _wait_or_kill(spare: Child) -> None:
    try:
        spare.wait(EXIT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        spare.kill()
        spare.wait()
