"""The mock engine: what it honours of a request, and what it refuses."""

import json
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import pytest
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params

from isochrone.wire.engines.engine import EngineConfig
from isochrone.wire.errors import ApiError
from nodeagent.mock import openai
from nodeagent.mock.answers import MockAnswerEncoder
from nodeagent.mock.engine import MockEngine, MockRequest, MockToken
from nodeagent.mock.slots import MockSlots
from nodeagent.mock.stop_strings import MockStopStrings

USER = [{"role": "user", "content": "a b c"}]


def read(**fields: Any) -> openai.MockRequestBody:
    return openai.decode(json.dumps(fields).encode())


def request_of(body: openai.MockRequestBody) -> MockRequest:
    return openai.mock_request(body, is_chat=body.messages is not None, salt="")


async def answers_of(**fields: Any) -> dict[int, list[MockToken]]:
    """Return the tokens of each answer to a request."""
    config = EngineConfig(socket="", model_path="", served_name="m", context_tokens_max=100)
    found: dict[int, list[MockToken]] = {}
    async for token in MockEngine(config).generate(request_of(read(**fields))):
        found.setdefault(token.answer, []).append(token)
    return found


@pytest.mark.parametrize(
    ("pieces", "stops", "visible"),
    [
        (["t0 ", "t1 "], [], ["t0 ", "t1 "]),
        (["t0 ", "t1 ", "t2 "], ["t1"], ["t0 ", ""]),
        (["t0 ", "t1 ", "t2 "], ["0 t1"], ["t", ""]),
        (["t0 ", "t1 "], ["0 x"], ["t", "0 t1 "]),
        (["t0 ", "t1 "], ["x", " t2"], ["t0", " t1 "]),
        (["t0 ", "t1 "], ["", "t0 t1 t2"], ["", "t0 t1 "]),
        (["aab", "c"], ["bc", "ab"], ["a"]),
    ],
    ids=lambda given: "|".join(given),
)
def test_a_text_ends_before_its_first_stop_string(
    pieces: list[str], stops: list[str], visible: list[str]
) -> None:
    text = MockStopStrings(stops)
    sent = []
    for number, piece in enumerate(pieces):
        sent.append(text.add(piece, is_last=number == len(pieces) - 1))
        if text.is_reached:
            break
    assert sent == visible


async def test_each_prompt_has_as_many_answers_as_are_asked_for() -> None:
    answers = await answers_of(prompt=["a b", "a t6"], n=2, max_tokens=3, stop="t8")
    texts = {
        number: "".join(token.visible for token in tokens) for number, tokens in answers.items()
    }
    assert texts == {0: "t0 t1 t2 ", 1: "t0 t1 t2 ", 2: "t7 ", 3: "t7 "}
    ends = [tokens[-1].finish_reason for tokens in answers.values()]
    assert ends == ["length", "length", "stop", "stop"]
    assert all(
        token.finish_reason is None for tokens in answers.values() for token, _ in pairwise(tokens)
    )


@pytest.mark.parametrize(
    ("answer_so_far", "numbers"),
    [("", (700, 701)), ("t700 t701 ", (702, 703))],
)
async def test_an_answer_has_the_numbers_that_are_asked_for(
    answer_so_far: str, numbers: tuple[int, ...]
) -> None:
    resumed = [{"role": "assistant", "content": answer_so_far}] if answer_so_far else []
    tokens = await answers_of(messages=USER + resumed, max_tokens=2, mock={"first_token": 700})
    assert [token.text for token in tokens[0]] == [f"t{number} " for number in numbers]


async def test_the_longest_prompt_is_held_to_the_context() -> None:
    with pytest.raises(ApiError, match="context length is 100 tokens"):
        await answers_of(prompt=["a", "b " * 98], max_tokens=3)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("response_format", {"type": "grammar"}),
        ("tool_choice", "any"),
        ("tools", [{"type": "custom", "custom": {"name": "f"}}]),
        ("logit_bias", {"1": 1}),
        ("suffix", "x"),
        ("echo", True),
        ("best_of", 2),
        ("temperature", 3),
        ("n", 100_000),
        ("top_logprobs", 2),
        ("misspelt", 1),
        ("store", True),
        ("modalities", ["audio"]),
    ],
    ids=str,
)
def test_what_it_cannot_do_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ApiError, match=field):
        read(messages=USER, **{field: value})


@pytest.mark.parametrize(
    ("sdk_fields", "prompt"),
    [
        (chat_params.CompletionCreateParamsBase, {"messages": USER}),
        (completion_params.CompletionCreateParamsBase, {"prompt": "a"}),
    ],
)
def test_each_field_of_the_sdk_may_be_null(sdk_fields: type, prompt: dict[str, Any]) -> None:
    """Some clients send every field, those without a value as null."""
    nulls = dict.fromkeys(sdk_fields.__annotations__.keys() - {"model"})
    request_of(read(**{**nulls, "stream": None, **prompt}))


@pytest.mark.parametrize("prompt", [None, "", [], ["a", 1], [[]], [[1], 1]], ids=str)
def test_a_prompt_of_a_wrong_kind_is_refused(prompt: Any) -> None:
    with pytest.raises(ApiError, match="prompt"):
        request_of(read(prompt=prompt))


@pytest.mark.parametrize("is_chat", [True, False])
async def test_log_probabilities_are_told_of_each_token(is_chat: bool) -> None:
    fields: dict[str, Any] = {"prompt": "a", "logprobs": 2}
    if is_chat:
        fields = {"messages": USER, "logprobs": True, "top_logprobs": 2}
    body = read(**fields, max_tokens=2)
    (tokens,) = (await answers_of(**fields, max_tokens=2)).values()
    encoder = MockAnswerEncoder(
        is_chat=is_chat, request_id="r", model="m", created=1, alternatives=body.alternatives
    )
    (choice,) = json.loads(encoder.complete([tokens], {}))["choices"]
    told = choice["logprobs"]
    if is_chat:
        assert [entry["token"] for entry in told["content"]] == ["t0 ", "t1 "]
        assert [len(entry["top_logprobs"]) for entry in told["content"]] == [2, 2]
        assert all(entry["top_logprobs"][0]["logprob"] == 0 for entry in told["content"])
    else:
        assert (told["tokens"], told["token_logprobs"]) == (["t0 ", "t1 "], [0.0, 0.0])
        assert told["text_offset"] == [0, 3]
        assert [len(entry) for entry in told["top_logprobs"]] == [2, 2]


def test_a_request_of_higher_priority_takes_a_place() -> None:
    slots = MockSlots(2)
    with ExitStack() as stack:
        low = [stack.enter_context(slots.join(0)) for _ in range(3)]
        assert [place.granted.is_set() for place in low] == [True, True, False]
        with slots.join(50) as urgent:
            # The newest of lower priority waits, before the one that came after it.
            assert [place.granted.is_set() for place in (urgent, *low)] == [
                True,
                True,
                False,
                False,
            ]
            with slots.join(50), slots.join(50) as third:
                assert not any(place.granted.is_set() for place in (third, *low))
                assert (slots.running, slots.waiting) == (2, 4)
        assert [place.granted.is_set() for place in low] == [True, True, False]
    assert (slots.running, slots.waiting) == (0, 0)
