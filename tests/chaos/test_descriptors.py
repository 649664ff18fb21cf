"""A process without free file descriptors refuses, does not spin, and recovers (R4)."""

import asyncio
import resource
from contextlib import suppress
from pathlib import Path

import aiohttp
import psutil

from tests.integration.router.fake_node import FakeNode, open_node
from tests.integration.router.fleet_of import KEY
from tests.integration.router.test_process import BODY, a_process, prepare

SPARE = 8
WINDOW_S = 1.0
SHARE_MAX = 0.5


async def test_a_router_out_of_descriptors_neither_dies_nor_spins(tmp_path: Path) -> None:
    node = FakeNode()
    async with open_node(node):
        config, port = prepare(tmp_path, node)
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        headers = {"authorization": f"Bearer {KEY}"}

        async def is_answered() -> bool:
            with suppress(aiohttp.ClientError):
                async with (
                    aiohttp.ClientSession(headers=headers) as http,
                    http.post(url, json=BODY) as response,
                ):
                    return response.status == 200
            return False

        async with a_process(config, port) as process:
            assert await is_answered()
            watched = psutil.Process(process.pid)
            limit = watched.num_fds() + SPARE
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (limit, limit))
            crowd = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4 * SPARE)]
            before_s = sum(watched.cpu_times()[:2])
            await asyncio.sleep(WINDOW_S)
            assert sum(watched.cpu_times()[:2]) - before_s < SHARE_MAX * WINDOW_S
            for _, writer in crowd:
                writer.close()
            async with asyncio.timeout(30):
                while not await is_answered():
                    await asyncio.sleep(0.05)
            assert process.returncode is None
