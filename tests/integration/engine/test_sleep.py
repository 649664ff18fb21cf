"""An engine that sleeps: its model is dropped, and a wake or a request brings it back."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp

from isochrone.wire.http import headers
from tests.integration.engine.conftest import EngineProcess

CHAT = "/v1/chat/completions"
BODY = {
    "model": "smollm2",
    "messages": [{"role": "user", "content": "Name three colours."}],
    "max_tokens": 8,
    "temperature": 0,
}


async def answer(http: aiohttp.ClientSession) -> str:
    async with http.post(CHAT, json=BODY) as response:
        assert response.status == 200, await response.text()
        return str((await response.json())["choices"][0]["message"]["content"])


async def stats(http: aiohttp.ClientSession) -> dict[str, Any]:
    async with http.get("/stats") as response:
        return dict(await response.json())


async def is_asleep(http: aiohttp.ClientSession) -> bool:
    async with http.get("/is_sleeping") as response:
        return bool((await response.json())["is_sleeping"])


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


async def test_a_sleeping_engine_gives_memory_back_and_answers_the_same_after_a_wake(
    engine: EngineProcess, http: aiohttp.ClientSession
) -> None:
    before, awake_bytes = await answer(http), resident_bytes(engine.process.pid)
    async with http.post("/sleep") as response:
        assert response.status == 200
    assert await is_asleep(http)
    assert resident_bytes(engine.process.pid) < awake_bytes - (50 << 20)
    async with http.get("/health") as response:
        assert response.status == 200
    async with http.post("/wake_up") as response:
        assert (await response.json())["wake_s"] > 0
    assert await answer(http) == before
    assert not await is_asleep(http)


async def test_requests_wake_a_sleeping_engine_once(http: aiohttp.ClientSession) -> None:
    before = await answer(http)
    async with http.post("/sleep") as response:
        assert response.status == 200
    wakes = (await stats(http))["wakes_total"]
    answers = await asyncio.gather(*(answer(http) for _ in range(4)))
    assert set(answers) == {before}
    assert (await stats(http))["wakes_total"] == wakes + 1


async def test_a_system_prompt_stays_cached_over_a_sleep(http: aiohttp.ClientSession) -> None:
    system = "You answer in one short sentence, in plain words, and you never use a list. " * 4

    async def ask(question: str, salt: str = "") -> tuple[str, int]:
        """Return the answer and how many prompt tokens were cached."""
        messages = [
            {"role": "system", "content": system},
            {"role": "user", "content": question},
        ]
        sent = {headers.CACHE_SALT: salt}
        body = {**BODY, "messages": messages}
        async with http.post(CHAT, json=body, headers=sent) as response:
            assert response.status == 200, await response.text()
            found = await response.json()
        cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
        return str(found["choices"][0]["message"]["content"]), int(cached)

    await ask("What is a river?")
    _, shared_tokens = await ask("Who wrote Hamlet?")
    assert shared_tokens >= 64
    expected, none = await ask("How many legs has a spider?", salt="another tenant")
    assert none == 0
    async with http.post("/sleep") as response:
        assert response.status == 200
    assert await ask("How many legs has a spider?") == (expected, shared_tokens)
    # What no second prompt had in common was dropped.
    assert (await ask("Who wrote Hamlet?"))[1] == shared_tokens


async def test_an_engine_with_an_open_request_does_not_fall_asleep(
    http: aiohttp.ClientSession,
) -> None:
    body = {**BODY, "stream": True, "max_tokens": 200, "ignore_eos": True}
    async with http.post(CHAT, json=body) as running:
        await running.content.readany()
        async with http.post("/sleep") as response:
            assert response.status == 409
            assert "requests are open" in await response.text()
        async for _ in running.content.iter_any():
            pass
    assert not await is_asleep(http)
