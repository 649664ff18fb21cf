"""The HTTP session of an engine, and what its errors mean."""

import asyncio
from collections.abc import Callable
from typing import Final, TypeVar

import aiohttp

from isochrone.service.http_responses import read_response
from nodeagent.drivers.driver import EngineCommand
from nodeagent.host.interim_answers import with_few_interim_answers

Parsed = TypeVar("Parsed")

IDLE_CONNECTION_S: Final = 2.0
"""How long an idle connection to a vendor's server is kept. vLLM, SGLang and TensorRT-LLM close it
after 5 s, and a request sent at that moment would look like a lost engine."""

ANSWER_BYTES_MAX: Final = 4 * 1024 * 1024
"""The longest answer that is read whole. An engine may send without end, and must not fill the
agent's memory."""

PARSED_AT_ONCE_BYTES_MAX: Final = 256 * 1024

CONNECT_TIMEOUT_S: Final = 4.0  # probes may fill a busy server's queue of connections for a second


def new_session(command: EngineCommand) -> aiohttp.ClientSession:
    """Return a session for requests to an engine. It limits no connections."""
    connector = (
        aiohttp.UnixConnector(command.socket, limit=0, force_close=not command.keep_alive)
        if command.socket
        else aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_S)
    )
    return aiohttp.ClientSession(
        command.base_url or None,
        connector=with_few_interim_answers(connector),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        headers={"authorization": f"Bearer {key}"} if (key := command.api_key) else None,
    )


class EngineStopped(aiohttp.ClientConnectionError):
    """The engine's session was closed: the request was not sent."""


def open_session(session: aiohttp.ClientSession) -> aiohttp.ClientSession:
    """Return `session`. Raises EngineStopped if it was closed.

    aiohttp raises RuntimeError where a stopped engine's session is used, which looks like a bug.
    """
    if session.closed:
        raise EngineStopped("the engine has stopped")
    return session


async def read_answer(answer: aiohttp.ClientResponse) -> bytes:
    """Return the whole body of an engine's answer.

    Raises aiohttp.ClientPayloadError if it has more than ANSWER_BYTES_MAX.
    """
    return await read_response(answer, ANSWER_BYTES_MAX)


async def parsed(body: bytes, parse: Callable[[bytes], Parsed]) -> Parsed:
    """Parse an engine's answer; a large one in a thread, so that it holds up no other work."""
    is_large = len(body) > PARSED_AT_ONCE_BYTES_MAX
    return await asyncio.to_thread(parse, body) if is_large else parse(body)
