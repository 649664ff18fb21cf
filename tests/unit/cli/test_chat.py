"""`isochrone chat` prints the answer as it comes, or all that is known of it as JSON."""

import json
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
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


def test_the_error_of_an_answer_that_broke_off_begins_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def breaks_off(*, on_text: Any, **_: Any) -> chat_client.ChatResult:
        on_text("Hel")
        raise chat_client.ChatFailed("cannot answer, try again: no event came")

    monkeypatch.setattr(chat_client, "chat", breaks_off)
    result = CliRunner().invoke(main, COMMAND)
    assert result.exit_code == 1
    assert result.output == "Hel\nError: cannot answer, try again: no event came\n"


def test_json_has_the_answer_and_where_it_came_from() -> None:
    result = CliRunner().invoke(main, [*COMMAND, "-o", "json"])
    assert json.loads(result.stdout) == ANSWER._asdict()


def a_stream(*frames: dict[str, Any]) -> Any:
    async def lines() -> AsyncIterator[bytes]:
        for frame in frames:
            yield b"data: %s\n" % json.dumps(frame).encode()
        yield b"data: [DONE]\n"

    return SimpleNamespace(content=lines(), headers={})


@pytest.mark.parametrize("delta", [{"reasoning_content": "Hm"}, {"role": "assistant"}])
async def test_an_answer_without_text_has_a_time_to_its_first_token(delta: dict[str, str]) -> None:
    stream = a_stream({"choices": [{"delta": delta}]}, {"choices": [], "usage": None})
    result = await chat_client._read(stream, time.monotonic(), print)
    assert (result.text, 0 <= result.ttft_ms < 60_000) == ("", True)


def test_an_answer_without_text_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def chat(**_: Any) -> chat_client.ChatResult:
        return ANSWER._replace(text="", output_tokens=256)

    monkeypatch.setattr(chat_client, "chat", chat)
    result = CliRunner().invoke(main, COMMAND)
    assert "no text in 256 tokens" in result.stderr and "--max-tokens" in result.stderr


async def test_an_engine_does_not_write_control_characters_to_the_terminal() -> None:
    stream = a_stream({"choices": [{"delta": {"content": "a\x1b]52;c;eA==\x07\x9b1mb\n"}}]})
    shown: list[str] = []
    result = await chat_client._read(stream, time.monotonic(), shown.append)
    assert (result.text, shown) == ("a]52;c;eA==1mb\n", ["a]52;c;eA==1mb\n"])
