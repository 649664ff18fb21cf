"""The engines of the admin API, and what `deploy` refuses because an engine cannot do it."""

from typing import Any

import msgspec

from isochrone.wire.models.artifact import manifest_digest
from isochrone.wire.models.model import Artifact, ArtifactFile
from scheduler.store.pool import Pool, using
from tests.integration.admin.conftest import Admin
from tests.integration.admin.test_admin import a_deployment_body, a_model_body, catalogued


async def test_engines_are_listed_with_what_they_lack(admin: Admin) -> None:
    first = await admin.ask("GET", "/v1/engines?limit=2")
    assert first.status == 200
    rest = await admin.ask("GET", f"/v1/engines?cursor={first.body['next_cursor']}")
    engines = {row["driver"]: row for row in (*first.body["data"], *rest.body["data"])}
    assert {"embedded", "vllm", "sglang", "tensorrt_llm", "mock"} <= engines.keys()
    assert "embeddings" in engines["tensorrt_llm"]["lacks"]
    assert "max_num_seqs" in engines["vllm"]["options"]


async def test_a_deployment_that_its_engine_cannot_have_is_refused(admin: Admin) -> None:
    await catalogued(admin)
    embedding = a_model_body("embed", kind="embedding")
    assert (await admin.ask("PUT", "/v1/models/embed", embedding)).status == 200
    body = a_deployment_body()
    for change, param in (
        ({"model_id": "embed"}, "engine.driver"),
        # The model's weights are a GGUF file.
        ({"engine": {"driver": "vllm"}}, "engine.driver"),
        ({"engine": {"driver": "sglang"}, "policy": {"overcommit": 4}}, "policy.overcommit"),
        ({"policy": {"awake_min": 2}}, "policy"),
    ):
        answer = await admin.ask("POST", "/v1/deployments", {**body, **change})
        assert answer.status == 400
        assert answer.body["error"]["param"] == param
    answer = await admin.ask("POST", "/v1/deployments", {**body, "policy": {"overcommit": 4}})
    assert answer.status == 201, answer
    assert answer.body["policy"]["overcommit"] == 4


async def test_an_over_committed_vllm_is_refused_while_all_nodes_are_cpus(
    admin: Admin, pool: Pool
) -> None:
    """Its sleep frees no memory there. Without any node, the nodes for it may still come."""
    await admin.pop()
    names = ("config.json", "model.safetensors")
    files = tuple(ArtifactFile(path=name, size_bytes=1, sha256="a" * 64) for name in names)
    artifact = Artifact(source="file:/nowhere", files=files, digest=manifest_digest(files))
    model = a_model_body(artifact=msgspec.to_builtins(artifact))
    assert (await admin.ask("PUT", "/v1/models/m", model)).status == 200
    engine = {"driver": "vllm", "options": {"enable_sleep_mode": "true"}}
    body = {**a_deployment_body(overcommit=4), "engine": engine}

    async def change(sql: str) -> None:
        async with using(pool) as connection:
            await connection.execute(sql)

    async def put(deployment_id: str, **fields: Any) -> Any:
        answer = await admin.ask("GET", f"/v1/deployments/{deployment_id}")
        kept = {name: answer.body[name] for name in ("model_id", "name", "engine", "policy")}
        return await admin.ask("PUT", f"/v1/deployments/{deployment_id}", {**kept, **fields})

    assert (await admin.ask("POST", "/v1/deployments", body)).status == 201
    await change("INSERT INTO node (node_id, pop) VALUES ('n1', 'ams')")
    await change("INSERT INTO device VALUES ('n1', 'cpu', 'cpu', 1000)")
    second = {**body, "deployment_id": "e", "name": "e"}
    refused = await admin.ask("POST", "/v1/deployments", second)
    assert refused.status == 400, refused
    assert "cannot over-commit vllm on a CPU" in refused.body["error"]["message"]
    assert refused.body["error"]["param"] == "policy"
    # What was accepted can still be changed, but not into another one that no device can hold.
    announcement = {"announced_at": 1, "sunset_at": 4_102_444_800}
    assert (await put("d", deprecation=announcement)).status == 200
    assert (await put("d", policy={"overcommit": 2})).status == 400
    assert (await put("d", policy={"overcommit": 1})).status == 200
    over_committed = {**body, "deployment_id": "f", "name": "f", "engine": {"driver": "mock"}}
    assert (await admin.ask("POST", "/v1/deployments", over_committed)).status == 201
    rollout = await admin.ask("POST", "/v1/deployments/f/rollouts", {"engine": engine})
    assert rollout.status == 400, rollout
    assert "cannot over-commit vllm on a CPU" in rollout.body["error"]["message"]
    await change("INSERT INTO device VALUES ('n1', 'gpu0', 'h100-80g', 1000)")
    assert (await admin.ask("POST", "/v1/deployments", second)).status == 201
