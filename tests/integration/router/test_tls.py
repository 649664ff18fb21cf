"""The public port over TLS: responses, streams, and handshakes that never come."""

import asyncio
import ssl
import time
from pathlib import Path
from typing import Any

import aiohttp

from isochrone.service.trust.identity import Authority
from isochrone.service.trust.tls import verifying_context
from tests.builders import NOW
from tests.integration.router.fake_node import FakeNode
from tests.integration.router.fleet_of import KEY, Bench, a_bench


def certified(folder: Path) -> tuple[dict[str, Any], ssl.SSLContext]:
    """Write a certificate and its key; return the settings for them, and a client's TLS context."""
    authority = Authority.create(folder / "public", "test", NOW)
    key, certificate = authority.issue_scheduler_certificate(NOW)
    paths = {"tls_key": folder / "tls.key", "tls_certificate": folder / "tls.crt"}
    paths["tls_key"].write_text(key)
    paths["tls_certificate"].write_text(certificate)
    trust = verifying_context(authority.ca_pem)
    # The certificate is for a scheduler's name.
    trust.check_hostname = False
    return paths, trust


async def ask(bench: Bench, trust: ssl.SSLContext, *, stream: bool) -> str:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "stream": stream}
    url = f"https://127.0.0.1:{bench.app.port}/v1/chat/completions"
    async with (
        aiohttp.ClientSession(headers={"authorization": f"Bearer {KEY}"}) as http,
        http.post(url, json=body | {"max_tokens": 3}, ssl=trust) as response,
    ):
        assert response.status == 200
        return await response.text()


async def test_responses_and_streams_work_over_tls(tmp_path: Path) -> None:
    settings, trust = certified(tmp_path)
    async with a_bench(tmp_path, [FakeNode()], **settings) as bench:
        assert "t0 t1 t2" in await ask(bench, trust, stream=False)
        assert (await ask(bench, trust, stream=True)).endswith("data: [DONE]\n\n")


async def test_a_missing_handshake_has_the_deadline_of_a_request_head(tmp_path: Path) -> None:
    settings, trust = certified(tmp_path)
    async with a_bench(tmp_path, head_timeout_s=0.3, **settings) as bench:
        reader, writer = await asyncio.open_connection("127.0.0.1", bench.app.port)
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(30):
                assert not await reader.read()
        finally:
            writer.close()
        assert time.monotonic() - began_s >= 0.2
        assert "t0 t1 t2" in await ask(bench, trust, stream=False)
