"""`/ai/finetunes` with the official `cloudflare` client: router, scheduler and Postgres."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
from cloudflare import APIStatusError, AsyncCloudflare

from isochrone.service.trust.joining import join
from isochrone.wire.peers import relay as wire
from isochrone.wire.peers.adapter import CONFIG_FILE, WEIGHTS_FILE
from isochrone.wire.peers.control import PeerRole
from router.app import RouterApp, open_router
from scheduler.decide.adapter_limits import AdapterLimits
from tests.integration.admin.conftest import Admin, admin
from tests.integration.router.catalogue import add_deployment
from tests.integration.router.fleet_of import a_config
from tests.lora_files import adapter_shapes, config_file, weights_file
from tests.system.harness import until

__all__ = ["admin"]

WAIT_S = 60.0
MODEL: Final = "@cf/meta/tiny"


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """Settings of the scheduler."""
    return {
        "batch_folder": tmp_path / "batches",
        "adapters": AdapterLimits(tenant_adapters_max=3, file_bytes_max=200_000),
    }


class FinetuneBench:
    """A router that follows a scheduler, and clients of two tenants."""

    def __init__(
        self,
        admin: Admin,
        app: RouterApp,
        clients: tuple[AsyncCloudflare, ...],
        folder: Path,
    ) -> None:
        self.admin = admin
        self.folder = folder
        self.app = app
        self.client, self.other = clients

    async def create(self, name: str, **fields: Any) -> Any:
        return await self.client.ai.finetunes.create(
            account_id="acme", model=MODEL, name=name, **fields
        )

    async def upload(self, finetune: str, path: str, body: bytes) -> Any:
        return await self.client.ai.finetunes.assets.create(
            finetune, account_id="acme", file_name=path, file=body
        )

    def known(self) -> dict[str, Any]:
        """Return the adapters that the router knows, by name."""
        table = self.app.fleet.directory.table
        return {one.name: one for one in table.adapters} if table is not None else {}


@pytest.fixture
async def bench(admin: Admin, tmp_path: Path) -> AsyncIterator[FinetuneBench]:
    await admin.pop()
    await add_deployments(admin)
    keys = [
        (await admin.ask("POST", "/v1/keys", {"tenant_id": tenant})).body["key"]
        for tenant in ("acme", "other")
    ]
    token = (await admin.ask("POST", "/v1/join-tokens", {"pop": "ams", "role": "router"})).body
    identity = await join(
        urls=[admin.control_url],
        token=token["token"],
        role=PeerRole.ROUTER,
        name="r",
        folder=tmp_path / "identity",
    )
    async with AsyncExitStack() as stack:
        config = a_config(tmp_path, schedulers=(admin.control_url,))
        app = await stack.enter_async_context(open_router(config, identity))

        async def follows() -> bool:
            table = app.fleet.directory.table
            if table is None or not app.scheduler_client.access.token:
                return False
            return len(table.keys) == 2 and len(table.deployments) == 2

        await until("the router follows", follows, WAIT_S)
        url = f"http://127.0.0.1:{app.port}/client/v4"
        clients = [
            await stack.enter_async_context(
                AsyncCloudflare(base_url=url, api_token=key, max_retries=0)
            )
            for key in keys
        ]
        yield FinetuneBench(admin, app, (clients[0], clients[1]), tmp_path / "batches")


async def add_deployments(admin: Admin) -> None:
    """Add one deployment that takes adapters, and one that does not."""
    await add_deployment(admin, "tiny", "embedded", MODEL)
    await add_deployment(admin, "plain", "mock", "@cf/meta/plain")


async def test_an_adapter_is_uploaded_and_listed(bench: FinetuneBench) -> None:
    made = await bench.create("mine", description="in short")
    assert (made.name, made.model, made.public, made.description) == (
        *("mine", MODEL, False),
        "in short",
    )
    await bench.upload("mine", WEIGHTS_FILE, weights_file())
    # Not complete yet: it may be replaced.
    await bench.upload(made.id, WEIGHTS_FILE, weights_file())
    await bench.upload(made.id, CONFIG_FILE, config_file())
    # The client's type says one object, the documentation a list.
    listed: Any = await bench.client.ai.finetunes.list(account_id="acme")
    assert [one.id for one in listed] == [made.id]

    async def is_known() -> bool:
        return "mine" in bench.known() and bench.known()["mine"].artifact is not None

    await until("the router knows it", is_known, WAIT_S)
    entry = bench.known()["mine"]
    assert (entry.adapter_id, entry.model_id, entry.rank) == (made.id, "tiny", 4)
    assert [file.path for file in entry.artifact.files] == [CONFIG_FILE, WEIGHTS_FILE]
    with pytest.raises(APIStatusError, match="its files are complete") as final:
        await bench.upload("mine", CONFIG_FILE, config_file())
    assert final.value.status_code == 409
    # Its files are for nodes: a router's token is of no use there.
    path = f"{wire.ADAPTER_FILE_PATH}/adapters/{made.id}/{WEIGHTS_FILE}"
    async with aiohttp.ClientSession() as http:
        for token in ("", bench.app.scheduler_client.access.token):
            sent = {wire.RELAY_TOKEN: token}
            async with http.get(f"{bench.admin.control_url}{path}", headers=sent) as response:
                assert response.status == 503


async def test_only_public_adapters_are_seen_by_others(bench: FinetuneBench) -> None:
    for name, public in (("hidden", False), ("shown", True), ("unfinished", True)):
        made = await bench.create(name, public=public)
        if name != "unfinished":
            await bench.upload(made.id, CONFIG_FILE, config_file())
            await bench.upload(made.id, WEIGHTS_FILE, weights_file())
    pages = bench.other.ai.finetunes.public.list(account_id="other", order_by="name", limit=10)
    assert [one.name async for one in pages] == ["shown"]
    pages = bench.other.ai.finetunes.public.list(account_id="other", offset=1)
    assert [one.name async for one in pages] == []
    with pytest.raises(APIStatusError) as missing:
        await bench.other.ai.finetunes.assets.create(
            "hidden", account_id="other", file_name=CONFIG_FILE, file=config_file()
        )
    assert missing.value.status_code == 404
    with pytest.raises(APIStatusError) as full:
        await bench.create("a fourth".replace(" ", "-"))
    assert full.value.status_code == 429


async def test_bad_uploads_are_refused_in_words(bench: FinetuneBench) -> None:
    made = await bench.create("mine")
    for path, body, status, words in (
        (CONFIG_FILE, config_file(r=64), 400, "the limit is 32"),
        (CONFIG_FILE, b"not json", 400, f"cannot read {CONFIG_FILE}"),
        (CONFIG_FILE, config_file(use_dora=True), 400, "use_dora"),
        (WEIGHTS_FILE, b"GGUF" * 100, 400, "no adapter in the safetensors format"),
        (WEIGHTS_FILE, weights_file()[:-1], 400, "the file has"),
        (WEIGHTS_FILE, bytes(300_000), 413, "more than 200000 bytes"),
        ("pytorch_model.bin", b"x", 400, CONFIG_FILE),
    ):
        with pytest.raises(APIStatusError, match=words) as refused:
            await bench.upload(made.id, path, body)
        assert refused.value.status_code == status, words
    await bench.upload(made.id, CONFIG_FILE, config_file())
    with pytest.raises(APIStatusError, match="for another model"):
        await bench.upload(made.id, WEIGHTS_FILE, weights_file(adapter_shapes(hidden=32)))
    with pytest.raises(APIStatusError, match="one of that name"):
        await bench.create("mine")
    with pytest.raises(APIStatusError, match="does not support LoRA") as unsupported:
        await bench.client.ai.finetunes.create(
            account_id="acme", model="@cf/meta/plain", name="other"
        )
    assert unsupported.value.status_code == 405
    assert unsupported.value.body["errors"][0]["code"] == 5005
    with pytest.raises(APIStatusError, match="the path of the public adapters"):
        await bench.create("public")
    with pytest.raises(APIStatusError) as unknown:
        await bench.client.ai.finetunes.create(account_id="acme", model="none", name="other")
    assert unknown.value.status_code == 404


async def test_a_deleted_adapter_is_gone_for_clients_and_on_disk(bench: FinetuneBench) -> None:
    folder = bench.folder
    made = await bench.create("mine")
    await bench.upload(made.id, CONFIG_FILE, config_file())
    await bench.upload(made.id, WEIGHTS_FILE, weights_file())
    assert len(list(folder.iterdir())) == 2
    path = "/accounts/acme/ai/finetunes"

    for name in ("mine", made.id):
        with pytest.raises(APIStatusError) as foreign:
            await bench.other.delete(f"{path}/{name}", cast_to=object)
        assert foreign.value.status_code == 404
    await bench.client.delete(f"{path}/{made.id}", cast_to=object)
    with pytest.raises(APIStatusError) as again:
        await bench.client.delete(f"{path}/{made.id}", cast_to=object)
    assert again.value.status_code == 404

    async def is_forgotten() -> bool:
        return "mine" not in bench.known()

    await until("the router has forgotten it", is_forgotten, WAIT_S)
    assert list(folder.iterdir()) == []
    with pytest.raises(APIStatusError) as gone:
        await bench.client.ai.run(MODEL, account_id="acme", prompt="Hi", lora="mine")
    assert gone.value.status_code == 404
    # Its name is free.
    assert (await bench.create("mine")).id != made.id
