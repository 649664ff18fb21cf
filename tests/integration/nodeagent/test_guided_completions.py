"""A completion for TensorRT-LLM takes no salt, but its schema is translated, too."""

import json
import os
from pathlib import Path

import pytest

from isochrone.wire.models.model import EngineSettings
from nodeagent.drivers.driver import CHAT_PATH, COMPLETIONS_PATH, EngineCommand
from nodeagent.drivers.guided_decoding import GuidedDecoding
from nodeagent.host.engines.engine_process import EngineProcess
from nodeagent.host.engines.engine_record import EngineRecord
from tests.builders import a_spec

SCHEMA = {"type": "object"}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
BODY = json.dumps({"response_format": FORMAT}).encode()


@pytest.mark.parametrize(
    ("path", "added"),
    [(CHAT_PATH, {"cache_salt": "t"}), (COMPLETIONS_PATH, {}), ("/v1/other", None)],
)
async def test_the_schema_is_translated(
    path: str, added: dict[str, str] | None, tmp_path: Path
) -> None:
    command = EngineCommand(
        arguments=(), base_url="http://127.0.0.1:1", guided=GuidedDecoding("qwen3")
    )
    settings = EngineSettings(driver="tensorrt_llm")
    record = EngineRecord(pid=os.getpid(), command=command, spec=a_spec(engine=settings))
    engine = EngineProcess(record, tmp_path, None)
    try:
        body = engine.salted(path, BODY, "t")
    finally:
        await engine.release()
    if added is None:
        assert body == BODY
    else:
        expected = {"response_format": {"type": "json", "schema": SCHEMA}, **added}
        assert json.loads(body) == expected
