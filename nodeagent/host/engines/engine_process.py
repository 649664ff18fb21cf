"""Starts engine processes, finds them again after a restart of the agent, and stops them.

Each engine has a folder in the agent's state with its config, socket, log and `process.json`: the
process id and start time, which together tell it from a later process with the same id. A first
version of the file is written before the process starts. If the agent crashes in between, it finds
the engine by the log that the engine writes.
"""

import asyncio
import logging
import os
import secrets
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec

from isochrone.service.files import write_atomic
from isochrone.service.network.shortage import lacks_descriptors
from isochrone.service.threads import wait_to_completion
from isochrone.wire.digits import parse_digits
from isochrone.wire.engines.engine import EngineStats
from isochrone.wire.http import headers
from isochrone.wire.ids import DeviceId
from isochrone.wire.peers.assignment import ReplicaSpec
from nodeagent.config import CANARY_TIMEOUT_S
from nodeagent.decide.replicas.sleep import SleepOutcome, WakeOutcome
from nodeagent.drivers import DRIVERS
from nodeagent.drivers.configured_command import ConfiguredCommand
from nodeagent.drivers.driver import (
    COMPLETIONS_PATH,
    DeviceMemory,
    EngineCommand,
    EngineLaunch,
    StorePorts,
    UnknownOption,
)
from nodeagent.drivers.handshake import Handshake
from nodeagent.drivers.request_body import with_fields
from nodeagent.host.confinement import EngineConfinement
from nodeagent.host.devices import CPU
from nodeagent.host.engines.canary import BAD_REQUEST, CANARIES, NO_TOKEN, OK, PROMPT_CANARY, Canary
from nodeagent.host.engines.engine_folder import new_folders, remove_folders, temporary_variables
from nodeagent.host.engines.engine_log import LOG
from nodeagent.host.engines.engine_ports import free_port, other_listener
from nodeagent.host.engines.engine_record import EngineRecord, surviving_engines, write_record
from nodeagent.host.engines.open_session import new_session, open_session, parsed, read_answer
from nodeagent.host.engines.standby import StandbyProcess
from nodeagent.host.kv_events import follow_kv_events
from nodeagent.host.processes import (
    Child,
    boot_id,
    ended_by,
    kill_remaining,
    lower_priority,
    signal_group,
    spawn,
    start_time,
)

log = logging.getLogger(__name__)

TERM_TIMEOUT_S: Final = 10.0
KILL_TIMEOUT_S: Final = 10.0
PIDFD_RETRY_S: Final = 1.0
PROBE_TIMEOUT_S: Final = 4.0
IGNORES_SIGTERM: Final = (
    "an engine does not end at SIGTERM and is killed; if its program is a wrapper, let it end, too"
)
NO_MEMORY: Final = 429  # the embedded engine's answer to a wake if there is no memory for its model


