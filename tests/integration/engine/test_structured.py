"""Structured outputs of the real model: streamed, batched, with stop strings and logprobs."""

import asyncio
import json
import re
from typing import Any

import aiohttp
import pytest

from tests.integration.engine.test_server import CHAT, LONG, PLAIN, chat, post, stream, text_of

pytestmark = pytest.mark.model

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "population_millions": {"type": "integer", "minimum": 1, "maximum": 40},
        "coastal": {"type": "boolean"},
    },
    "required": ["city", "population_millions", "coastal"],
    "additionalProperties": False,
}
ENVELOPE = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
BARE = {"type": "json_schema", "json_schema": CITY}
QUESTION = "Tell me about Paris as JSON: its city, population_millions and coastal."


def check_city(text: str) -> None:
    value = json.loads(text)
    assert set(value) == set(CITY["properties"])
    assert 1 <= value["population_millions"] <= 40
    assert isinstance(value["coastal"], bool)


def content(answer: Any) -> str:
    return str(answer["choices"][0]["message"]["content"])


@pytest.mark.parametrize("wanted", [ENVELOPE, BARE], ids=["openai", "workers-ai"])
async def test_a_schema_is_obeyed_streamed_and_complete(
    http: aiohttp.ClientSession, wanted: dict[str, Any]
) -> None:
    body = chat(QUESTION, response_format=wanted, max_tokens=120)
    whole = await post(http, CHAT, body)
    check_city(content(whole))
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert text_of(await stream(http, CHAT, body)) == content(whole)


@pytest.mark.parametrize("streams", [False, True])
async def test_a_grammar_that_exceeds_a_limit_during_the_answer_is_the_requests_fault(
    http: aiohttp.ClientSession, streams: bool
) -> None:
    """It compiles, and fails at the first or second mask."""
    body = chat("Write.", guided_regex="(a{1000}){1000}", max_tokens=20, stream=streams)
    async with http.post(CHAT, json=body) as response:
        text = await response.text()
    assert "lexer error" in text
    assert '"code":"invalid_request"' in text
    assert response.status == 400 or (streams and response.status == 200)


async def test_concurrent_requests_keep_their_own_grammars(
    http: aiohttp.ClientSession,
) -> None:
    free = chat(LONG, max_tokens=24)
    alone = await post(http, CHAT, free)
    bodies = [
        chat(QUESTION, response_format=BARE, max_tokens=120, temperature=1.3, seed=3),
        chat(QUESTION, guided_regex=r"[A-Z][a-z]{2,9} has \d{1,7} people\.", max_tokens=60),
        chat("Is Paris in France?", guided_choice=["certainly not", "certainly so"]),
        free,
        chat("Name three fruits.", max_tokens=60, temperature=1.0, seed=5,
             structured_outputs={"json": {"type": "array", "items": {"type": "string"},
                                          "minItems": 3, "maxItems": 3}}),
    ]  # fmt: skip
    answers = await asyncio.gather(*(post(http, CHAT, body) for body in bodies))
    check_city(content(answers[0]))
    assert re.fullmatch(r"[A-Z][a-z]{2,9} has \d{1,7} people\.", content(answers[1]))
    assert content(answers[2]) in ("certainly not", "certainly so")
    assert content(answers[3]) == content(alone)
    if answers[4]["choices"][0]["finish_reason"] == "stop":
        assert len(json.loads(content(answers[4]))) == 3


async def test_stops_logprobs_and_ignore_eos_keep_their_meaning(
    http: aiohttp.ClientSession,
) -> None:
    body = chat(QUESTION, response_format=BARE, max_tokens=120)
    whole = content(await post(http, CHAT, body))
    stopped = await post(http, CHAT, {**body, "stop": "popul"})
    assert content(stopped) == whole[: whole.index("popul")]
    assert content(await post(http, CHAT, {**body, "ignore_eos": True})) == whole
    told = await post(http, CHAT, {**body, "logprobs": True, "top_logprobs": 1})
    entries = told["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == whole
    assert all(entry["logprob"] <= 0 for entry in entries)


async def test_a_plain_completion_can_be_constrained(http: aiohttp.ClientSession) -> None:
    body = {"prompt": "The answer is", "guided_regex": " [0-9]{3}", "temperature": 0}
    answer = await post(http, PLAIN, body)
    assert re.fullmatch(" [0-9]{3}", answer["choices"][0]["text"])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"enum": []}}}, "anyOf"),
        ({"response_format": {"type": "json_schema", "json_schema": {"$ref": "#"}}}, "no output"),
        ({"guided_regex": "(["}, "unclosed"),
    ],
    ids=str,
)
async def test_an_unusable_grammar_is_a_400_and_the_engine_survives(
    http: aiohttp.ClientSession, fields: dict[str, Any], said: str
) -> None:
    async with http.post(CHAT, json=chat(**fields)) as response:
        error = (await response.json())["error"]
    assert response.status == 400
    assert error["type"] == "invalid_request_error"
    assert error["param"] in fields
    assert error["message"].startswith("cannot use")
    assert said in error["message"]
    assert content(await post(http, CHAT, chat())) == "The capital of France is Paris."
