"""Limits the parts of multipart forms, which aiohttp reads without a limit.

A part takes aiohttp 75 microseconds, and a line before the first part one. So a body of 200 MB that
has nothing else takes it minutes, in which it stops the event loop for a second at a time. A part
that has an encoding of its own takes it more for each byte, and a compressed one more memory. RFC
7578 (4.7) tells clients not to send such parts.
"""

from typing import Any, Final, cast

from aiohttp import BodyPartReader, MultipartReader, StreamReader, web

LINES_MAX: Final = 1_000
"""Lines of a form that are not within the contents of a part: before the first one, the boundaries,
and the headers. Clients send four or five for each part."""


class _CountedLines:
    """Limits how many lines of a body are read one by one."""

    def __init__(self, content: StreamReader) -> None:
        self._content = content
        self._lines = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)

    async def readline(self, **named: int) -> bytes:
        """Return the next line. Raises ValueError beyond LINES_MAX."""
        self._lines += 1
        if self._lines > LINES_MAX:
            raise ValueError(f"the form has more than {LINES_MAX} lines beside the contents")
        return await self._content.readline(**named)


ENCODINGS: Final = ("content-encoding", "content-transfer-encoding")
PLAIN: Final = frozenset({"identity", "binary", "8bit", "7bit"})
"""The encodings of a part that leave its bytes as they are."""


class _PlainParts(MultipartReader):
    """The parts of a form. One that is encoded raises ValueError."""

    async def next(self) -> MultipartReader | BodyPartReader | None:
        part = await super().next()
        if isinstance(part, BodyPartReader):
            for name in ENCODINGS:
                encoding = part.headers.get(name, "binary")
                if encoding.lower() not in PLAIN:
                    raise ValueError(f"a part has the {name} {encoding[:40]!r}: send it as it is")
        return part


def form_parts(request: web.Request) -> MultipartReader:
    """Return the parts of a request's form. It and they raise FORM_ERRORS if it is malformed."""
    if "content-type" not in request.headers:
        raise ValueError("it has no content-type")
    content = cast(StreamReader, _CountedLines(request.content))
    return _PlainParts(
        request.headers,
        content,
        client_max_size=request.client_max_size,
        max_size_error_cls=web.HTTPRequestEntityTooLarge,
    )
