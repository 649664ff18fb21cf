"""Prefetch before a forecast peak: a city fetches weights from another and starts from disk."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import pi, sin
from pathlib import Path
from time import time
from typing import Any

import asyncpg
import msgspec
from aiohttp import web

from isochrone.cli.manifest import artifact_of
from isochrone.service.network.http_server import serve_http
from isochrone.wire.ids import DeploymentId, PopId
from scheduler.decide.demand import FleetForecast, SlotDemand, slot_of
from scheduler.decide.demand.series_forecast import DAY_SLOTS, HORIZONS
from tests.system.harness import Fleet, a_fleet, until

BODY = b"GGUF" + bytes(range(256)) * 4096


class Origin:
    """Serves one file, and counts the requests."""

    def __init__(self) -> None:
        self.asked = 0

    async def get(self, request: web.Request) -> web.Response:
        self.asked += 1
        return web.Response(body=BODY)


@asynccontextmanager
async def an_origin() -> AsyncIterator[tuple[Origin, str]]:
    served = Origin()
    app = web.Application()
    app.router.add_get("/{path:.*}", served.get)
    async with serve_http(app, "127.0.0.1", 0) as port:
        yield served, f"http://127.0.0.1:{port}/"


async def remembered(fleet: Fleet) -> None:
    """Write a history of four days on which Singapore had demand some hours from now."""
    now = slot_of(time())
    peak = now + HORIZONS[-1]
    outlook, key = FleetForecast({}), (DeploymentId("d"), PopId("sin"))
    for slot in range(now - 4 * DAY_SLOTS, now):
        wave = max(0.0, sin(2 * pi * (slot - peak) / DAY_SLOTS + pi / 2)) ** 64
        outlook.learn(slot, key, SlotDemand(*(wave * part for part in (9.0, 180.0, 180.0, 360.0))))
    connection = await asyncpg.connect(fleet.dsn())
    await connection.execute(
        "INSERT INTO demand_series (deployment_id, pop, slot, state) VALUES ('d', 'sin', $1, $2)",
        *outlook.serialized(key),
    )
    await connection.close()


def replicas_in(*pops: str) -> dict[str, Any]:
    """Return a deployment that keeps replicas in these cities whatever the demand."""
    engine = {"driver": "mock", "kv_memory_bytes": 1_000_000, "context_tokens_max": 100_000}
    policy = {"replicas_min": len(pops), "replicas_max": 4, "keep_warm": list(pops)}
    return {"model_id": "m", "engine": engine, "policy": policy}


async def made_known(fleet: Fleet, url: str, folder: Path) -> None:
    """Add a model, and a deployment with a replica in Amsterdam only."""
    folder.mkdir()
    (folder / "m.gguf").write_bytes(BODY)
    model = {
        "model_id": "m",
        "architecture": "mock",
        "artifact": msgspec.to_builtins(artifact_of(folder, url)),
        "context_tokens": 100_000,
        "weights_bytes": len(BODY),
    }
    await fleet.ask("PUT", "/v1/models/m", model)
    body = {"deployment_id": "d", **replicas_in("ams")}
    await fleet.ask("POST", "/v1/deployments", body)
    await until("warm in ams", lambda: fleet.is_warm(1))


async def events(fleet: Fleet, kind: str) -> list[Any]:
    rows = (await fleet.ask("GET", "/v1/events"))["data"]
    return [row for row in rows if row["kind"] == kind]


async def test_a_city_prefetches_before_its_peak_and_starts_without_the_origin() -> None:
    async with a_fleet() as fleet, an_origin() as (origin, url):
        await made_known(fleet, url, fleet.folder / "model")
        assert origin.asked == 1
        await remembered(fleet)
        # A new term goes on from what is stored.
        await fleet.kill("scheduler-a")
        await fleet.start_scheduler("a")
        (planned,) = await until("planned", lambda: events(fleet, "weights.planned"))
        assert planned["subject"] == "sin-1"
        assert "forecast for" in planned["reason"]
        held = fleet.folder / "node-sin" / "artifacts"

        async def is_there() -> bool:
            return any(await asyncio.to_thread(lambda: list(held.glob("*/m.gguf"))))

        await until("fetched", is_there)
        answer = await fleet.ask("GET", "/v1/deployments/d/explain")
        assert answer["prefetches"][0].startswith("sin-1 ")
        assert [row["pop"] for row in answer["here"]] == ["ams"], "nothing was started"
        await fleet.ask("PUT", "/v1/deployments/d", replicas_in("ams", "sin"))
        await until("warm in both", lambda: fleet.is_warm(2))
        assert origin.asked == 1, "the other city had it from the first"
