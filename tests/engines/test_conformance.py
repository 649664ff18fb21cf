"""One contract for all engines: what a router and an agent rely on, whichever engine answers.

Each test runs with each engine. Where engines differ, their capabilities say so. SGLang and
TensorRT-LLM need a GPU: vendor_server.py takes their place, made from the fields of their source.
"""

import asyncio
import json
from typing import Any, Final

import msgspec
import pytest

from isochrone.wire.engines.engine_capabilities import EngineCapabilities
from isochrone.wire.errors import ApiError
from isochrone.wire.http import headers
from nodeagent.drivers.driver import CHAT_PATH, COMPLETIONS_PATH
from nodeagent.host.engines.engine_process import EngineProcess
from tests.engines.real_engines import EXIT_S, JSON, Answer, ask, post, stream, text_of, user

pytestmark = pytest.mark.asyncio(loop_scope="session")

FRANCE: Final = "What is the capital of France?"
LONG_PROMPT: Final = "Name the colours of the rainbow, in their order. " * 40
TOOL: Final = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


def check_usage(usage: dict[str, Any], output_tokens: int | None = None) -> None:
    assert usage["prompt_tokens"] > 0
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]
    assert output_tokens in (None, usage["completion_tokens"])


def check_refusal(answer: Answer, field: str) -> None:
    """Check that an engine refuses what its capabilities say it lacks."""
    assert (answer.status, field in str(answer.body)) == (400, True), answer.body


async def test_it_lists_its_model(engine: EngineProcess, traits: EngineCapabilities) -> None:
    """By the name that requests must have, if it checks that."""
    async with engine.http.get("/v1/models") as response:
        assert response.status == 200
        models = (await response.json())["data"]
    names = [model["id"] for model in models]
    assert engine.record.spec.name in names or (names and not traits.checks_model_name)


async def test_a_chat_answer_has_the_shape_of_openai(engine: EngineProcess) -> None:
    answer = await ask(engine, messages=user(FRANCE))
    assert answer.status == 200, answer.body
    assert answer.body["object"] == "chat.completion"
    assert answer.body["id"] and answer.body["created"] > 1_700_000_000
    (choice,) = answer.body["choices"]
    assert (choice["index"], choice["message"]["role"]) == (0, "assistant")
    assert choice["finish_reason"] in ("stop", "length")
    assert answer.text
    check_usage(answer.body["usage"])


async def test_an_answer_is_a_text_of_words(engine: EngineProcess) -> None:
    """Weights or a tokenizer that were read wrong give fragments and symbols."""
    answer = await ask(engine, messages=user("Tell me about rain."), max_tokens=32)
    words = answer.text.split()
    assert len(words) >= 12
    assert sum(word.strip(".,:;!?'\"()").isalnum() for word in words) >= 10, answer.text


async def test_a_stream_has_the_same_text_and_ends_with_its_usage(engine: EngineProcess) -> None:
    whole = await ask(engine, messages=user("Count to five."), max_tokens=8)
    chunks = await stream(engine, messages=user("Count to five."), max_tokens=8)
    assert text_of(chunks) == whole.text
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    reasons = [choice.get("finish_reason") for chunk in chunks for choice in chunk["choices"]]
    assert [reason for reason in reasons if reason] == ["length"]
    pieces = [chunk for chunk in chunks if text_of([chunk])]
    assert len(pieces) >= 4, "tokens come as they are generated"
    assert chunks[-1]["choices"] == []
    check_usage(chunks[-1]["usage"], 8)


async def test_events_of_several_tokens_say_so(
    engine: EngineProcess, traits: EngineCapabilities
) -> None:
    """Without it the rest of an interrupted answer could be longer than its limit."""
    characters = "\U0001f98a\U0001f419\U0001f30a\U0001f680 " * 6
    chunks = await stream(engine, path=COMPLETIONS_PATH, prompt=characters, max_tokens=24)
    assert not any(chunk.get("usage") for chunk in chunks[:-1])
    events = [chunk["choices"][0] for chunk in chunks if text_of([chunk])]
    counted = sum(choice.get("generated_tokens", 1) for choice in events)
    # The last tokens may be a part of a character, or end the answer, without any text.
    without_text = chunks[-1]["usage"]["completion_tokens"] - counted
    assert 0 <= without_text <= 3 or not traits.counts_tokens
    assert counted > len(events) or not (traits.counts_tokens and traits.generates_text)


