"""A small disk of its own, which a test fills, frees and makes read-only."""

import errno
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class Disk:
    """A tmpfs mounted at `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"

    def fill(self) -> None:
        """Take the last page that is free."""
        with self._filler.open("ab", buffering=0) as filler:
            for piece in (bytes(1 << 16), bytes(1 << 12)):
                try:
                    while filler.write(piece) == len(piece):
                        pass
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise

    def free(self) -> None:
        """Give everything back that `fill` took."""
        self._filler.unlink(missing_ok=True)

    def is_read_only(self, yes: bool) -> None:
        """Let nothing be written, or again anything."""
        how = "remount,ro" if yes else "remount,rw"
        subprocess.run(["mount", "-o", how, self.folder], check=True)


@contextmanager
def a_disk(folder: Path, size_bytes: int) -> Iterator[Disk]:
    """Mount a disk of so many bytes at `folder`; skips the test where that is not allowed."""
    folder.mkdir()
    options = f"size={size_bytes},mode=755"
    try:
        made = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "none", folder], capture_output=True, text=True
        )
    except FileNotFoundError as error:
        pytest.skip(f"needs to mount a tmpfs: {error}")
    if made.returncode:
        pytest.skip(f"needs to mount a tmpfs: {made.stderr.strip()}")
    try:
        yield Disk(folder)
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
