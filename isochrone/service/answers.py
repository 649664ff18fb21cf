"""Reading what another server answered: whole, and no more than is let in."""

import aiohttp


async def read_answer(response: aiohttp.ClientResponse, bytes_max: int) -> bytes:
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
