"""A small disk (tmpfs) that a test can fill, free and make read-only."""

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
        """Fill the disk to its last page."""
        with self._filler.open("ab", buffering=0) as filler:
            for piece in (bytes(1 << 16), bytes(1 << 12)):
                try:
                    while filler.write(piece) == len(piece):
                        pass
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise

    def free(self) -> None:
        """Free the space that `fill` took."""
        self._filler.unlink(missing_ok=True)

    def set_read_only(self, read_only: bool) -> None:
        """Make the disk read-only or writable."""
        options = "remount,ro" if read_only else "remount,rw"
        subprocess.run(["mount", "-o", options, self.folder], check=True)


@contextmanager
def a_disk(folder: Path, size_bytes: int) -> Iterator[Disk]:
    """Mount a disk of `size_bytes` at `folder`; skip the test if mounting is not allowed."""
    folder.mkdir()
    options = f"size={size_bytes},mode=755"
    try:
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "none", folder], capture_output=True, text=True
        )
    except FileNotFoundError as error:
        pytest.skip(f"needs to mount a tmpfs: {error}")
    if mounted.returncode:
        pytest.skip(f"needs to mount a tmpfs: {mounted.stderr.strip()}")
    try:
        yield Disk(folder)
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
