"""A rollout through a whole fleet: routers split the traffic, and a bad version is reverted."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from tests.system.harness import Fleet, a_fleet, until

BOUNDS = {"attempts_min": 20, "step_min_s": 0.0, "ttft_ratio": 10, "itl_ratio": 10,
          "error_ratio": 0.4}  # fmt: skip
STEPS = [{"share": 0.5}, {"share": 1.0}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet() -> AsyncIterator[Fleet]:
    async with a_fleet() as running:
        await running.deploy(replicas=1)
        yield running


class Traffic:
    """Sends requests continuously, and counts the answers."""

    def __init__(self, fleet: Fleet) -> None:
        self.statuses: list[int] = []
        self._fleet = fleet
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Traffic":
        self._task = asyncio.create_task(self._ask())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _ask(self) -> None:
        headers = {"authorization": f"Bearer {self._fleet.key}"}
        body = {
            "model": "mock",
            "messages": [{"role": "user", "content": "count"}],
            "max_tokens": 3,
            "stream": True,
        }
        url = f"{self._fleet.endpoint('ams')}/v1/chat/completions"
        async with aiohttp.ClientSession() as http:

            async def one() -> None:
                async with http.post(url, json=body, headers=headers) as response:
                    await response.read()
                    self.statuses.append(response.status)

            while True:
                await asyncio.gather(*(one() for _ in range(4)))
                await asyncio.sleep(0.05)


async def rolled_out(fleet: Fleet, options: dict[str, str]) -> dict[str, Any]:
    """Run a rollout under traffic and return its final state."""
    deployment = await fleet.ask("GET", "/v1/deployments/mock")
    body = {
        "engine": {**deployment["engine"], "options": options},
        "steps": STEPS,
        "bounds": BOUNDS,
    }
    made = await fleet.ask("POST", "/v1/deployments/mock/rollouts", body)

    async def ended() -> Any:
        row = await fleet.ask("GET", f"/v1/rollouts/{made['rollout_id']}")
        return row if row["state"] not in ("running", "paused") else None

    return dict(await until("the rollout ends", ended, 60.0))


@pytest.mark.asyncio(loop_scope="module")
async def test_a_good_version_gets_all_traffic(fleet: Fleet) -> None:
    async with Traffic(fleet) as traffic:
        row = await rolled_out(fleet, {"itl_ms": "11"})
        assert row["state"] == "done", row

        async def only_new() -> bool:
            rows = (await fleet.ask("GET", "/v1/placements"))["data"]
            return {(r["version"], r["state"], r["ending"]) for r in rows} == {(2, "warm", False)}

        await until("the old version is gone", only_new, 60.0)
    deployment = await fleet.ask("GET", "/v1/deployments/mock")
    assert deployment["version"] == 2
    assert deployment["engine"]["options"] == {"itl_ms": "11"}
    assert set(traffic.statuses) == {200}


@pytest.mark.asyncio(loop_scope="module")
async def test_a_bad_version_is_reverted_without_failed_requests(fleet: Fleet) -> None:
    before = await fleet.ask("GET", "/v1/deployments/mock")
    async with Traffic(fleet) as traffic:
        row = await rolled_out(fleet, {"itl_ms": "10", "error_status": "500"})
        assert row["state"] == "reverted", row
        # Its replicas become warm: what clients' requests meet decides.
        assert "errors" in row["reason"], row
    after = await fleet.ask("GET", "/v1/deployments/mock")
    assert (after["version"], after["engine"]) == (before["version"], before["engine"])
    failed = sum(status != 200 for status in traffic.statuses)
    assert failed <= len(traffic.statuses) / 20, traffic.statuses
