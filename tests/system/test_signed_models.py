"""Nodes with `model_signers` beside schedulers without, as if the admin token were stolen."""

from pathlib import Path
from typing import Any

import msgspec

from isochrone.cli.manifest import artifact_of, signed
from isochrone.wire.models.model import Artifact
from tests.system.harness import CITIES, Fleet, a_fleet, until
from tests.unit.service.test_model_signature import a_key, a_model, sign


async def add(fleet: Fleet, artifact: Artifact) -> None:
    model = {
        "model_id": "m",
        "architecture": "mock",
        "artifact": msgspec.to_builtins(artifact),
        "context_tokens": 100_000,
        "weights_bytes": 1000,
    }
    await fleet.ask("PUT", "/v1/models/m", model)


async def deploy(fleet: Fleet) -> None:
    engine = {"driver": "mock", "kv_memory_bytes": 1_000_000, "context_tokens_max": 100_000}
    policy = {"replicas_min": 2, "replicas_max": 2, "keep_warm": list(CITIES)}
    body = {"deployment_id": "d", "model_id": "m", "engine": engine, "policy": policy}
    await fleet.ask("POST", "/v1/deployments", body)


async def start_nodes(fleet: Fleet, *signers: Path) -> None:
    """Start the nodes again, with these signers; engines go on while their agents are away."""
    for pop in CITIES:
        await fleet.processes.stop(f"node-{pop}")
        fields: dict[str, Any] = {"model_signers": [str(path) for path in signers]}
        await fleet.start_node(pop, keep_engines_on_stop=True, **fields)


async def refusals(fleet: Fleet) -> list[str]:
    """Return the reasons of both replicas, if both lack a signature."""
    rows = (await fleet.ask("GET", "/v1/placements"))["data"]
    reasons = [row["state_reason"] for row in rows if "not signed" in row["state_reason"]]
    return reasons if len(reasons) == len(CITIES) else []


async def test_nodes_run_signed_models_only() -> None:
    async with a_fleet() as fleet:
        model, key = a_model(fleet.folder), a_key(fleet.folder, "acme")
        unsigned = artifact_of(model, f"file:{model}")
        await add(fleet, unsigned)
        await deploy(fleet)
        await until("warm without signers", lambda: fleet.is_warm(2))
        await start_nodes(fleet)
        await until("adopted", lambda: fleet.is_warm(2))
        before = fleet.engine_pids()
        # An engine that outlived its agent ends, and no other is started.
        await start_nodes(fleet, key.with_suffix(".pub"))
        for reason in await until("both are refused", lambda: refusals(fleet)):
            assert reason.endswith("it is not signed; expected a signature of acme")
        assert set(fleet.engine_pids().values()).isdisjoint(before.values())
        await add(fleet, signed(unsigned, sign(model, key)))
        await until("warm with a signature", lambda: fleet.is_warm(2))
