"""A real browser calls the router from a page of another origin, with OpenAI's SDK too."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from aiohttp import web

from tests.integration.router.fake_node import FakeNode
from tests.integration.router.fleet_of import KEY, a_bench
from tests.ports import free_port

MODULES = Path(__file__).parents[3] / ".node" / "node_modules"
TIMEOUT_S: Final = 60.0
BROWSER = shutil.which("chromium")

pytestmark = pytest.mark.skipif(BROWSER is None, reason="there is no chromium (Debian's package)")

PAGE: Final = """<!doctype html>
<script type="importmap">{"imports": {"openai": "/modules/openai/index.mjs"}}</script>
<script type="module">
const url = "ROUTER/v1", apiKey = "KEY", model = "tiny";
const messages = [{role: "user", content: "hi"}];
const told = {};

async function byFetch() {
  const headers = {authorization: `Bearer ${apiKey}`, "content-type": "application/json"};
  const body = JSON.stringify({model, messages, stream: true});
  const response = await fetch(`${url}/chat/completions`, {method: "POST", headers, body});
  const kinds = [response.status, response.headers.get("content-type")];
  const why = response.headers.get("x-isochrone-why");
  const text = await response.text();
  const refused = await fetch(`${url}/models`, {headers: {authorization: "Bearer iso_wrong"}});
  return {kinds, why, text, refused: [refused.status, (await refused.json()).error.code]};
}

async function bySdk() {
  const {default: OpenAI} = await import("openai");
  const client = new OpenAI({baseURL: url, apiKey, dangerouslyAllowBrowser: true, maxRetries: 0});
  const answer = await client.chat.completions.create({model, messages});
  const stream = await client.chat.completions.create({model, messages, stream: true});
  const pieces = [];
  for await (const chunk of stream) pieces.push(chunk.choices[0]?.delta?.content ?? "");
  const refused = await client.chat.completions.create({model: "none", messages})
    .catch((error) => [error.constructor.name, error.status, Boolean(error.requestID)]);
  return {answer: answer.choices[0].message.content, streamed: pieces.join(""), refused};
}

try {
  told.fetch = await byFetch();
  if (SDK) told.sdk = await bySdk();
} catch (error) {
  told.error = String(error.stack ?? error);
}
await fetch("/told", {method: "POST", body: JSON.stringify(told)});
</script>
"""


@asynccontextmanager
async def a_page(port: int, router: str) -> AsyncIterator["asyncio.Future[Any]"]:
    """Serve the page and the SDK's modules; yield what the page will tell."""
    told: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    has_sdk = str(MODULES.is_dir()).lower()
    text = PAGE.replace("ROUTER", router).replace("KEY", KEY, 1).replace("SDK)", f"{has_sdk})", 1)

    async def page(_: web.Request) -> web.Response:
        return web.Response(text=text, content_type="text/html")

    async def hear(request: web.Request) -> web.Response:
        if not told.done():
            told.set_result(await request.json())
        return web.Response()

    app = web.Application()
    app.router.add_get("/", page)
    app.router.add_post("/told", hear)
    if MODULES.is_dir():
        app.router.add_static("/modules", MODULES)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield told
    finally:
        await runner.cleanup()


async def visit(url: str, folder: Path, told: "asyncio.Future[Any]") -> Any:
    """Open a page in the browser; return what it tells."""
    assert BROWSER is not None
    process = await asyncio.create_subprocess_exec(
        *(BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
        *(f"--user-data-dir={folder}", "--remote-debugging-port=0", url),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(TIMEOUT_S):
            return await told
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


async def test_a_page_of_the_allowed_origin_reads_answers(tmp_path: Path) -> None:
    node, port = FakeNode(), free_port()
    node.tokens = 4
    origin = f"http://127.0.0.1:{port}"
    async with (
        a_bench(tmp_path / "router", [node], cors_origin=origin) as bench,
        a_page(port, bench.url) as told,
    ):
        result = await visit(origin, tmp_path / "browser", told)
    assert "error" not in result, result["error"]
    fetched = result["fetch"]
    assert fetched["kinds"] == [200, "text/event-stream; charset=utf-8"]
    assert fetched["why"].startswith("nearest-warm")
    assert fetched["text"].endswith("data: [DONE]\n\n")
    assert fetched["refused"] == [401, "invalid_api_key"]
    if MODULES.is_dir():
        expected = {"answer": "t0 t1 t2 t3", "streamed": "t0 t1 t2 t3 "}
        assert result["sdk"] == {**expected, "refused": ["NotFoundError", 404, True]}


async def test_a_page_of_another_origin_reads_nothing(tmp_path: Path) -> None:
    node, port = FakeNode(), free_port()
    async with (
        a_bench(tmp_path / "router", [node], cors_origin="https://app.example.net") as bench,
        a_page(port, bench.url) as told,
    ):
        result = await visit(f"http://127.0.0.1:{port}", tmp_path / "browser", told)
    assert "Failed to fetch" in result["error"]
    assert node.bodies == []
