"""Admin requests reach a real collector as spans: those that change something, and those traced."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from isochrone.service.tracing import names
from isochrone.wire.http.trace_context import TraceContext
from tests.integration.admin.conftest import Admin
from tests.otlp_collector import Collector, a_real_collector
from tests.system.harness import until

CLIENT = TraceContext("ab" * 16, "cd" * 8)


@pytest.fixture
async def collector(settings: dict[str, Any], tmp_path: Path) -> AsyncIterator[Collector]:
    """What the scheduler of a test sends its spans to. Requested before `admin`."""
    async with a_real_collector(tmp_path) as (url, behind):
        settings["traces_endpoint"] = url
        yield behind


async def test_admin_requests_are_spans(collector: Collector, admin: Admin) -> None:
    await admin.pop()
    assert (await admin.ask("GET", "/v1/snapshot", traceparent=CLIENT.traceparent)).status == 200
    assert (await admin.ask("DELETE", "/v1/pops/nowhere")).status == 404
    # Neither of these is recorded.
    assert (await admin.ask("GET", "/v1/pops")).status == 200
    ignored = CLIENT._replace(is_sampled=False).traceparent
    assert (await admin.ask("PUT", "/v1/pops/fra", {}, traceparent=ignored)).status == 400
    assert (await admin.ask("DELETE", "/v1/pops/ams", token="wrong-token-0123")).status == 401
    assert (await admin.ask("DELETE", "/v1/pops/ams")).status in (200, 204)

    async def last_has_come() -> bool:
        return len(collector.named("DELETE /v1/pops/{pop}")) == 2

    await until("the spans arrive", last_has_come)
    assert {span.service for span in collector.spans} == {"isochrone-scheduler"}
    (put,) = collector.named("PUT /v1/pops/{pop}")
    assert (put.parent, put.attributes[names.STATUS]) == ("", 200)
    assert put.attributes[names.SCHEDULER] == "s1"
    (planned,) = collector.named("GET /v1/snapshot")
    assert (planned.trace, planned.parent) == (CLIENT.trace_id, CLIENT.span_id)
    (planner,) = collector.named("planner")
    assert (planner.trace, planner.parent) == (CLIENT.trace_id, planned.id)
    missing, deleted = collector.named("DELETE /v1/pops/{pop}")
    assert missing.attributes[names.STATUS] == 404
    assert missing.attributes[names.ERROR_TYPE] == "not_found"
    assert deleted.attributes[names.STATUS] in (200, 204)
    assert len(collector.spans) == 5
