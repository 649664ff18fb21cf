"""Services work under the system call filters of their systemd units.

The embedded engine runs under the node's filter in test_adapters.py.
"""

import shutil

import aiohttp
import pytest

from isochrone.service.trust.landlock import landlock_version
from tests.system.harness import a_fleet

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)


@needs_systemd
async def test_a_fleet_answers_and_reads_documents_under_its_units_filters() -> None:
    async with a_fleet(comes_up=False) as fleet:
        fleet.run_under_unit_filters()
        await fleet.up()
        await fleet.deploy(replicas=1)
        chat = {"model": "mock", "messages": [{"role": "user", "content": "Hello"}]}
        documents = aiohttp.FormData()
        documents.add_field("files", b"<h1>Title</h1>", filename="page.html")
        key = {"authorization": f"Bearer {fleet.key}"}
        async with aiohttp.ClientSession(fleet.endpoint("ams"), headers=key) as http:
            async with http.post("/v1/chat/completions", json=chat) as response:
                assert response.status == 200, await response.text()
            path = "/client/v4/accounts/test/ai/tomarkdown"
            async with http.post(path, data=documents) as response:
                (page,) = (await response.json())["result"]
        if landlock_version() and pytest.importorskip("markitdown"):
            assert page["data"] == "# Title"
