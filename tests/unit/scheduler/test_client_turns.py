"""Tenants take turns at the database: one that sends many requests waits for its own."""

import asyncio
from collections import Counter

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from isochrone.wire.errors import ApiError, ErrorCode
from scheduler.api.client_objects.relayed import TURNS_MAX, ClientTurns
from scheduler.database import CLIENT_CONNECTIONS
from scheduler.state.files import file_threads


class Database:
    """A database that answers nothing until it is told to."""

    def __init__(self) -> None:
        self.running: Counter[str] = Counter()
        self.begun = asyncio.Semaphore(0)
        self.answers = asyncio.Event()

    async def handle(self, request: web.Request, tenant_id: str) -> web.Response:
        self.running[tenant_id] += 1
        self.begun.release()
        await self.answers.wait()
        return web.Response()


async def test_a_flood_of_one_tenant_leaves_turns_and_connections_for_others() -> None:
    """64 readers of one tenant had all connections: jobs and other tenants got none in time."""
    database = Database()
    limited, request = ClientTurns().limited(database.handle), make_mocked_request("GET", "/")

    async def ask(tenant_id: str) -> None:
        await limited(request, tenant_id)

    flood = [asyncio.create_task(ask("flood")) for _ in range(64)]
    small = asyncio.create_task(ask("small"))
    for _ in range(TURNS_MAX // 2 + 1):
        await database.begun.acquire()
    assert database.running == {"flood": TURNS_MAX // 2, "small": 1}
    assert TURNS_MAX < CLIENT_CONNECTIONS
    database.answers.set()
    await asyncio.gather(*flood, small)
    assert database.running == {"flood": 64, "small": 1}


async def test_a_request_whose_turn_does_not_come_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(file_threads, "TURN_TIMEOUT_S", 0.0)
    turns = ClientTurns()
    async with turns.turn("b"):
        for _ in range(TURNS_MAX // 2 - 1):
            await turns.turn("a").__aenter__()
        with pytest.raises(ApiError, match="too many requests of this tenant") as refused:
            for _ in range(TURNS_MAX):
                await turns.turn("a").__aenter__()
    assert refused.value.code is ErrorCode.OUT_OF_CAPACITY
