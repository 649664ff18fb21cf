"""The most memory that engines took with a model, kept on disk over restarts of the agent.

An engine that has just started, or is idle, takes less than it will. Without what earlier ones took
the scheduler would place replicas as if they kept to their plan.

Rule 1: a peak is that of one version of an engine, with one model and the same settings.
Rule 2: of more than PEAKS_MAX, those are dropped that were not measured for longest.
"""

import hashlib
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from isochrone.service.config import ConfigError
from isochrone.service.files import read_snapshot, write_snapshot
from isochrone.wire.peers.assignment import ReplicaSpec

log = logging.getLogger(__name__)

PEAKS_MAX: Final = 1000
GROWTH_MIN: Final = 1.01
"""A peak is stored again once it has grown by this factor: the scheduler plans in larger steps."""

_decoder = msgspec.json.Decoder(dict[str, int])


class MemoryPeaks:
    """The peaks of one node. Its methods block, and may be called from any thread."""

    def __init__(self, folder: Path, version_of: Callable[[str], str]) -> None:
        """Keep them in `folder`. `version_of` returns the installed version of a driver's engine,
        "" if it is unknown, and may block."""
        self._path = folder / "memory_peaks"
        self._version_of = version_of
        self._lock = threading.Lock()
        self._peaks: dict[str, int] | None = None

    def peak_bytes(self, spec: ReplicaSpec) -> int:
        """Return the most that such a replica took of one device; 0 if none was measured."""
        key = self._key(spec)
        with self._lock:
            return self._read().get(key, 0)

    def note(self, spec: ReplicaSpec, used_bytes: int) -> None:
        """Note what a replica takes of one device."""
        key = self._key(spec)
        with self._lock:
            peaks = self._read()
            known_bytes = peaks.pop(key, 0)
            peaks[key] = max(used_bytes, known_bytes)
            if used_bytes > GROWTH_MIN * known_bytes:
                self._store(dict(list(peaks.items())[-PEAKS_MAX:]))

    def _key(self, spec: ReplicaSpec) -> str:
        engine = spec.engine
        parts = (spec.artifact.digest, spec.context_tokens, engine, self._version_of(engine.driver))
        return hashlib.sha256(msgspec.json.encode(parts, order="deterministic")).hexdigest()

    def _read(self) -> dict[str, int]:
        if self._peaks is None:
            try:
                payload = read_snapshot(self._path)
                self._peaks = _decoder.decode(payload) if payload is not None else {}
            except (ConfigError, msgspec.DecodeError) as error:
                fields = {"path": str(self._path), "error": str(error)}
                log.error("cannot use the stored memory of engines", extra={"fields": fields})
                self._peaks = {}
        return self._peaks

    def _store(self, peaks: dict[str, int]) -> None:
        self._peaks = peaks
        try:
            write_snapshot(self._path, msgspec.json.encode(peaks))
        except OSError as error:
            # A full disk is no reason to end a good engine.
            fields = {"path": str(self._path), "error": str(error)}
            log.warning("cannot store the memory that an engine takes", extra={"fields": fields})
