"""Which contents of clients' files a folder holds."""

from pathlib import Path

from scheduler.decide.unnamed_contents import MARK


def stored_names(folder: Path) -> set[str]:
    """Return the names in a folder of files, without the mark of its cluster."""
    return {path.name for path in folder.iterdir() if not path.name.startswith(MARK)}
