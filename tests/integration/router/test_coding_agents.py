"""Coding agents, unmodified, with the router: `make test-coding-agents` installs them.

The mock engine calls their own tools: each agent reads a file, edits it and runs a command.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from aiohttp import web

from nodeagent.mock import openai as mock_requests
from tests.integration.router.fleet_of import KEY, Bench, a_bench
from tests.integration.router.mock_node import MockNode

BIN = Path(__file__).parents[3] / ".coding-agents" / "node_modules" / ".bin"
TIMEOUT_S = 240.0
PATIENT: dict[str, Any] = {
    "head_timeout_s": 60.0,
    "body_timeout_s": 60.0,
    "stream_idle_timeout_s": 60.0,
}
PRINTED = "printed.txt"
FIRST_CHUNK = b'data: {"choices":[{"index":0,"delta":{"content":"let me see"}}]}\n\n'

pytestmark = pytest.mark.skipif(
    not BIN.is_dir(), reason="run `make test-coding-agents` to install them"
)


class CodingAgent(NamedTuple):
    """How an agent is run. `{url}`, `{key}` and `{folder}` stand for those of a test.

    It gets its task as the last argument, or from its standard input.
    """

    command: Sequence[str]
    script: str
    env: Mapping[str, str] = {}
    files: Mapping[str, str] = {}
    reads_input: bool = False
    result: str = ""
    """A part of what it prints: what a tool that it had to search for returns."""


CLAUDE = CodingAgent(
    command=("claude", "--allowedTools", "Bash,Read,Edit,ToolSearch,CronList", "-p"),
    env={
        "ANTHROPIC_BASE_URL": "{url}",
        "ANTHROPIC_AUTH_TOKEN": "{key}",
        "ANTHROPIC_MODEL": "tiny",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "tiny",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    },
    script="""
call Read {"file_path": "{folder}/notes.txt"}
call Bash {"command": "ls"}
call ToolSearch {"query": "select:CronList"}
then
call Edit {"file_path": "{folder}/notes.txt", "old_string": "two", "new_string": "three"}
call CronList {}
""",
    result="No scheduled jobs",
)
CODEX = CodingAgent(
    command=(
        "codex",
        "exec",
        "--skip-git-repo-check",
        "--dangerously-bypass-approvals-and-sandbox",
    ),
    env={"CODEX_HOME": "{folder}", "ISOCHRONE_KEY": "{key}"},
    files={
        "config.toml": """
model = "tiny"
model_provider = "isochrone"
model_context_window = 100000
web_search = "disabled"
[model_providers.isochrone]
name = "Isochrone"
base_url = "{url}/v1"
env_key = "ISOCHRONE_KEY"
wire_api = "responses"
[analytics]
enabled = false
"""
    },
    script="""
call exec_command {"cmd": "cat notes.txt"}
call exec_command {"cmd": "ls"}
then
call exec_command {"cmd": "sed -i s/two/three/ notes.txt"}
""",
)
OPENCODE = CodingAgent(
    command=("opencode", "run"),
    env={"OPENCODE_DISABLE_MODELS_FETCH": "1", "ISOCHRONE_KEY": "{key}"},
    files={
        "opencode.json": """
{"autoupdate": false, "share": "disabled", "model": "isochrone/tiny",
 "provider": {"isochrone": {"npm": "@ai-sdk/openai-compatible",
  "options": {"baseURL": "{url}/v1", "apiKey": "{env:ISOCHRONE_KEY}"},
  "models": {"tiny": {"limit": {"context": 100000, "output": 8000}}}}}}
"""
    },
    script="""
call read {"filePath": "{folder}/notes.txt"}
call bash {"command": "ls", "description": "list"}
then
call edit {"filePath": "{folder}/notes.txt", "oldString": "two", "newString": "three"}
""",
    reads_input=True,
)
PI = CodingAgent(
    command=("pi", "--provider", "isochrone", "--model", "tiny", "-p"),
    env={"PI_OFFLINE": "1"},
    files={
        ".pi/agent/models.json": """
{"providers": {"isochrone": {"baseUrl": "{url}/v1", "api": "openai-completions", "apiKey": "{key}",
 "models": [{"id": "tiny", "reasoning": true, "contextWindow": 100000, "maxTokens": 8000}]}}}
"""
    },
    script="""
