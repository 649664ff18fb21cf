"""Usage that processes of this router left behind which it no longer has.

Each process keeps its usage in a state folder of its own, and sends what is left there when it
starts again. A router that starts with fewer processes, as on a machine with fewer cores, sends
that of the others from its main process.
"""

import logging
from itertools import chain, count
from pathlib import Path

log = logging.getLogger(__name__)


def adopt_usage(folder: Path, processes: int) -> int:
    """Move the usage of workers beyond `processes` into the main process's part of `folder`.

    Return how many files were moved. Raises OSError.
    """
    moved = 0
    for former in sorted(folder.glob("worker-*")):
        number = former.name.removeprefix("worker-")
        if not number.isdigit() or int(number) < processes:
            continue
        for part, pattern in (("usage", "*.usage"), ("journal", "rows*")):
            for path in sorted((former / part).glob(pattern)):
                (folder / part).mkdir(0o700, parents=True, exist_ok=True)
                # Batches have names of their own; each process numbers its journal's files.
                name = path.name if part == "usage" else f"{path.name}.{former.name}"
                path.rename(_unused(folder / part / name))
                moved += 1
    if moved:
        log.info("took usage of former processes", extra={"fields": {"files": moved}})
    return moved


def _unused(path: Path) -> Path:
    """Return `path`, with a number if there is such a file."""
    others = (path.with_name(f"{path.name}-{number}") for number in count(1))
    return next(name for name in chain((path,), others) if not name.exists())
