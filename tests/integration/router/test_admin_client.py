"""The command line at another server's address says that the admin API is elsewhere."""

import asyncio
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from isochrone.cli.client import AdminClient, AdminError, AdminUnavailable
from tests.integration.router.fleet_of import a_bench


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/status"),
        ("POST", "/v1/deployments"),
        # Routers have this path, too, for their own keys.
        ("GET", "/v1/models"),
        ("DELETE", "/v1/models/tiny"),
    ],
)
async def test_a_router_is_not_taken_for_a_scheduler(
    tmp_path: Path, method: str, path: str
) -> None:
    async with a_bench(tmp_path) as bench:
        client = AdminClient(bench.url, "an admin token")
        with pytest.raises(AdminError) as refused:
            await asyncio.to_thread(client.ask, method, path, {} if method == "POST" else None)
    assert f"{bench.url}: this is a router; the admin API is at a scheduler" in str(refused.value)
    assert "ISOCHRONE_ADMIN_URL" in str(refused.value)


@pytest.mark.parametrize("status", [200, 404, 502])
async def test_a_page_for_browsers_is_not_taken_for_an_answer(status: int) -> None:
    async def page(_: web.Request) -> web.Response:
        return web.Response(status=status, text="<html>Grafana</html>")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", page)
    async with TestServer(app) as server:
        url = str(server.make_url("")).rstrip("/")
        with pytest.raises(AdminError) as refused:
            await asyncio.to_thread(AdminClient(url, "an admin token").ask, "GET", "/v1/status")
    assert str(refused.value).startswith(f"cannot use the admin API at {url}: ")
    assert "ISOCHRONE_ADMIN_URL" in str(refused.value)


@pytest.mark.parametrize(
    ("health", "service"),
    [
        ({"status": "ok", "pop": "ams"}, "this is a router;"),
        ({"status": "ok", "replicas": {"warm": 1}}, "this is a node;"),
        ({"status": "ok", "acting": True}, "this is a scheduler's control port;"),
        ({"status": "ok", "acting": True, "scheduler": "s1"}, "no such path"),
    ],
)
async def test_a_service_is_known_by_its_health(health: dict[str, object], service: str) -> None:
    async def healthz(_: web.Request) -> web.Response:
        return web.json_response(health)

    async def refuse(_: web.Request) -> web.Response:
        error = {"code": "not_found", "message": "cannot serve: no such path", "param": ""}
        return web.json_response({"error": error}, status=404)

    app = web.Application()
    app.router.add_get("/healthz", healthz)
    app.router.add_route("*", "/{path:.*}", refuse)
    async with TestServer(app) as server:
        client = AdminClient(f"{server.make_url('/v1/')}", "an admin token\r\n")
        with pytest.raises(AdminError) as refused:
            await asyncio.to_thread(client.ask, "GET", "/v1/status")
    assert service in str(refused.value)


async def test_what_tenants_wrote_has_no_control_characters_for_the_terminal() -> None:
    """A tenant's description of its adapter once wrote to the clipboard of who looked at it."""
    text = "a\x1b]52;c;eA==\x07b\x9b1m\n\tc"

    async def show(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"description": text, "size": 1}]})

    async def refuse(_: web.Request) -> web.Response:
        error = {"code": "not_found", "message": text, "param": ""}
        return web.json_response({"error": error}, status=400)

    app = web.Application()
    app.router.add_get("/v1/adapters", show)
    app.router.add_delete("/v1/adapters", refuse)
    async with TestServer(app) as server:
        client = AdminClient(str(server.make_url("")), "an admin token")
        answer = await asyncio.to_thread(client.ask, "GET", "/v1/adapters")
        assert answer == {"data": [{"description": "a]52;c;eA==b1m\n\tc", "size": 1}]}
        with pytest.raises(AdminError, match=r"^a\]52;c;eA==b1m\n\tc \(not_found\)$"):
            await asyncio.to_thread(client.ask, "DELETE", "/v1/adapters")


@pytest.mark.parametrize(("status", "may_be_later"), [(503, True), (409, False)])
async def test_a_scheduler_without_its_database_may_answer_later(
    status: int, may_be_later: bool
) -> None:
    async def refuse(_: web.Request) -> web.Response:
        error = {"code": "unavailable", "message": "cannot answer", "param": ""}
        return web.json_response({"error": error}, status=status)

    app = web.Application()
    app.router.add_get("/v1/status", refuse)
    async with TestServer(app) as server:
        client = AdminClient(str(server.make_url("")), "an admin token")
        with pytest.raises(AdminError) as refused:
            await asyncio.to_thread(client.ask, "GET", "/v1/status")
    assert isinstance(refused.value, AdminUnavailable) is may_be_later
