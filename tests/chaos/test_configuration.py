"""A wrong configuration is pushed under load (G1): clients notice nothing; it can be taken back.

A request that is wrong is refused. A version that does not start or that answers with errors is
reverted by its rollout, and a version that replaced the old one at once leaves the old replicas in
place until its own are warm. A row that cannot be read leaves what was decided before in effect.
"""

from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import aiohttp
import asyncpg
import pytest
import pytest_asyncio

from isochrone.cli.client import AdminError
from tests.chaos.invariants import invariants
from tests.system.harness import CITIES, Fleet, a_fleet, until
from tests.system.load import one_stream, under_load, wait_ended

pytestmark = pytest.mark.asyncio(loop_scope="module")

BOUNDS = {"attempts_min": 20, "step_min_s": 0.0, "ttft_ratio": 10, "itl_ratio": 10,
          "error_ratio": 0.4}  # fmt: skip
FAILED_SHARE_MAX = 0.05
"""Of requests while a version that answers with errors is found out."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[Fleet]:
    async with a_fleet() as running:
        await running.deploy(replicas=2)
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def fleet(shared: Fleet) -> Fleet:
    await only_two_are_left(shared)
    shared.note_baseline()
    return shared


async def the_deployment(fleet: Fleet) -> dict[str, Any]:
    return dict(await fleet.ask("GET", "/v1/deployments/mock"))


def a_body(deployment: dict[str, Any], **changed: Any) -> dict[str, Any]:
    fields = {name: deployment[name] for name in ("name", "model_id", "engine", "policy")}
    return {**fields, **changed}


async def only_two_are_left(fleet: Fleet) -> None:
    """Wait until two warm replicas of the current version are all there is."""
    version = (await the_deployment(fleet))["version"]

    async def is_so() -> bool:
        rows = (await fleet.ask("GET", "/v1/placements"))["data"]
        states = sorted((row["state"], row["ending"], row["version"]) for row in rows)
        return states == [("warm", False, version)] * 2 and fleet.engine_processes() == 2

    await until("two warm replicas are all there is", is_so)
    await fleet.routers_know()


async def test_what_is_refused_changes_nothing(fleet: Fleet) -> None:
    deployment, engines = await the_deployment(fleet), fleet.engine_pids()
    generation = (await fleet.ask("GET", "/v1/status"))["route_generation"]
    policy, engine = deployment["policy"], deployment["engine"]
    wrong: list[tuple[str, str, Any]] = [
        ("PUT", "/v1/deployments/mock", {}),
        ("PUT", "/v1/deployments/mock", a_body(deployment, model_id="absent")),
        ("PUT", "/v1/deployments/mock", a_body(deployment, policy="two")),
        ("PUT", "/v1/deployments/mock", a_body(deployment, policy={**policy, "replicas_min": -1})),
        ("PUT", "/v1/deployments/mock", a_body(deployment, policy={**policy, "replicas_max": 1})),
        ("PUT", "/v1/deployments/mock", a_body(deployment, engine={**engine, "driver": "none"})),
        (
            "PUT",
            "/v1/deployments/mock",
            a_body(deployment, engine={**engine, "options": {"itl_ms": "1" * 900_000}}),
        ),
        ("PUT", "/v1/deployments/mock", a_body(deployment, unknown_field=1)),
        ("POST", "/v1/deployments", a_body(deployment, deployment_id="mock")),
        ("POST", "/v1/deployments", a_body(deployment, deployment_id="other")),
        ("PUT", "/v1/pops/ams", {"city": "", "country": "NL", "latitude": 1e9, "longitude": 0}),
        ("PUT", "/v1/models/mock", {"model_id": "mock"}),
    ]
    async with under_load(fleet, [*CITIES], streams=4, creates_keys=False) as load:
        accepted, unavailable = [], []
        for method, path, body in wrong:
            try:
                await fleet.ask(method, path, body)
            except AdminError as error:
                unavailable += [path] if "unavailable" in str(error) else []
            else:
                accepted.append((path, str(body)[:300]))
        assert not accepted
        assert not unavailable
        await wait_ended(load, 8)
    assert not load.failures(), load.failures()
    assert await the_deployment(fleet) == deployment
    assert (await fleet.ask("GET", "/v1/status"))["route_generation"] == generation
    assert fleet.engine_pids() == engines
    await invariants(fleet, load)


async def test_a_version_that_does_not_start_is_taken_back(fleet: Fleet) -> None:
    """Pushed without a rollout. The old replicas serve until those of a third version are warm."""
    deployment = await the_deployment(fleet)
    broken = {**deployment["engine"], "options": {"itl_ms": "10", "fail_load": "1"}}
    async with under_load(fleet, [*CITIES], streams=4) as load:
        await fleet.ask("PUT", "/v1/deployments/mock", a_body(deployment, engine=broken))

        async def has_failed() -> bool:
            rows = (await fleet.ask("GET", "/v1/placements"))["data"]
            new = [row for row in rows if row["version"] > deployment["version"]]
            return any(row["state"] in ("failed", "backoff") or row["reason"] for row in new)

        await until("a replica of the new version fails", has_failed)
        await wait_ended(load, 20)
        await fleet.ask("PUT", "/v1/deployments/mock", a_body(deployment))
        await wait_ended(load, 8)
    assert not load.failures(), load.failures()
    await only_two_are_left(fleet)
    await invariants(fleet, load)


async def test_a_rollout_of_a_bad_version_takes_itself_back(fleet: Fleet) -> None:
    deployment, engines = await the_deployment(fleet), fleet.engine_pids()
    body = {
        "engine": {**deployment["engine"], "options": {"itl_ms": "10", "error_status": "500"}},
        "steps": [{"share": 0.5}, {"share": 1.0}],
        "bounds": BOUNDS,
    }
    async with under_load(fleet, [*CITIES], streams=4, tokens=3) as load:
        made = await fleet.ask("POST", "/v1/deployments/mock/rollouts", body)

        async def is_reverted() -> bool:
            row = await fleet.ask("GET", f"/v1/rollouts/{made['rollout_id']}")
            assert row["state"] != "done", row
            return bool(row["state"] == "reverted")

        await until("the rollout is reverted", is_reverted, 180.0)
        await wait_ended(load, 8)
    assert len(load.failures()) <= FAILED_SHARE_MAX * len(load.ended), load.failures()
    after = await the_deployment(fleet)
    assert (after["version"], after["engine"]) == (deployment["version"], deployment["engine"])
    await only_two_are_left(fleet)
    assert fleet.engine_pids() == engines, "a replica of the good version was restarted"
    await invariants(fleet, load)


async def test_a_row_that_cannot_be_read_leaves_the_last_decisions_in_effect(fleet: Fleet) -> None:
    """As after an edit by hand. What the scheduler cannot read it does not act on; all else it
    does."""
    engines = fleet.engine_pids()
    connection = await asyncpg.connect(fleet.dsn())
    try:
        before = await connection.fetchval("SELECT spec FROM model WHERE model_id = 'mock'")
        async with under_load(fleet, [*CITIES], streams=4) as load:
            await connection.execute(
                "UPDATE model SET spec = jsonb_build_object('model_id', 'mock', 'kind', 7)"
            )

            async def is_reported() -> bool:
                return "cannot read model mock" in str(await fleet.ask("GET", "/v1/status"))

            await until("the scheduler says that it cannot read", is_reported)
            # A router that starts now has what it had stored.
            await fleet.kill("router-sin")
            await fleet.start_router("sin")
            before_s = len(load.ended)

            async def answers() -> bool:
                return load.count("complete") >= before_s + 20

            await until("requests are answered", answers)
            assert fleet.engine_pids() == engines
            made = await fleet.ask("POST", "/v1/keys", {"tenant_id": "after"})
            await until("a new key is used", lambda: is_accepted(fleet, made["key"]))
            await connection.execute("UPDATE model SET spec = $1", before)

            async def is_mended() -> bool:
                return not await is_reported()

            await until("the scheduler can read it", is_mended)
    finally:
        await connection.close()
    # Only streams of the router that was killed may have been cut or refused.
    assert all(ended.how in ("reset", "error-event", "broken") for ended in load.failures())
    load.ended = [ended for ended in load.ended if ended.how == "complete"]
    assert fleet.engine_pids() == engines
    await invariants(fleet, load)


async def is_accepted(fleet: Fleet, key: str) -> bool:
    async with aiohttp.ClientSession() as http:
        with suppress(aiohttp.ClientError):
            ended = [await one_stream(fleet, http, pop, 3, key) for pop in CITIES]
            return all(one.how == "complete" for one in ended)
    return False
