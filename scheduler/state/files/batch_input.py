"""Reads a batch's input file line by line, a part at a time."""

from codecs import BOM_UTF8
from collections.abc import Set
from typing import BinaryIO, Final

from isochrone.wire.peers.batches import ITEM_BYTES_MAX
from scheduler.decide.batch_lines import UNREADABLE, parse_line
from scheduler.store.client_objects.batch_items import NewItem

LINES_MAX: Final = 5_000
PART_BYTES_MAX: Final = 16 * 1024 * 1024
"""A part has at most this many lines, and ends with the line that makes it this large."""


BLANK_LINES_MAX: Final = 1_000_000
"""Blank lines are read, too, and none of them ends a part: these take a thread half a second."""


def has_more_lines(source: BinaryIO, lines_max: int) -> bool:
    """Return whether a file has more than `lines_max` lines, or too many blank ones. Blocks."""
    lines = blank_lines = 0
    is_line_begin = True
    while line := source.readline(PART_BYTES_MAX):
        if is_line_begin and line.isspace():
            blank_lines += 1
        else:
            lines += is_line_begin
        if lines > lines_max or blank_lines > BLANK_LINES_MAX:
            return True
        is_line_begin = line.endswith(b"\n")
    return False


class BatchInput:
    """An open input file. `deployment` is that of its lines, empty until one names it."""

    def __init__(self, source: BinaryIO, endpoint: str, known_deployments: Set[str]) -> None:
        self.deployment = ""
        self.lines = 0
        self._source = source
        self._endpoint = endpoint
        self._known = known_deployments
        self._offset = 0
        self._line_in_file = 0

    @property
    def bytes_read(self) -> int:
        """How much of the file has been read."""
        return self._offset

    def next_items(self) -> list[NewItem]:
        """Return the items of the next part; none at the end. Blocks."""
        items: list[NewItem] = []
        begin = self._offset
        while len(items) < LINES_MAX and self._offset - begin < PART_BYTES_MAX:
            line = self._source.readline(ITEM_BYTES_MAX + 1)
            if not line:
                break
            self._line_in_file += 1
            offset = self._offset
            self._offset += len(line)
            if offset == 0 and line.startswith(BOM_UTF8):
                # Editors on Windows begin files with it.
                offset = len(BOM_UTF8)
                line = line[offset:]
            is_too_long = len(line) > ITEM_BYTES_MAX
            while is_too_long and line and not line.endswith(b"\n"):
                line = self._source.readline(PART_BYTES_MAX)
                self._offset += len(line)
            text = line.strip()
            if text or is_too_long:
                self.lines += 1
                items.append(self._item(offset, line, is_too_long=is_too_long))
        return items

    def _item(self, offset: int, line: bytes, *, is_too_long: bool) -> NewItem:
        where = f"line {self._line_in_file} of the file"
        if is_too_long:
            message = f"cannot read {where}: it has more than {ITEM_BYTES_MAX} bytes"
            return NewItem(self.lines, "", offset, 0, "request_too_large", message)
        parsed = parse_line(line, self._endpoint, self.deployment, self._known)
        self.deployment = self.deployment or parsed.deployment
        message = parsed.message
        if parsed.error_code == UNREADABLE:  # nothing else says which line it is
            message = f"{message} ({where})"
        return NewItem(self.lines, parsed.custom_id, offset, len(line), parsed.error_code, message)
