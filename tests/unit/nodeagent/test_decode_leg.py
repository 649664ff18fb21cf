"""An answer of two legs: what its node counts of it."""

from collections.abc import AsyncIterator
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from isochrone.wire.kv.kv_transfer import ReceivedBlocks
from nodeagent import metrics
from nodeagent.api.request.decode_leg import apply_leg


def waits_counted() -> float:
    (family,) = metrics.DECODE_WAIT_SECONDS.collect()
    return sum(sample.value for sample in family.samples if sample.name.endswith("_count"))


async def chunks() -> AsyncIterator[bytes]:
    yield b"{}"


@pytest.mark.parametrize(
    ("content_type", "counted"), [("text/event-stream", 1), ("application/json", 0)]
)
async def test_the_wait_for_the_first_token_is_known_of_streams_only(
    content_type: str, counted: int
) -> None:
    received = ReceivedBlocks(blocks=1, transfer_bytes=1, cached_tokens=0)
    leg: Any = SimpleNamespace(received=received, received_s=monotonic())
    response = web.StreamResponse(headers={"content-type": content_type})
    before = waits_counted()
    body = apply_leg(leg, response, chunks())
    assert waits_counted() - before == counted
    assert b"".join([chunk async for chunk in body])
