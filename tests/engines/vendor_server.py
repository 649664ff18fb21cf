"""A server in place of SGLang or TensorRT-LLM, made from the description of their fields.

    python -m tests.engines.vendor_server ENGINE ARGUMENT...

It takes the command line that our driver writes. What vendor_fields.json does not allow is refused
in the way of that engine, and answers have no other fields than it lists. A token is a word, and
words follow from the prompt alone, or from the seed where the request samples.
"""

import asyncio
import hashlib
import itertools
import json
import re
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from aiohttp import web

from tests.engines.vendor_request import (
    ARGUMENTS,
    ENGINE,
    FIELDS,
    LIMIT,
    VENDOR,
    Refusal,
    check_fields,
    check_length,
    check_values,
    flag,
    prompts_of,
    tokens_max,
)

WORDS: Final = (
    *("rain", "over", "this", "old", "town", "was", "soft", "and", "warm"),
    *("while", "people", "walked", "home", "by", "river"),
)
BLOCK: Final = 16
ANSWER_TOKENS: Final = 40
"""The tokens after which an answer ends by itself."""
STEP_S: Final = 0.002
CALL: Final = re.compile(r'<tool_call>\n\{"name": "([^"]*)", "arguments": (.*)\}\n</tool_call>')

COUNTED: Final = ("running", "waiting", "tokens_held", "prompt", "output", "cached", "finished")
counts: Final = dict.fromkeys(COUNTED, 0)
at_end: Final = dict.fromkeys(VENDOR["metrics_at_end"], 0)
"""What the metrics page says of gauges that are written when a request ends."""
blocks: Final[set[str]] = set()
"""The prefix cache."""


class Generated(NamedTuple):
    """One choice: the tokens of its text, the calls in it, and why it ends."""

    tokens: list[str]
    calls: list[dict[str, Any]]
    reason: str

    @property
    def text(self) -> str:
        return "".join(self.tokens)


def shaped(shape: str, **values: Any) -> dict[str, Any]:
    """Return an object with the fields of a shape, in their order."""
    names, dropped = FIELDS["answer"][shape], VENDOR["drops_null"].get(shape, ())
    assert values.keys() <= set(names), (shape, values.keys() - set(names))
    found = {name: values.get(name) for name in names}
    return {
        name: value
        for name, value in found.items()
        if value is not None or not {name, "*"}.intersection(dropped)
    }


def cached_tokens(prompt: list[str], salt: str) -> int:
    """Return how many tokens of the prompt are cached for this salt, and cache it."""
    hits, is_prefix = 0, True
    for end in range(BLOCK, len(prompt), BLOCK):
        block = hashlib.sha256(json.dumps([salt, prompt[:end]]).encode()).hexdigest()
        is_prefix = is_prefix and block in blocks
        hits = end if is_prefix else hits
        blocks.add(block)
    return hits


def words_of(prompt: list[str], fields: dict[str, Any], index: int) -> Iterator[str]:
    """Yield words without an end."""
    chance = fields.get("seed", uuid.uuid4().hex) if fields.get("temperature", 1) else ""
    key = json.dumps([prompt, chance, index if chance != "" else 0])
    for place in itertools.count():
        digest = hashlib.sha256(f"{key}{place}".encode()).digest()
        yield WORDS[digest[0] % len(WORDS)] + " "


def value_of(schema: dict[str, Any]) -> Any:
    """Return a value that follows the schema."""
    if "const" in schema or "enum" in schema:
        return schema.get("const", (schema.get("enum") or [None])[0])
    if schema.get("type") == "object":
        names = schema.get("properties", {})
        return {name: value_of(names[name]) for name in schema.get("required", names)}
    simple: dict[str, Any] = {"boolean": True, "integer": 1, "number": 1.0, "array": []}
    return simple.get(str(schema.get("type")), "Paris")


def forced_text(fields: dict[str, Any]) -> str | None:
    """Return the text that a schema or a grammar demands, None if there is none."""
    form = fields.get("response_format", {})
    if form.get("type") == "json":
        return json.dumps(value_of(form["schema"]))
    if form.get("type") == "json_schema":
        schema = form["json_schema"]
        return json.dumps(value_of(schema.get("schema", schema)))
    if form.get("type") == "json_object":
        return json.dumps({"city": "Paris"})
    if form.get("type") == "structural_tag":
        calls = form["format"]
        assert VENDOR["has_structural_tags"] and calls["type"] == "triggered_tags"
        tag = calls["tags"][0]
        value = json.dumps(value_of(tag["content"]["json_schema"]))
        return f"{tag['begin']}{value}{tag['end']}" if calls["at_least_one"] else None
    choice, tools = fields.get("tool_choice"), fields.get("tools", ())
    if VENDOR["has_structural_tags"] or (choice != "required" and not isinstance(choice, dict)):
        return None
    name = choice["function"]["name"] if isinstance(choice, dict) else ""
    function = next(t["function"] for t in tools if name in ("", t["function"]["name"]))
    value = json.dumps(value_of(function.get("parameters", {})))
    return f'<tool_call>\n{{"name": "{function["name"]}", "arguments": {value}}}\n</tool_call>'


