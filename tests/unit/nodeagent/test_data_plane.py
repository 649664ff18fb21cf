"""The node's door: what an answer's end is counted as, whichever end goes away."""

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from nodeagent import metrics
from nodeagent.api.data_plane import _copy


class Ends:
    """A request and its answer, whose client may have left."""

    def __init__(self, *, has_left: bool) -> None:
        self.aborted = False
        self.transport = self
        self._has_left = has_left

    def abort(self) -> None:
        self.aborted = True

    async def write(self, chunk: bytes) -> None:
        if self._has_left:
            raise aiohttp.ClientConnectionResetError("Cannot write to closing transport")

    async def write_eof(self) -> None:
        """Nothing more comes."""


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
    ("error", "has_left", "outcome"),
    [
        (None, False, "answered"),
        (aiohttp.ClientPayloadError("cut"), False, "engine_lost"),
        (None, True, "client_left"),
    ],
)
async def test_an_answer_is_counted_by_who_ended_it(
    error: Exception | None, has_left: bool, outcome: str
) -> None:
    outcomes = ("answered", "engine_lost", "client_left")
    before = {name: counted(name) for name in outcomes}
    ends: Any = Ends(has_left=has_left)
    await _copy(ends, ends, chunks(error), "answered")
    assert {name for name in outcomes if counted(name) > before[name]} == {outcome}
    assert ends.aborted == (outcome == "engine_lost")
