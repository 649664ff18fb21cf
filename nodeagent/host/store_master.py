"""Runs the master of a PoP's store of KV (Mooncake's `mooncake_master`) as a process of this node.

It holds the names and places of blocks in memory, never blocks. Engines that lose it compute what
they cannot find, and register their memory again at the next one. It listens on loopback; other
nodes reach it through this agent (api/store_relay.py). Like an engine it outlives an agent that
fails, and the next agent finds it by its record.
"""

import asyncio
import logging
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from isochrone.service.files import write_atomic
from isochrone.wire.kv.kv_store import MEMBER_TTL_S
from nodeagent.host.confinement import EngineConfinement
from nodeagent.host.engines.engine_log import trim_log
from nodeagent.host.engines.engine_ports import free_port
from nodeagent.host.processes import (
    Child,
    boot_id,
    is_alive,
    kill_remaining,
    signal_group,
    spawn,
    start_time,
)

log = logging.getLogger(__name__)

PROGRAM: Final = "mooncake_master"
RESTART_S: Final = 1.0
RESTART_MAX_S: Final = 60.0
"""The pause before a master that exited is started again, twice as long after each further exit
within STEADY_S of its start, and at most."""
STEADY_S: Final = 60.0


def missing_master() -> str:
    """Return what the store's master lacks on this node, or ""."""
    if store_master_program():
        return ""
    return (
        f"{PROGRAM} is neither on the PATH of the agent nor in its environment: install Mooncake"
        " beside the engine"
    )


def store_master_program() -> str:
    """Return the path of the master's program, "" if it is not installed."""
    beside = str(Path(sys.executable).parent)
    return shutil.which(PROGRAM) or shutil.which(PROGRAM, path=beside) or ""


class _MasterRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `master.json`."""

    pid: int
    started: int
    boot: str
    port: int


class StoreMaster:
    """The master's process, if this node runs it."""

    def __init__(self, folder: Path, confinement: EngineConfinement | None = None) -> None:
        self._folder, self._confinement = folder, confinement
        self._path = folder / "master.json"
        self._log = folder / "master.log"
        self._child: Child | None = None
        self._record: _MasterRecord | None = None
        self._is_stopped = False
        """Whether it is known that no master runs, also none of an earlier agent."""
        self._pause_s = 0.0
        self._started_s = self._restart_at_s = 0.0

    @property
    def port(self) -> int:
        """Its port on loopback, 0 if it does not run."""
        record = self._record
        return record.port if record is not None and is_alive(record.pid, record.started) else 0

    async def ensure_runs(self, now_s: float) -> bool:
        """Start the master unless it runs, or must wait after it exited; say whether it started."""
        self._is_stopped = False
        if self._record is None:
            self._record = await asyncio.to_thread(self._survivor)
        if self.port:
            await asyncio.to_thread(trim_log, self._log)
            return False
        if self._record is not None:
            if self._child is not None:
                # Its other threads end a little after the one that /proc shows.
                await asyncio.to_thread(self._child.wait)
            self._note_exit(now_s)
        if now_s < self._restart_at_s:
            return False
        self._record = await asyncio.to_thread(self._start)
        self._started_s = now_s
        return True

    async def stop(self) -> None:
        """End the master, if it runs. Called each second on a node without one."""
        if self._is_stopped:
            return
        record = self._record or await asyncio.to_thread(self._survivor)
        self._record = None
        if record is not None:
            await asyncio.to_thread(self._kill, record)
        self._is_stopped = True

    def _note_exit(self, now_s: float) -> None:
        log.warning("the master of the KV store exited", extra={"fields": {"log": str(self._log)}})
        is_steady = now_s - self._started_s >= STEADY_S
        self._pause_s = 0.0 if is_steady else min(RESTART_MAX_S, max(RESTART_S, 2 * self._pause_s))
        self._restart_at_s = now_s + self._pause_s
        self._record = None
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _start(self) -> _MasterRecord:
        self._folder.mkdir(mode=0o700, exist_ok=True, parents=True)
        port = free_port([])
        arguments = (
            store_master_program() or PROGRAM,
            *("--rpc_address=127.0.0.1", f"--rpc_port={port}"),
            *("--metrics_host=127.0.0.1", f"--metrics_port={free_port([port])}"),
            f"--client_ttl={MEMBER_TTL_S}",
        )
        rules = self._confinement.rules(self._folder) if self._confinement else ()
        child = self._child = spawn(arguments, self._log, rules=rules)
        record = _MasterRecord(
            pid=child.pid, started=start_time(child.pid), boot=boot_id(), port=port
        )
        try:
            write_atomic(self._path, msgspec.json.encode(record))
        except BaseException:
            self._kill(record)
            raise
        fields = {"pid": child.pid, "port": port}
        log.info("the master of the KV store started", extra={"fields": fields})
        return record

    def _survivor(self) -> _MasterRecord | None:
        """Return the master that an earlier agent left running."""
        try:
            record = msgspec.json.decode(self._path.read_bytes(), type=_MasterRecord)
        except (OSError, msgspec.DecodeError):
            # One without a record would never be found again.
            kill_remaining(self._log)
            return None
        is_current = record.boot == boot_id() and is_alive(record.pid, record.started)
        return record if is_current else None

    def _kill(self, record: _MasterRecord) -> None:
        if record.boot == boot_id():
            signal_group(record.pid, record.started, signal.SIGKILL)
        kill_remaining(self._log)
        if self._child is not None:
            self._child.wait()
            self._child = None
        self._path.unlink(missing_ok=True)
