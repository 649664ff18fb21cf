"""Every field of the SDKs' request types on the mock engine, through a router."""

from pathlib import Path

from isochrone.wire.models.model import EngineSettings
from tests.builders import a_spec
from tests.engines.real_engines import running_engine
from tests.field_conformance import a_router_before, check_surface, check_within_chat
from tests.integration.router.test_conformance import SURFACES


async def test_each_field_is_honoured_or_refused_by_the_mock_engine(tmp_path: Path) -> None:
    engine = EngineSettings(driver="mock", options={"itl_ms": "1"})
    spec = a_spec(name="mock", context_tokens=2048, engine=engine)
    async with (
        running_engine(spec, tmp_path, tmp_path / "e") as process,
        a_router_before(
            process.http, tmp_path, driver="mock", name="mock", context_tokens=2048
        ) as bench,
    ):
        for name in SURFACES:
            await check_surface(bench, "mock", "mock", name)
        await check_within_chat(bench, "mock", "mock")
