"""An answer that another engine began is continued unchanged, greedy or seeded."""

import asyncio
from typing import Any

import aiohttp
import pytest

from isochrone.wire.http import headers
from router.dataplane.sse import StreamRelay, data_frame
from tests.integration.engine.test_server import CHAT, PLAIN, chat, post, stream, text_of

pytestmark = pytest.mark.model

PROMPTS = (
    "What is the capital of France?",
    "Write three lines about the sea.",
    "Count from one to ten in words.",
)
TOKENS = 24


@pytest.mark.parametrize(
    "drawn", [{"temperature": 0}, {"temperature": 0.8, "seed": 7}], ids=["greedy", "seeded"]
)
@pytest.mark.parametrize("prompt", PROMPTS)
async def test_the_continuation_equals_the_uninterrupted_answer(
    http: aiohttp.ClientSession, prompt: str, drawn: dict[str, Any]
) -> None:
    body = chat(prompt, max_tokens=TOKENS, **drawn)
    pieces = await stream(http, CHAT, body)
    whole = text_of(pieces)
    said = [text_of([piece]) for piece in pieces]
    tokens = [text for text in said if text]
    for at in (1, 4, 9, 15):
        begun = "".join(tokens[:at])
        if not begun.strip() or begun == whole:
            continue
        rest = await post(
            http,
            CHAT,
            {
                **body,
                "messages": [*body["messages"], {"role": "assistant", "content": begun}],
                "continue_final_message": True,
                "add_generation_prompt": False,
                "max_tokens": TOKENS - at,
            },
            **{headers.GENERATED_TOKENS: str(at)},
        )
        assert begun + rest["choices"][0]["message"]["content"] == whole, f"cut after {at}"


@pytest.mark.parametrize("speculate", [True, False])
async def test_a_frame_says_how_many_tokens_it_has(
    http: aiohttp.ClientSession, speculate: bool
) -> None:
    """Some characters of this answer have three, and were counted as one."""
    prompt = "Repeat exactly: \U0001f98a\U0001f419\U0001f30a\U0001f680"
    fields = {"max_tokens": 40, "stream_options": {"include_usage": True}, "speculate": speculate}
    pieces = await stream(http, CHAT, chat(prompt, **fields))
    relay = StreamRelay(wants_usage=True)
    for piece in pieces[:-1]:
        relay.feed(data_frame(piece))
    generated = relay.generated()
    assert generated.text == text_of(pieces)
    assert any("generated_tokens" in piece["choices"][0] for piece in pieces[:-1])
    frames = [piece for piece in pieces[:-1] if text_of([piece])]
    # Without the tokens at the end that have no text (yet).
    missing = pieces[-1]["usage"]["completion_tokens"] - generated.tokens
    assert 0 <= missing <= 2
    assert generated.tokens > len(frames)


async def test_an_answer_is_the_same_in_any_batch(
    http: aiohttp.ClientSession,
) -> None:
    bodies = [
        chat(f"{prompt} {'Think of it slowly. ' * (7 * at)}", max_tokens=TOKENS, seed=at)
        for at, prompt in enumerate(PROMPTS * 4)
    ]

    async def said(body: dict[str, Any]) -> str:
        answer = await post(http, CHAT, body)
        text: str = answer["choices"][0]["message"]["content"]
        return text

    alone = [await said(body) for body in bodies]
    assert await asyncio.gather(*(said(body) for body in bodies)) == alone


async def test_a_completion_is_continued_too(http: aiohttp.ClientSession) -> None:
    body = {"model": "smollm2", "prompt": "Once upon a time", "temperature": 0, "max_tokens": 16}
    whole = (await post(http, PLAIN, body))["choices"][0]["text"]
    begun = whole[: whole.index(" ", 8)]
    rest = await post(http, PLAIN, {**body, "prompt": body["prompt"] + begun})
    assert (begun + rest["choices"][0]["text"]).startswith(whole)


async def test_only_an_assistant_message_can_be_continued(http: aiohttp.ClientSession) -> None:
    async with http.post(CHAT, json=chat("hello", continue_final_message=True)) as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == "continue_final_message"
