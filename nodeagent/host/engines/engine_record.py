"""The record on disk of a running engine, by which a later agent finds it again."""

import asyncio
import logging
import signal
from contextlib import suppress
from pathlib import Path

import msgspec

from isochrone.service.files import is_locked, write_atomic
from isochrone.wire.peers.assignment import ReplicaSpec
from nodeagent.drivers.driver import EngineCommand
from nodeagent.host.engines.engine_folder import remove_folders
from nodeagent.host.engines.engine_log import LOG
from nodeagent.host.processes import (
    boot_id,
    group_that_writes,
    is_alive,
    kill_remaining,
    output_of,
    signal_group,
    start_time,
)

log = logging.getLogger(__name__)


class EngineRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `process.json`. `pid` is 0 until the process has started.

    `started` is the process's start time in clock ticks since boot, and `boot` the id of that boot:
    after a reboot the process id belongs to another process. `step_limit_s` is how long a step may
    take (decide/replicas/step_limit.py), 0 if that is not known. `was_ready` says that the engine
    has loaded its model.
    """

    pid: int = 0
    started: int = 0
    boot: str = ""
    command: EngineCommand
    spec: ReplicaSpec
    step_limit_s: float = 0.0
    was_ready: bool = False


def write_record(folder: Path, record: EngineRecord) -> None:
    """Write `process.json` into an engine's folder. Raises OSError."""
    write_atomic(folder / "process.json", msgspec.json.encode(record))


async def keep_record(folder: Path, record: EngineRecord) -> None:
    """Write `process.json` of an engine that runs, or log why that failed.

    The disk may have filled up during the start: no reason to end a good engine.
    """
    try:
        await asyncio.to_thread(write_record, folder, record)
    except OSError as error:
        fields = {"replica": record.spec.replica_id, "reason": str(error)}
        log.warning("cannot store what a later agent needs of an engine", extra={"fields": fields})


def surviving_engines(folder: Path) -> list[EngineRecord]:
    """Return the engines of an earlier agent that still run, by the records in their folders below
    `folder`; clean up after all others."""
    survivors: list[EngineRecord] = []
    for path in sorted(folder.glob("*/process.json")):
        try:
            record = msgspec.json.decode(path.read_bytes(), type=EngineRecord)
        except (OSError, ValueError) as error:  # one that is not UTF-8, too
            fields = {"path": str(path), "reason": str(error)}
            log.warning("cannot read an engine's record", extra={"fields": fields})
            # Its replica is unknown, and it would occupy its devices for ever.
            pid = group_that_writes(path.parent / LOG)
            signal_group(pid, start_time(pid), signal.SIGKILL)
            kill_remaining(path.parent / LOG)
            remove_folders(path.parent)
            continue
        if record.boot in ("", boot_id()):
            if not record.pid:
                pid = group_that_writes(path.parent / LOG)
                record = msgspec.structs.replace(record, pid=pid, started=start_time(pid))
            if not (record.pid and is_alive(record.pid, record.started)):
                # The group's leader is gone, but its children may still run.
                signal_group(record.pid, record.started, signal.SIGKILL)
                kill_remaining(path.parent / LOG)
            elif (owner := _other_owner(record.pid, path.parent / LOG)) is None:
                survivors.append(record)
                continue
            else:
                fields = {"replica": record.spec.replica_id, "owner": str(owner)}
                log.warning("not adopted: this state folder is a copy", extra={"fields": fields})
        remove_folders(path.parent)
    return survivors


def _other_owner(pid: int, engine_log: Path) -> Path | None:
    """Return the state folder of the running agent that owns the engine, None if this one does.

    The engine of a copied record writes to the log that was copied. A moved log is the same file,
    and without an agent at the original folder the copy takes the engine over.
    """
    with suppress(OSError):
        output = output_of(pid)
        if output.name == LOG and not output.samefile(engine_log):
            state = output.parents[2]
            return state if is_locked(state) else None
    return None
