"""Real reverse proxies with the settings of ops/proxies, between clients and a router."""

import asyncio
import json
import os
import re
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from tests.integration.router.fleet_of import KEY, Bench, a_bench
from tests.ports import free_port

PROXIES = Path(__file__).parents[3] / "ops" / "proxies"
ROUTER, LISTENS = "127.0.0.1:8080", "127.0.0.1:8000"
TIMEOUT_S: Final = 30.0

NGINX: Final = """
daemon off;
pid {folder}/pid;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {settings};
}}
"""


def nginx(settings: Path) -> Sequence[str]:
    """Return the command that runs nginx with settings that are made to be included."""
    main = settings.parent / "main.conf"
    main.write_text(NGINX.format(folder=settings.parent, settings=settings))
    return ("nginx", "-p", str(settings.parent), "-e", "stderr", "-c", str(main))


def haproxy(settings: Path) -> Sequence[str]:
    """Return the command that runs HAProxy."""
    return ("haproxy", "-db", "-f", str(settings))


def caddy(settings: Path) -> Sequence[str]:
    """Return the command that runs Caddy, without its port for administration."""
    settings.write_text("{\n\tadmin off\n}\n" + settings.read_text())
    return ("caddy", "run", "--adapter", "caddyfile", "--config", str(settings))


@asynccontextmanager
async def proxy(
    command_of: Callable[[Path], Sequence[str]], file: str, bench: Bench, folder: Path
) -> AsyncIterator[str]:
    """Run a proxy before a router; yield its address once the router answers through it."""
    address = f"127.0.0.1:{free_port()}"
    text = (PROXIES / file).read_text()
    assert ROUTER in text, file
    assert LISTENS in text, file
    settings = folder / file
    settings.write_text(text.replace(ROUTER, bench.url[7:]).replace(LISTENS, address))
    with (folder / "printed").open("wb") as printed:
        process = await asyncio.create_subprocess_exec(
            *command_of(settings),
            env=os.environ | {"HOME": str(folder), "XDG_DATA_HOME": str(folder)},
            stdout=printed,
            stderr=printed,
        )
    try:
        async with asyncio.timeout(TIMEOUT_S):
            while not await _answers(bench, f"http://{address}/healthz"):
                assert process.returncode is None, (folder / "printed").read_text()
                await asyncio.sleep(0.05)
        yield f"http://{address}"
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


async def _answers(bench: Bench, url: str) -> bool:
    try:
        async with bench.http.get(url) as response:
            return response.status == 200
    except OSError:
        return False


@pytest.fixture(
    params=[(nginx, "nginx.conf"), (haproxy, "haproxy.cfg"), (caddy, "Caddyfile")],
    ids=["nginx", "haproxy", "caddy"],
)
async def proxied(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Any]:
    command_of, file = request.param
    search = os.pathsep.join((os.environ["PATH"], "/usr/sbin"))
    if shutil.which(command_of.__name__, path=search) is None:
        pytest.skip(f"there is no {command_of.__name__} (Debian has a package)")
    limits: dict[str, Any] = {
        "body_timeout_s": 10.0,
        "stream_idle_timeout_s": 60.0,
        "body_bytes_max": 3_000_000,
    }
    async with a_bench(tmp_path, **limits) as bench:
        folder = tmp_path / "proxy"
        folder.mkdir()
        # nginx as root leaves its files to another user.
        tmp_path.chmod(0o755)
        async with proxy(command_of, file, bench, folder) as url:
            bench.url = url
            yield bench


async def test_tokens_pass_as_they_come_and_a_client_that_leaves_ends_them(proxied: Bench) -> None:
    (node,) = proxied.nodes
    node.hang_at = 2
    async with proxied.chat(stream=True) as response:
        assert response.status == 200
        read = b""
        async with asyncio.timeout(TIMEOUT_S):
            while b"t1" not in read:
                read += await response.content.readany()
        assert node.running == 1
        response.close()
    await node.until(lambda: node.cancelled == 1, TIMEOUT_S)


async def post_while_reading(url: str, content: str, key: str) -> tuple[int, Any]:
    """Send a chat request and read its answer meanwhile; return the status and the body.

    A refused body is not read whole: the proxy ends its side of the connection after the answer.
    aiohttp's client drops an answer that comes before all of the body is written.
    """
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": content}]})
    reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
    head = (
        "POST /v1/chat/completions HTTP/1.1",
        f"host: {LISTENS}",
        f"authorization: Bearer {key}",
        "content-type: application/json",
        f"content-length: {len(body)}",
    )
    try:
        writer.write(("\r\n".join(head) + "\r\n\r\n" + body).encode())
        async with asyncio.timeout(TIMEOUT_S):
            answer = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = re.search(rb"\r\ncontent-length: (\d+)\r\n", answer)
            assert length is not None, answer
            return int(answer.split()[1]), json.loads(await reader.readexactly(int(length[1])))
    finally:
        writer.transport.abort()


async def test_errors_of_large_bodies_are_the_routers(proxied: Bench) -> None:
    for size, key, status, code in (
        (2_000_000, KEY, 200, None),
        (2_000_000, "iso_wrong", 401, "invalid_api_key"),
        (4_000_000, KEY, 413, "request_too_large"),
    ):
        found, answer = await post_while_reading(proxied.url, "x" * size, key)
        assert (found, answer.get("error", {}).get("code")) == (status, code), answer


async def test_each_of_many_requests_is_answered_once(proxied: Bench) -> None:
    (node,) = proxied.nodes

    async def ask(text: str) -> None:
        async with proxied.chat(text) as response:
            assert response.status == 200, await response.text()

    for turn in range(5):
        await asyncio.gather(*(ask(f"{turn} {number}") for number in range(40)))
    assert len(node.bodies) == len(set(node.bodies)) == 200
