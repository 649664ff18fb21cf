"""Rollouts by the admin API: created, paused, resumed, aborted, and refused with a reason."""

import asyncio
from typing import Any

import msgspec

from isochrone.wire.models.artifact import manifest_digest
from isochrone.wire.models.model import ArtifactFile
from scheduler.store.catalogue import bump_generation
from scheduler.store.pool import Pool, transaction
from tests.integration.admin.conftest import Admin
from tests.locks import locked_out

FILE = ArtifactFile(path="m.gguf", size_bytes=1, sha256="a" * 64)
MODEL = {
    "model_id": "m",
    "architecture": "mock",
    "artifact": {
        "source": "file:/nowhere",
        "files": [{"path": "m.gguf", "size_bytes": 1, "sha256": "a" * 64}],
        "digest": manifest_digest([FILE]),
    },
    "context_tokens": 100,
    "weights_bytes": 1000,
}


async def deployed(admin: Admin) -> None:
    await admin.pop()
    assert (await admin.ask("PUT", "/v1/models/m", MODEL)).status == 200
    body = {"deployment_id": "d", "model_id": "m", "engine": {"driver": "mock"}}
    assert (await admin.ask("POST", "/v1/deployments", body)).status == 201


async def begin(admin: Admin, **fields: Any) -> Any:
    body = {"engine": {"driver": "mock", "options": {"itl_ms": "7"}}, **fields}
    return await admin.ask("POST", "/v1/deployments/d/rollouts", body)


async def test_a_rollout_is_created_paused_resumed_and_aborted(admin: Admin) -> None:
    await deployed(admin)
    made = await begin(admin, steps=[{"share": 0.1, "pops": ["ams"]}, {"share": 1.0}])
    assert made.status == 201
    assert (made.body["state"], made.body["to_version"], made.body["step"]) == ("running", 2, 0)
    assert made.body["seen"][0] == "attempts: 0"
    path = f"/v1/rollouts/{made.body['rollout_id']}"
    second = await begin(admin)
    assert second.status == 409
    assert "abort it first" in second.body["error"]["message"]
    passing = {"model_id": "m", "engine": {"driver": "mock", "options": {"itl_ms": "9"}}}
    assert (await admin.ask("PUT", "/v1/deployments/d", passing)).status == 409
    policy = {"model_id": "m", "engine": {"driver": "mock"}, "policy": {"replicas_max": 5}}
    assert (await admin.ask("PUT", "/v1/deployments/d", policy)).status == 200
    assert (await admin.ask("POST", f"{path}/pause")).body["state"] == "paused"
    again = await admin.ask("POST", f"{path}/pause")
    assert again.status == 409
    assert "it is paused" in again.body["error"]["message"]
    assert (await admin.ask("POST", f"{path}/resume")).body["state"] == "running"
    assert (await admin.ask("POST", f"{path}/abort")).body["state"] == "aborted"
    assert (await admin.ask("POST", f"{path}/resume")).status == 409
    third = await begin(admin)
    assert third.body["to_version"] == 3, "a number is never used twice"
    listed = (await admin.ask("GET", "/v1/rollouts?deployment_id=d")).body["data"]
    assert sorted(row["state"] for row in listed) == ["aborted", "running"]


IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"steps": [{"share": 1.0}]}, "nothing is left to compare"),
    ({"steps": [{"share": 0.5}, {"share": 0.2}]}, "smaller share"),
    ({"steps": [{"share": 0.5, "pops": ["xyz"]}]}, "no PoP xyz"),
    ({"model_id": "other"}, "no model other"),
    ({"engine": {"driver": "mock"}}, "already deployed"),
    ({"steps": [{"share": 7}]}, "cannot use field 'steps[0].share': expected"),
    ({"bounds": {"error_ratio": 0}}, "cannot use field 'bounds.error_ratio': expected"),
]


async def test_an_invalid_rollout_is_refused_with_the_reason(admin: Admin) -> None:
    await deployed(admin)
    for fields, words in IMPOSSIBLE:
        refused = await begin(admin, **fields)
        assert refused.status == (404 if fields == {"model_id": "other"} else 400), fields
        assert words in refused.body["error"]["message"]


