"""The last assignment on disk: a node that boots with no scheduler runs what it ran."""

import logging
from pathlib import Path

import msgspec

from isochrone.service.files import read_snapshot, write_snapshot
from isochrone.wire.assignment import Assignment

log = logging.getLogger(__name__)

_decoder = msgspec.msgpack.Decoder(Assignment)


class AssignmentFile:
    """One snapshot file. Blocking: called from threads."""

    def __init__(self, state: Path) -> None:
        self._path = state / "assignment"

    def read(self) -> Assignment | None:
        """Return the last assignment, or None where there is none that can be read."""
        payload = read_snapshot(self._path)
        try:
            return _decoder.decode(payload) if payload is not None else None
        except msgspec.DecodeError as error:
            # Whole, and of another release: a node that does not start would be worse off.
            fields = {"path": str(self._path), "error": str(error)}
            log.error("cannot use the stored assignment", extra={"fields": fields})
            return None

    def write(self, assignment: Assignment) -> None:
        """Keep an assignment; returns when it is on disk."""
        write_snapshot(self._path, msgspec.msgpack.encode(assignment))
