"""Every field of the official SDKs' request types, on every surface: honoured, or refused by name.

The tables decide each field of the installed SDKs. A field that is new in an SDK fails the test
until someone decides. Values of a wrong type never lead to a 5xx, and errors have their surface's
shape.
"""

from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_count_tokens_params as beta_count_tokens_params
from anthropic.types.beta import message_create_params as beta_create_params
from cloudflare.types.ai import ai_run_params
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import input_token_count_params, response_create_params

from tests.integration.router.fleet_of import Bench, a_bench

JUNK: Final[tuple[Any, ...]] = (
    *(None, True, -1, 10**30, 1e308, "", "\0\ud800", "x" * 300, [], [[]], [None], {}, {"a": {}}),
    [{"type": "nonsense", "text": 1}],
    {"type": "nonsense", "id": -1, "name": "", "url": "file:///etc/passwd"},
)
USER: Final = [{"role": "user", "content": "hi"}]
SCHEMA: Final = {"type": "object"}
TOOL: Final = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
TEXT_BLOCK: Final = {"type": "text", "text": "be brief"}


class Surface(NamedTuple):
    """One route: its body, the SDK's fields, and the decision on each of them.

    `stored` are fields that need a scheduler, which these tests have not: 503.
    """

    path: str
    body: dict[str, Any]
    fields: set[str]
    honoured: dict[str, Any]
    refused: dict[str, Any]
    stored: dict[str, Any] = {}  # noqa: RUF012


def fields_of(*kinds: Any) -> set[str]:
    return {name for kind in kinds for name in kind.__annotations__} - {"account_id", "model"}


_SAMPLING: Final = {
    "temperature": 0.5,
    "top_p": 0.5,
    "seed": 7,
    "frequency_penalty": 1,
    "presence_penalty": 1,
    "max_tokens": 3,
}
_NAMES: Final = {
    "metadata": {"a": "b"},
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "prompt_cache_options": {},
    "user": "u",
    "service_tier": "flex",
}

