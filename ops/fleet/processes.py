"""Starts, watches and stops the demo's processes."""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

STOP_TIMEOUT_S: Final = 15.0
LOG_TAIL_LINES: Final = 15


class StartFailed(Exception):
    """The demo could not start or had an unexpected result; the message says why."""


class RunningProcess(Protocol):
    """What is used of a process that was started."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    def send_signal(self, signal: int) -> None: ...

    async def wait(self) -> int: ...


class Processes:
    """All processes of the demo, which are stopped in the reverse order of their start."""

    def __init__(self, logs: Path, root: Path) -> None:
        self._logs = logs
        self._root = root
        self._running: dict[str, RunningProcess] = {}

    def pid(self, name: str) -> int:
        """Return the process id of `name`."""
        return self._running[name].pid

    def names(self) -> list[str]:
        """Return the names of the processes, in the order of their start."""
        return list(self._running)

    def ended(self) -> list[str]:
        """Return the names of the processes that exited on their own."""
        return [name for name, process in self._running.items() if process.returncode is not None]

    async def start(
        self,
        name: str,
        arguments: Sequence[str],
        env: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        """Start `PREFIX python -m ARGUMENTS` with its output in `LOGS/NAME.log`."""
        with (self._logs / f"{name}.log").open("ab") as log:
            self._running[name] = await asyncio.create_subprocess_exec(
                *prefix,
                sys.executable,
                "-m",
                *arguments,
                cwd=self._root,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C must reach only this process, which then stops the others in order.
                start_new_session=True,
            )

    async def wait(
        self, name: str, is_ready: Callable[[], Awaitable[bool]], timeout_s: float
    ) -> None:
        """Wait until `is_ready`. Raises StartFailed with the end of the log of `name`."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not await is_ready():
            process = self._running[name]
            if process.returncode is not None:
                raise StartFailed(
                    f"cannot start {name}: it exited with {process.returncode}\n{self.tail(name)}"
                )
            if asyncio.get_running_loop().time() > deadline:
                raise StartFailed(
                    f"cannot start {name}: not ready after {timeout_s:g} s\n{self.tail(name)}"
                )
            await asyncio.sleep(0.05)

    def tail(self, name: str) -> str:
        """Return the last lines of a process's log, indented."""
        try:
            lines = (self._logs / f"{name}.log").read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return ""
        return "\n".join(f"    {line[:400]}" for line in lines[-LOG_TAIL_LINES:])

    async def stop(self, name: str) -> None:
        """Stop one process by SIGTERM; kill its group by SIGKILL after STOP_TIMEOUT_S."""
        process = self._running.pop(name)
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await process.wait()
            except TimeoutError:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()

    async def stop_all(self, on_stop: Callable[[str], None]) -> None:
        """Stop all processes, the last started first; those of one kind at the same time."""
        while self._running:
            kind = next(reversed(self._running)).partition("-")[0]
            names = [name for name in self._running if name.partition("-")[0] == kind]
            on_stop(", ".join(names))
            await asyncio.gather(*(self.stop(name) for name in names))
