"""The limit of a vendor engine's steps is measured over HTTP, once, and kept in its record."""

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from isochrone.service.network.http_server import serve_http
from isochrone.wire.models.model import EngineSettings
from nodeagent.decide.replicas.step_limit import step_limit_s
from nodeagent.drivers.driver import EngineCommand
from nodeagent.host.engines.engine_process import EngineProcess
from nodeagent.host.engines.engine_record import EngineRecord
from nodeagent.host.engines.step_probe import measure_step
from tests.builders import a_spec

PROMPT_TOKENS = 180


class TextServer:
    """An OpenAI server that counts tokens, with or without a chat template."""

    def __init__(self, *, has_template: bool, says_usage: bool) -> None:
        self._has_template = has_template
        self._says_usage = says_usage
        self.bodies: list[dict[str, Any]] = []

    async def answer(self, request: web.Request) -> web.Response:
        """Answer a chat or a completion."""
        self.bodies.append(await request.json())
        if "messages" in self.bodies[-1] and not self._has_template:
            return web.json_response({"error": {"message": "no chat template"}}, status=400)
        usage = {"prompt_tokens": PROMPT_TOKENS} if self._says_usage else None
        return web.json_response({"choices": [{}], "usage": usage})


@pytest.mark.parametrize(
    ("driver", "has_template", "says_usage", "requests"),
    [
        ("vllm", True, True, 1),
        ("vllm", False, True, 2),
        ("vllm", True, False, 1),
        ("embedded", True, True, 0),
    ],
)
async def test_an_engine_is_measured_with_one_long_prompt(
    driver: str, has_template: bool, says_usage: bool, requests: int, tmp_path: Path
) -> None:
    server = TextServer(has_template=has_template, says_usage=says_usage)
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.answer)
    app.router.add_post("/v1/completions", server.answer)
    times = iter((0.0, 2.0) if has_template else (0.0, 0.0, 2.0))
    async with serve_http(app, "127.0.0.1", 0) as port:
        command = EngineCommand(arguments=(), base_url=f"http://127.0.0.1:{port}")
        settings = EngineSettings(driver=driver, options={"max_num_batched_tokens": "1024"})
        record = EngineRecord(pid=os.getpid(), command=command, spec=a_spec(engine=settings))
        engine = EngineProcess(record, tmp_path, None)
        try:
            await measure_step(engine, "chat", clock=lambda: next(times))
        finally:
            await engine.release()
    is_measured = says_usage and requests > 0
    assert engine.record.step_limit_s == (
        step_limit_s(1024, PROMPT_TOKENS / 2) if is_measured else 0.0
    )
    assert len(server.bodies) == requests
    if requests:
        kept = msgspec.json.decode((tmp_path / "process.json").read_bytes(), type=EngineRecord)
        assert kept.step_limit_s == engine.record.step_limit_s


async def test_a_disk_that_has_filled_up_ends_no_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = TextServer(has_template=True, says_usage=True)
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.answer)
    times = iter((0.0, 2.0))
    async with serve_http(app, "127.0.0.1", 0) as port:
        command = EngineCommand(arguments=(), base_url=f"http://127.0.0.1:{port}")
        settings = EngineSettings(driver="vllm", options={"max_num_batched_tokens": "1024"})
        record = EngineRecord(pid=os.getpid(), command=command, spec=a_spec(engine=settings))
        engine = EngineProcess(record, tmp_path / "gone", None)
        try:
            await measure_step(engine, "chat", clock=lambda: next(times))
        finally:
            await engine.release()
    assert engine.record.step_limit_s == step_limit_s(1024, PROMPT_TOKENS / 2)
    assert "cannot store what a later agent needs" in caplog.text
