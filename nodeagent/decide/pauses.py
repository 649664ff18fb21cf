"""Peers that are left alone for a while after a failure."""

from collections.abc import Hashable
from typing import Generic, TypeVar

Peer = TypeVar("Peer", bound=Hashable)


class Pauses(Generic[Peer]):
    """The peers that failed, and until when each is left alone.

    Requests name the peers, so their number is bounded: beyond `peers_max` all pauses end.
    """

    def __init__(self, pause_s: float, peers_max: int) -> None:
        self._pause_s = pause_s
        self._peers_max = peers_max
        self._until_s: dict[Peer, float] = {}

    def begin(self, peer: Peer, now_s: float) -> None:
        """Leave a peer alone from now on."""
        if peer not in self._until_s and len(self._until_s) >= self._peers_max:
            self._until_s.clear()
        self._until_s[peer] = now_s + self._pause_s

    def is_paused(self, peer: Peer, now_s: float) -> bool:
        """Return whether a peer is left alone now."""
        return self._until_s.get(peer, now_s) > now_s
