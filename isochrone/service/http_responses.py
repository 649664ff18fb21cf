"""Reading what another server answered: whole, no more than is let in, and errors as words."""

from typing import NamedTuple

import aiohttp
import msgspec


class ErrorBody(NamedTuple):
    """What an answer that is an error says; `code` is empty where it is of nobody we know."""

    words: str
    code: str


def parse_error_body(body: bytes, status: int) -> ErrorBody:
    """Read an error in the shape of any of our doors."""
    try:
        error = msgspec.json.decode(body)["error"]
        return ErrorBody(str(error["message"]), str(error["code"]))
    except (msgspec.DecodeError, KeyError, TypeError):
        return ErrorBody(f"the answer was {status}, without words", "")


async def read_response(response: aiohttp.ClientResponse, bytes_max: int) -> bytes:
    """Return the whole body, in however many pieces it comes.

    Raises aiohttp.ClientPayloadError past `bytes_max`. The caller sets the deadline.
    """
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > bytes_max:
            raise aiohttp.ClientPayloadError(
                f"cannot read the answer of {response.url}: more than {bytes_max} bytes"
            )
    return bytes(body)