call read {"path": "notes.txt"}
call bash {"command": "ls"}
then
call edit {"path": "notes.txt", "edits": [{"oldText": "two", "newText": "three"}]}
""",
)
QWEN = CodingAgent(
    command=("qwen", "--yolo", "--auth-type", "openai", "-p"),
    env={"OPENAI_BASE_URL": "{url}/v1", "OPENAI_API_KEY": "{key}", "OPENAI_MODEL": "tiny"},
    script="""
call read_file {"file_path": "{folder}/notes.txt"}
call run_shell_command {"command": "ls", "is_background": false}
then
call edit {"file_path": "{folder}/notes.txt", "old_string": "two", "new_string": "three"}
""",
)
AGENTS = {"claude": CLAUDE, "codex": CODEX, "opencode": OPENCODE, "pi": PI, "qwen": QWEN}


class BreakingNode(MockNode):
    """A node that breaks off its first `cuts` answers, or lets them hang, within the text."""

    def __init__(self) -> None:
        super().__init__()
        self.cuts = 0
        self.hangs = False

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Answer as the mock engine does, or begin an answer."""
        if not (self.cuts or self.hangs):
            return await super().generate(request)
        await request.read()
        self.cuts -= 1
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(FIRST_CHUNK)
        self.running += 1
        await self.note()
        try:
            if self.hangs:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            await self.note()
            raise
        assert request.transport is not None
        request.transport.abort()
        return response


@asynccontextmanager
async def running(agent: CodingAgent, bench: Bench, folder: Path) -> AsyncIterator[Any]:
    """Run an agent in a new folder with notes.txt; yield its process."""
    folder.mkdir()

    def filled(text: str) -> str:
        for name, value in {"url": bench.url, "key": KEY, "folder": str(folder)}.items():
            text = text.replace(f"{{{name}}}", value)
        return text

    for name, text in {"notes.txt": "one\ntwo\n", **agent.files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(filled(text))
    task = filled(agent.script)
    (folder / "task.txt").write_text(task)
    with (folder / "task.txt").open() as given, (folder / PRINTED).open("w") as printed:
        process = await asyncio.create_subprocess_exec(
            BIN / agent.command[0],
            *agent.command[1:],
            *([] if agent.reads_input else [task]),
            cwd=folder,
            env={
                "PATH": f"{BIN}:{os.environ['PATH']}",
                "HOME": str(folder),
                "TERM": "dumb",
                **{name: filled(value) for name, value in agent.env.items()},
            },
            stdin=given if agent.reads_input else asyncio.subprocess.DEVNULL,
            stdout=printed,
            stderr=printed,
            start_new_session=True,
        )
    try:
        async with asyncio.timeout(TIMEOUT_S):
            yield process
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


@pytest.fixture
def roles(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The roles of the messages of each chat that the engine got."""
    found: list[list[str]] = []
    decode = mock_requests.decode

    def noting(data: bytes) -> mock_requests.MockRequestBody:
        body = decode(data)
        found.append([message.role for message in body.messages or ()])
        return body

    monkeypatch.setattr(mock_requests, "decode", noting)
    return found


@pytest.mark.parametrize("name", AGENTS)
@pytest.mark.parametrize("cuts", [0, 1])
async def test_a_file_is_edited(
    tmp_path: Path, roles: list[list[str]], name: str, cuts: int
) -> None:
    """Also if a replica breaks off an answer, which is not continued because it may have calls."""
    if cuts and name in {"opencode", "qwen"}:
        pytest.skip("it ends its work at an error within a stream")
    node = BreakingNode()
    node.cuts = cuts
    async with (
        a_bench(tmp_path, [node], **PATIENT) as bench,
        running(AGENTS[name], bench, tmp_path / "work") as process,
    ):
        await process.wait()
    printed = (tmp_path / "work" / PRINTED).read_text()
    assert (process.returncode, node.cuts) == (0, 0), printed
    assert (tmp_path / "work" / "notes.txt").read_text() == "one\nthree\n", printed
    assert AGENTS[name].result in printed
    for each in roles:
        assert each[0] == "system" and not {"system", "developer"} & set(each[1:]), each


@pytest.mark.parametrize("name", AGENTS)
async def test_an_interrupt_stops_the_engine(tmp_path: Path, name: str) -> None:
    node = BreakingNode()
    node.hangs = True
    async with (
        a_bench(tmp_path, [node], **PATIENT) as bench,
        running(AGENTS[name], bench, tmp_path / "work") as process,
    ):
        await node.until(lambda: node.running, TIMEOUT_S)
        os.killpg(process.pid, signal.SIGINT)
        await node.until(lambda: node.cancelled, 20.0)
