"""Connections to engines that listen on TCP."""

import asyncio
import os
from pathlib import Path

from isochrone.wire.models.model import EngineSettings
from nodeagent.drivers.driver import EngineCommand
from nodeagent.host.engines.engine_process import EngineProcesses
from nodeagent.host.engines.engine_record import EngineRecord
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
