"""LangChain's agents (on LangGraph) and chat models, unmodified, with each API of theirs."""

import asyncio
from typing import Any

from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_openai import ChatOpenAI
from tools import KEY, MODEL, SCRIPT, UNKNOWN, URL, City, clock, refusal, tell, weather

ASK = {"messages": [("user", SCRIPT)]}


def chat(name: str) -> Any:
    """Return a model over Chat Completions."""
    return ChatOpenAI(model=name, base_url=f"{URL}/v1", api_key=KEY, max_retries=0)


def responses(name: str) -> Any:
    """Return a model over Responses."""
    return ChatOpenAI(
        model=name, base_url=f"{URL}/v1", api_key=KEY, max_retries=0, use_responses_api=True
    )


def messages(name: str) -> Any:
    """Return a model over Anthropic's Messages."""
    return ChatAnthropic(model=name, base_url=URL, api_key=KEY, max_retries=0, max_tokens=1000)


async def results_of(model: Any, unknown: Any) -> dict[str, Any]:
    """Return what one model's runs return."""
    agent = create_agent(model, [weather, clock])
    run = (await agent.ainvoke(ASK))["messages"]
    answers = [message for message in run if isinstance(message, AIMessage)]
    pieces = [
        piece.text
        async for piece, _ in agent.astream(ASK, stream_mode="messages")
        if isinstance(piece, AIMessageChunk)
    ]
    formed = [
        (await create_agent(model, response_format=strategy(City)).ainvoke({"messages": "A city."}))
        for strategy in (ToolStrategy, ProviderStrategy)
    ]
    return {
        "steps": [
            [(call["name"], call["args"]) for call in answer.tool_calls]
            for answer in answers
            if answer.tool_calls
        ],
        "text": run[-1].text,
        "streamed": "".join(pieces),
        "formed": [form["structured_response"].model_dump() for form in formed],
        "refused": await refusal(unknown.ainvoke("hi")),
        "tokens": sum(answer.usage_metadata["output_tokens"] for answer in answers),
    }


async def main() -> None:
    """Run with each API."""
    apis = {"chat": chat, "responses": responses, "messages": messages}
    tell({name: await results_of(api(MODEL), api(UNKNOWN)) for name, api in apis.items()})


asyncio.run(main())
