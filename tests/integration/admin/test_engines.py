"""The engines of the admin API, and what `deploy` refuses because an engine cannot do it."""

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
