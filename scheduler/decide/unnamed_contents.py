"""Decides which contents of clients' files are deleted because no row names them. Pure.

A scheduler stores the contents first, then the row. One that dies in between leaves contents that
no client can read or delete.

Two clusters that use the same folder do not know each other's rows. So each leaves a mark there,
and deletes nothing where it sees another's, nor before its own mark is as old as what it deletes.
"""

import re
from collections.abc import Iterable, Sequence, Set
from typing import Final, NamedTuple

AGE_MIN_S: Final = 7 * 86_400.0
"""Younger contents stay: their row may still come. The slowest upload takes hours, and some stores
date an object by the beginning of its upload."""

FOREIGN_MIN: Final = 100
"""More contents without a row, if they are also most of all contents, suggest that the database is
not complete: none is deleted then."""

MARK: Final = "isochrone-cluster-"
"""How the name of a cluster's mark begins; its id follows."""

_ID: Final = re.compile(r"(?:file|adapter)-[0-9a-f]{24}")
"""The form of the ids that schedulers make."""


class StoredContents(NamedTuple):
    """The contents of one file in the folder or bucket, last modified at a Unix time."""

    file_id: str
    modified_at: float


class ListingRefused(Exception):
    """The scheduler may not list what is there."""


class MostlyUnnamed(Exception):
    """Most contents have no row: nothing may be deleted."""


class MarkedByOthers(Exception):
    """Another cluster uses the same folder: nothing may be deleted."""


def own_mark(marks: Iterable[StoredContents], cluster_id: str) -> StoredContents | None:
    """Return this cluster's mark, of those in a folder; None if it has left none yet.

    Raises MarkedByOthers.
    """
    own = None
    for mark in marks:
        if mark.file_id != MARK + cluster_id:
            raise MarkedByOthers(
                f"cannot delete files that no row names: {mark.file_id} says that another cluster"
                " uses the same folder or bucket. Give each its own, or its own prefix; if that"
                f" cluster is no more, delete {mark.file_id}"
            )
        own = mark
    return own


def is_old(contents: StoredContents, now: float) -> bool:
    """Return whether contents are old enough at the Unix time `now`."""
    return now - contents.modified_at >= AGE_MIN_S


def old_contents(listed: Iterable[StoredContents], now: float) -> list[str]:
    """Return the ids, in order, of contents that are old enough at the Unix time `now`.

    Whatever has a name of another form is not ours.
    """
    return [
        contents.file_id
        for contents in listed
        if _ID.fullmatch(contents.file_id) and is_old(contents, now)
    ]


def unnamed_contents(old: Sequence[str], named: Set[str]) -> list[str]:
    """Return those of the `old` contents that are to be deleted: no row names them.

    Raises MostlyUnnamed if that cannot be right: the folder is also one of a cluster that leaves no
    mark, or the database is new or restored from a backup that is not complete.
    """
    unnamed = [file_id for file_id in old if file_id not in named]
    if len(unnamed) >= FOREIGN_MIN and 2 * len(unnamed) > len(old):
        raise MostlyUnnamed(
            f"cannot delete files that no row names: these are {len(unnamed)} of {len(old)}. Does"
            " a cluster of an older version use the same folder or bucket, or is the database not"
            " complete?"
        )
    return unnamed