class EngineProcess:
    """A running engine process, started or adopted by this agent."""

    def __init__(
        self,
        record: EngineRecord,
        folder: Path,
        child: Child | None,
        on_release: Callable[[], object] = lambda: None,
        canary_timeout_s: float = CANARY_TIMEOUT_S,
    ) -> None:
        """`child` is None for an adopted process."""
        self.record = record
        self._canary_timeout_s = canary_timeout_s
        self._on_release = on_release
        self.exited = asyncio.Event()
        self.problem = ""
        """The reason why the engine cannot be used although it runs; "" if there is none."""
        self.canary_problem = ""
        self.lacks_descriptors = False
        """True if the last request failed because the agent had no free file descriptor."""
        self.log = folder / LOG
        self._owns_port = False
        self._folder, self._child, self.is_adopted = folder, child, child is None
        self.driver = DRIVERS[record.spec.engine.driver]
        self._http = new_session(record.command)
        self._exit_watcher = asyncio.create_task(self._watch_exit())
        self._kv_events = follow_kv_events(record.command.kv_events, is_new=child is not None)

    @property
    def pid(self) -> int:
        """The process id, which is also the id of the process group."""
        return self.record.pid

    @property
    def sends_kv(self) -> bool:
        """Whether engines of this kind send each other the KV of prompts."""
        return self.driver.kv_transfer

    @property
    def handshake(self) -> Handshake | None:
        """The engine's own protocol for sending KV; None if it has none."""
        return self.driver.handshake(self.record.spec)

    @property
    def _ready_path(self) -> str:
        return self.record.command.ready_path or self.driver.health_path

    @property
    def exit_reason(self) -> str:
        """The way in which the process ended, with the signal if one killed it."""
        return f"the engine {ended_by(self._child)}"

    @property
    def http(self) -> aiohttp.ClientSession:
        """Requests to the engine. Raises aiohttp.ClientConnectionError once it was released."""
        return open_session(self._http)

    def salted(self, path: str, body: bytes, salt: str, priority: str = "") -> bytes:
        """Return the body with the tenant's cache salt and its priority, from "0" to "100".

        The body is unchanged if the engine reads them from headers or not at all, and needs no
        translation of schemas. Raises ApiError 400.
        """
        command = self.record.command
        is_salted = path in self.driver.salted_paths
        if not is_salted and (command.guided is None or path != COMPLETIONS_PATH):
            return body
        given = parse_digits(priority, 3)
        rank = headers.PRIORITY_DEFAULT if given is None else given
        values = self.driver.body_fields(command, salt, rank) if is_salted else {}
        return with_fields(body, values, command, counts_tokens=self.driver.counts_tokens)

    async def is_ready(self) -> bool:
        """Return True if the engine reports to be healthy.

        A part of a replica without an HTTP server is ready once all parts have met.
        """
        command = self.record.command
        if not command.base_url:
            return not command.socket or await asyncio.to_thread(Path(command.socket).exists)
        status, _ = await self._request("GET", self._ready_path, PROBE_TIMEOUT_S)
        if status == 200 and command.port and not self._owns_port:
            # Once is enough: it keeps the port that it has.
            other = await asyncio.to_thread(other_listener, command.port, self.pid)
            if other:
                self.problem = f"port {command.port} of the engine is also used by {other}"
                return False
            self._owns_port = True
        return status == 200

    async def stats(self) -> EngineStats | None:
        """Return the engine's statistics, or None if it returns none that can be read."""
        status, body = await self._request("GET", self.driver.stats_path or self._ready_path)
        with suppress(ValueError, RecursionError):  # not valid JSON, or not UTF-8
            if status == OK:
                return self._kv_events.with_reach(await parsed(body, self.driver.read_stats))
        return None

    async def metrics(self) -> str:
        """Return the engine's Prometheus metrics page, or "" if it has none."""
        path = self.record.command.metrics_path or self.driver.metrics_path
        status, body = await self._request("GET", path) if path else (BAD_REQUEST, b"")
        return body.decode(errors="replace") if status == 200 else ""

    async def canary(self, kind: str) -> bool:
        """Send the smallest request for the kind of model; return True if it is answered.

        `kind` is what the engine reports, which counts if the assignment does not name it. The
        request waits in the engine's queue like any other. `canary_problem` then says what is wrong
        with the answer. `problem` says the same if its status is one of `NO_TOKEN`.
        """
        canary = CANARIES.get(self.record.spec.kind or kind, CANARIES["chat"])
        status, self.canary_problem = await self._send_canary(canary)
        if status == BAD_REQUEST and canary is CANARIES["chat"]:
            _, problem = await self._send_canary(PROMPT_CANARY)
            self.canary_problem = problem and self.canary_problem
        self.problem = self.canary_problem if status in NO_TOKEN else ""
        return not self.canary_problem

    async def _send_canary(self, canary: Canary) -> tuple[int, str]:
        """Return the status, 0 if there is no answer, and what is wrong with the answer, or ""."""
        command = self.record.command
        if not canary.body and command.ready_path:
            canary = Canary(command.ready_path, {}, "")
        name = command.model_name or self.record.spec.name
        body = {"model": name, **canary.body} if canary.body else None
        if body is not None and self.handshake is not None:
            body |= self.handshake.canary_fields
        method, timeout_s = "POST" if body else "GET", self._canary_timeout_s
        status, answer = await self._request(method, canary.path, timeout_s, body)
        if not status:
            return 0, f"a test request was not answered within {timeout_s:g} s"
        return status, canary.problem(status, answer)

    async def fall_asleep(self, timeout_s: float) -> SleepOutcome:
        """Have the engine drop its model, in at most `timeout_s`."""
        status = await self._order(self.driver.sleep_path, timeout_s)
        if 400 <= status < 500:
            return SleepOutcome.REFUSED
        return SleepOutcome.ASLEEP if status == OK else SleepOutcome.FAILED

    async def wake_up(self, timeout_s: float) -> WakeOutcome:
        """Have the engine load its model again, in at most `timeout_s`."""
        outcomes = {OK: WakeOutcome.AWAKE, NO_MEMORY: WakeOutcome.NO_MEMORY}
        status = await self._order(self.driver.wake_path, timeout_s)
        return outcomes.get(status, WakeOutcome.FAILED)

    async def _order(self, path: str, timeout_s: float) -> int:
        return (await self._request("POST", path, timeout_s))[0] if path else BAD_REQUEST

    async def is_asleep(self) -> bool | None:
        """Return whether the engine says that its model is not in memory; None without a word."""
        path = self.driver.is_asleep_path
        status, body = await self._request("GET", path) if path else (BAD_REQUEST, b"")
        if not status or status >= 500:
            return None
        return status == OK and body.replace(b" ", b"") == b'{"is_sleeping":true}'

    async def _request(
        self, method: str, path: str, timeout_s: float = PROBE_TIMEOUT_S, body: Any = None
    ) -> tuple[int, bytes]:
        """Return status and body of an answer, or (0, b"") if it is not complete in time."""
        self.lacks_descriptors = False
        try:
            async with asyncio.timeout(timeout_s):
                async with self.http.request(method, path, json=body) as response:
                    return response.status, await read_answer(response)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            self.lacks_descriptors = lacks_descriptors(error)
            return 0, b""

    async def stop(self, *, kill: bool = False) -> None:
        """End the process group: by SIGTERM, and by SIGKILL later; at once with `kill`."""
        for number in (signal.SIGKILL,) if kill else (signal.SIGTERM, signal.SIGKILL):
            signal_group(self.pid, self.record.started, number)
            timeout_s = TERM_TIMEOUT_S if number is signal.SIGTERM else KILL_TIMEOUT_S
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self.exited.wait()
            if number is signal.SIGTERM and not self.exited.is_set():
                extra = {"fields": {"replica": self.record.spec.replica_id, "after_s": timeout_s}}
                log.warning(IGNORES_SIGTERM, extra=extra)
        await self.release()
        # Children that left the group still hold memory and devices.
        await asyncio.to_thread(kill_remaining, self.log, self.pid)
        await asyncio.to_thread(remove_folders, self._folder)

    async def release(self) -> None:
        """Stop watching the process and leave it running."""
        self._on_release()
        self._exit_watcher.cancel()
        await self._kv_events.stop()
        await self._http.close()

    async def _watch_exit(self) -> None:
        loop, exited = asyncio.get_running_loop(), asyncio.Event()
        descriptor = -1
        while descriptor < 0:
            try:
                descriptor = os.pidfd_open(self.record.pid)
            except ProcessLookupError:
                self.exited.set()
                return
            except OSError:  # no free descriptor
                await asyncio.sleep(PIDFD_RETRY_S)
        loop.add_reader(descriptor, exited.set)
        try:
            await exited.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)
        if self._child is not None:
            self._child.poll()
        self.exited.set()


