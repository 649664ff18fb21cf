"""A real Prometheus, with the settings and alerting rules of ops/prometheus, scrapes a fleet."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml  # type: ignore[import-untyped]

from tests.ports import free_port
from tests.system.harness import CITIES, Fleet, a_fleet, until
from tests.unit.dashboard import dashboard_queries, evaluable

SETTINGS = Path(__file__).parents[3] / "ops" / "prometheus"

OF_EVENTS = (
    *("router_errors", "router_refusals", "router_retries", "sleep_switch", "kv_found_tokens"),
    *("stall_seconds", "prefill_legs"),
)
"""Their metrics have no series before the first event."""

ITL = next(query.expression for query in dashboard_queries() if "decode_" in query.expression)

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="there is no prometheus (Debian has a package)"
)


Targets = Mapping[str, Sequence[Mapping[str, Any]]]
"""The static targets of each job, as the settings have them."""


def settings_for(targets: Targets, folder: Path) -> Path:
    """Write the settings for these targets of each job; return the file."""
    settings = yaml.safe_load((SETTINGS / "prometheus.yml").read_text())
    settings["global"] = {"scrape_interval": "500ms", "evaluation_interval": "500ms"}
    assert {job["job_name"] for job in settings["scrape_configs"]} == targets.keys()
    for job in settings["scrape_configs"]:
        labels = [{*target.get("labels", ())} for target in job["static_configs"]]
        job["static_configs"] = targets[job["job_name"]]
        assert labels == [{*target.get("labels", ())} for target in job["static_configs"]]
        job.pop("scheme", None)  # this fleet has no TLS
    for rules in settings["rule_files"]:
        shutil.copy(SETTINGS / rules, folder)
    file = folder / "prometheus.yml"
    file.write_text(yaml.safe_dump(settings))
    return file


class Prometheus:
    """A running Prometheus."""

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self._url = url
        self._http = http

    async def get(self, path: str, **parameters: str) -> Any:
        """Return the data of an answer of its API; None while it starts."""
        try:
            async with self._http.get(f"{self._url}/api/v1/{path}", params=parameters) as response:
                answer = await response.json()
        except aiohttp.ClientError:
            return None
        assert answer["status"] == "success", answer
        return answer["data"]

    async def value(self, expression: str) -> float:
        """Return the value of an expression that has one; NaN if it has none yet."""
        rows = (await self.get("query", query=expression))["result"]
        return float(rows[0]["value"][1]) if rows else float("nan")

    async def targets(self) -> list[dict[str, Any]]:
        """Return the targets with the state of their last scrapes."""
        data = await self.get("targets", state="active")
        return [] if data is None else list(data["activeTargets"])

    async def rules(self) -> list[dict[str, Any]]:
        """Return the rules with the state of their last evaluations."""
        return [rule for group in (await self.get("rules"))["groups"] for rule in group["rules"]]


@asynccontextmanager
async def a_prometheus(targets: Targets, folder: Path) -> AsyncIterator[Prometheus]:
    """Run Prometheus for these targets of each job."""
    address = f"127.0.0.1:{free_port()}"
    with (folder / "printed").open("wb") as printed:
        process = await asyncio.create_subprocess_exec(
            "prometheus",
            f"--config.file={settings_for(targets, folder)}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={address}",
            stdout=printed,
            stderr=printed,
        )
    try:
        async with aiohttp.ClientSession() as http:
            yield Prometheus(f"http://{address}", http)
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


async def chat(fleet: Fleet, **fields: Any) -> None:
    body = {"model": "mock", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    key = {"authorization": f"Bearer {fleet.key}"}
    url = f"{fleet.endpoint('ams')}/v1/chat/completions"
    async with (
        aiohttp.ClientSession(headers=key) as http,
        http.post(url, json=body | fields) as response,
    ):
        assert response.status == 200
        await response.read()


async def lint(url: str) -> str:
    """Return what promtool has to say of a page of metrics, without what concerns names."""
    async with aiohttp.ClientSession() as http, http.get(f"{url}/metrics") as response:
        page = await response.read()
    process = await asyncio.create_subprocess_exec(
        *("promtool", "check", "metrics"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    told, _ = await process.communicate(page)
    lines = told.decode().splitlines()
    return "\n".join(line for line in lines if not line.endswith("abbreviated units"))


async def check_dashboard(prometheus: Prometheus, fleet: Fleet) -> None:
    """Evaluate each query of the dashboard: all have data, but for events that did not happen."""

    async def is_itl_known() -> bool:
        await chat(fleet, stream=True)
        rows = (await prometheus.get("query", query=evaluable(ITL)))["result"]
        return [row["metric"] for row in rows] == [{"pop": "ams"}] and (
            0.0 < float(rows[0]["value"][1]) < 1.0
        )

    await until("the inter-token latency is known", is_itl_known)

    async def without_data() -> set[str]:
        expressions = [query.expression for query in dashboard_queries()]
        return {
            expression
            for expression in expressions
            if not (await prometheus.get("query", query=evaluable(expression)))["result"]
            and not any(name in expression for name in OF_EVENTS)
        }

    async def have_data() -> bool:
        return not await without_data()

    try:
        await until("the dashboard's queries have data", have_data)
    except AssertionError:
        pytest.fail(f"these have none: {await without_data()}")


async def test_it_scrapes_all_services_and_its_rules_hold(tmp_path: Path) -> None:
    async with a_fleet() as fleet:
        await fleet.deploy(replicas=2)
        parts = [f"{kind}-{pop}" for kind in ("router", "node") for pop in CITIES]
        urls = [fleet.admin_url(), *map(fleet.url, parts)]
        assert [text for url in urls if (text := await lint(url))] == []
        targets: dict[str, list[dict[str, Any]]] = {
            "isochrone-scheduler": [{"targets": [fleet.admin_url().removeprefix("http://")]}]
        }
        for job, kind in (("isochrone-router", "router"), ("isochrone-nodeagent", "node")):
            targets[job] = [
                {
                    "targets": [fleet.url(f"{kind}-{pop}").removeprefix("http://")],
                    "labels": {"pop": pop},
                }
                for pop in CITIES
            ]
        async with a_prometheus(targets, tmp_path) as prometheus:

            async def are_up() -> bool:
                found = await prometheus.targets()
                return len(found) == 5 and {target["health"] for target in found} == {"up"}

            await until("it scrapes every service", are_up)
            await chat(fleet)
            await chat(fleet, stream=True)

            async def have_counted() -> bool:
                expressions = (
                    "sum(isochrone_router_requests_total)",
                    "sum(isochrone_router_ttft_seconds_count)",
                    'sum(isochrone_engine_tokens_out_total{replica!=""})',
                    "sum(isochrone_node_replicas)",
                    "histogram_quantile(0.5, sum by (le) (isochrone_router_ttft_seconds_bucket))",
                )
                values = [await prometheus.value(expression) for expression in expressions]
                return values[0] >= 2 and all(value > 0 for value in values)

            await until("its series have the two requests", have_counted)
            await check_dashboard(prometheus, fleet)

            async def are_evaluated() -> bool:
                return {rule["health"] for rule in await prometheus.rules()} == {"ok"}

            await until("every rule is evaluated", are_evaluated)
            states = {rule["name"]: rule["state"] for rule in await prometheus.rules()}
            assert set(states.values()) == {"inactive"}, states
            await fleet.kill("router-sin")

            async def is_noticed() -> bool:
                states = {rule["name"]: rule["state"] for rule in await prometheus.rules()}
                return bool(states["IsochroneServiceDown"] == "pending")

            await until("the router that is down is noticed", is_noticed)
