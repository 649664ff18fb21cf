"""The data-plane server counts each relayed answer by how it ended."""

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from nodeagent import metrics
from nodeagent.api.request.answer_relay import relay_body


class FakeExchange:
    """A request and its response, whose client may have disconnected."""

    def __init__(self, *, is_disconnected: bool) -> None:
        self.aborted = False
        self.transport = self
        self._is_disconnected = is_disconnected

    def abort(self) -> None:
        self.aborted = True

    async def write(self, chunk: bytes) -> None:
        if self._is_disconnected:
            raise aiohttp.ClientConnectionResetError("Cannot write to closing transport")

    async def write_eof(self) -> None:
        """Accept the end of the body."""


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
    ("error", "is_disconnected", "outcome"),
    [
        (None, False, "answered"),
        (aiohttp.ClientPayloadError("cut"), False, "engine_failed"),
        (None, True, "client_disconnected"),
    ],
)
async def test_an_answer_is_counted_by_how_it_ended(
    error: Exception | None, is_disconnected: bool, outcome: str
) -> None:
    outcomes = ("answered", "engine_failed", "client_disconnected")
    before = {name: counted(name) for name in outcomes}
    exchange: Any = FakeExchange(is_disconnected=is_disconnected)
    await relay_body(exchange, exchange, chunks(error), "answered")
    assert {name for name in outcomes if counted(name) > before[name]} == {outcome}
    assert exchange.aborted == (outcome == "engine_failed")
