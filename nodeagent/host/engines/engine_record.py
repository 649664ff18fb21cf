"""What is on disk of a running engine, so that a later agent finds it again."""

from pathlib import Path

import msgspec

from isochrone.service.files import write_atomic
from isochrone.wire.peers.assignment import ReplicaSpec
from nodeagent.drivers.driver import EngineCommand


class EngineRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `process.json`. `pid` is 0 until the process has started.

    `started` is the process's start time in clock ticks since boot, and `boot` the id of that boot:
    after a reboot the process id belongs to another process.
    """

    pid: int = 0
    started: int = 0
    boot: str = ""
    command: EngineCommand
    spec: ReplicaSpec


def write_record(folder: Path, record: EngineRecord) -> None:
    """Write `process.json` into an engine's folder. Raises OSError."""
    write_atomic(folder / "process.json", msgspec.json.encode(record))
