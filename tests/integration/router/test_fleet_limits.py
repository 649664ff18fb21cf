"""Limits of keys and budgets of tenants hold over two routers of one fleet."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from isochrone.service.trust.joining import join
from isochrone.wire.client_keys.key_table import budget_id
from isochrone.wire.client_keys.keys import format_key
from isochrone.wire.ids import DeploymentId, KeyId, TenantId
from isochrone.wire.peers.control import PeerRole
from isochrone.wire.peers.routes import KeyEntry, KeyLimits
from router.app import RouterApp, open_router
from tests.integration.admin.conftest import Admin, admin, settings
from tests.integration.router.catalogue import add_deployment
from tests.integration.router.fake_node import FakeNode, open_node
from tests.integration.router.fleet_of import KEY, a_config, a_key, a_route, a_table
from tests.system.harness import until

__all__ = ["admin", "settings"]

WAIT_S = 60.0
LIMIT = 5
SECOND_KEY = format_key(KeyId("s" * 12), b"\x02" * 32)
OTHER_KEY = format_key(KeyId("o" * 12), b"\x03" * 32)
REQUEST_TOKENS = 12
"""What the fake node says that a request of `max_tokens` 1 took."""


class TwoRouters:
    """Two routers that follow one scheduler, their node, and clients."""

    def __init__(
        self, apps: Sequence[RouterApp], node: FakeNode, http: aiohttp.ClientSession
    ) -> None:
        self.apps = apps
        self.node = node
        self._http = http
        self.admitted = 0

    def adopt_keys(self, *keys: KeyEntry) -> None:
        """Let both routers serve a table with these keys."""
        for app in self.apps:
            app.fleet.adopt(a_table([a_route(self.node)], generation=1_000, keys=keys))

    async def ask(self, router: int, key: str = KEY) -> aiohttp.ClientResponse:
        """Send a request through one of the routers; return its read response."""
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        async with self._http.post(
            f"http://127.0.0.1:{self.apps[router].port}/v1/chat/completions",
            json=body,
            headers={"authorization": f"Bearer {key}"},
        ) as response:
            await response.read()
            self.admitted += response.status == 200
            return response


@pytest.fixture
async def routers(admin: Admin, tmp_path: Path) -> AsyncIterator[TwoRouters]:
    """Two routers that have a table of the scheduler, with a deployment and no routes."""
    await admin.pop()
    await add_deployment(admin, "tiny", "embedded", "tiny")
    apps: list[RouterApp] = []
    async with AsyncExitStack() as stack:
        node = FakeNode()
        await stack.enter_async_context(open_node(node))
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
                return app.fleet.directory.deployment("tiny") is not None and app.link.connected

            await until("the router has a table", has_table, WAIT_S)
            apps.append(app)
        http = await stack.enter_async_context(aiohttp.ClientSession())
        yield TwoRouters(apps, node, http)


async def test_what_is_used_at_one_router_is_not_left_at_the_other(routers: TwoRouters) -> None:
    routers.adopt_keys(a_key(limits=KeyLimits(requests_per_min=LIMIT)))
    assert [(await routers.ask(0)).status for _ in range(LIMIT)] == [200] * LIMIT

    async def is_used_up() -> bool:
        meter = routers.apps[1].limiter._usages.get(a_key().key_id)
        return meter is not None and (await routers.ask(1)).status == 429

    # It has not served the key before: what it knows, it was told.
    await until("the other router knows", is_used_up, WAIT_S)


async def test_a_tenants_rate_holds_over_its_keys_and_routers(routers: TwoRouters) -> None:
    budget = KeyEntry(
        key_id=budget_id("acme"),
        secret_sha256="",
        tenant_id=TenantId("acme"),
        limits=KeyLimits(requests_per_min=LIMIT),
    )
    other = msgspec.structs.replace(a_key(OTHER_KEY), tenant_id=TenantId("other"))
    routers.adopt_keys(a_key(), a_key(SECOND_KEY), other, budget)
    begun_s = time.monotonic()

    async def use_up(router: int) -> aiohttp.ClientResponse:
        while True:
            for key in (KEY, SECOND_KEY):
                response = await routers.ask(router, key)
                if response.status != 200:
                    return response

    for refused in await asyncio.gather(use_up(0), use_up(1)):
        assert refused.status == 429

    async def is_owed_at(router: int) -> bool:
        response = await routers.ask(router)
        elapsed_s = time.monotonic() - begun_s
        # Whatever the time, no more was granted than the documented bound.
        assert routers.admitted <= LIMIT * (elapsed_s / 60 + len(routers.apps)) + 1e-6
        if response.status == 200:
            return False
        message = (await response.json())["error"]["message"]
        assert "the tenant's limit" in message
        # A request is admitted when what was granted by both routers is paid back but for a burst.
        owed_s = routers.admitted * 60 / LIMIT - elapsed_s
        return int(response.headers["retry-after"]) >= owed_s - 60 + 60 / LIMIT

    for router in range(2):

        async def is_owed(router: int = router) -> bool:
            return await is_owed_at(router)

        await until("the router draws what the other has granted", is_owed, WAIT_S)
    # Another tenant has what it had.
    assert (await routers.ask(0, OTHER_KEY)).status == 200


async def test_a_tenants_month_is_spent_at_both_routers_once_the_ledger_says_so(
    routers: TwoRouters, admin: Admin
) -> None:
    made = [await admin.ask("POST", "/v1/keys", {"tenant_id": name}) for name in ("acme",) * 2]
    keys = [answer.body["key"] for answer in made]
    limits = {"tokens_per_month": LIMIT * REQUEST_TOKENS}
    assert (await admin.ask("PUT", "/v1/tenants/acme/limits", limits)).status == 200
    route = msgspec.structs.replace(a_route(routers.node), deployment_id=DeploymentId("tiny"))
    for app in routers.apps:

        async def has_keys(app: RouterApp = app) -> bool:
            return len(app.fleet.directory.keys) == 3

        await until("the router has the keys and the budget", has_keys, WAIT_S)
        table = app.fleet.directory.table
        assert table is not None
        # The changes that the scheduler publishes next go on top of it.
        app.follower.accept(msgspec.structs.replace(table, routes=(route,)))
    for number in range(LIMIT):
        assert (await routers.ask(number % 2, keys[number % 2])).status == 200

    for router in range(2):

        async def is_spent(router: int = router) -> bool:
            response = await routers.ask(router, keys[router])
            if response.status == 200:
                return False
            error: Any = (await response.json())["error"]
            assert (response.status, error["code"]) == (429, "insufficient_quota")
            assert "the tenant's quota of this month (UTC) is used up" in error["message"]
            return True

        await until("the month is spent", is_spent, WAIT_S)

    async def is_booked() -> bool:
        budget = (await admin.ask("GET", "/v1/tenants/acme")).body
        booked: int = budget["tokens_this_month"]
        return booked == routers.admitted * REQUEST_TOKENS

    # What was granted until the routers knew is booked, too: none of it is lost.
    await until("all is booked", is_booked, WAIT_S)
    assert [(await routers.ask(number, keys[1 - number])).status for number in range(2)] == [
        429
    ] * 2
