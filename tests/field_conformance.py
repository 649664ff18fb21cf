"""Every field of the official SDKs' request types, through a router, on a real engine.

The tables are those of the router's own conformance test. A field that is honoured is accepted by
the engine and reaches it, and some have an effect that can be seen. What an engine lacks, by its
capabilities, is refused with a 400 that names the field, as are the fields that none honours.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec
from aiohttp import web

from isochrone.service.network.http_server import json_error
from isochrone.wire.engines.engine_capabilities import lacking_features
from isochrone.wire.errors import ApiError
from tests.chat_fields import HONOURED, NOT_TEXT, REFUSED
from tests.integration.router.fake_node import FakeNode
from tests.integration.router.fleet_of import Bench, a_bench, a_key, a_route, a_table
from tests.integration.router.test_conformance import SURFACES, Surface, message_of

PATIENCE_S: Final = 300.0
AT_ONCE: Final = 4
OUTPUT_TOKENS_MAX: Final = 4

SHORT: Final[Mapping[str, dict[str, Any]]] = {
    **{name: {"max_tokens": 3} for name in ("chat", "completion", "run messages", "run prompt")},
    "responses": {"max_output_tokens": 3},
}
"""What keeps an answer short where the body does not."""

COMPANIONS: Final[Mapping[tuple[str, str], dict[str, Any]]] = {
    ("chat", "top_logprobs"): {"logprobs": True},
    ("chat", "max_completion_tokens"): {"max_tokens": None},
}
"""Fields that go with another, by surface and field."""

FEATURE_OF: Final[Mapping[str, str]] = {
    **{"tools": "tools", "response_format": "structured_output", "logprobs": "logprobs"},
    **{"top_logprobs": "logprobs", "logit_bias": "logit_bias", "n": "several_answers"},
    **{name: name for name in ("seed", "suffix", "echo", "best_of")},
}
"""The feature of an engine that a field needs."""

FEATURE_OF_COMPLETION: Final = {"logprobs": "completion_logprobs", "prompt": "several_prompts"}
"""The same for fields of completions, where `prompt` has two texts."""

COUNTS: Final = ("count_tokens", "input_tokens")
"""The surfaces that need the feature `token_count`."""


def is_lacking(driver: str, surface: str, field: str) -> bool:
    """Return True if an engine lacks the feature that a field of a surface needs."""
    if surface == "completion" and field in FEATURE_OF_COMPLETION:
        return FEATURE_OF_COMPLETION[field] in lacking_features(driver)
    is_format = (surface, field) == ("responses", "text")
    feature = "structured_output" if is_format else FEATURE_OF.get(field, "chat")
    return feature in lacking_features(driver)


_JSON_FORMAT: Final = {"type": "json_object"}
ARRIVES: Final[Mapping[str, Mapping[str, tuple[str, Any]]]] = {
    "responses": {
        "max_output_tokens": ("max_tokens", 3),
        "temperature": ("temperature", 0.5),
        "top_p": ("top_p", 0.5),
        "text": ("response_format", _JSON_FORMAT),
        "parallel_tool_calls": ("parallel_tool_calls", True),
        "reasoning": ("reasoning_effort", "low"),
    },
    "messages": {
        "max_tokens": ("max_tokens", 3),
        "stop_sequences": ("stop", ["x"]),
        "temperature": ("temperature", 0.5),
    },
    **{
        name: {
            field: (field, SURFACES[name].honoured[field])
            for field in (
                *("temperature", "top_p", "seed", "frequency_penalty", "presence_penalty"),
                *("max_tokens", "repetition_penalty", "top_k", "response_format"),
            )
        }
        for name in ("run messages", "run prompt")
    },
    "run translation": {"target_lang": ("temperature", 0)},
}
"""The engine's field and value for a field of a surface. On OpenAI's own surface all arrive."""

Effect = Callable[[Any], bool]
EFFECTS: Final[Mapping[str, Mapping[str, Effect]]] = {
    "chat": {
        "max_tokens": lambda answer: answer["usage"]["completion_tokens"] <= 3,
        "max_completion_tokens": lambda answer: answer["usage"]["completion_tokens"] <= 3,
        "n": lambda answer: len(answer["choices"]) == 2,
        "logprobs": lambda answer: bool(answer["choices"][0]["logprobs"]["content"]),
        "top_logprobs": lambda answer: (
            len(answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 2
        ),
    },
    "completion": {
        "prompt": lambda answer: len(answer["choices"]) == 2,
        "n": lambda answer: len(answer["choices"]) == 2,
        "logprobs": lambda answer: bool(answer["choices"][0]["logprobs"]["token_logprobs"]),
        "echo": lambda answer: answer["choices"][0]["text"].startswith("hi"),
    },
    "responses": {"max_output_tokens": lambda answer: answer["usage"]["output_tokens"] <= 3},
    "messages": {"max_tokens": lambda answer: answer["usage"]["output_tokens"] <= 3},
    "count_tokens": {"messages": lambda answer: answer["input_tokens"] > 0},
}
"""What the answer shows of a field."""


PrepareBody = Callable[[str, bytes], bytes]
"""What an agent makes of a body for its engine, by the path."""


class EngineRelay(FakeNode):
    """A node that sends each request to an engine."""

    def __init__(self, http: aiohttp.ClientSession, prepare: PrepareBody) -> None:
        super().__init__()
        self._http = http
        self._prepare = prepare

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Relay a request, and keep its body."""
        body = await request.read()
        self.bodies.append(body)
        fields = json.loads(body)
        is_counted = request.path == "/tokenize"
        if not is_counted and not fields.keys() & {"max_tokens", "max_completion_tokens"}:
            # Translations and summaries have no limit of their own.
            body = json.dumps({**fields, "max_tokens": OUTPUT_TOKENS_MAX}).encode()
        try:
            body = self._prepare(request.path, body)
        except ApiError as refusal:
            return json_error(refusal)
        sent = {"content-type": "application/json"}
        async with self._http.post(request.path, data=body, headers=sent) as answer:
            return web.Response(
                status=answer.status, body=await answer.read(), content_type="application/json"
            )

    async def tokenize(self, request: web.Request) -> web.Response:
        """Relay a request for a count."""
        answer = await self.generate(request)
        assert isinstance(answer, web.Response)
        return answer


