"""Engine processes: each in a group of its own, known again after our crash, never doubled.

Each has a folder below the state: its config, socket, log, and `process.json` with its pid and that
process's start time, by which a pid used again is told from ours. That is written before there is a
process, too: one whose pid was not noted any more is known by the log that it writes.
"""

import asyncio
import logging
import os
import shutil
import signal
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec

from isochrone.service.files import write_atomic
from isochrone.service.http_responses import read_response
from isochrone.service.threads import wait_to_completion
from isochrone.wire.assignment import ReplicaSpec
from isochrone.wire.engine import EngineStats
from nodeagent.drivers import DRIVERS
from nodeagent.drivers.driver import Command, Launch, UnknownOption, with_salt
from nodeagent.host.processes import (
    Child,
    boot_id,
    group_that_writes,
    is_alive,
    signal_group,
    spawn,
    start_time,
)
from nodeagent.host.standby import Standby

log = logging.getLogger(__name__)

LOG: Final = "engine.log"
LOG_BYTES_MAX: Final = 16 * 1024 * 1024
TAIL_BYTES: Final = 4000
TERM_TIMEOUT_S: Final = 10.0
PROBE_TIMEOUT_S: Final = 4.0
CANARY_TIMEOUT_S: Final = 20.0
ANSWER_BYTES_MAX: Final = 4 * 1024 * 1024
CANARIES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "1"}], "max_tokens": 1, "temperature": 0},
    ),
    "embedding": ("/v1/embeddings", {"input": "1"}),
    "rerank": ("/v1/rerank", {"query": "1", "documents": ["1"]}),
}
"""The least that a model of each kind can be asked for."""


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept on disk of an engine that runs, or is about to start: then its pid is 0."""

    pid: int = 0
    started: int = 0
    boot: str = ""
    """Which of the machine's lives it is of: in another, its pid is somebody else's."""
    command: Command
    spec: ReplicaSpec


class Engine:
    """One running engine process, ours or adopted."""

    def __init__(self, started: Started, folder: Path, child: Child | None) -> None:
        self.started = started
        self.exited = asyncio.Event()
        self.log = folder / LOG
        self._folder = folder
        self._child = child
        self._driver = DRIVERS[started.spec.engine.driver]
        connector = (
            aiohttp.UnixConnector(started.command.socket, limit=0)
            if started.command.socket
            else aiohttp.TCPConnector(limit=0)
        )
        self.http = aiohttp.ClientSession(
            started.command.base_url or None,
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=PROBE_TIMEOUT_S),
            auto_decompress=False,
        )
        self._watcher = asyncio.create_task(self._watch_exit())

    @property
    def pid(self) -> int:
        """Return the process id, which is also its group's."""
        return self.started.pid

    @property
    def resumes(self) -> str:
        """Return what of a broken answer this engine goes on from; empty for nothing."""
        return self._driver.resumes

    def salted(self, path: str, body: bytes, salt: str) -> bytes:
        """Return a request as this engine takes it that keeps tenants' caches apart."""
        return with_salt(body, salt) if salt and path in self._driver.salted else body

    async def is_ready(self) -> bool:
        """Say whether the engine answers that it is well; a part without a door, that it met."""
        command = self.started.command
        if not command.base_url:
            return not command.socket or await asyncio.to_thread(Path(command.socket).exists)
        status, _ = await self._ask("GET", self._driver.health_path, PROBE_TIMEOUT_S)
        return status == 200

    async def stats(self) -> EngineStats | None:
        """Return the engine's account of itself, or None where it gives none that can be read."""
        status, body = await self._ask("GET", self._driver.stats_path, PROBE_TIMEOUT_S)
        try:
            return self._driver.read_stats(body) if status == 200 else None
        except msgspec.DecodeError:
            return None

    async def metrics(self) -> str:
        """Return the engine's page of metrics; "" where it has none."""
        status, body = await self._ask("GET", self._driver.metrics_path, PROBE_TIMEOUT_S)
        return body.decode(errors="replace") if status == 200 else ""

    async def canary(self, kind: str) -> bool:
        """Ask a model of this kind for the least, by the same queue as all; say whether it came."""
        path, fields = CANARIES.get(kind, CANARIES["chat"])
        body = {"model": self.started.spec.name, **fields}
        status, _ = await self._ask("POST", path, CANARY_TIMEOUT_S, body)
        # Refused for want of room is no sickness.
        return status in (200, 429)

    async def _ask(
        self, method: str, path: str, timeout_s: float, body: Any = None
    ) -> tuple[int, bytes]:
        """Return the status and body of an answer that comes whole and in time; else status 0."""
        try:
            async with asyncio.timeout(timeout_s):
                async with self.http.request(method, path, json=body) as response:
                    return response.status, await read_response(response, ANSWER_BYTES_MAX)
        except (aiohttp.ClientError, OSError, TimeoutError):
            return 0, b""

    async def stop(self, *, kill: bool = False) -> None:
        """End the whole process group: SIGTERM, then SIGKILL after TERM_TIMEOUT_S."""
        if not kill:
            signal_group(self.pid, self.started.started, signal.SIGTERM)
            with suppress(TimeoutError):
                async with asyncio.timeout(TERM_TIMEOUT_S):
                    await self.exited.wait()
        signal_group(self.pid, self.started.started, signal.SIGKILL)
        with suppress(TimeoutError):
            async with asyncio.timeout(TERM_TIMEOUT_S):
                await self.exited.wait()
        await self.release()
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def release(self) -> None:
        """Let go of the process without ending it."""
        self._watcher.cancel()
        await self.http.close()

    async def _watch_exit(self) -> None:
        loop = asyncio.get_running_loop()
        gone = asyncio.Event()
        try:
            descriptor = os.pidfd_open(self.started.pid)
        except ProcessLookupError:
            self.exited.set()
            return
        loop.add_reader(descriptor, gone.set)
        try:
            await gone.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)
        if self._child is not None:
            self._child.poll()
        self.exited.set()


