"""The session of an engine: one that stopped, and answers that are read whole."""

import ast
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

import nodeagent
from nodeagent.host.engines.open_session import open_session

AGENT = Path(nodeagent.__file__).parent


async def test_a_closed_session_is_a_lost_connection() -> None:
    session = aiohttp.ClientSession()
    assert open_session(session) is session
    await session.close()
    with pytest.raises(aiohttp.ClientConnectionError, match="the engine has stopped"):
        open_session(session)


def unlimited_reads(path: Path) -> Iterator[str]:
    """Yield the places that read all of an answer, however much comes."""
    for node in ast.walk(ast.parse(path.read_text())):
        read: ast.expr | None = None
        if isinstance(node, ast.Await):
            read = node.value
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "asyncio.ensure_future":
            read = node.args[0]
        if read is not None and ast.unparse(read).endswith((".read()", ".json()", ".text()")):
            yield f"{path.relative_to(AGENT)}:{read.lineno}"


def test_no_answer_of_an_engine_or_node_is_read_without_a_limit() -> None:
    """An engine that answers without end took all memory of the agent, in nine places."""
    files = [
        path
        for path in AGENT.rglob("*.py")
        if path.relative_to(AGENT).parts[0] not in ("engine", "mock")
    ]
    assert [place for path in files for place in unlimited_reads(path)] == []
