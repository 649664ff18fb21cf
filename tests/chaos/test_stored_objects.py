"""Files, batches, stored responses and adapters while the database or the disk fails."""

import asyncio
import io
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import psutil
import pytest

from isochrone.cli.client import AdminError
from isochrone.wire.peers.adapter import CONFIG_FILE, WEIGHTS_FILE
from scheduler.state.files.batch_folder import FREE_BYTES_MIN
from tests.chaos.disk import Disk, a_disk
from tests.lora_files import DIMENSIONS, config_file, weights_file
from tests.stored_contents import stored_names
from tests.system.harness import Fleet, a_fleet, until

OUTAGE_S = 30.0
ANSWER_S = 20.0
"""The longest time for an answer: a statement of the database has 10 s."""

WAIT_S = 90.0
TUNED = "@cf/meta/tiny"
LINE = {
    "custom_id": "one",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"model": "mock", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4},
}


class Answer(NamedTuple):
    """An answer, and how long it took."""

    status: int
    body: bytes
    retry_after: str
    took_s: float

    @property
    def is_refusal(self) -> bool:
        """Whether a client knows from it when to ask again."""
        return self.status == 503 and bool(self.retry_after) and b"cannot" in self.body


class Client:
    """A client of the router in Amsterdam."""

    def __init__(self, fleet: Fleet, http: aiohttp.ClientSession) -> None:
        self._url = fleet.endpoint("ams")
        self._headers = {"authorization": f"Bearer {fleet.key}"}
        self._http = http

    async def ask(self, method: str, path: str, **body: Any) -> Answer:
        began_s = time.monotonic()
        async with self._http.request(
            method, f"{self._url}{path}", headers=self._headers, **body
        ) as response:
            text = await response.read()
            retry_after = response.headers.get("retry-after", "")
            return Answer(response.status, text, retry_after, time.monotonic() - began_s)

    async def found(self, path: str) -> Any:
        answer = await self.ask("GET", path)
        assert answer.status == 200, answer
        return json.loads(answer.body)

    async def upload(self, padding_bytes: int = 0) -> Answer:
        """Upload a file with one line of a batch."""
        form = aiohttp.FormData()
        form.add_field("purpose", "batch")
        content = io.BytesIO(json.dumps(LINE).encode() + b"\n" + bytes(padding_bytes))
        form.add_field("file", content, filename="in.jsonl")
        return await self.ask("POST", "/v1/files", data=form)

    async def begin_batch(self, file_id: str) -> Answer:
        body = {
            "input_file_id": file_id,
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        }
        return await self.ask("POST", "/v1/batches", json=body)

    async def add_adapter(self, name: str) -> Answer:
        return await self.ask("POST", "/ai/finetunes", json={"model": TUNED, "name": name})

    async def upload_adapter(self, name: str, path: str, content: bytes) -> Answer:
        form = aiohttp.FormData()
        form.add_field("file_name", path)
        form.add_field("file", io.BytesIO(content), filename=path)
        return await self.ask("POST", f"/ai/finetunes/{name}/finetune-assets", data=form)


@pytest.fixture
async def disk(tmp_path: Path) -> AsyncIterator[Disk]:
    """A disk with room for 24 MiB beside what uploads leave free."""
    with a_disk(tmp_path / "disk", FREE_BYTES_MIN + (24 << 20)) as made:
        yield made


@asynccontextmanager
async def storing(folder: Path | None = None) -> AsyncIterator[tuple[Fleet, Client]]:
    """Start a fleet with one scheduler, which stores what clients give it in `folder`."""
    async with a_fleet(comes_up=False) as fleet:
        fleet.settings["scheduler-a"] = {
            "batch_folder": str(folder or fleet.folder / "batches"),
            "batches": {"lease_s": 4.0},
        }
        await fleet.up()
        await fleet.deploy()
        await add_tunable(fleet)
        timeout = aiohttp.ClientTimeout(total=120.0)
        async with aiohttp.ClientSession(timeout=timeout) as http:
            client = Client(fleet, http)

            async def stores() -> bool:
                return (await client.add_adapter("mine")).status == 200

            await until("objects are stored", stores)
            assert (await client.upload()).status == 200
            yield fleet, client


async def add_tunable(fleet: Fleet) -> None:
    """Deploy a model that takes adapters, without replicas."""
    files = [
        {"path": path, "size_bytes": 1, "sha256": "a" * 64}
        for path in ("config.json", "model.safetensors")
    ]
    body: dict[str, Any] = {
        "model_id": "tiny",
        "architecture": "LlamaForCausalLM",
        "artifact": {"source": "file:/nowhere", "files": files, "digest": "0" * 64},
        "context_tokens": 512,
        "weights_bytes": 1,
        "shape": DIMENSIONS,
    }
    with pytest.raises(AdminError) as refused:
        await fleet.ask("PUT", "/v1/models/tiny", body)
    body["artifact"]["digest"] = re.findall("[0-9a-f]{64}", str(refused.value))[-1]
    await fleet.tell("PUT", "/v1/models/tiny", body)
    deployment = {
        "deployment_id": "tiny",
        "model_id": "tiny",
        "name": TUNED,
        "engine": {"driver": "embedded"},
        "policy": {"replicas_min": 0},
    }
    await fleet.tell("POST", "/v1/deployments", deployment)


