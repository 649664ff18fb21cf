"""Reads HTTP responses: a whole body within a limit, and the error in a body."""

from typing import NamedTuple

import aiohttp
import msgspec


class ErrorBody(NamedTuple):
    """The error that a response's body describes; `code` is empty for a body of unknown form."""

    message: str
    code: str


def parse_error_body(body: bytes, status: int) -> ErrorBody:
    """Read an error in the form that every HTTP server of this project uses."""
    try:
        error = msgspec.json.decode(body)["error"]
        return ErrorBody(str(error["message"]), str(error["code"]))
    except (ValueError, KeyError, TypeError):
        return ErrorBody(f"HTTP status {status} without an error message", "")


async def read_response(response: aiohttp.ClientResponse, bytes_max: int) -> bytes:
    """Return the whole body; the caller sets the deadline.

    Raises aiohttp.ClientPayloadError for a body of more than `bytes_max` bytes.
    """
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > bytes_max:
            raise aiohttp.ClientPayloadError(
                f"cannot read the response of {response.url}: more than {bytes_max} bytes"
            )
    return bytes(body)