CHAT: Final = Surface(
    "/v1/chat/completions",
    {"model": "tiny", "messages": USER},
    fields_of(chat_create_params.CompletionCreateParamsBase),
    _SAMPLING
    | _NAMES
    | {
        "messages": USER,
        "stop": ["x"],
        "n": 2,
        "logit_bias": {"1": 1},
        "logprobs": True,
        "top_logprobs": 2,
        "max_completion_tokens": 3,
        "modalities": ["text"],
        "parallel_tool_calls": False,
        "prediction": {"type": "content", "content": "x"},
        "reasoning_effort": "low",
        "response_format": {"type": "json_object"},
        "store": False,
        "stream_options": None,
        "tool_choice": "none",
        "tools": [TOOL],
        "verbosity": "medium",
    },
    {
        "audio": {"voice": "v"},
        "function_call": "auto",
        "functions": [{"name": "f"}],
        "moderation": {},
        "web_search_options": {},
        "store": True,
        "service_tier": "priority",
        "modalities": ["audio"],
        "verbosity": "low",
    },
)
COMPLETION: Final = Surface(
    "/v1/completions",
    {"model": "tiny", "prompt": "hi"},
    fields_of(completion_create_params.CompletionCreateParamsBase),
    _SAMPLING
    | {
        "prompt": ["a", "b"],
        "stop": "x",
        "n": 2,
        "logit_bias": {"1": 1},
        "logprobs": 1,
        "stream_options": None,
        "suffix": "x",
        "best_of": 2,
        "echo": True,
        "user": "u",
    },
    {"n": 17, "temperature": 3, "service_tier": "priority"},
)
RESPONSES: Final = Surface(
    "/v1/responses",
    {"model": "tiny", "input": "hi"},
    fields_of(response_create_params.ResponseCreateParamsBase),
    _NAMES
    | {
        "background_options": {"completion_window": "soonest"},
        "input": [{"role": "user", "content": "hi"}],
        "instructions": "be brief",
        "max_output_tokens": 3,
        "max_tool_calls": 3,
        "parallel_tool_calls": True,
        "reasoning": {"effort": "low", "summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "store": False,
        "stream_options": {"include_obfuscation": False},
        "temperature": 0.5,
        "text": {"format": {"type": "json_object"}, "verbosity": "medium"},
        "tool_choice": "auto",
        "tools": [{"type": "function", "name": "f"}],
        "top_logprobs": 0,
        "top_p": 0.5,
        "truncation": "disabled",
    },
    {
        "access_programs": [],
        "background_options": {"completion_window": "8h"},
        "context_management": [],
        "image": {},
        "moderation": {},
        "prompt": {"id": "p"},
        "truncation": "auto",
        "top_logprobs": 3,
        "tools": [{"type": "web_search"}],
        "include": ["file_search_call.results"],
        "service_tier": "priority",
    },
    {
        "store": True,
        "background": True,
        "previous_response_id": "resp_1",
        "conversation": {"id": "conv_1"},
    },
)
MESSAGES: Final = Surface(
    "/v1/messages",
    {"model": "tiny", "messages": USER, "max_tokens": 3},
    fields_of(message_create_params.MessageCreateParamsBase),
    {
        "cache_control": {"type": "ephemeral"},
        "max_tokens": 3,
        "messages": USER,
        "metadata": {"user_id": "u"},
        "output_config": {"effort": "low"},
        "service_tier": "standard_only",
        "speed": "standard",
        "stop_sequences": ["x"],
        "system": [TEXT_BLOCK],
        "thinking": {"type": "disabled"},
        "tool_choice": {"type": "auto"},
        "tools": [{"name": "f", "input_schema": SCHEMA}],
    },
    {
        "container": "c",
        "diagnostics": {},
        "user_profile_id": "u",
        "workspace_id": "w",
        "inference_geo": "us",
        "speed": "fast",
        "max_tokens": 0,
        "tools": [{"type": "web_search_20250305", "name": "web_search"}],
    },
)
COUNT: Final = Surface(
    "/v1/messages/count_tokens",
    {"model": "tiny", "messages": USER},
    fields_of(message_count_tokens_params.MessageCountTokensParams),
    {},
    {"speed": "fast", "messages": []},
)
_BETA_HONOURED: Final = {
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "mcp_servers": [],
    "thinking": {"type": "adaptive", "display": "omitted"},
    "output_config": {"effort": "max"},
    "tools": [
        {"name": "f", "input_schema": SCHEMA, "type": "custom", "allowed_callers": ["direct"]}
    ],
}
_BETA_REFUSED: Final = {
    "billing_policy": {},
    "compaction": {},
    "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
    "mcp_servers": [{"type": "url", "name": "m", "url": "https://mcp.example.net"}],
    "output_config": {"task_budget": {"type": "tokens", "total": 9_000}},
    "tools": [{"type": "code_execution_20250825", "name": "code_execution"}],
}
BETA_MESSAGES: Final = Surface(
    "/v1/messages?beta=true",
    MESSAGES.body,
    # The SDK sends `betas` as a header.
    fields_of(beta_create_params.MessageCreateParamsBase) - {"betas"},
    MESSAGES.honoured | _BETA_HONOURED,
    MESSAGES.refused
    | _BETA_REFUSED
    | {"fallback_credit_token": "t", "fallbacks": [{"model": "m"}], "thread": {"type": "new"}},
)
BETA_COUNT: Final = Surface(
    "/v1/messages/count_tokens?beta=true",
    COUNT.body,
    fields_of(beta_count_tokens_params.MessageCountTokensParams) - {"betas"},
    {},
    COUNT.refused | _BETA_REFUSED,
)
INPUT_TOKENS: Final = Surface(
    "/v1/responses/input_tokens",
    {"model": "tiny", "input": "hi"},
    fields_of(input_token_count_params.InputTokenCountParams),
    {
        "input": "hi",
        "instructions": "be brief",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "low"},
        "text": {"format": {"type": "json_object"}},
        "tool_choice": "auto",
        "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
        "truncation": "disabled",
    },
    {"conversation": "c", "personality": "friendly", "previous_response_id": "r"},
)
RUN_MESSAGES: Final = Surface(
    "/ai/run/tiny",
    {"messages": USER},
    fields_of(ai_run_params.Messages),
    _SAMPLING
    | {
        "messages": USER,
        "repetition_penalty": 1.1,
        "response_format": {"type": "json_object"},
        "stream": False,
        "tools": [{"name": "f", "description": "d", "parameters": SCHEMA}],
        "top_k": 5,
        "raw": False,
    },
    {"functions": [{"name": "f", "code": "x"}], "image": [1], "raw": True},
)
RUN_PROMPT: Final = Surface(
    "/ai/run/tiny",
    {"prompt": "hi"},
    fields_of(ai_run_params.Prompt),
    _SAMPLING
    | {
        "prompt": "hi",
        "raw": True,
        "repetition_penalty": 1.1,
        "response_format": {"type": "json_object"},
        "stream": False,
        "top_k": 5,
    },
    {"lora": "a:b", "image": [1], "mask": [1], "num_steps": 3},
)
RUN_TRANSLATION: Final = Surface(
    "/ai/run/tiny",
    {"text": "hi", "target_lang": "fr"},
    fields_of(ai_run_params.Translation),
    {"text": "hi", "target_lang": "fr", "source_lang": "en"},
    {"temperature": 1},
)
RUN_SUMMARY: Final = Surface(
    "/ai/run/tiny",
    {"input_text": "hi"},
    fields_of(ai_run_params.Summarization),
    {"input_text": "hi", "max_length": 9},
    {"max_length": 0, "stream": True},
)
SURFACES: Final = {
    "chat": CHAT,
    "completion": COMPLETION,
    "responses": RESPONSES,
    "messages": MESSAGES,
    "count_tokens": COUNT,
    "beta messages": BETA_MESSAGES,
    "beta count_tokens": BETA_COUNT,
    "input_tokens": INPUT_TOKENS,
    "run messages": RUN_MESSAGES,
    "run prompt": RUN_PROMPT,
    "run translation": RUN_TRANSLATION,
    "run summary": RUN_SUMMARY,
}


