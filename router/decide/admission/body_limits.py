"""Limits the cost of request bodies to a router process: bytes in memory, and parsing.

Rule 1: the bytes of bodies that are not complete yet are limited by key, by client network and in
all. A body that would exceed a limit is refused when its bytes arrive, so a client that only
announces a large body takes nothing from others.
Rule 2: each body is charged to its key's parse budget before it is parsed. A key that owes more
than PARSE_BURST_S of it is refused until it has waited; one body is never too large for a key that
owes nothing.
Rule 3: inflated bytes are charged in advance, at the most that the body can inflate to, and the
unused part is given back. So if many compressed bodies arrive together, one is inflated, and the
rest are refused.
Rule 4: a large body is kept until its request is answered, because another replica may have to go
on. A tenant's bodies may have as many bytes as are still free.
"""

from typing import Final

from isochrone.fair_shares import FairShares
from isochrone.wire.errors import ErrorCode
from isochrone.wire.ids import KeyId, TenantId
from router.decide.admission.limits import LimitExceeded

PARSE_BURST_S: Final = 4.0
"""How many seconds of its parse budget a key may owe and still send a body."""

INFLATED_WEIGHT: Final = 16
"""An inflated byte is charged as this many plain ones: its sender pays for a fraction of it."""

BOMB_RATIO: Final = 20
"""JSON text compresses to a fifth or a twentieth."""

BOMB_WEIGHT: Final = 64
"""The same for a body of a higher ratio. With the default budget a key can have such a body of 8
MiB inflated and parsed, up to 65 ms, once in 16 s: below 1 % of the time, so that the 99th
percentile of others does not see it."""

INFLATION_RATIO_MAX: Final = 100
"""A body may inflate to this many times its size. JSON text reaches 5 to 20, zip bombs 1000."""

INFLATION_FREE_BYTES: Final = 64 * 1024
"""A body may inflate to this many bytes at any ratio."""

HELD_RETRY_AFTER_S: Final = 2.0
LARGE_BODY_BYTES: Final = 64 * 1024
"""The number of connections bounds what smaller bodies take while they are answered."""

_FORGET_KEYS_MIN: Final = 1024
"""Keys that owe nothing are looked for only once this many have been added."""


def inflated_bytes_max(body_bytes: int, bytes_max: int) -> int:
    """Return to how many bytes a compressed body of `body_bytes` may inflate."""
    by_ratio = INFLATION_RATIO_MAX * body_bytes
    if by_ratio < INFLATION_FREE_BYTES:
        by_ratio = INFLATION_FREE_BYTES
    return by_ratio if by_ratio < bytes_max else bytes_max


def inflated_charge(body_bytes: int, inflated_bytes: int) -> int:
    """Return what the parse budget is charged for a body that inflates to `inflated_bytes`."""
    is_bomb = inflated_bytes > BOMB_RATIO * body_bytes and inflated_bytes > INFLATION_FREE_BYTES
    return (BOMB_WEIGHT if is_bomb else INFLATED_WEIGHT) * inflated_bytes


class HeldBytes:
    """The bytes of unfinished bodies in this process, by key and by client network."""

    def __init__(self, per_key_max: int, per_network_max: int, total_max: int) -> None:
        """Limit the bytes of each key, of each network, and of all together."""
        self._per_key_max = per_key_max
        self._per_network_max = per_network_max
        self._total_max = total_max
        self._by_key: dict[str, int] = {}
        self._by_network: dict[str, int] = {}
        self.total = 0

    def hold(self, key_id: str, network: str, count: int) -> None:
        """Count `count` more bytes until `release`; raise LimitExceeded and count none if over.

        `key_id` is empty for a request without a key.
        """
        of_key = self._by_key.get(key_id, 0) + count
        of_network = self._by_network.get(network, 0) + count
        if key_id and of_key > self._per_key_max:
            raise _held("key", self._per_key_max, ErrorCode.RATE_LIMITED, "this key")
        if of_network > self._per_network_max:
            raise _held("network", self._per_network_max, ErrorCode.RATE_LIMITED, "this network")
        if self.total + count > self._total_max:
            raise _held("router", self._total_max, ErrorCode.UNAVAILABLE, "all clients")
        if key_id:
            self._by_key[key_id] = of_key
        self._by_network[network] = of_network
        self.total += count

    def release(self, key_id: str, network: str, count: int) -> None:
        """Count bytes no longer: their body is complete or given up."""
        if not count:
            return
        self.total -= count
        if key_id:
            _subtract(self._by_key, key_id, count)
        _subtract(self._by_network, network, count)

    def __len__(self) -> int:
        """Return how many keys and networks have state here."""
        return len(self._by_key) + len(self._by_network)


