"""The data-plane server counts each relayed answer by how it ended."""

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from isochrone.wire.http import headers
from nodeagent import metrics
from nodeagent.api.request.answer_relay import loss_headers, relay_body
from nodeagent.host.engines.open_session import open_session


class FakeExchange:
    """A request and its response, whose client may have disconnected."""

    def __init__(self, disconnected_at: str) -> None:
        self.aborted = False
        self.transport = self
        self._disconnected_at = disconnected_at

    def abort(self) -> None:
        self.aborted = True

    def _send(self, part: str) -> None:
        if part == self._disconnected_at:
            raise aiohttp.ClientConnectionResetError("Cannot write to closing transport")

    async def prepare(self, request: object) -> None:
        self._send("head")

    async def write(self, chunk: bytes) -> None:
        self._send("body")

    async def write_eof(self) -> None:
        self._send("end")


async def chunks(error: Exception | None) -> AsyncIterator[bytes]:
    yield b"one"
    if error is not None:
        raise error


def counted(outcome: str) -> float:
    return (
        metrics.REGISTRY.get_sample_value("isochrone_node_requests_total", {"outcome": outcome})
        or 0.0
    )


@pytest.mark.parametrize(
    ("error", "disconnected_at", "outcome"),
    [
        (None, "", "answered"),
        (aiohttp.ClientPayloadError("cut"), "", "engine_failed"),
        # The head and the end passed for a failure of the engine, for which others were blamed.
        (None, "head", "client_disconnected"),
        (None, "body", "client_disconnected"),
        (None, "end", "client_disconnected"),
    ],
)
async def test_an_answer_is_counted_by_how_it_ended(
    error: Exception | None, disconnected_at: str, outcome: str
) -> None:
    outcomes = ("answered", "engine_failed", "client_disconnected")
    before = {name: counted(name) for name in outcomes}
    exchange: Any = FakeExchange(disconnected_at)
    await relay_body(exchange, exchange, chunks(error), "answered")
    assert {name for name in outcomes if counted(name) > before[name]} == {outcome}
    assert exchange.aborted == (outcome == "engine_failed")


async def test_a_request_that_was_not_sent_is_not_blamed_for_its_engine() -> None:
    """Its prompt was read elsewhere while the engine failed and was released."""
    blamed: list[int] = []

    async def is_blamed() -> bool:
        blamed.append(1)
        return True

    running: Any = SimpleNamespace(is_blamed=is_blamed)
    closed: Any = SimpleNamespace(closed=True)
    with pytest.raises(aiohttp.ClientConnectionError) as stopped:
        open_session(closed)
    assert await loss_headers(running, stopped.value) == {}
    assert not blamed, "a verdict would count for others, too"
    lost = await loss_headers(running, aiohttp.ServerDisconnectedError())
    assert lost == {headers.ENGINE_LOST: "1"}
