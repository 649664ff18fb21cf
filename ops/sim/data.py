"""Read traces and round trips from a folder of public data, or from the small extract here.

The folder is `--data`, else `$ISOCHRONE_DATA`, else `../shared/data` from the repository's root.
"""

import csv
import gzip
import io
import os
from argparse import ArgumentTypeError
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
EXTRACT: Final = Path(__file__).parent / "extract"


class NoData(Exception):
    """The data that a simulation needs are missing."""


def folder(named: str | None = None) -> Path:
    """Return the folder of public data, or raise NoData."""
    path = Path(named or os.environ.get("ISOCHRONE_DATA") or ROOT.parent / "shared" / "data")
    if not (path / "traces").is_dir():
        raise NoData(
            f"cannot simulate: {path} has no traces/; name the folder of public data with --data "
            "or ISOCHRONE_DATA (its contents: ops/sim/choice.md)"
        )
    return path


def folder_argument(named: str) -> Path:
    """Return `folder(named)` for the `type` of an argparse argument, with a one-line error."""
    try:
        return folder(named)
    except NoData as error:
        raise ArgumentTypeError(str(error)) from error


def lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file, compressed or not."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise NoData(f"cannot read {path}: {error.strerror}") from error
    text = gzip.decompress(raw) if path.suffix == ".gz" else raw
    yield from io.StringIO(text.decode())


def rows(path: Path) -> Iterator[dict[str, str]]:
    """Yield the rows of a CSV file with a header line."""
    yield from csv.DictReader(lines(path))
