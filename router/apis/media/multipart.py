"""Reads `multipart/form-data` (RFC 7578): the form fields of an upload, and the size of its file.

The engine gets the same bytes and parses them again. A body that two parsers could read in
different ways is refused: a second field of one name, text before the first part, a header besides
the two of a form, an encoding.
"""

import re
from typing import Final, NamedTuple

from isochrone.wire.errors import ApiError, ErrorCode

PARTS_MAX: Final = 64
FIELD_BYTES_MAX: Final = 64 * 1024
PART_HEAD_BYTES_MAX: Final = 1024
REPEATABLE: Final = "[]"
"""The end of the name of a field that may be sent several times."""

_BOUNDARY: Final = re.compile(
    r"multipart/form-data[ \t]*;[ \t]*"
    r"""boundary=(?:"([\w'()+,./:=? -]{1,70})"|([\w'+.-]{1,70}))[ \t]*""",
    re.IGNORECASE | re.ASCII,
)
_DISPOSITION: Final = re.compile(
    rb'form-data; ?name="([^"\\\r\n]{1,80})"(?:; ?filename="([^"\\\r\n]{0,255})")?', re.IGNORECASE
)
_HEAD_LINE: Final = re.compile(rb"(content-disposition|content-type): ?([^\r\n]{1,500})", re.I)


class UploadForm(NamedTuple):
    """The parts of a form: the values of its fields by name, and its only file."""

    fields: dict[str, list[str]]
    file_field: str
    file_name: str
    file_bytes: int


def read_form(content_type: str, body: bytes) -> UploadForm:
    """Return the parts of a body. Raises ApiError 400."""
    match = _BOUNDARY.fullmatch(content_type)
    if match is None:
        raise _invalid("expected the content type multipart/form-data with a boundary")
    delimiter = b"--" + (match.group(1) or match.group(2)).encode()
    fields: dict[str, list[str]] = {}
    file_field = file_name = ""
    file_bytes = 0
    if not body.startswith(delimiter):
        raise _invalid("it does not begin with its boundary")
    start = len(delimiter)
    for _ in range(PARTS_MAX):
        if body[start : start + 2] == b"--":
            if body[start + 2 :] not in (b"", b"\r\n"):
                raise _invalid("there is more behind its last boundary")
            return UploadForm(fields, file_field, file_name, file_bytes)
        if body[start : start + 2] != b"\r\n":
            raise _invalid("a boundary is not followed by a line end")
        head_end = body.find(b"\r\n\r\n", start + 2, start + 2 + PART_HEAD_BYTES_MAX)
        end = body.find(b"\r\n" + delimiter, head_end)
        if head_end < 0 or end < 0:
            raise _invalid("a part of it has no head of at most 1 KiB, or no end")
        name, filename = _read_head(body[start + 2 : head_end])
        # The line end behind the head of an empty part may be that before its boundary.
        size = max(0, end - head_end - 4)
        if filename is None:
            _add_field(fields, name, body[head_end + 4 : head_end + 4 + size])
        elif file_field:
            raise _invalid(f"it has two files, '{file_field}' and '{name}'")
        else:
            file_field, file_name, file_bytes = name, filename, size
        start = end + 2 + len(delimiter)
    raise _invalid(f"it has more than {PARTS_MAX} parts")


def _read_head(head: bytes) -> tuple[str, str | None]:
    """Return the name of a part, and its file name if it is a file. Raises ApiError 400."""
    name: str | None = None
    filename: str | None = None
    for line in head.split(b"\r\n"):
        match = _HEAD_LINE.fullmatch(line)
        if match is None:
            raise _invalid(f"a part has the header {line[:60].decode(errors='replace')!r}")
        if match.group(1).lower() == b"content-type":
            continue
        disposition = _DISPOSITION.fullmatch(match.group(2))
        if disposition is None or name is not None:
            raise _invalid("a part has no single content-disposition with a name in quotes")
        name = disposition.group(1).decode(errors="replace")
        if disposition.group(2) is not None:
            filename = disposition.group(2).decode(errors="replace")
    if name is None:
        raise _invalid("a part has no name")
    return name, filename


def _add_field(fields: dict[str, list[str]], name: str, value: bytes) -> None:
    """Add the value of a form field. Raises ApiError 400."""
    if len(value) > FIELD_BYTES_MAX:
        raise _invalid(f"field '{name}' has more than {FIELD_BYTES_MAX} bytes")
    if name in fields and not name.endswith(REPEATABLE):
        raise _invalid(f"field '{name}' appears twice")
    try:
        fields.setdefault(name, []).append(value.decode())
    except UnicodeDecodeError:
        raise _invalid(f"field '{name}' is not UTF-8") from None


def _invalid(reason: str) -> ApiError:
    return ApiError(ErrorCode.INVALID_REQUEST, f"cannot read the form: {reason}")
