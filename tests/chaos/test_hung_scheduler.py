"""The acting scheduler hangs (SIGSTOP) or dies: clients that use what it stores get answers."""

import asyncio
import io
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from scheduler.state.files.batch_folder import CLIENT_CALL_TIMEOUT_S, UNFINISHED
from tests.chaos.slow_disk import SlowDisks
from tests.stored_contents import stored_names
from tests.system.harness import LEASE_S, Fleet, a_fleet, until

ANSWER_S = 15.0
"""Twice the time in which a router notices that a scheduler hangs, and more."""

TOKENS = 300
UPLOAD_BYTES = 48 << 20
SLOW_S = 0.2
"""How long each operation on the disk takes while files are sent."""

HANGS_S = 3600.0
STOP_S = 30.0
"""In which a scheduler ends that is told to: it waits for its connections, up to ten seconds."""

LINE = (
    b'{"custom_id": "one", "method": "POST", "url": "/v1/chat/completions",'
    b' "body": {"model": "mock", "messages": [{"role": "user", "content": "x"}]}}\n'
)


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with a_fleet(comes_up=False) as running:
        for name in ("scheduler-a", "scheduler-b"):
            running.environment[name] = SlowDisks(running).environment("batches")
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

    async def open(self, method: str, path: str, **body: Any) -> aiohttp.ClientResponse:
        """Return an answer whose body is not read yet."""
        return await self._http.request(method, f"{self._url}{path}", headers=self._headers, **body)

    async def download(self, file_id: str, has_begun: asyncio.Event) -> int:
        """Read a file to its end; return how many bytes came. Raises ClientError if it is cut."""
        size_bytes = 0
        path = f"{self._url}/v1/files/{file_id}/content"
        async with self._http.get(path, headers=self._headers) as response:
            async for chunk in response.content.iter_any():
                size_bytes += len(chunk)
                has_begun.set()
        return size_bytes

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
        await until_only_rows(client, fleet.folder / "batches")
        _, batches, _ = await client.ask("GET", "/v1/batches")
        assert not batches["data"]


async def until_only_rows(client: Client, folder: Path, *, may_have_parts: bool = False) -> None:
    """Wait until the folder has the files that are listed, and nothing else."""

    async def has_only_rows() -> bool:
        _, files, _ = await client.ask("GET", "/v1/files")
        stored = {
            name
            for name in stored_names(folder)
            if not (may_have_parts and name.endswith(UNFINISHED))
        }
        return stored == {file["id"] for file in files["data"]}

    await until("each file has a row", has_only_rows)


@pytest.mark.parametrize("strike", [signal.SIGKILL, signal.SIGSTOP])
async def test_files_that_are_being_sent_end_soon(fleet: Fleet, strike: signal.Signals) -> None:
    disks, folder = SlowDisks(fleet), fleet.folder / "batches"
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120.0)) as http:
        client = Client(fleet, http)

        async def stores() -> Any:
            status, file, _ = await client.upload(UPLOAD_BYTES)
            return file if status == 200 else None

        file = await until("files are stored", stores)
        disks.set("batches", SLOW_S)
        has_begun = asyncio.Event()
        downloading = asyncio.create_task(client.download(file["id"], has_begun))
        uploading = asyncio.create_task(client.upload(UPLOAD_BYTES))

        async def is_arriving() -> bool:
            return has_begun.is_set() and bool(list(folder.glob(f"*{UNFINISHED}")))

        await until("both are under way", is_arriving)
        struck = fleet.processes.pid("scheduler-a")
        os.kill(struck, strike)
        disks.set("batches", 0.0)
        try:
            began_s = time.monotonic()
            status, body, has_retry_after = await uploading
            assert (status, has_retry_after) == (503, True), body
            with pytest.raises(aiohttp.ClientError):  # cut: its client sees that it is not whole
                await downloading
            assert time.monotonic() - began_s < ANSWER_S
            await until("another scheduler answers", stores, LEASE_S + 30.0)
            assert await client.download(file["id"], has_begun) == file["bytes"]
        finally:
            if strike is signal.SIGSTOP:
                os.kill(struck, signal.SIGCONT)

        # What one that was killed had begun stays for a day.
        await until_only_rows(client, folder, may_have_parts=strike is signal.SIGKILL)


async def test_a_disk_that_hangs_keeps_neither_clients_nor_the_scheduler(fleet: Fleet) -> None:
    disks = SlowDisks(fleet)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120.0)) as http:
        client = Client(fleet, http)

        async def stores() -> Any:
            status, file, _ = await client.upload()
            return file if status == 200 else None

        file = await until("files are stored", stores)
        disks.set("batches", HANGS_S)
        began_s = time.monotonic()
        answers = await asyncio.gather(
            client.ask("GET", f"/v1/files/{file['id']}/content"), client.upload()
        )
        assert time.monotonic() - began_s < CLIENT_CALL_TIMEOUT_S + ANSWER_S
        for status, body, has_retry_after in answers:
            assert (status, has_retry_after) == (503, True), body
        os.kill(fleet.processes.pid("scheduler-a"), signal.SIGTERM)

        async def has_ended() -> bool:
            return "scheduler-a" in fleet.processes.ended()

        await until("it ends although its calls hang", has_ended, STOP_S)
        disks.set("batches", 0.0)
        await until("another scheduler answers", stores, LEASE_S + 30.0)


async def test_a_stored_response_ends_though_its_scheduler_hangs(fleet: Fleet) -> None:
    """Its end is stored before the client gets the last event: by the scheduler that acts then."""
    body = {
        "model": "mock",
        "input": "x",
        "store": True,
        "stream": True,
        "max_output_tokens": TOKENS,
    }
    hung = fleet.processes.pid("scheduler-a")
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120.0)) as http:
        client = Client(fleet, http)

        async def begins() -> Any:
            response = await client.open("POST", "/v1/responses", json=body)
            if response.status == 200:
                return response
            response.close()
            return None

        response = await until("a response begins", begins)
        events: list[dict[str, Any]] = []
        try:
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                events.append(json.loads(line.removeprefix(b"data: ")))
                if len(events) == TOKENS // 2:
                    os.kill(hung, signal.SIGSTOP)
            assert events[-1]["type"] == "response.incomplete"
            response_id = events[-1]["response"]["id"]
            status, stored, _ = await client.ask("GET", f"/v1/responses/{response_id}")
            assert (status, stored["status"]) == (200, "incomplete")
        finally:
            os.kill(hung, signal.SIGCONT)
