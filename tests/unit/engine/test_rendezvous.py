"""Ranks on several nodes: rank 0 waits for no connection longer than a handshake may take."""

from types import SimpleNamespace
from typing import Any

import pytest

from nodeagent.engine.workers.rendezvous import _receive


class Trickle:
    """A connection whose other end sends a byte each 1.5 s, on a clock that this class moves."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.timeouts_s: list[float] = []

    def settimeout(self, seconds: float) -> None:
        self.timeouts_s.append(seconds)

    def recv(self, size: int) -> bytes:
        if self.timeouts_s[-1] < 1.5:
            self.now_s += self.timeouts_s[-1]
            raise TimeoutError("timed out")
        self.now_s += 1.5
        return b"x"


def test_a_peer_that_sends_byte_by_byte_does_not_hold_up_rank_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connection: Any = Trickle()
    clock = SimpleNamespace(monotonic=lambda: connection.now_s)
    monkeypatch.setattr("nodeagent.engine.workers.rendezvous.time", clock)
    with pytest.raises(TimeoutError):
        _receive(connection, 51, until_s=2.0)
    assert (connection.timeouts_s, connection.now_s) == ([2.0, 0.5], 2.0)
