"""SIGSTOP of the acting scheduler: clients that use what it stores get answers all the same."""

import asyncio
import io
import os
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from tests.system.harness import LEASE_S, Fleet, a_fleet, until

ANSWER_S = 15.0
"""Twice the time in which a router notices that a scheduler hangs, and more."""

UPLOAD_BYTES = 48 << 20
LINE = (
    b'{"custom_id": "one", "method": "POST", "url": "/v1/chat/completions",'
    b' "body": {"model": "mock", "messages": [{"role": "user", "content": "x"}]}}\n'
)


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with a_fleet(comes_up=False) as running:
        for name in ("scheduler-a", "scheduler-b"):
            running.settings[name] = {"batch_folder": str(running.folder / "batches")}
        await running.up()
        await running.deploy()
        await running.start_scheduler("b")
        yield running


class Client:
    """A client of the router in Amsterdam."""

    def __init__(self, fleet: Fleet, http: aiohttp.ClientSession) -> None:
        self._url = fleet.endpoint("ams")
        self._headers = {"authorization": f"Bearer {fleet.key}"}
        self._http = http

    async def ask(self, method: str, path: str, **body: Any) -> tuple[int, Any, bool]:
        """Return the status, the body, and whether the answer says when to ask again."""
        async with self._http.request(
            method, f"{self._url}{path}", headers=self._headers, **body
        ) as response:
            return response.status, await response.json(), "retry-after" in response.headers

    async def upload(self, size_bytes: int = 0) -> tuple[int, Any, bool]:
        """Upload a file with one line, made longer with spaces."""
        form = aiohttp.FormData()
        form.add_field("purpose", "batch")
        form.add_field("file", io.BytesIO(LINE + size_bytes * b" "), filename="in.jsonl")
        return await self.ask("POST", "/v1/files", data=form)


async def test_a_hung_scheduler_keeps_no_client_waiting(fleet: Fleet) -> None:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120.0)) as http:
        client = Client(fleet, http)

        async def stores() -> Any:
            status, file, _ = await client.upload()
            return file if status == 200 else None

        file = await until("files are stored", stores)
        batch = {
            "input_file_id": file["id"],
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        }
        stored = {"model": "mock", "input": "x", "store": True}
        hung = fleet.processes.pid("scheduler-a")
        os.kill(hung, signal.SIGSTOP)
        try:
            began_s = time.monotonic()
            answers = await asyncio.gather(
                client.ask("GET", "/v1/files"),
                client.ask("POST", "/v1/batches", json=batch),
                client.ask("GET", "/v1/responses/resp_0"),
                client.ask("POST", "/v1/responses", json=stored),
                client.upload(UPLOAD_BYTES),
            )
            assert time.monotonic() - began_s < ANSWER_S
            for status, body, has_retry_after in answers:
                assert (status, has_retry_after) == (503, True), body
            await until("another scheduler answers", stores, LEASE_S + 30.0)
        finally:
            os.kill(hung, signal.SIGCONT)

        async def has_stepped_down() -> bool:
            return not await fleet.acts("a")

        await until("it knows that it was replaced", has_stepped_down)
        # It finds the requests that were given up, and does nothing for their clients.
        _, files, _ = await client.ask("GET", "/v1/files")
        _, batches, _ = await client.ask("GET", "/v1/batches")
        contents = {path.name for path in (fleet.folder / "batches").iterdir()}
        assert contents == {file["id"] for file in files["data"]}
        assert not batches["data"]
