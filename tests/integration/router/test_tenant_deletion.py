"""A tenant is deleted with all that its clients have stored; nothing of others is touched."""

import json
from typing import Any

import openai
import pytest
from cloudflare import AsyncCloudflare

from isochrone.wire.peers.adapter import CONFIG_FILE, WEIGHTS_FILE
from tests.integration.admin.conftest import admin
from tests.integration.admin.test_cli import run_cli
from tests.integration.router.test_batches import a_client, a_line
from tests.integration.router.test_finetunes import MODEL, WAIT_S, FinetuneBench, bench, settings
from tests.lora_files import config_file, weights_file
from tests.stored_contents import stored_names
from tests.system.harness import until

__all__ = ["admin", "bench", "settings"]


async def store_one_of_each(client: openai.AsyncOpenAI, adapters: AsyncCloudflare) -> str:
    """Store one object of each kind; return the id of the response."""
    file = await client.files.create(
        file=("in.jsonl", json.dumps(a_line("a", model=MODEL)).encode()), purpose="batch"
    )
    await client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    await client.conversations.create(items=[{"type": "message", "role": "user", "content": "a"}])
    response = await client.responses.create(model=MODEL, input="a", background=True, store=True)
    finetunes = adapters.ai.finetunes
    made: Any = await finetunes.create(account_id="x", model=MODEL, name="mine")
    for path, body in ((CONFIG_FILE, config_file()), (WEIGHTS_FILE, weights_file())):
        await finetunes.assets.create(made.id, account_id="x", file_name=path, file=body)
    return response.id


async def test_a_tenant_is_deleted_with_all_that_it_has_stored(bench: FinetuneBench) -> None:
    url, delete = f"http://127.0.0.1:{bench.app.port}", ("-o", "json", "tenants", "delete", "acme")
    mine, theirs = str(bench.client.api_token), str(bench.other.api_token)
    async with a_client(url, mine) as client, a_client(url, theirs) as other:
        await store_one_of_each(client, bench.client)
        kept = await store_one_of_each(other, bench.other)
        stored = stored_names(bench.folder)
        assert len(stored) == 6  # of each tenant an input file, and two of an adapter
        limit = ("tenants", "limit", "acme", "--tokens-per-day", "5")
        assert (await run_cli(bench.admin, *limit))[0] == 0
        code, out, err = await run_cli(bench.admin, *delete)
        assert code == 0, err
        one_of_each = dict.fromkeys(
            ("files", "batches", "responses", "conversations", "adapters"), 1
        )
        # The budget is revoked like a key.
        assert json.loads(out) == {"tenant_id": "acme", "keys": 2, **one_of_each}

        async def are_deleted() -> bool:
            return len(stored_names(bench.folder)) == 3

        await until("the contents of its files are deleted", are_deleted, WAIT_S)

        async def is_unknown() -> bool:
            table = bench.app.fleet.directory.table
            return table is not None and len(table.keys) == len(table.adapters) == 1

        await until("the router has one key and one adapter", is_unknown, WAIT_S)
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()
        # Nothing is left, and nothing of the other tenant is gone.
        assert set(json.loads((await run_cli(bench.admin, *delete))[1]).values()) == {"acme", 0}
        assert (await other.responses.retrieve(kept)).id == kept
        assert len((await other.files.list()).data) == len((await other.batches.list()).data) == 1
        for subject, kind in (("acme", "tenant.delete"), (mine.split("_")[1], "key.revoke")):
            path = f"/v1/events?subject={subject}&limit=1"
            (event,) = (await bench.admin.ask("GET", path)).body["data"]
            assert event["kind"] == kind


async def test_a_tenant_that_never_was_is_not_deleted(bench: FinetuneBench) -> None:
    code, _, err = await run_cli(bench.admin, "tenants", "delete", "acmee")
    assert (code, "cannot find the tenant 'acmee': `isochrone keys list`" in err) == (1, True)
