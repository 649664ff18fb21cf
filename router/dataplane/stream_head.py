"""The id and the time that all events of one answer have, also those of a second replica."""

import re
from typing import Any, Final

import msgspec

_ID: Final = re.compile(rb'"id"\s*:\s*"(?:[^"\\]|\\.)*"')
_CREATED: Final = re.compile(rb'"created"\s*:\s*\d+')
"""In a JSON text no string matches them: quotes within a string are escaped. The objects within the
events of a stream that can be continued have no ids: it has no tool calls."""


class StreamHead:
    """Takes `id` and `created` from the first event of a stream, and puts them on later ones."""

    __slots__ = ("_created", "_id")

    def __init__(self) -> None:
        self._id = b""
        self._created = b""

    def note(self, frame: bytes) -> None:
        """Take the fields of the first event that has an id."""
        if self._id:
            return
        found = _ID.search(frame)
        created = _CREATED.search(frame)
        if found is not None:
            self._id = found.group()
        if created is not None:
            self._created = created.group()

    def put_on(self, frames: bytes) -> bytes:
        """Return the events with the fields of the first one."""
        if self._id:
            frames = _ID.sub(lambda _: self._id, frames)
        if self._created:
            frames = _CREATED.sub(lambda _: self._created, frames)
        return frames

    def fields(self) -> dict[str, Any]:
        """Return the fields, for an event that the router makes itself."""
        parts = [part for part in (self._id, self._created) if part]
        fields: dict[str, Any] = msgspec.json.decode(b"{" + b",".join(parts) + b"}")
        return fields