def generated(prompt: list[str], fields: dict[str, Any], index: int) -> Generated:
    limit = min(tokens_max(fields), LIMIT - len(prompt))
    forced = forced_text(fields)
    if forced is None:
        end = limit if fields.get("ignore_eos") else min(limit, ANSWER_TOKENS)
        tokens = list(itertools.islice(words_of(prompt, fields, index), end))
    else:
        tokens = re.findall(r"\S+\s*", forced)[:limit]
        end = len(re.findall(r"\S+\s*", forced))
    reason = "length" if len(tokens) == limit and end >= limit else "stop"
    stops = fields.get("stop") or []
    places = ["".join(tokens).find(stop) for stop in ([stops] if isinstance(stops, str) else stops)]
    if found := [place for place in places if place >= 0]:
        cut = "".join(tokens)[: min(found)]
        tokens, reason = re.findall(r"\S+\s*", cut), "stop"
    if "tools" in fields and (call := CALL.fullmatch("".join(tokens))):
        function = {"name": call[1], "arguments": call[2]}
        called = {"id": f"call_{uuid.uuid4().hex[:8]}", "type": "function", "function": function}
        return Generated(tokens, [{**called, "index": 0}], "tool_calls")
    return Generated(tokens, [], reason)


def usage_of(prompts: list[list[str]], output: int, cached: int) -> dict[str, Any]:
    size = sum(map(len, prompts))
    is_reported = ENGINE != "sglang" or "--enable-cache-report" in ARGUMENTS
    details = {"cached_tokens": cached} if is_reported else None
    return shaped(
        "usage",
        prompt_tokens=size,
        total_tokens=size + output,
        completion_tokens=output,
        prompt_tokens_details=details,
    )


def chat_logprobs(tokens: list[str], top: int) -> dict[str, Any]:
    def likely(token: str, logprob: float) -> dict[str, Any]:
        return {"token": token, "logprob": logprob, "bytes": list(token.encode())}

    return {
        "content": [
            {
                **likely(token, -0.1),
                "top_logprobs": [likely([token, *WORDS][n], -0.1 - n) for n in range(top)],
            }
            for token in tokens
        ]
    }


def logprobs_of(kind: str, fields: dict[str, Any], tokens: list[str]) -> dict[str, Any] | None:
    if not fields.get("logprobs"):
        return None
    if kind == "chat":
        return chat_logprobs(tokens, fields.get("top_logprobs", 0))
    ends = list(itertools.accumulate(map(len, tokens), initial=0))
    top = [{token: -0.1} for token in tokens]
    logprobs = [-0.1] * len(tokens)
    names = {"text_offset": ends[:-1], "token_logprobs": logprobs, "tokens": tokens}
    return {**names, "top_logprobs": top}


def choice_of(kind: str, fields: dict[str, Any], index: int, one: Generated) -> dict[str, Any]:
    logprobs = logprobs_of(kind, fields, one.tokens)
    if kind == "completion":
        echoed = str(fields["prompt"]) if fields.get("echo") else ""
        return shaped(
            "completion_choice",
            index=index,
            text=echoed + one.text,
            logprobs=logprobs,
            finish_reason=one.reason,
        )
    text = "" if one.calls else one.text
    calls = one.calls or (None if "tool_calls" in VENDOR["drops_null"].get("message", ()) else [])
    message = shaped("message", role="assistant", content=text, tool_calls=calls)
    return shaped(
        "chat_choice", index=index, message=message, logprobs=logprobs, finish_reason=one.reason
    )


def event_choice(kind: str, index: int, **delta: Any) -> dict[str, Any]:
    reason, logprobs = delta.pop("reason", None), delta.pop("logprobs", None)
    if kind == "completion":
        text = delta.get("content") or ""
        values: dict[str, Any] = {"text": text}
    else:
        values = {"delta": shaped("delta", **delta)}
    return shaped(
        f"{kind}_event_choice", index=index, **values, finish_reason=reason, logprobs=logprobs
    )


def groups_of(tokens: list[str]) -> Iterator[list[str]]:
    """Yield the tokens of each event: every third one has two, as if the server fell behind."""
    left = list(tokens)
    for place in itertools.count():
        if not left:
            return
        size = 2 if place % 3 == 2 else 1
        yield left[:size]
        left = left[size:]


