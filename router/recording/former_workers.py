"""Usage that processes of this router left behind which it no longer has.

Each process keeps its usage in a state folder of its own, and sends what is left there when it
starts again. A router that starts with fewer processes, as on a machine with fewer cores, sends
that of the others from its main process.
"""

import logging
from itertools import chain, count
from pathlib import Path

from isochrone.wire.digits import parse_digits

log = logging.getLogger(__name__)


def adopt_usage(folder: Path, processes: int) -> int:
    """Move the usage of workers beyond `processes` into the main process's part of `folder`.

    Return how many files were moved. A file that cannot be moved stays for the next start.
    """
    moved = 0
    for former in sorted(folder.glob("worker-*")):
        number = parse_digits(former.name.removeprefix("worker-"))
        if number is None or number < processes:
            continue
        try:
            for path in (*(former / "usage").glob("*.usage"), *(former / "journal").glob("rows*")):
                _move(path, folder / path.parent.name, former.name)
                moved += 1
        except OSError as error:
            fields = {"folder": str(former), "reason": error.strerror}
            log.error("cannot take usage of a former process", extra={"fields": fields})
    if moved:
        log.info("took usage of former processes", extra={"fields": {"files": moved}})
    return moved


def _move(path: Path, folder: Path, former: str) -> None:
    """Move a file of the process `former` into a folder of the main process."""
    folder.mkdir(0o700, parents=True, exist_ok=True)
    # Batches have names of their own; each process numbers the files of its journal.
    name = path.name if path.suffix == ".usage" else f"{path.name}.{former}"
    path.rename(_unused(folder / name))


def _unused(path: Path) -> Path:
    """Return `path`, with a number if there is such a file."""
    others = (path.with_name(f"{path.name}-{number}") for number in count(1))
    return next(name for name in chain((path,), others) if not name.exists())
