"""The OpenAI Agents SDK, unmodified, with Responses and Chat Completions."""

import asyncio
import json
from itertools import groupby
from typing import Any

import openai
from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from tools import KEY, MODEL, SCRIPT, STEPS_MAX, UNKNOWN, URL, City, clock, refusal, tell, weather


def steps_of(items: list[Any]) -> list[Any]:
    """Return the calls of a run, by step: results are between two steps."""
    groups = groupby(items, lambda item: item.type == "tool_call_item")
    return [
        [(item.raw_item.name, json.loads(item.raw_item.arguments)) for item in group]
        for are_calls, group in groups
        if are_calls
    ]


async def results_of(api: type[Any], client: openai.AsyncOpenAI) -> dict[str, Any]:
    """Return what one API's runs return."""
    model = api(MODEL, openai_client=client)
    agent: Any = Agent(
        name="guide", model=model, tools=[function_tool(weather), function_tool(clock)]
    )
    run = await Runner.run(agent, SCRIPT, max_turns=STEPS_MAX)
    stream = Runner.run_streamed(agent, SCRIPT, max_turns=STEPS_MAX)
    kinds = {event.type async for event in stream.stream_events()}
    assert "raw_response_event" in kinds, kinds
    front: Any = Agent(name="front", model=model, handoffs=[agent])
    passed_on = await Runner.run(front, f"call transfer_to_guide {{}}\nthen\n{SCRIPT}")
    assert passed_on.last_agent is agent, passed_on
    formed = await Runner.run(Agent(name="form", model=model, output_type=City), "A city.")
    unknown: Any = Agent(name="unknown", model=api(UNKNOWN, openai_client=client))
    return {
        "steps": steps_of(run.new_items),
        "text": run.final_output,
        "streamed": stream.final_output,
        "formed": [formed.final_output.model_dump()],
        "refused": await refusal(Runner.run(unknown, "hi")),
        "tokens": run.context_wrapper.usage.output_tokens,
    }


async def main() -> None:
    """Run with both APIs."""
    set_tracing_disabled(True)
    apis = {"responses": OpenAIResponsesModel, "chat": OpenAIChatCompletionsModel}
    async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0) as client:
        tell({name: await results_of(api, client) for name, api in apis.items()})


asyncio.run(main())