async def test_a_text_is_completed(engine: EngineProcess, traits: EngineCapabilities) -> None:
    fields: dict[str, Any] = {
        "path": COMPLETIONS_PATH,
        "prompt": "The capital of France is",
        "max_tokens": 4,
    }
    whole = await ask(engine, **fields)
    assert whole.body["object"] == "text_completion"
    assert whole.text
    check_usage(whole.body["usage"], 4)
    chunks = await stream(engine, **fields)
    assert text_of(chunks) == whole.text
    check_usage(chunks[-1]["usage"], 4)
    by_ids = await ask(engine, path=COMPLETIONS_PATH, prompt=[504, 3575, 282], max_tokens=4)
    assert by_ids.body["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_an_answer_ends_at_its_limit(engine: EngineProcess, name: str) -> None:
    fields: dict[str, Any] = {"max_tokens": None, name: 3}
    answer = await ask(engine, messages=user("Tell a long story."), **fields)
    assert answer.body["usage"]["completion_tokens"] == 3
    assert answer.body["choices"][0]["finish_reason"] == "length"


async def test_a_stop_string_ends_the_answer(engine: EngineProcess) -> None:
    messages = user("Repeat exactly: one two three four five")
    plain = (await ask(engine, messages=messages)).text
    stop = plain.split()[2]
    answer = await ask(engine, messages=messages, stop=[stop])
    assert answer.text == plain[: plain.index(stop)]
    assert answer.body["choices"][0]["finish_reason"] == "stop"


async def test_a_seed_repeats_an_answer(engine: EngineProcess, traits: EngineCapabilities) -> None:
    async def text(seed: int) -> str:
        fields: dict[str, Any] = {"temperature": 1.0, "seed": seed, "max_tokens": 12}
        return (await ask(engine, messages=user("Invent a name."), **fields)).text

    first = await text(7)
    assert await text(7) == first
    if traits.generates_text:
        assert {await text(seed) for seed in (8, 9, 10)} != {first}


async def test_tenants_share_no_cached_prompt(
    engine: EngineProcess, traits: EngineCapabilities
) -> None:
    messages = user(f"A prompt of this test alone. {LONG_PROMPT}")
    counts = [
        (await ask(engine, salt, messages=messages, max_tokens=1)).cached_tokens
        for salt in ("tenant a", "tenant b", "tenant a")
    ]
    assert counts[:2] == [0, 0]
    assert counts[2] >= traits.cache_block_tokens
    assert bool(counts[2]) == bool(traits.cache_block_tokens)


async def test_a_client_cannot_choose_its_cache(
    engine: EngineProcess, traits: EngineCapabilities
) -> None:
    """Its own words for the salt, the slot and the priority are replaced, or refused."""
    messages = user(f"Another prompt of one tenant. {LONG_PROMPT}")
    await ask(engine, "owner", messages=messages, max_tokens=1)
    guesses: dict[str, Any] = {
        "cache_salt": "owner",
        "cache_prompt": True,
        "id_slot": 0,
        "priority": -99,
    }
    for name, value in guesses.items():
        fields: dict[str, Any] = {name: value}
        guess = await ask(engine, f"not {name}", messages=messages, max_tokens=1, **fields)
        if traits.refuses_unknown_fields and guess.status != 200:
            check_refusal(guess, name)
        else:
            assert (guess.status, guess.cached_tokens) == (200, 0), guess.body


async def test_an_answer_follows_a_json_schema(
    engine: EngineProcess, traits: EngineCapabilities
) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "is_large": {"type": "boolean"}},
        "required": ["city", "is_large"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    answer = await ask(
        engine, messages=user("A city in JSON."), response_format=form, max_tokens=64
    )
    if "structured_output" not in traits.features:
        check_refusal(answer, "response_format")
        return
    value = json.loads(answer.text)
    assert value["city"] in ("Paris", "Rome")
    assert isinstance(value["is_large"], bool)


async def test_a_schema_that_ends_a_compiler_of_grammars_is_refused(
    engine: EngineProcess,
) -> None:
    """vLLM gives a schema with `multipleOf` to llguidance, which dies of the low number."""
    numbers = {"a": {"type": "integer", "multipleOf": 5}, "b": {"const": -(2**63)}}
    schema = {"type": "object", "properties": numbers, "required": ["a", "b"]}
    form = {"type": "json_schema", "json_schema": {"name": "low", "schema": schema}}
    try:
        answer = await ask(engine, messages=user(FRANCE), response_format=form, max_tokens=4)
        check_refusal(answer, "response_format")
    except ApiError as error:
        # The agent refuses it for engines whose bodies it decodes.
        if error.param != "response_format":
            raise
    answer = await ask(engine, messages=user(FRANCE), max_tokens=4)
    assert answer.status == 200, answer.body


@pytest.mark.parametrize("choice", ["auto", "none", "named"])
async def test_tools_are_accepted_and_a_named_one_is_called(
    engine: EngineProcess, traits: EngineCapabilities, choice: str
) -> None:
    """A model of 135M seldom calls a tool by itself."""
    named = {"type": "function", "function": {"name": "get_weather"}}
    fields: dict[str, Any] = {
        "messages": user("What is the weather in Paris?"),
        "tools": [TOOL],
        "tool_choice": named if choice == "named" else choice,
        "max_tokens": 48,
    }
    if choice == "named" and not engine.record.command.may_force_tools:
        with pytest.raises(ApiError, match="template of this model has no tools"):
            await ask(engine, **fields)
        return
    answer = await ask(engine, **fields)
    if choice == "named" and "forced_tools" not in traits.features:
        check_refusal(answer, "tool_choice")
        return
    assert answer.status == 200, answer.body
    (reply,) = answer.body["choices"]
    if choice == "named" and traits.forces_named_tools:
        (call,) = reply["message"]["tool_calls"]
        assert call["function"]["name"] == "get_weather"
        assert "Paris" in call["function"]["arguments"]
    assert reply["finish_reason"] in ("stop", "length", "tool_calls")


@pytest.mark.parametrize("choice", ["required", "named"])
async def test_a_call_that_must_be_made_follows_the_schema_of_its_function(
    engine: EngineProcess, traits: EngineCapabilities, choice: str
) -> None:
    """Although the client did not mark the tool `strict`."""
    if "forced_tools" not in traits.features or not engine.record.command.may_force_tools:
        pytest.skip("it cannot be made to call a tool: see the test before this one")
    schema = {
        "type": "object",
        "properties": {"code": {"enum": ["zq-7"]}, "is_large": {"type": "boolean"}},
        "required": ["code", "is_large"],
        "additionalProperties": False,
    }
    function = {"name": "get_weather", "description": "Get the weather", "parameters": schema}
    answer = await ask(
        engine,
        messages=user("What is the weather in Paris?"),
        tools=[{"type": "function", "function": function}],
        tool_choice={"type": "function", "function": {"name": "get_weather"}}
        if choice == "named"
        else choice,
        parallel_tool_calls=False,
        max_tokens=96,
    )
    assert answer.status == 200, answer.body
    (call,) = answer.body["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    arguments = json.loads(call["function"]["arguments"])
    assert arguments.keys() == {"code", "is_large"}
    assert arguments["code"] == "zq-7"
    assert isinstance(arguments["is_large"], bool)


async def test_log_probabilities_are_returned(engine: EngineProcess) -> None:
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 2, "max_tokens": 3}
    answer = await ask(engine, messages=user(FRANCE), **fields)
    tokens = answer.body["choices"][0]["logprobs"]["content"]
    assert len(tokens) == 3
    for token in tokens:
        assert token["logprob"] <= 0
        assert len(token["top_logprobs"]) >= 2
        assert token["token"] == token["top_logprobs"][0]["token"], "greedy takes the likeliest"


async def test_several_choices_are_returned_and_counted(
    engine: EngineProcess, traits: EngineCapabilities
) -> None:
    if "several_answers" not in traits.features:
        pytest.skip("its router refuses them")
    fields: dict[str, Any] = {"n": 2, "temperature": 1.0, "seed": 3, "max_tokens": 8}
    answer = await ask(engine, messages=user("Invent a name."), **fields)
    assert [choice["index"] for choice in answer.body["choices"]] == [0, 1]
    if all(choice["finish_reason"] == "length" for choice in answer.body["choices"]):
        assert answer.body["usage"]["completion_tokens"] == 16


async def test_an_interrupted_answer_is_resumed(
    engine: EngineProcess, traits: EngineCapabilities
) -> None:
    """The request that a router sends in the place of one whose replica failed."""
    if not traits.resumes:
        pytest.skip("its agent refuses such requests")
    question = user("Name the colours of the rainbow.")
    pieces = [text_of([chunk]) for chunk in await stream(engine, messages=question, max_tokens=24)]
    whole, begun = "".join(pieces), ""
    while len(begun) < 12:
        begun += pieces.pop(0)
    fields: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    messages = [*question, {"role": "assistant", "content": begun}]
    chunks = await stream(engine, messages=messages, max_tokens=12, **fields)
    rest = text_of(chunks)
    assert rest.strip()
    # No new turn begins between the two parts, and the first is not sent again.
    assert begun.strip() not in rest
    assert engine.driver.resumes in (headers.INEXACT, headers.GREEDY, headers.SEEDED)
    if engine.driver.resumes != headers.INEXACT:
        assert (begun + rest)[:40] == whole[:40]


async def test_a_last_message_of_the_assistant_is_continued_only_if_the_request_says_so(
    engine: EngineProcess, traits: EngineCapabilities
) -> None:
    """As in OpenAI's API, the answer is a turn of its own: its prompt ends the message before."""
    messages = [*user(FRANCE), {"role": "assistant", "content": "It is a city in"}]
    fields: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    answers = [
        await ask(engine, messages=messages, max_tokens=4, **given) for given in ({}, fields)
    ]
    assert [answer.status for answer in answers] == [200, 200 if traits.resumes else 400], answers
    if traits.resumes:
        turn, continued = (answer.body["usage"]["prompt_tokens"] for answer in answers)
        assert turn > continued or not traits.generates_text
    else:
        check_refusal(answers[1], "continue_final_message")
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    called = [*messages, {"role": "assistant", "content": "", "tool_calls": calls}]
    answer = await ask(engine, messages=called, max_tokens=4)
    assert answer.status == 200, answer.body


BAD_BODIES: Final = {
    "no JSON": b"{",
    "no object": b"[1]",
    "empty": b"",
    "no messages": b'{"model":"smol"}',
    "messages of a wrong type": b'{"model":"smol","messages":"hello"}',
    "a message without content of a known type": (
        b'{"model":"smol","messages":[{"role":"user","content":[{"type":"wrong"}]}]}'
    ),
    "a limit that is no number": (
        b'{"model":"smol","messages":[{"role":"user","content":"a"}],"max_tokens":"many"}'
    ),
    "deeply nested": b'{"model":"smol","messages":' + b"[" * 5000 + b"]" * 5000 + b"}",
}


@pytest.mark.parametrize("name", BAD_BODIES)
async def test_a_bad_body_is_refused_with_a_message(engine: EngineProcess, name: str) -> None:
    """Through the agent, which refuses some before the engine sees them."""
    try:
        answer = await post(engine, CHAT_PATH, BAD_BODIES[name], "t")
    except ApiError as refusal:
        answer = Answer(400, {"error": {"message": refusal.message}})
    assert 400 <= answer.status < 500, answer.body
    assert answer.error["message"]
    assert await engine.canary("chat"), "it still answers others"


@pytest.mark.parametrize(
    "fields", [{"temperature": -1}, {"top_p": 3}, {"max_tokens": -7}, {"n": 100_000}]
)
async def test_settings_out_of_range_are_refused(
    engine: EngineProcess, traits: EngineCapabilities, fields: dict[str, Any]
) -> None:
    if traits.checks_sampling:
        answer = await ask(engine, messages=user("a"), **fields)
        assert answer.status == 400, answer.body
        assert answer.error["message"]


async def test_an_unknown_model_is_refused(
    engine: EngineProcess, traits: EngineCapabilities
) -> None:
    answer = await ask(engine, messages=user("a"), model="unknown", max_tokens=1)
    assert answer.status == (404 if traits.checks_model_name else 200)


async def test_a_prompt_longer_than_the_context_is_refused(engine: EngineProcess) -> None:
    answer = await ask(engine, messages=user("word " * 5000), max_tokens=1)
    assert answer.status == 400, answer.body
    assert answer.error["code"] == "context_length_exceeded"
    assert str(engine.record.spec.context_tokens) in answer.error["message"]
    assert await engine.canary("chat")


async def test_its_statistics_move_with_its_work(engine: EngineProcess) -> None:
    before = await engine.stats()
    await ask(engine, messages=user("Count to ten."), max_tokens=16)
    after = await engine.stats()
    assert before is not None
    assert after is not None
    assert after.tokens_out_total >= before.tokens_out_total + 8
    assert after.prompt_tokens_total > before.prompt_tokens_total
    assert after.steps_total > before.steps_total
    assert (after.running, after.waiting) == (0, 0)
    assert "# TYPE" in await engine.metrics()


async def test_a_client_that_disconnects_frees_its_place(
    engine: EngineProcess, traits: EngineCapabilities
) -> None:
    fields: dict[str, Any] = {"messages": user("Tell a story."), "stream": True}
    fields |= {"model": engine.record.spec.name, "max_tokens": 1500, "ignore_eos": True}
    if not traits.generates_text:
        fields["mock"] = {"itl_ms": 20}
    if not traits.counts_steps:
        pytest.skip("it does not say what it processes")
    body = engine.salted(CHAT_PATH, msgspec.json.encode(fields), "t")

    async def running() -> int:
        stats = await engine.stats()
        return stats.running if stats else -1

    async with asyncio.timeout(EXIT_S):
        async with engine.http.post(CHAT_PATH, data=body, headers=JSON) as response:
            await response.content.readany()
            while await running() != 1:
                await asyncio.sleep(0.05)
            response.close()
        while await running() != 0:
            await asyncio.sleep(0.05)


async def test_requests_that_come_at_once_are_all_answered(engine: EngineProcess) -> None:
    questions = [user(f"What comes after {number}?") for number in range(24)]
    answers = await asyncio.gather(
        *(ask(engine, str(n % 3), messages=q, max_tokens=6) for n, q in enumerate(questions))
    )
    assert [answer.status for answer in answers] == [200] * 24
    assert all(answer.body["usage"]["completion_tokens"] <= 6 for answer in answers)
