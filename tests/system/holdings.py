"""What the processes of a fleet hold: memory and descriptors."""

from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ops.fleet.processes import Processes


class Holdings(NamedTuple):
    """What one process holds."""

    memory_kib: int
    """Resident memory."""

    descriptors: int


def holdings_of(processes: Processes) -> dict[tuple[str, int], Holdings]:
    """Return what each running process holds, by its name and pid."""
    found = {}
    for name in processes.names():
        pid = processes.pid(name)
        folder = Path(f"/proc/{pid}")
        with suppress(OSError):
            for line in (folder / "status").read_text().splitlines():
                if line.startswith("VmRSS:"):
                    descriptors = sum(1 for _ in (folder / "fd").iterdir())
                    found[name, pid] = Holdings(int(line.split()[1]), descriptors)
    return found
