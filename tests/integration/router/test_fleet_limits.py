"""A key's limit holds over two routers of one fleet."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest

from isochrone.service.joining import join
from isochrone.wire.control import PeerRole
from isochrone.wire.routes import KeyLimits
from router.app import RouterApp, open_router
from tests.integration.admin.conftest import Admin, admin, settings
from tests.integration.router.fake_node import FakeNode, open_node
from tests.integration.router.fleet_of import KEY, a_config, a_key, a_route, a_table
from tests.system.harness import until

__all__ = ["admin", "settings"]

WAIT_S = 60.0
LIMIT = 5


@pytest.fixture
async def routers(admin: Admin, tmp_path: Path) -> AsyncIterator[list[RouterApp]]:
    """Two routers that follow one scheduler, with a key of LIMIT requests a minute."""
    await admin.pop()
    apps: list[RouterApp] = []
    async with AsyncExitStack() as stack:
        node = FakeNode()
        await stack.enter_async_context(open_node(node))
        key = a_key(limits=KeyLimits(requests_per_min=LIMIT))
        for name in ("r1", "r2"):
            body = {"pop": "ams", "role": "router"}
            token = (await admin.ask("POST", "/v1/join-tokens", body)).body["token"]
            folder = tmp_path / name
            identity = await join(
                urls=[admin.control_url],
                token=token,
                role=PeerRole.ROUTER,
                name=name,
                folder=folder / "identity",
            )
            config = a_config(folder, schedulers=(admin.control_url,))
            app = await stack.enter_async_context(open_router(config, identity))

            async def has_table(app: RouterApp = app) -> bool:
                return app.fleet.directory.table is not None and app.link.connected

            await until("the router has a table", has_table, WAIT_S)
            app.fleet.adopt(a_table([a_route(node)], generation=1_000, keys=[key]))
            apps.append(app)
        yield apps


async def test_what_is_used_at_one_router_is_not_left_at_the_other(
    routers: list[RouterApp],
) -> None:
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {KEY}"}) as http:

        async def status(app: RouterApp) -> int:
            body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
            url = f"http://127.0.0.1:{app.port}/v1/chat/completions"
            async with http.post(url, json={**body, "max_tokens": 1}) as response:
                return response.status

        first, second = routers
        assert [await status(first) for _ in range(LIMIT)] == [200] * LIMIT

        async def is_used_up() -> bool:
            meter = second.limiter._usages.get(a_key().key_id)
            return meter is not None and await status(second) == 429

        # It has not served the key before: what it knows, it was told.
        await until("the other router knows", is_used_up, WAIT_S)
