"""Every field of the SDKs' request types on each engine, through a router."""

from pathlib import Path

import pytest

from nodeagent.host.engines.engine_process import EngineProcess
from tests.field_conformance import a_router_before, check_surface, check_within_chat
from tests.integration.router.test_conformance import SURFACES

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.parametrize("name", SURFACES)
async def test_each_field_is_honoured_or_refused(
    engine: EngineProcess, tmp_path: Path, name: str
) -> None:
    spec = engine.record.spec
    driver = spec.engine.driver
    async with a_router_before(
        engine.http,
        tmp_path,
        driver=driver,
        name=spec.name,
        context_tokens=spec.context_tokens,
        prepare=lambda path, body: engine.salted(path, body, "t", "50"),
    ) as bench:
        await check_surface(bench, driver, spec.name, name)
        if name == "chat":
            await check_within_chat(bench, driver, spec.name)