async def post(bench: Bench, surface: Surface, **fields: Any) -> tuple[int, Any]:
    """Send the surface's body with `fields`; return the status and the decoded answer."""
    body = {**surface.body, **fields}
    async with bench.http.post(f"{bench.url}{surface.path}", json=body) as response:
        return response.status, await response.json(content_type=None)


def message_of(surface: Surface, answer: Any) -> str:
    """Return the message of an error in the surface's own shape."""
    if surface.path.startswith("/ai/run"):
        assert answer["success"] is False
        return str(answer["errors"][0]["message"])
    if surface.path.startswith("/v1/messages"):
        assert answer["type"] == "error"
    return str(answer["error"]["message"])


@pytest.mark.parametrize("name", SURFACES)
async def test_each_field_is_decided(tmp_path: Path, name: str) -> None:
    surface = SURFACES[name]
    decided = {*surface.honoured, *surface.refused, *surface.stored}
    if surface in (COUNT, BETA_COUNT):
        # The fields that both have are read by one struct.
        decided |= {*BETA_MESSAGES.honoured, *BETA_MESSAGES.refused}
    assert surface.fields - decided == set(), "decide these: honoured or refused"
    async with a_bench(tmp_path) as bench:
        for field, value in surface.honoured.items():
            status, answer = await post(bench, surface, **{field: value})
            assert status == 200, (field, answer)
        for field, value in surface.refused.items():
            status, answer = await post(bench, surface, **{field: value})
            assert status == 400, (field, answer)
            assert field in message_of(surface, answer)
        for field, value in surface.stored.items():
            status, answer = await post(bench, surface, **{field: value})
            assert (status, "no scheduler" in message_of(surface, answer)) == (503, True), field


@pytest.mark.parametrize("name", SURFACES)
async def test_no_value_of_a_field_leads_to_a_server_error(tmp_path: Path, name: str) -> None:
    surface = SURFACES[name]
    async with a_bench(tmp_path) as bench:
        for field in sorted(surface.fields | {"model", "stream"}):
            for value in JUNK:
                body = {**surface.body, field: value}
                url = f"{bench.url}{surface.path}"
                async with bench.http.post(url, json=body) as response:
                    text = await response.text()
                    is_stored = response.status == 503 and "no scheduler" in text
                    assert response.status < 500 or is_stored, (field, value, text[:300])
        assert (await post(bench, surface))[0] < 500


def test_embeddings_have_no_new_fields() -> None:
    assert fields_of(embedding_create_params.EmbeddingCreateParams) == {
        *("dimensions", "encoding_format", "input", "user"),
    }
