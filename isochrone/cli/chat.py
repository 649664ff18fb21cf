"""Sends one streamed chat through a router's public endpoint and measures it."""

import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import aiohttp
import msgspec

from isochrone.cli.client import printable
from isochrone.service.http_responses import parse_error_body
from isochrone.service.network.connection_errors import describe_connection_error
from isochrone.wire.http import headers

TIMEOUT_S: Final = 300.0


class ChatFailed(Exception):
    """The endpoint refused the chat or broke off; the message says why."""


class ChatResult(NamedTuple):
    """The place that answered a chat, why there, and how fast. The client measures times."""

    pop: str
    node: str
    why: str
    request_id: str
    ttft_ms: float
    tokens_per_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    text: str


async def chat(
    *, endpoint: str, key: str, body: dict[str, Any], on_text: Callable[[str], None]
) -> ChatResult:
    """Stream one chat, passing each piece of text to `on_text`. Raises ChatFailed."""
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    start_s = time.monotonic()
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as http,
            http.post(
                f"{endpoint.rstrip('/').removesuffix('/v1')}/v1/chat/completions",
                data=msgspec.json.encode(streamed),
                headers={"authorization": f"Bearer {key}", "content-type": "application/json"},
            ) as response,
        ):
            if response.status != 200:
                error = parse_error_body(await response.read(), response.status)
                raise ChatFailed(printable(error.message))
            return await _read(response, start_s, on_text)
    except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as error:
        raise ChatFailed(f"cannot use endpoint {endpoint!r}: write it as https://host") from error
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        problem = describe_connection_error(endpoint, error)
        raise ChatFailed(f"cannot reach {endpoint}: {problem}") from error


async def _read(
    response: aiohttp.ClientResponse, start_s: float, on_text: Callable[[str], None]
) -> ChatResult:
    texts: list[str] = []
    usage: dict[str, Any] = {}
    first_at = last_at = 0.0
    async for line in response.content:
        data = line.strip().removeprefix(b"data: ")
        if not data or data == b"[DONE]" or not line.startswith(b"data:"):
            continue
        frame = msgspec.json.decode(data)
        if "error" in frame:
            raise ChatFailed(printable(frame["error"]["message"]))
        usage = frame.get("usage") or usage
        for choice in frame["choices"]:
            text = printable(choice["delta"].get("content"))
            if text or choice["delta"].get("reasoning_content"):
                last_at = time.monotonic()
                first_at = first_at or last_at
            if text:
                texts.append(text)
                on_text(text)
    first_at = first_at or time.monotonic()  # an answer without a token: its end
    output = usage.get("completion_tokens", len(texts))
    decode_s = last_at - first_at
    return ChatResult(
        pop=response.headers.get(headers.POP, "?"),
        node=response.headers.get(headers.NODE, "?"),
        why=response.headers.get(headers.WHY, ""),
        request_id=response.headers.get(headers.REQUEST_ID, ""),
        ttft_ms=(first_at - start_s) * 1000,
        tokens_per_s=(output - 1) / decode_s if decode_s > 0 else 0.0,
        prompt_tokens=usage.get("prompt_tokens", 0),
        output_tokens=output,
        cached_tokens=usage.get("prompt_tokens_details", {}).get("cached_tokens", 0),
        text="".join(texts),
    )
