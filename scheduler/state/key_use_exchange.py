"""Adds up each key's use at each router, and reports to every router the use at the others.

The sums are kept in memory only: use that a scheduler has not passed on when it ends is never
charged at other routers.

Rule 1: a sum beyond what a message may say is passed on as the most that it may say. A router that
forges use, even at its bounds, must not make messages that the others cannot read.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Final

from isochrone.wire.client_keys.key_use import (
    KEY_USE_ROWS_MAX,
    REQUESTS_MAX,
    TOKENS_MAX,
    KeyUse,
)
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

    def take(self, routers: Sequence[str]) -> Iterator[tuple[str, tuple[KeyUse, ...]]]:
        """Reset the sums; return messages for the routers: the use of keys at the others.

        Each step makes one message, of KEY_USE_ROWS_MAX rows at most, so that a turn with many keys
        and routers can pause in between.
        """
        total, by_router = self._total, self._by_router
        self._total, self._by_router = {}, {}
        return _messages(total, by_router, routers)


def _messages(
    total: dict[KeyId, _Units], by_router: dict[str, dict[KeyId, _Units]], routers: Sequence[str]
) -> Iterator[tuple[str, tuple[KeyUse, ...]]]:
    """Yield each router's message about some keys, then about the next ones."""
    keys = iter(total.items())
    while part := list(islice(keys, KEY_USE_ROWS_MAX)):
        # All routers that used none of these keys get the same message.
        of_all = tuple(
            _bounded(key_id, units.requests, units.tokens)
            for key_id, units in part
            if units.requests or units.tokens
        )
        for router in routers:
            own = by_router.get(router)
            rows = _without(part, own) if own else of_all
            if rows:
                yield router, rows


def _without(part: Iterable[tuple[KeyId, _Units]], own: dict[KeyId, _Units]) -> tuple[KeyUse, ...]:
    """Return the use of keys without a router's own."""
    rows = []
    for key_id, units in part:
        own_units = own.get(key_id)
        requests = units.requests - (own_units.requests if own_units else 0)
        tokens = units.tokens - (own_units.tokens if own_units else 0)
        if requests or tokens:
            rows.append(_bounded(key_id, requests, tokens))
    return tuple(rows)


def _bounded(key_id: KeyId, requests: int, tokens: int) -> KeyUse:
    return KeyUse(key_id, min(requests, REQUESTS_MAX), max(-TOKENS_MAX, min(tokens, TOKENS_MAX)))
