"""The spool: batches of usage on disk until the store has them."""

import logging
import threading
from pathlib import Path

from isochrone.service import files
from isochrone.wire import codec
from isochrone.wire.peers.usage import Usage

log = logging.getLogger(__name__)

_USAGE = codec.decoder(Usage)


class UsageSpool:
    """Batches on disk, one file each, oldest first. When full, the oldest are dropped."""

    def __init__(self, folder: Path, bytes_max: int) -> None:
        """Keep at most `bytes_max` in `folder`."""
        self.bytes = 0
        self._folder = folder
        self._bytes_max = bytes_max
        self._sizes: dict[str, int] = {}
        self._rows: dict[str, int] = {}
        """Rows of the batches added since the start; those of older batches are read from disk."""
        # Adding and removing run in threads.
        self._lock = threading.RLock()

    def open(self) -> int:
        """Find the batches that an earlier run left; return how many."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for path in sorted(self._folder.glob("*.usage")):
            self._sizes[path.stem] = path.stat().st_size
        self.bytes = sum(self._sizes.values())
        return len(self._sizes)

    @property
    def batch_ids(self) -> list[str]:
        """The batches on disk, oldest first."""
        return list(self._sizes)

    def add(self, batch: Usage) -> int:
        """Write a batch; return how many rows of older batches were dropped for it."""
        data = codec.encode(batch)
        with self._lock:
            files.write_atomic(self._path(batch.batch_id), data)
            self._sizes[batch.batch_id] = len(data)
            self._rows[batch.batch_id] = len(batch.rows)
            self.bytes += len(data)
            dropped = 0
            while self.bytes > self._bytes_max and len(self._sizes) > 1:
                oldest = next(iter(self._sizes))
                if oldest in self._rows:
                    dropped += self._rows[oldest]
                elif (lost := self.read(oldest)) is not None:
                    dropped += len(lost.rows)
                self.remove(oldest)
            return dropped

    def read(self, batch_id: str) -> Usage | None:
        """Read a batch; return None if that fails or it is gone. A malformed file is removed."""
        path = self._path(batch_id)
        try:
            batch: Usage = codec.decode(path.read_bytes(), _USAGE)
        except (OSError, codec.MalformedFrame) as error:
            if batch_id not in self._sizes:
                return None  # the store confirmed it meanwhile
            fields = {"path": str(path), "error": str(error)}
            log.error("cannot read spooled usage", extra={"fields": fields})
            # Any other error, such as too many open files, may pass.
            if isinstance(error, codec.MalformedFrame | FileNotFoundError):
                self.remove(batch_id)
            return None
        return batch

    def remove(self, batch_id: str) -> None:
        """Remove a batch."""
        with self._lock:
            if batch_id in self._sizes:
                self.bytes -= self._sizes.pop(batch_id)
                self._rows.pop(batch_id, None)
                try:
                    self._path(batch_id).unlink(missing_ok=True)
                except OSError as error:
                    # The next run sends it again, and the store counts it once.
                    fields = {"batch": batch_id, "reason": error.strerror}
                    log.warning("cannot remove spooled usage", extra={"fields": fields})

    def _path(self, batch_id: str) -> Path:
        return self._folder / f"{batch_id}.usage"
