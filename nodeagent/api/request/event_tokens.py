"""Tells the router how many tokens an event of a stream has, where the engine counts them.

Engines put several tokens into one event when they draft tokens, or when their server falls behind.
The router counts an event as one token unless its choice has `generated_tokens`. vLLM, SGLang and
TensorRT-LLM put the usage so far into each event instead, if the request has CONTINUOUS_USAGE. Here
the usage is taken out again, and an event that is not one token gets `generated_tokens`. All other
events are as they would be without it, and the router relays them without decoding them.

Rule 1: a client that asks for these counts itself gets the events as they are.
Rule 2: tokens without text, such as a part of a character, count with the next text.
"""

import re
from collections.abc import AsyncIterator
from typing import Final

from aiohttp import web

from isochrone.wire.http.headers import PROMPT_TOKENS
from nodeagent.drivers.request_body import mentions_token_counts
from nodeagent.host.engines.engine_process import EngineProcess

EVENT_STREAM: Final = "text/event-stream"

_USAGE: Final = re.compile(rb',"usage":\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}')
_PROMPT: Final = re.compile(rb',"usage":\{"prompt_tokens":(\d{1,9})[,}]')
_TOTAL: Final = re.compile(rb'"completion_tokens":(\d+)')
_CHOICE: Final = re.compile(rb'"choices":\[\{"index":(\d+),')
_OUTPUT: Final = re.compile(
    rb'"(?:content|text|reasoning_content|reasoning)":"[^"]|"tool_calls":\[\{'
)
"""As these servers write them. In a text of JSON none of them matches: its quotes are escaped."""


def is_counted(engine: EngineProcess, body: bytes) -> bool:
    """Return whether the counts in the answer to a request are for the router, see rule 1."""
    return engine.driver.counts_tokens and not mentions_token_counts(body)


def add_prompt_tokens(response: web.StreamResponse, first: bytes, *, is_counted: bool) -> None:
    """Add the header with the prompt's tokens, if the first bytes of a stream have their number."""
    found = _PROMPT.search(first) if is_counted and _CHOICE.search(first) else None
    if found is not None:
        response.headers[PROMPT_TOKENS] = found[1].decode()


def with_event_tokens(
    response: web.StreamResponse, chunks: AsyncIterator[bytes], *, is_counted: bool
) -> AsyncIterator[bytes]:
    """Return an answer's body; events of several tokens say so if the engine has counted them."""
    is_stream = response.content_type == EVENT_STREAM
    return _rewritten(chunks) if is_counted and is_stream else chunks


async def _rewritten(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    events = EventTokens()
    async for chunk in chunks:
        if lines := events.feed(chunk):
            yield lines
    yield events.flush()


class EventTokens:
    """Rewrites a stream of events, each of one line, whose chunks may end anywhere."""

    def __init__(self) -> None:
        self._line = bytearray()
        self._counted: dict[bytes, int] = {}
        """The tokens in the events so far, by choice."""

    def feed(self, data: bytes) -> bytes:
        """Take received bytes; return the complete lines."""
        end = data.rfind(b"\n") + 1
        if not end:
            self._line += data
            return b""
        whole = bytes(self._line) + data[:end]
        self._line = bytearray(data[end:])
        return b"".join(map(self._rewrite, whole.splitlines(keepends=True)))

    def flush(self) -> bytes:
        """Return the last line, which has no end."""
        return bytes(self._line)

    def _rewrite(self, line: bytes) -> bytes:
        """Return a line without its usage; the usage of all choices together stays."""
        choice, usage = _CHOICE.search(line), _USAGE.search(line)
        total = _TOTAL.search(line, *usage.span()) if usage is not None else None
        if choice is None or usage is None or total is None:
            return line
        rest = line[: usage.start()] + line[usage.end() :]
        if _OUTPUT.search(line) is None:
            return rest
        before = self._counted.get(choice[1], 0)
        self._counted[choice[1]] = int(total[1])
        tokens = int(total[1]) - before
        if tokens == 1:
            return rest
        return rest.replace(choice[0], choice[0] + b'"generated_tokens":%d,' % tokens, 1)
