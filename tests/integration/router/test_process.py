"""The router as a process: started, killed, restarted, and terminated by a signal."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

from isochrone.service import files
from isochrone.service.trust.identity import save_identity
from isochrone.wire import codec
from router.app import open_router
from tests.cuts import held, until_as_before
from tests.integration.router.fake_node import FakeNode, open_node
from tests.integration.router.fleet_of import KEY, a_config, a_route, a_table, an_identity
from tests.ports import free_port

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
START_TIMEOUT_S = 60.0


def prepare(folder: Path, *nodes: FakeNode, **route: Any) -> tuple[Path, int]:
    """Write the state of a router that ran before; return its configuration file and port."""
    port = free_port()
    state = folder / "state"
    save_identity(state, an_identity(folder))
    table = a_table([a_route(node, **route) for node in nodes])
    files.write_snapshot(state / "table.snapshot", codec.encode(table))
    config = folder / "router.toml"
    config.write_text(
        f'state_folder = "{state}"\nport = {port}\nschedulers = ["http://127.0.0.1:9"]\n'
        'source_address = "127.0.0.1"\nusage_interval_s = 0.05\nprocesses = 1\n'
    )
    return config, port


def batches(spool: Path) -> list[Path]:
    """Return the usage batches on disk."""
    return sorted(spool.glob("*.usage"))


async def until_any(spool: Path) -> None:
    """Wait until a usage batch is on disk."""
    deadline = asyncio.get_running_loop().time() + START_TIMEOUT_S
    found = False
    while not found:
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.02)
        found = bool(batches(spool))


@asynccontextmanager
async def a_process(config: Path, port: int) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "router",
        "--config",
        str(config),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(START_TIMEOUT_S), aiohttp.ClientSession() as http:
            while True:
                assert process.returncode is None
                with suppress(aiohttp.ClientConnectorError):
                    async with http.get(f"http://127.0.0.1:{port}/healthz") as response:
                        assert response.status == 200
                        break
                await asyncio.sleep(0.05)
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_killed_router_serves_after_a_restart_and_has_lost_no_usage(tmp_path: Path) -> None:
    node = FakeNode()
    node.itl_s = 0.02
    async with open_node(node), aiohttp.ClientSession() as http:
        http.headers["authorization"] = f"Bearer {KEY}"
        config, port = prepare(tmp_path, node)
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        async with a_process(config, port) as process:
            async with http.post(url, json=BODY) as response:
                assert response.status == 200
            spool = tmp_path / "state" / "usage"
            await until_any(spool)
            streams = [
                await http.post(url, json={**BODY, "stream": True, "max_tokens": 1000})
                for _ in range(20)
            ]
            await node.until(lambda: node.running == 20)
            process.kill()
            await process.wait()
            for stream in streams:
                stream.close()
        # The node sees that its callers are gone, and stops.
        await node.until(lambda: node.running == 0)
        async with a_process(config, port) as process:
            async with http.post(url, json=BODY) as response:
                assert response.status == 200
            assert batches(spool)


async def test_sigterm_finishes_streams_and_exits_0(tmp_path: Path) -> None:
    node = FakeNode()
    node.itl_s = 0.03
    async with open_node(node), aiohttp.ClientSession() as http:
        http.headers["authorization"] = f"Bearer {KEY}"
        config, port = prepare(tmp_path, node)
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        async with a_process(config, port) as process:
            stream = await http.post(url, json={**BODY, "stream": True, "max_tokens": 20})
            await stream.content.readuntil(b"t0")
            process.send_signal(signal.SIGTERM)
            assert (await stream.text()).endswith("data: [DONE]\n\n")
            async with asyncio.timeout(30):
                assert await process.wait() == 0


async def run_and_fail(config: Path) -> tuple[int | None, str]:
    """Run a router that cannot start; return its exit code and its error output."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "router",
        "--config",
        str(config),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(START_TIMEOUT_S):
        _, output = await process.communicate()
    return process.returncode, output.decode()


async def test_a_router_that_cannot_start_prints_the_reason(tmp_path: Path) -> None:
    config = tmp_path / "none.toml"
    config.write_text(f'state_folder = "{tmp_path / "none"}"\n')
    code, output = await run_and_fail(config)
    assert (code, "cannot start" in output, "Traceback" in output) == (2, True, False)
    config.write_text("prot = 1\n")
    code, output = await run_and_fail(config)
    assert (code, "prot" in output, "Traceback" in output) == (2, True, False)
    config, port = prepare(tmp_path, FakeNode())
    with socket.create_server(("127.0.0.1", port)):
        code, output = await run_and_fail(config)
    assert (code, "cannot listen" in output, "Traceback" in output) == (2, True, False)


async def test_a_stopped_router_leaves_nothing_open(tmp_path: Path) -> None:
    config, identity = a_config(tmp_path), an_identity(tmp_path)
    before, tasks = held(), asyncio.all_tasks()
    async with open_router(config, identity) as app:
        url = f"http://127.0.0.1:{app.port}/healthz"
        async with aiohttp.ClientSession() as http, http.get(url) as response:
            assert response.status == 503
    await until_as_before(before, tasks, "at its end")


async def test_a_second_router_on_the_same_state_folder_exits_with_a_reason(tmp_path: Path) -> None:
    """They could share the port, but one would remove usage that the other reads."""
    node = FakeNode()
    async with open_node(node):
        config, port = prepare(tmp_path, node)
        config.write_text(config.read_text().replace("processes = 1", "processes = 2"))
        async with a_process(config, port):
            second = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "router", "--config", str(config)),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stderr=asyncio.subprocess.PIPE,
            )
            async with asyncio.timeout(START_TIMEOUT_S):
                output = (await second.communicate())[1].decode()
    assert second.returncode == 2
    assert "another process uses it; is the service running" in output