class Engines:
    """Starts, finds again and ends engine processes. Folders lie below `state`."""

    def __init__(self, state: Path, threads: int, *, standby: bool = False) -> None:
        self._folder = state
        self._threads = threads
        self._standby = Standby(state / "standby.log") if standby else None
        self._starting = asyncio.Lock()
        """One spare cannot become two engines."""
        state.mkdir(parents=True, exist_ok=True, mode=0o700)

    async def start(self, spec: ReplicaSpec, artifact: Path) -> Engine:
        """Start an engine for `spec`, or none where cancelled; raises OSError or UnknownOption."""
        starting = asyncio.create_task(self._start(spec, artifact))
        try:
            return await wait_to_completion(starting)
        except asyncio.CancelledError:
            with suppress(OSError, UnknownOption):
                await wait_to_completion(starting.result().stop(kill=True))
            raise

    async def _start(self, spec: ReplicaSpec, artifact: Path) -> Engine:
        folder = self._folder / spec.replica_id
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        launch = Launch(
            spec=spec,
            model_path=artifact,
            folder=folder,
            port=_free_port(),
            threads=self._threads,
        )
        command = DRIVERS[spec.engine.driver].command(launch)
        for name, data in command.files.items():
            await asyncio.to_thread(write_atomic, folder / name, data)
        about_to = Started(command=command, spec=spec, boot=boot_id())
        await asyncio.to_thread(_note, folder, about_to)
        async with self._starting:
            child = await asyncio.to_thread(self._run, command, folder / LOG)
        started = msgspec.structs.replace(about_to, pid=child.pid, started=start_time(child.pid))
        try:
            await asyncio.to_thread(_note, folder, started)
        except BaseException:
            # A full disk: what a later life might not find again must not run.
            signal_group(started.pid, started.started, signal.SIGKILL)
            await asyncio.to_thread(child.wait)
            raise
        return Engine(started, folder, child)

    def _run(self, command: Command, log: Path) -> Child:
        spare = self._standby.hand_over(command, log) if self._standby else None
        child = spare or spawn(command.arguments, log, command.environment)
        if self._standby:
            self._standby.keep_for(command)
        return child

    async def close(self) -> None:
        """Let the spare go; engines run on."""
        if self._standby is not None:
            await asyncio.to_thread(self._standby.end)

    def survivors(self) -> list[Started]:
        """Return the engines of an earlier life of this agent that still run."""
        found = []
        for path in sorted(self._folder.glob("*/process.json")):
            try:
                started = msgspec.json.decode(path.read_bytes(), type=Started)
            except (OSError, msgspec.DecodeError) as error:
                log.warning("unreadable", extra={"fields": {"path": str(path), "why": str(error)}})
                # Whose it is nobody can say: it would hold its devices for ever.
                pid = group_that_writes(path.parent / LOG)
                signal_group(pid, start_time(pid), signal.SIGKILL)
                shutil.rmtree(path.parent, ignore_errors=True)
                continue
            if started.boot not in ("", boot_id()):
                shutil.rmtree(path.parent, ignore_errors=True)
                continue
            if not started.pid:
                pid = group_that_writes(path.parent / LOG)
                started = msgspec.structs.replace(started, pid=pid, started=start_time(pid))
            if started.pid and is_alive(started.pid, started.started):
                found.append(started)
            else:
                # The leader is gone, but what it started may not be.
                signal_group(started.pid, started.started, signal.SIGKILL)
                shutil.rmtree(path.parent, ignore_errors=True)
        return found

    def adopt(self, started: Started) -> Engine:
        """Take up a running engine of an earlier life."""
        return Engine(started, self._folder / started.spec.replica_id, None)


def _note(folder: Path, started: Started) -> None:
    write_atomic(folder / "process.json", msgspec.json.encode(started))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def last_line(log: Path) -> str:
    """Return the last line that an engine wrote, to say why it ended."""
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        for line in reversed(file.read(TAIL_BYTES).splitlines()):
            if line.strip():
                return line.decode(errors="replace")[:300]
    return ""


def trim_log(path: Path) -> None:
    """Keep the last half of a log that has grown past LOG_BYTES_MAX."""
    with suppress(OSError):
        if path.stat().st_size > LOG_BYTES_MAX:
            with path.open("r+b") as file:
                file.seek(-LOG_BYTES_MAX // 2, os.SEEK_END)
                kept = file.read()
                file.seek(0)
                file.write(kept)
                file.truncate()
