"""Computes the unpacked size of a packed document, before a converter unpacks it in memory.

Python's unpacker stops at the size that the archive states, so a stated size holds. A spreadsheet
needs few bytes for a cell that is far away from the others, and converters fill all that lie
between.
"""

import io
import zipfile
from contextlib import suppress
from typing import IO, Final
from xml.parsers import expat

UNPACKED_BYTES_MAX: Final = 128 * 1024 * 1024
CELLS_MAX: Final = 1_300_000
"""More cells give more Markdown than is returned: each has at least three characters."""

PACKED: Final = frozenset({".docx", ".epub", ".pptx", ".xlsx"})
SHEETS: Final = ".xlsx"


class TooLarge(Exception):
    """A document that is not to be converted; says why."""


def check_packed(document: bytes, extension: str) -> None:
    """Raise TooLarge if a document unpacks to too much; zipfile.BadZipFile if it is no archive."""
    if extension not in PACKED:
        return
    with zipfile.ZipFile(io.BytesIO(document)) as archive:
        parts = archive.infolist()
        if sum(part.file_size for part in parts) > UNPACKED_BYTES_MAX:
            raise TooLarge(f"it unpacks to more than {UNPACKED_BYTES_MAX >> 20} MiB")
        if extension == SHEETS:
            for part in parts:
                with archive.open(part) as source:
                    _Grid().read(source)


class _Grid:
    """The rows and columns of one part, if it is a sheet."""

    def __init__(self) -> None:
        self._row = self._column = 0
        self._rows = self._columns = 0

    def read(self, source: IO[bytes]) -> None:
        """Read the part. Raises TooLarge once its grid has too many cells."""
        parser = expat.ParserCreate()
        parser.StartElementHandler = self._start
        # Pictures and damaged parts: the converter says what is wrong with them.
        with suppress(expat.ExpatError):
            parser.ParseFile(source)

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        kind = name.rpartition(":")[2]
        if kind not in ("row", "c"):
            return
        reference = attributes.get("r", "")
        letters = reference.rstrip("0123456789")
        digits = reference[len(letters) :]
        if kind == "row":
            self._row = int(digits) if digits else self._row + 1
            self._column = 0
        else:
            self._row = int(digits) if digits else self._row
            self._column = _column_number(letters) if letters else self._column + 1
        self._rows = max(self._rows, self._row)
        self._columns = max(self._columns, self._column)
        if self._rows * self._columns > CELLS_MAX:
            raise TooLarge(f"it has a sheet of more than {CELLS_MAX} cells")


def _column_number(letters: str) -> int:
    number = 0
    for letter in letters.upper():
        number = number * 26 + ord(letter) - ord("A") + 1
    return number
