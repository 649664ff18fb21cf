"""Pydantic AI, unmodified, with Chat Completions, Responses and Anthropic's Messages."""

import asyncio
from typing import Any

import anthropic
import openai
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.messages import ModelResponse
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from tools import KEY, MODEL, SCRIPT, UNKNOWN, URL, City, clock, refusal, tell, weather


def steps_of(messages: list[Any]) -> list[Any]:
    """Return the calls of a run, by step."""
    answers = [message for message in messages if isinstance(message, ModelResponse)]
    return [
        [(call.tool_name, call.args_as_dict()) for call in answer.tool_calls]
        for answer in answers
        if answer.tool_calls
    ]


async def results_of(api: Any, provider: Any) -> dict[str, Any]:
    """Return what one API's runs return."""
    model = api(MODEL, provider=provider)
    agent: Any = Agent(model, tools=[weather, clock])
    run = await agent.run(SCRIPT)
    async with agent.run_stream(SCRIPT) as stream:
        streamed = "".join([piece async for piece in stream.stream_text(delta=True)])
    forms: list[Any] = [City]
    if api is not AnthropicModel:  # it takes structured output of Anthropic's own models alone
        forms.append(NativeOutput(City))
    formed = [await Agent(model, output_type=form).run("A city.") for form in forms]
    return {
        "steps": steps_of(run.all_messages()),
        "text": run.output,
        "streamed": streamed,
        "formed": [form.output.model_dump() for form in formed],
        "refused": await refusal(Agent(api(UNKNOWN, provider=provider)).run("hi")),
        "tokens": run.usage.output_tokens,
    }


async def main() -> None:
    """Run with each API."""
    chat = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
    messages = anthropic.AsyncAnthropic(base_url=URL, api_key=KEY, max_retries=0)
    providers = {
        "chat": (OpenAIChatModel, OpenAIProvider(openai_client=chat)),
        "responses": (OpenAIResponsesModel, OpenAIProvider(openai_client=chat)),
        "messages": (AnthropicModel, AnthropicProvider(anthropic_client=messages)),
    }
    async with chat, messages:
        tell({name: await results_of(*provider) for name, provider in providers.items()})


asyncio.run(main())