async def kill_postgres(fleet: Fleet) -> Callable[[], Awaitable[None]]:
    await fleet.kill("postgres")
    return fleet.start_postgres


async def hang_postgres(fleet: Fleet) -> Callable[[], Awaitable[None]]:
    lock = fleet.folder / "pg" / "data" / "postmaster.pid"
    server = psutil.Process(int(lock.read_text().split()[0]))
    hung = [server, *server.children(recursive=True)]
    for process in hung:
        process.suspend()

    async def resume() -> None:
        for process in reversed(hung):
            process.resume()

    return resume


async def check_rows(client: Client, folder: Path) -> None:
    """Check that each row of a file has its contents; no other contents stay."""

    async def is_clean() -> bool:
        listed = await client.ask("GET", "/v1/files")
        if listed.status != 200:  # the scheduler acts only soon
            return False
        files = {file["id"] for file in json.loads(listed.body)["data"]}
        stored = stored_names(folder)
        adapters = {name for name in stored if name.startswith("adapter-")}
        assert files <= stored, "a row has no contents"
        return stored - files == adapters and len(adapters) in (0, 2)

    await until("each file has its row", is_clean, WAIT_S)


async def upload_adapter(client: Client) -> None:
    """Upload both files of the adapter that the fleet knows."""
    for path, content in ((CONFIG_FILE, config_file()), (WEIGHTS_FILE, weights_file())):
        answer = await client.upload_adapter("mine", path, content)
        assert answer.status == 200, answer


async def until_answered(client: Client, batch_id: str) -> None:
    """Wait until a batch of one line has ended, with its answer."""

    async def has_ended() -> Any:
        shown = await client.ask("GET", f"/v1/batches/{batch_id}")
        state = json.loads(shown.body)
        return state if shown.status == 200 and state["status"] == "completed" else None

    ended = await until("the batch is answered", has_ended, WAIT_S)
    assert ended["request_counts"] == {"total": 1, "completed": 1, "failed": 0}


@pytest.mark.parametrize("fail", [kill_postgres, hang_postgres])
async def test_an_outage_of_the_database(
    fail: Callable[[Fleet], Awaitable[Callable[[], Awaitable[None]]]],
) -> None:
    async with storing() as (fleet, client):
        folder = fleet.folder / "batches"
        file_id = (await client.found("/v1/files"))["data"][0]["id"]
        batch = json.loads((await client.begin_batch(file_id)).body)
        requests: dict[str, Callable[[], Awaitable[Answer]]] = {
            "upload": lambda: client.upload(1 << 20),
            "download": lambda: client.ask("GET", f"/v1/files/{file_id}/content"),
            "list": lambda: client.ask("GET", "/v1/files"),
            "delete": lambda: client.ask("DELETE", f"/v1/files/{file_id}"),
            "batch": lambda: client.begin_batch(file_id),
            "cancel": lambda: client.ask("POST", f"/v1/batches/{batch['id']}/cancel"),
            "adapter": lambda: client.add_adapter("other"),
            "config": lambda: client.upload_adapter("mine", CONFIG_FILE, config_file()),
            "response": lambda: client.ask("GET", "/v1/responses/resp_0"),
            "store": lambda: client.ask(
                "POST", "/v1/responses", json={"model": "mock", "input": "x", "store": True}
            ),
        }
        before = stored_names(folder)
        end = await fail(fleet)
        began_s = time.monotonic()

        async def repeat(name: str) -> None:
            while time.monotonic() - began_s < OUTAGE_S:
                answer = await requests[name]()
                assert answer.took_s < ANSWER_S, (name, answer)
                assert answer.is_refusal, (name, answer)
                await asyncio.sleep(2.0)

        try:
            chat = {"model": "mock", "messages": [{"role": "user", "content": "x"}]}
            _, answer = await asyncio.gather(
                asyncio.gather(*(repeat(name) for name in requests)),
                client.ask("POST", "/v1/chat/completions", json=chat),
            )
            assert answer.status == 200
            assert stored_names(folder) == before, "an upload was written that cannot be stored"
        finally:
            await end()

        async def stores() -> bool:
            return (await client.upload()).status == 200

        await until("files are stored again", stores)
        await upload_adapter(client)
        await check_rows(client, folder)
        await until_answered(client, batch["id"])


async def test_a_disk_that_fills_up(disk: Disk) -> None:
    async with storing(disk.folder / "batches") as (_, client):
        folder = disk.folder / "batches"
        await check_rows(client, folder)
        before = stored_names(folder)
        for _ in range(3):
            answer = await client.upload(40 << 20)
            assert answer.is_refusal, answer
        disk.fill()
        for answer in (
            await client.upload(),
            await client.upload_adapter("mine", CONFIG_FILE, config_file()),
        ):
            assert answer.is_refusal, answer
        assert stored_names(folder) == before
        file_id = (await client.found("/v1/files"))["data"][0]["id"]
        batch = json.loads((await client.begin_batch(file_id)).body)

        async def is_written() -> bool:
            state = await client.found(f"/v1/batches/{batch['id']}")
            assert state["status"] != "completed"
            return bool(state["status"] == "finalizing")

        await until("its results are to be written", is_written, WAIT_S)
        disk.free()
        await until_answered(client, batch["id"])
        await upload_adapter(client)
        await check_rows(client, folder)
