"""Speculation in the served engine: same text, fewer steps for repetitive text, and metrics."""

from typing import Any

import aiohttp
import pytest

from tests.integration.engine.test_server import CHAT, chat, post, stats, stream, text_of

pytestmark = pytest.mark.model

RECORD = '[{"id": 101, "city": "Amsterdam"}, {"id": 102, "city": "Singapore"}]'
COPY = f"Repeat this JSON exactly as it is, and nothing else:\n{RECORD}"
ASKED_MAX = 10
"""Drafts are verified where that pays, which a busy machine may hide for a while."""


async def said(http: aiohttp.ClientSession, **fields: Any) -> str:
    answer = await post(http, CHAT, chat(COPY, max_tokens=40, **fields))
    return str(answer["choices"][0]["message"]["content"])


async def test_speculation_changes_only_the_number_of_steps(http: aiohttp.ClientSession) -> None:
    plain = await said(http, speculate=False)
    accepted = 0.0
    for _ in range(ASKED_MAX):
        before = await stats(http)
        assert await said(http) == plain
        after = await stats(http)
        accepted = after["accepted_tokens_total"] - before["accepted_tokens_total"]
        if accepted >= 5:
            break
    assert accepted >= 5
    assert after["drafted_tokens_total"] - before["drafted_tokens_total"] >= accepted
    assert 0 < after["draft_acceptance"] <= 1
    tokens = after["tokens_out_total"] - before["tokens_out_total"]
    assert after["steps_total"] - before["steps_total"] < tokens
    async with http.get("/metrics") as response:
        told = await response.text()
    assert "isochrone_engine_accepted_tokens_total" in told
    assert "isochrone_engine_accepted_by_lookup_tokens_total" in told
    assert text_of(await stream(http, CHAT, chat(COPY, max_tokens=40))) == plain


async def test_a_request_can_turn_speculation_off_or_bring_a_prediction(
    http: aiohttp.ClientSession,
) -> None:
    before = await stats(http)
    plain = await said(http, speculate=False)
    off = await stats(http)
    assert off["drafted_tokens_total"] == before["drafted_tokens_total"]
    answer = chat("Name a city.", max_tokens=12)
    first = await post(http, CHAT, answer)
    expected = first["choices"][0]["message"]["content"]
    told = await post(
        http, CHAT, {**answer, "prediction": {"type": "content", "content": expected}}
    )
    assert told["choices"][0]["message"]["content"] == expected
    assert await said(http, temperature=1.0, seed=9) == await said(
        http, temperature=1.0, seed=9, speculate=False
    )
    assert plain
