"""Stores the last assignment on disk, so that a node can restart without a scheduler."""

import logging
from pathlib import Path

import msgspec

from isochrone.service.files import read_snapshot, write_snapshot
from isochrone.wire.peers.assignment import Assignment

log = logging.getLogger(__name__)

_decoder = msgspec.msgpack.Decoder(Assignment)


class AssignmentFile:
    """One snapshot file. Its methods block: call them from a thread."""

    def __init__(self, state: Path) -> None:
        self._path = state / "assignment"

    def read(self) -> Assignment | None:
        """Return the stored assignment, or None if there is none that can be read."""
        payload = read_snapshot(self._path)
        try:
            return _decoder.decode(payload) if payload is not None else None
        except msgspec.DecodeError as error:
            # An intact file of an incompatible release must not keep the node from starting.
            fields = {"path": str(self._path), "error": str(error)}
            log.error("cannot use the stored assignment", extra={"fields": fields})
            return None

    def write(self, assignment: Assignment) -> None:
        """Store an assignment; return once it is on disk."""
        write_snapshot(self._path, msgspec.msgpack.encode(assignment))
