"""Connections to engines that listen on TCP."""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from isochrone.wire.models.model import EngineSettings
from nodeagent.api.request.answer_relay import response_head
from nodeagent.drivers.driver import EngineCommand
from nodeagent.host.engines.engine_process import EngineProcesses
from nodeagent.host.engines.engine_record import EngineRecord
from nodeagent.host.engines.open_session import ANSWER_BYTES_MAX, new_session, read_answer
from nodeagent.host.interim_answers import INTERIM_MAX
from tests.builders import a_spec

SERVERS_CLOSE_S = 5.0
"""uvicorn's default, under vLLM, SGLang and TensorRT-LLM, for idle connections."""


async def test_the_agent_closes_an_idle_connection_before_its_server_does(tmp_path: Path) -> None:
    """A request that is sent while the server closes its connection would get no answer."""
    answered_s = closed_s = 0.0
    is_closed = asyncio.Event()
    loop = asyncio.get_running_loop()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal answered_s, closed_s
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        answered_s = loop.time()
        await reader.read(1)
        closed_s = loop.time()
        writer.close()
        is_closed.set()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        command = EngineCommand(arguments=(), base_url=f"http://127.0.0.1:{port}")
        spec = a_spec("r1", engine=EngineSettings(driver="vllm", kv_memory_bytes=1))
        record = EngineRecord(pid=os.getpid(), command=command, spec=spec)
        engine = EngineProcesses(tmp_path, 1).adopt(record)
        try:
            async with engine.http.get("/health") as answer:
                assert await answer.read() == b"ok"
            async with asyncio.timeout(4 * SERVERS_CLOSE_S):
                await is_closed.wait()
        finally:
            await engine.release()
    assert closed_s - answered_s < SERVERS_CLOSE_S


@asynccontextmanager
async def engine_that_sends(pieces: Sequence[bytes]) -> AsyncIterator[aiohttp.ClientSession]:
    """Serve these pieces as the answer to every request; yield a session of that engine."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        try:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
        except OSError:
            pass  # the agent has closed the connection
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        command = EngineCommand(arguments=(), base_url=f"http://127.0.0.1:{port}")
        async with new_session(command) as http:
            yield http


OK_HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"


async def test_headers_that_cannot_be_sent_on_are_left_out() -> None:
    """The router got a 500, and the log a traceback, by what an engine or another node sent."""
    fields = b"retry-after: \xff\xfe\r\nx-isochrone-load: p=\xc3\xa9\r\ncache-control: no-store\r\n"
    head = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n" + fields + b"\r\nok"
    async with engine_that_sends([head]) as http, http.get("/") as answer:
        response = response_head(answer, ("retry-after", "x-isochrone-load", "cache-control"))
    assert response.headers["cache-control"] == "no-store"
    assert not {"retry-after", "x-isochrone-load"} & {*response.headers}


async def test_interim_answers_without_end_are_an_engines_failure() -> None:
    """Each was taken without a pause: one request held the agent up for 15 s and more."""
    few, many = [INTERIM * INTERIM_MAX, OK_HEAD], [INTERIM * (INTERIM_MAX + 1), OK_HEAD]
    async with engine_that_sends(few) as http, http.get("/") as answer:
        assert await answer.read() == b"ok"
    async with engine_that_sends(many) as http:
        with pytest.raises(aiohttp.ClientPayloadError, match="more than 64 interim answers"):
            async with http.get("/"):
                pytest.fail("it was answered")


async def test_an_answer_without_end_is_not_read_whole() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-length: 1000000000\r\n\r\n"
    part = bytes(ANSWER_BYTES_MAX // 8)
    async with engine_that_sends([head, *([part] * 9)]) as http, http.get("/") as answer:
        with pytest.raises(aiohttp.ClientPayloadError, match="more than 4194304 bytes"):
            await read_answer(answer)
