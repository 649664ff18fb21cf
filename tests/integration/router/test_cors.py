"""Web pages read answers only if the operator names their origin."""

from pathlib import Path

import aiohttp
import msgspec
import pytest

from router.config import RouterConfig
from tests.integration.router.fleet_of import a_bench

PREFLIGHT = {
    "origin": "https://app.example.net",
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
}


@pytest.mark.parametrize("origin", ["", "*", "https://app.example.net"])
@pytest.mark.parametrize(
    "path",
    [
        *("/v1/chat/completions", "/v1/models", "/ai/run/tiny", "/v1/files/file-1", "/v1/batches"),
        *("/v1/responses/resp_1", "/v1/conversations", "/ai/finetunes"),
    ],
)
async def test_a_preflight_allows_the_configured_origin(
    tmp_path: Path, origin: str, path: str
) -> None:
    async with (
        a_bench(tmp_path, cors_origin=origin) as bench,
        aiohttp.ClientSession() as browser,  # without a key
        browser.options(f"{bench.url}{path}", headers=PREFLIGHT) as response,
    ):
        assert (response.status, await response.read()) == (200, b"")
        assert response.headers.get("access-control-allow-origin", "") == origin
        # `client.responses.delete(...)` in a page.
        assert response.headers["access-control-allow-methods"] == "GET, POST, DELETE"
        assert "authorization" in response.headers["access-control-allow-headers"]
        assert "access-control-allow-credentials" not in response.headers


async def test_answers_streams_and_errors_name_the_origin(tmp_path: Path) -> None:
    async with a_bench(tmp_path, cors_origin="*") as bench:
        for fields in ({}, {"stream": True}, {"model": "none"}):
            async with bench.chat(**fields) as response:
                assert response.headers["access-control-allow-origin"] == "*"
                await response.read()


@pytest.mark.parametrize(
    "origin", ["example.net", "https://a/b", "*\r\nx: y", "https://a,https://b"]
)
def test_an_origin_that_no_browser_sends_is_refused(origin: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"cors_origin": origin}, RouterConfig)