class AnsweredBodies:
    """The bytes of large bodies whose requests are being answered in this process, by tenant."""

    def __init__(self, bytes_max: int) -> None:
        """Limit the bytes of all together; a tenant alone has half."""
        self._shares = FairShares(bytes_max)

    def hold(self, tenant_id: TenantId, size_bytes: int) -> int:
        """Count a body if it is large; return how many bytes to release. Raises LimitExceeded."""
        if size_bytes < LARGE_BODY_BYTES:
            return 0
        self.take(tenant_id, size_bytes)
        return size_bytes

    def take(self, tenant_id: TenantId, size_bytes: int) -> None:
        """Count bytes until `release`. Raises LimitExceeded."""
        if not self._shares.take(tenant_id, size_bytes):
            raise LimitExceeded(
                "answered_bodies",
                ErrorCode.OUT_OF_CAPACITY,
                "cannot take the request now: the bodies of this tenant's requests that are being"
                " answered fill its share of the router's memory",
                HELD_RETRY_AFTER_S,
                {},
            )

    def release(self, tenant_id: TenantId, count: int) -> None:
        """Stop counting bytes that `hold` returned, or that were taken."""
        if count:
            self._shares.give_back(tenant_id, count)


class ParseBudget:
    """How many bytes each key may have parsed per second; a key's state is when it owes nothing."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._paid_at_s: dict[KeyId, float] = {}
        self._forget_at = _FORGET_KEYS_MIN

    def check(self, key_id: KeyId, now_s: float) -> None:
        """Raise LimitExceeded while the key owes more than PARSE_BURST_S."""
        wait_s = self._paid_at_s.get(key_id, 0.0) - now_s - PARSE_BURST_S
        if wait_s > 0:
            raise LimitExceeded(
                "parse_budget",
                ErrorCode.RATE_LIMITED,
                f"the key's bodies need more work than the {self._bytes_per_s:.0f} bytes a second"
                f" that a key may have parsed (a compressed body counts {INFLATED_WEIGHT} times"
                f" its inflated size, {BOMB_WEIGHT} if that is over {BOMB_RATIO} times its own)",
                wait_s,
                {},
            )

    def charge(self, key_id: KeyId, units: float, now_s: float) -> None:
        """Charge bytes to the key, or give them back if negative."""
        paid_at_s = self._paid_at_s.get(key_id, 0.0)
        paid_at_s = (paid_at_s if paid_at_s > now_s else now_s) + units / self._bytes_per_s
        self._paid_at_s[key_id] = paid_at_s
        if len(self._paid_at_s) > self._forget_at:
            owing = {key: at_s for key, at_s in self._paid_at_s.items() if at_s > now_s}
            self._paid_at_s = owing
            self._forget_at = 2 * len(owing) + _FORGET_KEYS_MIN

    def __len__(self) -> int:
        """Return how many keys have state here."""
        return len(self._paid_at_s)


def _subtract(counts: dict[str, int], name: str, count: int) -> None:
    left = counts.get(name, 0) - count
    if left > 0:
        counts[name] = left
    else:
        counts.pop(name, None)


def _held(holder: str, bytes_max: int, code: ErrorCode, holder_text: str) -> LimitExceeded:
    return LimitExceeded(
        f"held_bytes_of_{holder}",
        code,
        f"unfinished request bodies of {holder_text} hold more than {bytes_max} bytes here",
        HELD_RETRY_AFTER_S,
        {},
    )