async def test_the_new_version_of_a_deployment_with_roles_is_checked_and_sends_kv(
    admin: Admin,
) -> None:
    await admin.pop()
    files = [
        ArtifactFile(path=path, size_bytes=1, sha256="a" * 64)
        for path in ("config.json", "m.safetensors")
    ]
    artifact = {
        "source": "file:/nowhere",
        "files": msgspec.to_builtins(files),
        "digest": manifest_digest(files),
    }
    assert (await admin.ask("PUT", "/v1/models/m", {**MODEL, "artifact": artifact})).status == 200
    body = {
        "deployment_id": "d",
        "model_id": "m",
        "engine": {"driver": "vllm"},
        "policy": {"roles": "prefill=1,decode=1"},
    }
    assert (await admin.ask("POST", "/v1/deployments", body)).status == 201
    for engine, words in (
        ({"driver": "mock"}, "need an engine that sends the KV"),
        ({"driver": "sglang"}, "need both in each PoP at all times"),
        ({"driver": "vllm"}, "already deployed"),
        ({"driver": "vllm", "options": {"kv_connector": "pigeon"}}, "'pigeon' is unknown"),
    ):
        refused = await begin(admin, engine=engine)
        assert refused.status == 400, engine
        assert words in refused.body["error"]["message"]
    made = await begin(admin, engine={"driver": "vllm", "options": {"max_num_seqs": "8"}})
    assert made.status == 201
    options = made.body["spec"]["engine"]["options"]
    assert options == {"max_num_seqs": "8", "kv_connector": "nixl"}


async def test_other_files_of_a_model_make_a_new_version_of_its_deployments(
    admin: Admin,
) -> None:
    await deployed(admin)
    other = ArtifactFile(path="m.gguf", size_bytes=1, sha256="b" * 64)
    artifact = {
        "source": "file:/there",
        "files": [msgspec.to_builtins(other)],
        "digest": manifest_digest([other]),
    }

    async def version() -> int:
        return int((await admin.ask("GET", "/v1/deployments/d")).body["version"])

    dearer = {**MODEL, "price": {"prompt_per_million": 1.0}}
    assert (await admin.ask("PUT", "/v1/models/m", dearer)).status == 200
    assert await version() == 1
    made = (await begin(admin)).body
    refused = await admin.ask("PUT", "/v1/models/m", {**MODEL, "artifact": artifact})
    assert refused.status == 409
    assert "a rollout of d is active; abort it first" in refused.body["error"]["message"]
    assert (await admin.ask("POST", f"/v1/rollouts/{made['rollout_id']}/abort")).status == 200
    assert (await admin.ask("PUT", "/v1/models/m", {**MODEL, "artifact": artifact})).status == 200
    assert await version() == 3, "a number is never used twice"


async def test_a_simultaneous_change_and_rollout_get_different_versions(
    admin: Admin, pool: Pool
) -> None:
    await deployed(admin)
    other = {"model_id": "m", "engine": {"driver": "mock", "options": {"itl_ms": "9"}}}
    async with transaction(pool) as connection:
        await bump_generation(connection)  # every other change waits for this lock
        changing = asyncio.create_task(admin.ask("PUT", "/v1/deployments/d", other))
        await locked_out(pool)
        rolling = asyncio.create_task(begin(admin))
        await locked_out(pool, 2)
    assert (await changing).body["version"] == 2
    made = (await rolling).body
    assert (made["from_version"], made["to_version"]) == (2, 3)


async def test_the_target_model_of_a_rollout_cannot_be_deleted_until_it_is_aborted(
    admin: Admin,
) -> None:
    await deployed(admin)
    assert (await admin.ask("PUT", "/v1/models/new", {**MODEL, "model_id": "new"})).status == 200
    made = await begin(admin, model_id="new")
    assert made.status == 201
    refused = await admin.ask("DELETE", "/v1/models/new")
    assert refused.status == 409
    assert "rollout depends on it" in refused.body["error"]["message"]
    path = f"/v1/rollouts/{made.body['rollout_id']}"
    assert (await admin.ask("POST", f"{path}/abort")).status == 200
    assert (await admin.ask("DELETE", "/v1/models/new")).status == 204
