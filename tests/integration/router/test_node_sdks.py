"""The official clients for Node.js, unmodified, with the router: `make test-node` installs them."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.integration.admin.conftest import admin
from tests.integration.router.client_script import run_script
from tests.integration.router.fake_node import FakeNode
from tests.integration.router.fleet_of import KEY, a_bench, a_route, a_table
from tests.integration.router.mock_node import MockNode
from tests.integration.router.test_batches import BatchBench, bench
from tests.integration.router.test_tool_loops import END, EXPECTED, SCRIPT

__all__ = ["admin", "bench"]

ROOT = Path(__file__).parents[3]
MODULES = ROOT / ".node" / "node_modules"
SCRIPTS = ROOT / "tests" / "node"
MODEL = "@cf/meta/tiny:8b"

needs_node = pytest.mark.skipif(
    not (MODULES.is_dir() and shutil.which("node")), reason="run `make test-node` to install it"
)
pytestmark = needs_node


@pytest.fixture
def settings() -> dict[str, Any]:
    """Settings of the scheduler."""
    return {}


async def run(script: str, url: str, *arguments: str, key: str = KEY) -> dict[str, Any]:
    """Run a script with Node.js; return the object that it prints.

    A module (.mjs) is read from standard input, as its imports are then looked for in the working
    folder: NODE_PATH is for `require` alone.
    """
    path = SCRIPTS / script
    source = ("--input-type=module", "-") if path.suffix == ".mjs" else (str(path),)
    with path.open("rb") as text:
        return await run_script(
            ("node", *source, url, key, *arguments),
            cwd=MODULES.parent,
            env={"PATH": os.environ["PATH"], "NODE_PATH": str(MODULES)},
            stdin=text,
        )


def a_node() -> FakeNode:
    node = FakeNode()
    node.itl_s = 0.005
    return node


async def test_anthropic(tmp_path: Path) -> None:
    node = a_node()
    async with a_bench(tmp_path, [node]) as bench:
        result = await run("anthropic_sdk.cjs", bench.url)
        assert result["message"]["content"] == [{"type": "text", "text": "t0 t1 t2 t3"}]
        assert result["kinds"][0] == "message_start"
        assert result["kinds"][-2:] == ["message_delta", "message_stop"]
        final = result["final"]
        assert final["content"][0]["text"] == "t0 t1 t2 t3 "
        assert (final["stop_reason"], final["usage"]["output_tokens"]) == ("end_turn", 4)
        assert result["counted"]["input_tokens"] == 2
        assert result["models"] == ["tiny"]
        expected = {"name": "NotFoundError", "status": 404, "type": "not_found_error"}
        assert result["refused"] == expected
        await node.until(lambda: node.cancelled == 1)


async def test_openai(tmp_path: Path) -> None:
    node = a_node()
    async with a_bench(tmp_path, [node]) as bench:
        result = await run("openai_sdk.cjs", bench.url)
        assert result["chat"]["choices"][0]["message"]["content"] == "t0 t1 t2 t3"
        assert result["text"] == "t0 t1 t2 t3 "
        assert result["response"]["output_text"] == "t0 t1 t2 t3"
        assert result["kinds"][-1] == "response.completed"
        assert result["models"] == ["tiny"]
        assert (result["refused"]["name"], result["refused"]["status"]) == ("NotFoundError", 404)
        await node.until(lambda: node.cancelled == 1)


async def test_cloudflare(tmp_path: Path) -> None:
    node = a_node()
    async with a_bench(tmp_path, [node]) as bench:
        bench.app.fleet.adopt(a_table([a_route(node)], generation=2, names=(MODEL,)))
        result = await run("cloudflare_sdk.cjs", bench.url)
        assert result["answer"]["response"] == "t0 t1 t2 t3"
        assert (result["refused"]["name"], result["refused"]["status"]) == ("NotFoundError", 404)
        assert (result["models"], result["authors"]) == ([MODEL], ["meta"])
        await node.until(lambda: node.cancelled == 1)


async def test_providers_of_the_vercel_ai_sdk(tmp_path: Path) -> None:
    node = a_node()
    async with a_bench(tmp_path, [node]) as bench:
        bench.app.fleet.adopt(a_table([a_route(node)], generation=2, names=(MODEL,)))
        results = await run("vercel_ai_sdk.mjs", bench.url)
        assert set(results) == {"responses", "chat", "messages", "run"}
        await node.until(lambda: node.cancelled == len(results))
    for api, result in results.items():
        assert (result["text"], result["reason"]) == ("t0 t1 t2 t3", "stop"), api
        assert (result["streamed"], result["tokens"]) == ("t0 t1 t2 t3 ", [11, 4]), api
        assert "error" not in result["kinds"], api
        assert result["kinds"][0] == "start", api
        assert result["kinds"][-2:] == ["finish-step", "finish"], api
        assert result["refused"] == {"status": 404, "retryable": False}, api


async def test_loops_of_tool_calls_end(tmp_path: Path) -> None:
    node = MockNode()
    async with a_bench(tmp_path, [node]) as bench:
        bench.app.fleet.adopt(a_table([a_route(node)], generation=2, names=(MODEL,)))
        result = await run("tool_loops.mjs", bench.url, SCRIPT)
    expected = [[list(call) for call in step] for step in EXPECTED]
    for name, loops in result.items():
        for loop in loops:
            assert "error" not in loop, (name, loop)
            assert (loop["steps"], loop["text"].strip()) == (expected, END), name


async def test_a_conversation_refers_to_earlier_answers(bench: BatchBench) -> None:
    result = await run("ai_conversation.mjs", bench.url)
    assert set(result) == {"stored", "unstored"}
    assert {text.strip() for texts in result.values() for text in texts} == {"t0 t1"}
    contents = [
        [message["content"] for message in json.loads(body)["messages"]]
        for body in bench.node.bodies
    ]
    whole = ["one", "t0 t1", "two", "t0 t1", "three"]
    texts = [[text.strip() for text in sent] for sent in contents]
    assert texts == [whole[:1], whole[:3], whole] * 2
