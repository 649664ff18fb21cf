"""An answer is read whole, in however many pieces it comes."""

import aiohttp
import pytest
from aiohttp import web

from isochrone.service.answers import read_answer
from isochrone.service.door import open_door


async def in_pieces(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    for _ in range(50):
        await response.write(b"x" * 1000)
    return response


async def test_an_answer_in_pieces_is_read_whole_and_bounded() -> None:
    app = web.Application()
    app.router.add_get("/", in_pieces)
    async with (
        open_door(app, "127.0.0.1", 0) as port,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http,
    ):
        async with http.get("/") as response:
            assert await read_answer(response, 50_000) == b"x" * 50_000
        async with http.get("/") as response:
            with pytest.raises(aiohttp.ClientPayloadError, match="more than 49999 bytes"):
                await read_answer(response, 49_999)