@asynccontextmanager
async def a_router_before(
    http: aiohttp.ClientSession,
    folder: Path,
    *,
    driver: str,
    name: str,
    context_tokens: int,
    prepare: PrepareBody = lambda _, body: body,
) -> AsyncIterator[Bench]:
    """Run a router before an engine, whose table says what the engine lacks."""
    node = EngineRelay(http, prepare)
    patient: dict[str, Any] = {
        "first_byte_timeout_s": PATIENCE_S,
        "stream_idle_timeout_s": PATIENCE_S,
        "queue_timeout_s": PATIENCE_S,
    }
    async with a_bench(folder, [node], **patient) as bench:
        table = a_table([a_route(node)], generation=2, keys=[a_key()], names=(name,))
        (deployment,) = table.deployments
        described = msgspec.structs.replace(
            deployment,
            context_tokens=context_tokens,
            engine=driver,
            engine_lacks=lacking_features(driver),
        )
        bench.app.fleet.adopt(msgspec.structs.replace(table, deployments=(described,)))
        yield bench


async def check_surface(bench: Bench, driver: str, model: str, name: str) -> None:
    """Check each field of a surface, several at once."""
    given = SURFACES[name]
    body = {**given.body, **SHORT.get(name, {})}
    if "model" in body:
        body["model"] = model
    surface = given._replace(path=given.path.replace("tiny", model), body=body)
    if name in COUNTS and "token_count" in lacking_features(driver):
        status, answer = await _post(bench, surface, {})
        assert (status, "cannot use counts" in message_of(surface, answer)) == (400, True), answer
        assert not bench.nodes[0].bodies
        return
    limit = asyncio.Semaphore(AT_ONCE)

    async def check(field: str, value: Any, *, is_honoured: bool) -> None:
        async with limit:
            status, answer = await _post(
                bench, surface, {**COMPANIONS.get((name, field), {}), field: value}
            )
            lacks = is_lacking(driver, name, field)
            if is_honoured and not lacks:
                assert status == 200, (field, value, answer)
                if field in EFFECTS.get(name, {}):
                    assert EFFECTS[name][field](answer), (field, answer)
            else:
                assert status == 400, (field, value, answer)
                named = {"text": "response_format"}.get(field, field) if lacks else field
                assert named in message_of(surface, answer), answer

    checks = [check(field, value, is_honoured=True) for field, value in surface.honoured.items()]
    checks += [check(field, value, is_honoured=False) for field, value in surface.refused.items()]
    await asyncio.gather(*checks)
    _check_arrivals(bench, surface, name, driver)


async def check_within_chat(bench: Bench, driver: str, model: str) -> None:
    """Check the fields within the messages, tools and formats of a chat, several at once."""
    chat = SURFACES["chat"]
    surface = chat._replace(body={**chat.body, "model": model, "max_tokens": 3})
    limit = asyncio.Semaphore(AT_ONCE)

    async def check(name: str, fields: dict[str, Any], *, is_honoured: bool) -> None:
        async with limit:
            status, answer = await _post(bench, surface, fields)
            lacks = any(is_lacking(driver, "chat", field) for field in fields)
            if is_honoured and not lacks:
                assert status == 200, (name, answer)
            else:
                assert status == 400, (name, answer)
                assert lacks or name in message_of(surface, answer), (name, answer)

    checks = [check(name, fields, is_honoured=True) for name, fields in HONOURED.items()]
    checks += [check(name, fields, is_honoured=False) for name, fields in REFUSED.items()]
    await asyncio.gather(*checks)
    assert (await _post(bench, surface, NOT_TEXT))[0] == 400


async def _post(bench: Bench, surface: Surface, fields: dict[str, Any]) -> tuple[int, Any]:
    body = {**surface.body, **fields}
    async with bench.http.post(f"{bench.url}{surface.path}", json=body) as response:
        return response.status, await response.json(content_type=None)


def _check_arrivals(bench: Bench, surface: Surface, name: str, driver: str) -> None:
    """Check that the engine has received each field that changes an answer."""
    received = [json.loads(body) for body in bench.nodes[0].bodies]
    expected = dict(ARRIVES.get(name, {}))
    if name in ("chat", "completion"):
        expected = {field: (field, value) for field, value in surface.honoured.items()}
    for field, (engine_field, value) in expected.items():
        if field in surface.honoured and not is_lacking(driver, name, field):
            found = any(engine_field in body and body[engine_field] == value for body in received)
            assert found, (field, engine_field, value)
