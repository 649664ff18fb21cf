"""Puts an engine's own name of the model into a request: in JSON, or in a form with a file.

Rule 1: only the field `model` changes. The bytes of files are not looked at.
Rule 2: a form that cannot be read is left as it is; the engine refuses it.
"""

import re
from typing import Final

from nodeagent.drivers.driver import with_fields

_BOUNDARY: Final = re.compile(r'boundary="?([^";,]{1,200})"?', re.IGNORECASE)
_MODEL: Final = re.compile(
    rb'^content-disposition:[^\r\n]*;\s*name="?model"?\s*(;|$)', re.IGNORECASE | re.MULTILINE
)
HEAD_BYTES_MAX: Final = 4096


def with_model_name(body: bytes, content_type: str, name: str) -> bytes:
    """Return a request body that names the model `name`. Raises ApiError 400 for broken JSON."""
    if not content_type.lower().startswith("multipart/"):
        return with_fields(body, {"model": name})
    found = _BOUNDARY.search(content_type)
    if found is None:
        return body
    delimiter = b"--" + found[1].strip().encode()
    start = body.find(delimiter)
    while start >= 0:
        head_start = start + len(delimiter)
        head_end = body.find(b"\r\n\r\n", head_start, head_start + HEAD_BYTES_MAX)
        if head_end < 0:
            return body
        following = body.find(b"\r\n" + delimiter, head_end + 2)
        if following < 0:
            return body
        head = body[head_start:head_end].replace(b"\r\n", b"\n")
        if _MODEL.search(head):
            return b"".join((body[: head_end + 4], name.encode(), body[following:]))
        start = following + 2
    return body
