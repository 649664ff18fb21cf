"""A scheduler in this process, on a fresh database, with its admin listener open."""

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest

from isochrone.service.files import write_atomic
from scheduler.app import serve
from scheduler.config import SchedulerConfig
from tests.ports import free_port
from tests.system.harness import until

TOKEN = "0123456789abcdef-admin"


class Answer(NamedTuple):
    """A response of the API."""

    status: int
    body: Any
    headers: dict[str, str]


class Admin:
    """A client of the admin API."""

    def __init__(self, http: aiohttp.ClientSession, url: str, control_url: str) -> None:
        self.url = url
        self.control_url = control_url
        self._http = http

    async def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        token: str | None = TOKEN,
        raw: bytes | None = None,
        **headers: str,
    ) -> Answer:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if token is not None:
            sent["authorization"] = f"Bearer {token}"
        async with self._http.request(
            method,
            f"{self.url}{path}",
            json=body if raw is None else None,
            data=None if raw is None else io.BytesIO(raw),
            headers=sent,
        ) as response:
            is_json = response.content_type == "application/json"
            answer = await response.json() if is_json else await response.text()
            lowered = {name.lower(): value for name, value in response.headers.items()}
            return Answer(response.status, answer, lowered)

    async def pop(self, name: str = "ams", country: str = "NL") -> None:
        body = {"city": name, "country": country, "latitude": 52.0, "longitude": 4.0}
        assert (await self.ask("PUT", f"/v1/pops/{name}", body)).status == 200


@pytest.fixture
def settings() -> dict[str, Any]:
    """Settings of the scheduler that a test module may override."""
    return {}


@pytest.fixture
async def admin(
    database_dsn: str, tmp_path: Path, settings: dict[str, Any]
) -> AsyncIterator[Admin]:
    write_atomic(tmp_path / "token", TOKEN.encode())
    config = SchedulerConfig(
        name="s1",
        database_url=database_dsn,
        authority=tmp_path / "ca",
        admin_token_file=tmp_path / "token",
        admin_port=free_port(),
        control_port=free_port(),
        lease_renew_s=0.2,
        **settings,
    )
    stopping = asyncio.Event()
    running = asyncio.create_task(serve(config, stopping))
    async with aiohttp.ClientSession() as http:
        asks = Admin(
            http,
            f"http://127.0.0.1:{config.admin_port}",
            f"http://127.0.0.1:{config.control_port}",
        )

        async def acts() -> bool:
            with suppress(aiohttp.ClientError):
                return bool((await asks.ask("GET", "/v1/status")).body.get("acting"))
            return False

        await until("the scheduler acts", acts)
        yield asks
    stopping.set()
    assert await running == 0