async def answer(request: web.Request) -> web.StreamResponse:
    kind = "chat" if "chat" in request.path else "completion"
    try:
        try:
            body = json.loads(await request.read())
        except ValueError as error:
            raise Refusal(f"JSON decode error: {error}", is_validation=True) from error
        fields = check_fields(kind, body)
        check_values(fields)
        prompts = prompts_of(fields)
        for prompt in prompts:
            check_length(prompt)
    except Refusal as error:
        return refused(error)
    held = sum(map(len, prompts))
    counts["running"] += 1
    counts["tokens_held"] += held
    try:
        cached = sum(cached_tokens(p, fields.get("cache_salt", "")) for p in prompts)
        n = fields.get("n", 1)
        choices = [generated(prompt, fields, index) for prompt in prompts for index in range(n)]
        produce = streamed if fields.get("stream") else whole
        response = await produce(request, kind, fields, prompts, choices, cached)
    finally:
        counts["running"] -= 1
        counts["tokens_held"] -= held
    counts["prompt"] += held
    counts["output"] += sum(len(one.tokens) for one in choices)
    counts["cached"] += cached
    counts["finished"] += 1
    at_end.update({name: counts.get(name, 0) for name in at_end})
    return response


async def whole(
    request: web.Request,
    kind: str,
    fields: dict[str, Any],
    prompts: list[list[str]],
    choices: list[Generated],
    cached: int,
) -> web.StreamResponse:
    await asyncio.sleep(STEP_S * max(len(one.tokens) for one in choices))
    return web.json_response(
        shaped(
            kind,
            **head_of(kind, fields),
            object="chat.completion" if kind == "chat" else "text_completion",
            choices=[choice_of(kind, fields, index, one) for index, one in enumerate(choices)],
            usage=usage_of(prompts, sum(len(one.tokens) for one in choices), cached),
        )
    )


async def streamed(
    request: web.Request,
    kind: str,
    fields: dict[str, Any],
    prompts: list[list[str]],
    choices: list[Generated],
    cached: int,
) -> web.StreamResponse:
    options = fields.get("stream_options", {})
    has_usage = bool(options) and options.get("include_usage", VENDOR["include_usage_default"])
    is_counted = bool(options.get("continuous_usage_stats"))
    is_counted = is_counted and (has_usage or not VENDOR["continuous_needs_include"])
    head = head_of(kind, fields)
    head["object"] = "chat.completion.chunk" if kind == "chat" else "text_completion"
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)

    async def send(choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> None:
        event = shaped(f"{kind}_event", **head, choices=choices, usage=usage)
        await response.write(f"data: {json.dumps(event, separators=(',', ':'))}\n\n".encode())

    for index, one in enumerate(choices):
        done = 0
        if kind == "chat":
            first = event_choice(kind, index, role="assistant", content="")
            await send([first], usage_of(prompts, 0, cached) if is_counted else None)
        if one.calls:
            called = event_choice(kind, index, tool_calls=one.calls)
            await send([called], None)
        for group in groups_of([] if one.calls else one.tokens):
            await asyncio.sleep(STEP_S * len(group))
            done += len(group)
            counts["tokens_held"] += len(group)
            logprobs = logprobs_of(kind, fields, group)
            piece = event_choice(kind, index, content="".join(group), logprobs=logprobs)
            await send([piece], usage_of(prompts, done, cached) if is_counted else None)
        counts["tokens_held"] -= done
        last = event_choice(kind, index, content="", reason=one.reason)
        await send([last], usage_of(prompts, len(one.tokens), cached) if is_counted else None)
    if has_usage:
        await send([], usage_of(prompts, sum(len(one.tokens) for one in choices), cached))
    await response.write(b"data: [DONE]\n\n")
    return response


def head_of(kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    name = f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{uuid.uuid4().hex}"
    return {"id": name, "created": int(time.time()), "model": fields.get("model", "default")}


def refused(error: Refusal) -> web.Response:
    if error.is_validation and VENDOR["validation_error"] == "text":
        return web.json_response({"error": str(error)}, status=400)
    kind = VENDOR["validation_type"] if error.is_validation else VENDOR["error_type"]
    body = shaped("error", object="error", message=str(error), type=kind, code=400)
    return web.json_response(body, status=400)


async def metrics(request: web.Request) -> web.Response:
    shown = {**counts, "kv_use": 0.1 * bool(counts["running"]), **at_end}
    lines = []
    for key, name in FIELDS["metrics"].items():
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += [f"# TYPE {name} {kind}", f'{name}{{model_name="m"}} {shown[key]}']
    return web.Response(text="\n".join([*lines, ""]))


async def models(request: web.Request) -> web.Response:
    model = flag("--model-path") or ARGUMENTS[ARGUMENTS.index("serve") + 1]
    name = flag(VENDOR["lists_model_as"]) or Path(model).name
    return web.json_response({"object": "list", "data": [{"id": name, "object": "model"}]})


async def health(request: web.Request) -> web.Response:
    return web.Response()


def main() -> None:
    app = web.Application(client_max_size=64 * 1024 * 1024)
    app.router.add_get("/health", health)
    app.router.add_get("/v1/models", models)
    app.router.add_get(VENDOR["metrics_path"], metrics)
    app.router.add_post("/v1/chat/completions", answer)
    app.router.add_post("/v1/completions", answer)
    port = int(flag("--port"))
    web.run_app(app, host=flag("--host"), port=port, handler_cancellation=True, print=None)


main()