class EngineProcesses:
    """Starts, adopts and finds engine processes. Their folders are below `folder`."""

    def __init__(
        self,
        folder: Path,
        threads: int,
        *,
        standby: bool = False,
        device_memory: Callable[[Sequence[DeviceId]], DeviceMemory | None] = lambda _: None,
        host: str = "127.0.0.1",
        commands: Mapping[str, ConfiguredCommand] | None = None,
        canary_timeout_s: float = CANARY_TIMEOUT_S,
        store_ports: StorePorts | None = None,
        confinement: EngineConfinement | None = None,
    ) -> None:
        """`device_memory` returns the memory of a replica's devices; None if it is unknown.

        Engines of other nodes reach this node's at `host`. `commands` are the operator's own
        servers, by name.
        """
        self._commands = commands or {}
        self._host, self._store_ports = host, store_ports
        self._confinement = confinement
        self._canary_timeout_s = canary_timeout_s
        self._folder = folder
        self._device_memory = device_memory
        self._threads = threads
        self._standby = StandbyProcess(folder / "standby.log") if standby else None
        self._spawn_lock = asyncio.Lock()  # the spare can become only one engine
        self._ports: dict[str, list[int]] = {}
        """By replica. An engine begins to listen long after it was given its ports."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    async def start(self, spec: ReplicaSpec, artifact_path: Path) -> EngineProcess:
        """Start an engine for `spec`. Raises OSError or UnknownOption.

        If the caller is cancelled meanwhile, the new engine is killed.
        """
        starting = asyncio.create_task(self._start(spec, artifact_path))
        try:
            return await wait_to_completion(starting)
        except asyncio.CancelledError:
            with suppress(OSError, UnknownOption):
                await wait_to_completion(starting.result().stop(kill=True))
            raise

    async def _start(self, spec: ReplicaSpec, artifact_path: Path) -> EngineProcess:
        folder = self._folder / spec.replica_id
        on_release = partial(self._ports.pop, spec.replica_id, [])
        async with new_folders(folder, on_release) as temporary:
            taken = [port for ports in self._ports.values() for port in ports]
            port = free_port(taken)
            self._ports[spec.replica_id] = [port, transfer_port := free_port([*taken, port])]
            launch = EngineLaunch(
                spec=spec,
                model_path=artifact_path,
                folder=folder,
                port=port,
                host=self._host,
                transfer_port=transfer_port,
                store_ports=self._store_ports,
                start_id=secrets.token_hex(4),
                threads=self._threads,
                memory=await asyncio.to_thread(self._device_memory, spec.device_ids),
                commands=self._commands,
            )
            command = await asyncio.to_thread(DRIVERS[spec.engine.driver].command, launch)
            environment = {**temporary_variables(temporary), **command.environment}
            command = msgspec.structs.replace(command, environment=environment)
            for name, data in command.files.items():
                await asyncio.to_thread(write_atomic, folder / name, data)
            if command.model_link:
                (folder / command.model_link).symlink_to(artifact_path)
            unstarted = EngineRecord(command=command, spec=spec, boot=boot_id())
            await asyncio.to_thread(write_record, folder, unstarted)
            async with self._spawn_lock:
                child = await asyncio.to_thread(self._spawn, command, folder / LOG)
            try:
                if spec.device_ids == (CPU,):
                    await asyncio.to_thread(lower_priority, child.pid)
                started = start_time(child.pid)
                record = msgspec.structs.replace(unstarted, pid=child.pid, started=started)
                await asyncio.to_thread(write_record, folder, record)
            except BaseException:
                # An engine without a record, for example on a full disk, might not be found again.
                # No one has waited for it, so its number is still its own.
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                await asyncio.to_thread(child.wait)
                raise
            return EngineProcess(record, folder, child, on_release, self._canary_timeout_s)

    def _spawn(self, command: EngineCommand, log: Path) -> Child:
        rules = self._confinement.rules(log.parent) if self._confinement else ()
        spare = self._standby.take_for(command, log, rules) if self._standby else None
        folder = str(log.parent) if command.model_link else None
        child = spare or spawn(
            command.arguments, log, command.environment, folder=folder, rules=rules
        )
        if self._standby:
            self._standby.prepare_for(command)
        return child

    async def close(self) -> None:
        """End the standby process. Engines keep running."""
        if self._standby is not None:
            await asyncio.to_thread(self._standby.stop)

    def survivors(self) -> list[EngineRecord]:
        """Return the engines of an earlier agent that still run; clean up after all others."""
        return surviving_engines(self._folder)

    def adopt(self, record: EngineRecord) -> EngineProcess:
        """Take over a running engine of an earlier agent."""
        replica_id = record.spec.replica_id
        address = record.command.kv_address
        self._ports[replica_id] = [record.command.port, address.port if address else 0]
        on_release = partial(self._ports.pop, replica_id, [])
        folder = self._folder / replica_id
        return EngineProcess(record, folder, None, on_release, self._canary_timeout_s)
