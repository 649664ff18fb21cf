"""Adds up each key's use at each router, and reports to every router the use at the others.

The sums are kept in memory only: use that a scheduler has not passed on when it ends is never
charged at other routers.
"""

from collections.abc import Sequence
from typing import Final

from isochrone.wire.client_keys.key_use import KeyUse
from isochrone.wire.ids import KeyId

KEYS_MAX: Final = 100_000
"""Keys in one turn. The use of further keys is not passed on."""


class _Units:
    """Requests and tokens of one key."""

    __slots__ = ("requests", "tokens")

    def __init__(self) -> None:
        self.requests = self.tokens = 0

    def add(self, requests: int, tokens: int) -> None:
        self.requests += requests
        self.tokens += tokens


class KeyUseExchange:
    """Sums the use since the last turn."""

    def __init__(self) -> None:
        """Start without any."""
        self._total: dict[KeyId, _Units] = {}
        self._by_router: dict[str, dict[KeyId, _Units]] = {}

    def add(self, router: str, rows: Sequence[KeyUse]) -> None:
        """Add the use of keys at a router."""
        own = self._by_router.setdefault(router, {})
        for row in rows:
            if row.key_id not in self._total and len(self._total) >= KEYS_MAX:
                continue
            for units in (self._total, own):
                units.setdefault(row.key_id, _Units()).add(row.requests, row.tokens)

    def take(self, routers: Sequence[str]) -> dict[str, list[KeyUse]]:
        """Return for each router the use of keys at the others, and reset the sums."""
        total, by_router = self._total, self._by_router
        self._total, self._by_router = {}, {}
        told: dict[str, list[KeyUse]] = {}
        for router in routers:
            own = by_router.get(router, {})
            rows: list[KeyUse] = []
            for key_id, units in total.items():
                mine = own.get(key_id)
                requests = units.requests - (mine.requests if mine else 0)
                tokens = units.tokens - (mine.tokens if mine else 0)
                if requests or tokens:
                    rows.append(KeyUse(key_id, requests, tokens))
            if rows:
                told[router] = rows
        return told
