"""Agent libraries for Python, unmodified, with the router: `make test-agents` installs them.

Their needs collide with the project's, so they run in environments of their own.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.integration.router.client_script import run_script
from tests.integration.router.fleet_of import KEY, a_bench, a_route, a_table
from tests.integration.router.mock_node import MockNode
from tests.integration.router.test_tool_loops import END, EXPECTED, SCRIPT

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".agents" / "bin" / "python"
INSTRUCTORS_PYTHON = ROOT / ".agents" / "instructor" / "bin" / "python"
SCRIPTS = ROOT / "tests" / "agents"
MODEL = "@cf/meta/tiny:8b"
APIS = {"chat", "responses", "messages"}
FORMED = {"name": "", "is_large": False}
"""The mock engine's smallest answer in the form that the scripts ask for."""

TOKENS = 19
"""The tokens of the answers to SCRIPT, all steps together."""

pytestmark = pytest.mark.skipif(
    not PYTHON.exists(), reason="run `make test-agents` to install them"
)


async def run(tmp_path: Path, script: str, python: Path = PYTHON) -> dict[str, Any]:
    """Run a script with the router before a mock engine; return the object that it prints."""
    node = MockNode()
    async with a_bench(tmp_path, [node]) as bench:
        bench.app.fleet.adopt(a_table([a_route(node)], generation=2, names=(MODEL,)))
        return await run_script(
            (python, SCRIPTS / script, bench.url, KEY, MODEL, SCRIPT),
            cwd=tmp_path,
            env={"HOME": str(tmp_path), "OPENAI_AGENTS_DISABLE_TRACING": "1"},
            stdin=None,
        )


@pytest.mark.parametrize(
    ("script", "apis", "errors"),
    [
        ("agents_sdk.py", APIS - {"messages"}, {"NotFoundError"}),
        ("pydantic_ai_agents.py", APIS, {"ModelNotFoundError"}),
        ("langchain_agents.py", APIS, {"OpenAIModelNotFoundError", "AnthropicModelNotFoundError"}),
        ("litellm_calls.py", APIS, {"NotFoundError"}),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
async def test_agents(tmp_path: Path, script: str, apis: set[str], errors: set[str]) -> None:
    results = await run(tmp_path, script)
    assert results.keys() == apis
    expected = [[list(call) for call in step] for step in EXPECTED]
    for api, result in results.items():
        assert result["steps"] == expected, api
        assert (result["text"].strip(), result["streamed"].strip()) == (END, END), api
        assert all(form == FORMED for form in result["formed"]), api
        assert result["tokens"] == TOKENS, api
        assert result["refused"]["status"] == 404, api
    assert {result["refused"]["name"] for result in results.values()} == errors


async def test_forms_of_answers_with_instructor(tmp_path: Path) -> None:
    results = await run(tmp_path, "instructor_forms.py", INSTRUCTORS_PYTHON)
    assert results.keys() == APIS
    for api, result in results.items():
        assert len(result["formed"]) >= 2, api
        assert all(form == FORMED for form in result["formed"]), api
        assert result["refused"]["name"] == "InstructorRetryException", api
