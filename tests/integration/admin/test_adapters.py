"""LoRA adapters as operators manage them: the admin API and the command."""

import json
from pathlib import Path
from typing import Any, Final

import pytest

from isochrone.wire.peers.adapter import CONFIG_FILE, WEIGHTS_FILE
from scheduler.decide.adapter_limits import AdapterLimits
from tests.integration.admin.conftest import Admin
from tests.integration.admin.test_cli import run_cli
from tests.integration.router.test_finetunes import add_deployments
from tests.lora_files import adapter_shapes, config_file, weights_file
from tests.stored_contents import stored_names

MODEL: Final = "@cf/meta/tiny"
LIMITS: Final = AdapterLimits(tenant_adapters_max=2, file_bytes_max=200_000)


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """Settings of the scheduler."""
    return {"batch_folder": tmp_path / "batches", "adapters": LIMITS}


def write_folder(folder: Path, **fields: Any) -> Path:
    """Write an adapter as PEFT does."""
    folder.mkdir()
    (folder / CONFIG_FILE).write_bytes(config_file(**fields))
    (folder / WEIGHTS_FILE).write_bytes(weights_file())
    return folder


async def add_keys(admin: Admin, *tenants: str) -> None:
    """Create a key for each tenant."""
    for tenant in tenants:
        made = await admin.ask("POST", "/v1/keys", {"tenant_id": tenant})
        assert made.status == 201, made


async def cli(admin: Admin, *arguments: str) -> Any:
    """Run the command; return what it prints as JSON."""
    code, out, err = await run_cli(admin, "-o", "json", "adapters", *arguments)
    assert code == 0, err
    return json.loads(out) if out else None


async def test_an_operator_manages_the_adapters_of_tenants(admin: Admin, tmp_path: Path) -> None:
    await add_deployments(admin)
    await add_keys(admin, "acme", "other")
    folder, stored = write_folder(tmp_path / "mine"), tmp_path / "batches"
    upload = ("upload", str(folder), "--model", MODEL, "--tenant")
    made = await cli(admin, *upload, "acme", "--name", "mine", "--description", "in short")
    assert (made["state"], made["missing_files"], made["rank"]) == ("complete", [], 4)
    assert (made["public"], made["model_id"], made["nodes"]) == (False, "tiny", [])
    files = [folder / CONFIG_FILE, folder / WEIGHTS_FILE]
    assert made["size_bytes"] == sum(file.stat().st_size for file in files)
    by_id = ("upload", str(folder), "--model", "tiny", "--tenant")
    other = await cli(admin, *by_id, "other", "--name", "mine", "--public")
    assert other["model"] == MODEL
    assert [row["adapter_id"] for row in await cli(admin, "list", "--tenant", "acme")] == [
        made["adapter_id"]
    ]
    assert len(await cli(admin, "list")) == 2
    assert "complete" in (await run_cli(admin, "adapters", "list"))[1]
    assert (await cli(admin, "show", other["adapter_id"]))["public"] is True
    assert (await cli(admin, "unpublish", other["adapter_id"]))["public"] is False
    assert (await cli(admin, "publish", other["adapter_id"]))["public"] is True
    assert await cli(admin, "limits") == [
        {
            "tenant_id": tenant,
            "adapters": 1,
            "adapters_max": 2,
            "size_bytes": made["size_bytes"],
            "file_bytes_max": 200_000,
            "rank_max": 32,
        }
        for tenant in ("acme", "other")
    ]
    assert len(list(stored.iterdir())) == 4
    await cli(admin, "delete", made["adapter_id"])
    assert len(list(stored.iterdir())) == 2
    code, _, err = await run_cli(admin, "adapters", "delete", made["adapter_id"])
    assert (code, f"cannot find the adapter '{made['adapter_id']}'" in err) == (1, True)
    events = (await run_cli(admin, "events", "--limit", "20"))[1]
    for kind in ("adapter.create", "adapter.upload", "adapter.put", "adapter.delete"):
        assert kind in events


async def test_what_cannot_be_used_is_refused_and_leaves_nothing(
    admin: Admin, tmp_path: Path
) -> None:
    await add_deployments(admin)
    await add_keys(admin, "acme")
    good, big = write_folder(tmp_path / "good"), write_folder(tmp_path / "big", r=64)
    foreign, huge = write_folder(tmp_path / "foreign"), write_folder(tmp_path / "huge")
    (foreign / WEIGHTS_FILE).write_bytes(weights_file(adapter_shapes(hidden=32)))
    (huge / WEIGHTS_FILE).write_bytes(bytes(300_000))
    options = ("--tenant", "acme", "--name", "mine", "--model")
    for folder, model, status, words in (
        (big, MODEL, 1, "the limit is 32"),
        (foreign, MODEL, 1, "for another model"),
        (huge, MODEL, 1, "more than 200000 bytes"),
        (good, "@cf/meta/plain", 1, "does not support LoRA"),
        (good, "none", 1, "cannot find the model"),
        (tmp_path, MODEL, 2, f"has no {CONFIG_FILE} and no {WEIGHTS_FILE}"),
    ):
        code, _, err = await run_cli(admin, "adapters", "upload", str(folder), *options, model)
        assert code == status
        assert words in " ".join(err.replace("│", " ").split()), words
    assert await cli(admin, "list") == []
    assert not stored_names(tmp_path / "batches")
    body = {"tenant_id": "acme", "model": MODEL, "name": "one"}
    made = (await admin.ask("POST", "/v1/adapters", body)).body
    path = f"/v1/adapters/{made['adapter_id']}"
    bad = await admin.ask("PUT", f"{path}/files/pytorch_model.bin", raw=b"x")
    assert (bad.status, CONFIG_FILE in bad.body["error"]["message"]) == (400, True)
    partly = await admin.ask("PUT", f"{path}/files/{CONFIG_FILE}", raw=config_file())
    assert partly.body["missing_files"] == [WEIGHTS_FILE]
    assert partly.headers["etag"] != f'"{made["etag"]}"'
    for answer in (
        await admin.ask("DELETE", path, if_match=f'"{made["etag"]}"'),
        await admin.ask("PUT", f"{path}/public", {"public": True}, if_match=f'"{made["etag"]}"'),
    ):
        assert answer.status == 412, answer
    nothing = await admin.ask("PUT", "/v1/adapters/ft-none/files/x", raw=b"x")
    assert nothing.status == 404
    assert len(stored_names(tmp_path / "batches")) == 1


async def test_an_adapter_needs_a_tenant_that_exists(admin: Admin, tmp_path: Path) -> None:
    await add_deployments(admin)
    folder = write_folder(tmp_path / "mine")
    upload = ("adapters", "upload", str(folder), "--model", MODEL, "--name", "mine", "--tenant")
    words = "create a key first"
    for existing in ("acme", "other"):
        code, _, err = await run_cli(admin, *upload, "acmee")
        said = " ".join(err.replace("│", " ").split())
        assert code == 1
        assert "cannot add an adapter of tenant 'acmee'" in said
        assert words in said
        await add_keys(admin, existing)
        words = "use one of acme (`isochrone keys list` shows all)"
    revoked = (await admin.ask("GET", "/v1/keys")).body["data"][0]
    await admin.ask("DELETE", f"/v1/keys/{revoked['key_id']}")
    assert (await run_cli(admin, *upload, revoked["tenant_id"]))[0] == 1
    budget = {"tokens_per_day": 1000}
    await admin.ask("PUT", f"/v1/tenants/{revoked['tenant_id']}/limits?new=true", budget)
    assert (await run_cli(admin, *upload, revoked["tenant_id"]))[0] == 0
