"""Slow disks for the processes of a fleet, each set while it runs (`slow_disk.c`)."""

import struct
import subprocess
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from tests.system.harness import Fleet

SOURCE: Final = Path(__file__).with_suffix(".c")
CONTROL: Final = struct.Struct("=3q")


class DiskWaits(NamedTuple):
    """How many slow operations the event loop's thread waited for, and all threads."""

    event_loop: int
    all: int


class SlowDisks:
    """Sets the speed of the disk that holds a part's state."""

    def __init__(self, fleet: Fleet) -> None:
        """Prepare a fleet that has not been started; skip the test without a C compiler."""
        self._folder = fleet.folder
        self._library = fleet.folder / "slow_disk.so"
        try:
            subprocess.run(
                ["cc", "-shared", "-fPIC", "-O1", "-o", self._library, SOURCE, "-ldl"],
                check=True, capture_output=True,
            )  # fmt: skip
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"needs a C compiler: {error}")

    def environment(self, part: str) -> dict[str, str]:
        """Return the environment in which a part's disk can be made slow."""
        self.set(part, 0.0)
        return {
            "LD_PRELOAD": str(self._library),
            "SLOW_DISK": str(self._control(part)),
            "SLOW_DISK_FOLDER": str(self._folder / part),
        }

    def set(self, part: str, delay_s: float) -> None:
        """Make each operation on the disk take so much longer; forget how many were waited for."""
        path = self._control(part)
        # In place: the process has it mapped.
        with path.open("r+b" if path.exists() else "wb") as file:
            file.write(CONTROL.pack(int(delay_s * 1e9), 0, 0))

    def waits(self, part: str) -> DiskWaits:
        """Return for how many slow operations a part has waited."""
        return DiskWaits(*CONTROL.unpack(self._control(part).read_bytes())[1:])

    def _control(self, part: str) -> Path:
        return self._folder / f"{part}.disk"
