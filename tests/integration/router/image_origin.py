"""A web server with images on loopback, over TLS, and a router that may fetch from it."""

import asyncio
import base64
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from isochrone.service.network.public_addresses import refuse_private
from router.apis.linked_images.cheap_tls import with_cheap_handshakes
from router.apis.linked_images.download import LinkRules
from router.apis.openai.surface import OpenAiSurface
from tests.integration.router.fleet_of import Bench, a_bench
from tests.integration.router.test_tls import certified

GIF = base64.b64decode("R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7")
GIF_URL = f"data:image/gif;base64,{base64.b64encode(GIF).decode()}"
NAMES = {"images.test": ["127.0.0.1"], "mixed.test": ["127.0.0.1", "10.0.0.1"]}


class ImageOrigin:
    """What the server answers to each path, and what it was asked for."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {"/a.gif": GIF}
        self.requests: list[web.Request] = []
        self.port = 0
        self.open = Counter[str]()
        self.open_max = 0
        self.changed = asyncio.Condition()

    def url(self, path: str = "/a.gif", host: str = "images.test") -> str:
        """Return a link to a path of this server."""
        return f"https://{host}:{self.port}{path}"

    async def until(self, condition: Any) -> None:
        """Wait until `condition()` is true."""
        async with asyncio.timeout(30), self.changed:
            await self.changed.wait_for(condition)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer with bytes, or as a function or a response of that path says."""
        self.requests.append(request)
        self.open[request.path] += 1
        self.open_max = max(self.open_max, self.open.total())
        await self._note()
        try:
            answer = self.answers.get(request.path)
            if answer is None:
                return web.Response(status=404)
            if isinstance(answer, bytes):
                return web.Response(body=answer, content_type="text/plain")
            response: web.StreamResponse = await answer(request)
            return response
        finally:
            self.open[request.path] -= 1
            await asyncio.shield(self._note())

    async def _note(self) -> None:
        async with self.changed:
            self.changed.notify_all()


async def look_up(host: str) -> Sequence[str]:
    """Return the addresses of the names of these tests."""
    if host in NAMES:
        return NAMES[host]
    raise OSError(f"no such name: {host}")


def refuse_but_loopback(address: str) -> None:
    """Allow the address of the server."""
    if address != "127.0.0.1":
        refuse_private(address)


@asynccontextmanager
async def an_origin(folder: Path) -> AsyncIterator[tuple[ImageOrigin, ssl.SSLContext]]:
    """Run the server; return it and a client's TLS context that trusts it."""
    paths, trust = certified(folder)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(paths["tls_certificate"], paths["tls_key"])
    origin, app = ImageOrigin(), web.Application()
    app.router.add_route("*", "/{path:.*}", origin.answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
        origin.port = runner.addresses[0][1]
        yield origin, trust
    finally:
        await runner.cleanup()


@asynccontextmanager
async def a_fetching_bench(
    folder: Path, nodes: int | Sequence[Any] = 1, **config: Any
) -> AsyncIterator[tuple[Bench, ImageOrigin]]:
    """Run a router that fetches links, nodes, and a server whose images it may fetch."""
    async with (
        an_origin(folder) as (origin, trust),
        a_bench(folder, nodes, image_links="fetch", **config) as bench,
    ):
        allow(bench.app.surface, origin, trust)
        yield bench, origin


def allow(surface: OpenAiSurface, origin: ImageOrigin, trust: ssl.SSLContext) -> None:
    """Let a router fetch from the server."""
    fetcher = surface.image_fetcher
    assert fetcher is not None
    fetcher.rules = LinkRules(origin.port, refuse_but_loopback)
    fetcher.look_up, fetcher.tls = look_up, with_cheap_handshakes(trust)
