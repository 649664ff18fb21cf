"""A response is read completely, however many pieces it arrives in."""

import aiohttp
import pytest
from aiohttp import web

from isochrone.service.http_responses import read_response
from isochrone.service.network.http_server import serve_http


async def in_pieces(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    for _ in range(50):
        await response.write(b"x" * 1000)
    return response


async def test_a_response_in_pieces_is_read_completely_and_limited() -> None:
    app = web.Application()
    app.router.add_get("/", in_pieces)
    async with (
        serve_http(app, "127.0.0.1", 0) as port,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http,
    ):
        async with http.get("/") as response:
            assert await read_response(response, 50_000) == b"x" * 50_000
        async with http.get("/") as response:
            with pytest.raises(aiohttp.ClientPayloadError, match="more than 49999 bytes"):
                await read_response(response, 49_999)
