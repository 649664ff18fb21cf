"""Every field of the SDKs' request types on the embedded engine, through a router."""

from pathlib import Path

import pytest

from tests.field_conformance import a_router_before, check_surface, check_within_chat
from tests.integration.engine.conftest import EngineProcess
from tests.integration.router.test_conformance import SURFACES

pytestmark = pytest.mark.model


@pytest.mark.parametrize("name", SURFACES)
async def test_each_field_is_honoured_or_refused(
    engine: EngineProcess, tmp_path: Path, name: str
) -> None:
    async with (
        engine.session() as http,
        a_router_before(
            http, tmp_path, driver="embedded", name="smollm2", context_tokens=2048
        ) as bench,
    ):
        await check_surface(bench, "embedded", "smollm2", name)
        if name == "chat":
            await check_within_chat(bench, "embedded", "smollm2")
