"""Limits the parts of multipart forms, which aiohttp reads without a limit.

A part takes aiohttp 75 microseconds, and a line before the first part one. So a body of 200 MB that
has nothing else takes it minutes, in which it stops the event loop for a second at a time.
"""

from typing import Any, Final, cast

from aiohttp import MultipartReader, StreamReader, web

LINES_MAX: Final = 1_000
"""Lines of a form that are not within the contents of a part: before the first one, the boundaries,
and the headers. Clients send four or five for each part."""


class _CountedLines:
    """A body of which only so many lines are read one by one."""

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


def form_parts(request: web.Request) -> MultipartReader:
    """Return the parts of a request's form. It and they raise FORM_ERRORS if it is malformed."""
    content = cast(StreamReader, _CountedLines(request.content))
    return MultipartReader(
        request.headers,
        content,
        client_max_size=request.client_max_size,
        max_size_error_cls=web.HTTPRequestEntityTooLarge,
    )
