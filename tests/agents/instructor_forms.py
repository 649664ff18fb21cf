"""Instructor, unmodified, with its ways to ask for an answer in a form."""

import asyncio
from typing import Any

import anthropic
import instructor
import openai
from tools import KEY, MODEL, UNKNOWN, URL, City, refusal, tell

ASK: Any = {"messages": [{"role": "user", "content": "A city."}], "response_model": City}


async def results_of(clients: list[Any], fields: dict[str, Any]) -> dict[str, Any]:
    """Return what one API's clients return, one for each way."""
    ask = {**ASK, **fields}
    formed = [await client.create(model=MODEL, **ask) for client in clients]
    partial = [part async for part in clients[0].create_partial(model=MODEL, **ask)]
    return {
        "formed": [form.model_dump() for form in (*formed, partial[-1])],
        "refused": await refusal(clients[0].create(model=UNKNOWN, max_retries=0, **ask)),
    }


async def main() -> None:
    """Run with each API."""
    chat = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
    messages = anthropic.AsyncAnthropic(base_url=URL, api_key=KEY, max_retries=0)
    ways = instructor.Mode
    async with chat, messages:
        chats = [instructor.from_openai(chat, mode=mode) for mode in (ways.TOOLS, ways.JSON_SCHEMA)]
        by_responses = [instructor.from_openai(chat, mode=ways.RESPONSES_TOOLS)]
        by_messages = [instructor.from_anthropic(messages, mode=ways.ANTHROPIC_TOOLS)]
        results = {
            "chat": await results_of(chats, {}),
            "responses": await results_of(by_responses, {}),
            "messages": await results_of(by_messages, {"max_tokens": 1000}),
        }
    tell(results)


asyncio.run(main())
