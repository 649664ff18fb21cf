"""`isochrone chat` prints the answer as it comes, or all that is known of it as JSON."""

import json
from typing import Any

import pytest
from click.testing import CliRunner

from isochrone.cli import chat as chat_client
from isochrone.cli.main import main

ANSWER = chat_client.ChatResult(
    *("ams", "ams-1", "nearest-warm", "req-1"),
    ttft_ms=12.0,
    tokens_per_s=50.0,
    prompt_tokens=3,
    output_tokens=2,
    cached_tokens=0,
    text="Hello there",
)
COMMAND = ["chat", "tiny", "hi", "--endpoint", "http://router:8080", "--key", "iso_k"]


@pytest.fixture(autouse=True)
def endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    async def chat(*, on_text: Any, **_: Any) -> chat_client.ChatResult:
        for text in ("Hello", " there"):
            on_text(text)
        return ANSWER

    monkeypatch.setattr(chat_client, "chat", chat)


def test_the_answer_is_on_standard_output() -> None:
    result = CliRunner().invoke(main, COMMAND)
    assert (result.exit_code, result.stdout) == (0, "Hello there\n")


def test_json_has_the_answer_and_where_it_came_from() -> None:
    result = CliRunner().invoke(main, [*COMMAND, "-o", "json"])
    assert json.loads(result.stdout) == ANSWER._asdict()
