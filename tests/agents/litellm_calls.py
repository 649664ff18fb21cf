"""LiteLLM's SDK, unmodified, with its providers for OpenAI, OpenAI's Responses and Anthropic."""

import asyncio
import json
from typing import Any

import litellm
from tools import KEY, MODEL, SCRIPT, STEPS_MAX, UNKNOWN, URL, City, clock, refusal, tell, weather

TOOLS = {"weather": weather, "clock": clock}
FUNCTIONS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {argument: {"type": "string"}},
                "required": [argument],
            },
        },
    }
    for name, argument in (("weather", "city"), ("clock", "zone"))
]


async def answer(provider: str, *, streams: bool = False, **fields: Any) -> Any:
    """Return one answer, joined if it is streamed."""
    base = URL if provider == "anthropic" else f"{URL}/v1"
    answered = await litellm.acompletion(
        model=f"{provider}/{fields.pop('model', MODEL)}",
        api_base=base,
        api_key=KEY,
        max_retries=0,
        stream=streams,
        **fields,
    )
    if not streams:
        return answered
    pieces = [piece async for piece in answered]
    return litellm.stream_chunk_builder(pieces, messages=fields["messages"])


async def loop(provider: str, *, streams: bool) -> tuple[list[Any], str, int]:
    """Return the calls of each step, the last text, and the tokens of all answers."""
    messages: list[Any] = [{"role": "user", "content": SCRIPT}]
    steps: list[Any] = []
    tokens = 0
    for _ in range(STEPS_MAX):
        answered = await answer(provider, streams=streams, messages=messages, tools=FUNCTIONS)
        tokens += answered.usage.completion_tokens
        message = answered.choices[0].message
        if not message.tool_calls:
            return steps, message.content, tokens
        messages.append(message.model_dump())
        calls = [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls]
        for call, (name, arguments) in zip(message.tool_calls, calls, strict=True):
            said = TOOLS[name](**arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
        steps.append(calls)
    raise AssertionError(messages)


async def results_of(provider: str) -> dict[str, Any]:
    """Return what one provider's calls return."""
    steps, text, tokens = await loop(provider, streams=False)
    again, streamed, _ = await loop(provider, streams=True)
    assert again == steps, again
    ask: Any = [{"role": "user", "content": "A city."}]
    formed = await answer(provider, messages=ask, response_format=City)
    return {
        "steps": steps,
        "text": text,
        "streamed": streamed,
        "formed": [json.loads(formed.choices[0].message.content)],
        "refused": await refusal(answer(provider, model=UNKNOWN, messages=ask)),
        "tokens": tokens,
    }


async def main() -> None:
    """Run with each provider."""
    litellm.suppress_debug_info = True
    providers = {"chat": "openai", "responses": "openai/responses", "messages": "anthropic"}
    tell({api: await results_of(provider) for api, provider in providers.items()})


asyncio.run(main())
