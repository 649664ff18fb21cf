"""Models and deployments in the catalogue of a scheduler under test; no node can run them."""

from typing import Any

from tests.integration.admin.conftest import Admin
from tests.lora_files import DIMENSIONS


async def add_deployment(admin: Admin, model_id: str, driver: str, name: str) -> None:
    """Add a model and a deployment of it, both with this id, that clients call `name`."""
    paths = ("config.json", "model.safetensors")
    files = [{"path": path, "size_bytes": 1, "sha256": "a" * 64} for path in paths]
    body: dict[str, Any] = {
        "model_id": model_id,
        "architecture": "LlamaForCausalLM",
        "artifact": {"source": "file:/nowhere", "files": files, "digest": "0" * 64},
        "context_tokens": 512,
        "weights_bytes": 1,
        "shape": DIMENSIONS,
    }
    refused = await admin.ask("PUT", f"/v1/models/{model_id}", body)
    body["artifact"]["digest"] = refused.body["error"]["message"][-64:]
    answer = await admin.ask("PUT", f"/v1/models/{model_id}", body)
    assert answer.status == 200, answer
    body = {
        "deployment_id": model_id,
        "model_id": model_id,
        "name": name,
        "engine": {"driver": driver},
        "policy": {"replicas_min": 0},
    }
    answer = await admin.ask("POST", "/v1/deployments", body)
    assert answer.status == 201, answer
