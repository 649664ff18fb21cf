"""How much a key may ask: requests and tokens a minute, requests at once, and a day's quota.

Rule 1: state is made for a key of the table only, so that guessing keys costs this router nothing.
Rule 2: a refused request costs its caller nothing: every limit is looked at before any is drawn.
Rule 3: tokens are drawn by estimate on the way in and settled by real use on the way out; what
came to nothing gives them back. A request stays drawn, or a client could hammer a sick fleet.
Rule 4: rates run on monotonic seconds. A day is a day of UTC, and so on Unix time.

Processes of one router share nothing, and a client's connections spread over them as they happen
to. So each process grants its share of a key's rates: together they never exceed the limit, while
a client that keeps to one connection may be held to less. A day's quota is not divided: what all
routers used together comes down with the table (`KeyEntry.spent_until`), and what is counted here
only bridges the seconds until then, and the hours when no scheduler can be heard.
"""

import math
from collections.abc import Set
from typing import Final

from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.ids import KeyId
from isochrone.wire.routes import KeyEntry, Limits

BURST_S: Final = 60.0
"""A meter holds a minute's worth: what was not asked for in a minute is gone."""

BUSY_RETRY_AFTER_S: Final = 1.0
DAY_S: Final = 86_400.0
_SLACK_S: Final = 1e-6


class Limited(ApiError):
    """A key has reached its limit; `limit` says which, for the metrics."""

    def __init__(
        self,
        limit: str,
        code: ErrorCode,
        what: str,
        retry_after_s: float,
        headers: dict[str, str],
    ) -> None:
        wait = f"try again in {max(1, math.ceil(retry_after_s))} s"
        super().__init__(
            code,
            f"cannot accept the request now: {what}; {wait}",
            retry_after_s=max(1.0, retry_after_s),
            headers=headers,
        )
        self.limit = limit


class Rate:
    """A limit of so many a minute, kept as one number: when the meter would be full again (GCRA).

    Time is what it counts in: a unit costs `unit_s`, and `burst_s` may be owed.
    """

    __slots__ = ("_full_at_s", "burst_s", "per_min", "unit_s")

    def __init__(self, per_min: float, now_s: float) -> None:
        self.per_min = per_min
        self.unit_s = 60.0 / per_min
        # A share smaller than one a minute still lets one through when it is full.
        self.burst_s = max(BURST_S, self.unit_s)
        self._full_at_s = now_s

    def wait_s(self, units: float, now_s: float) -> float:
        """Return the seconds until `units` may be drawn; what is larger than all waits for full."""
        owed_s = max(0.0, self._full_at_s - now_s)
        wait_s = owed_s + min(units * self.unit_s, self.burst_s) - self.burst_s
        return wait_s if wait_s > _SLACK_S else 0.0

    def draw(self, units: float, now_s: float) -> None:
        """Take `units` out, or put back where negative; it never holds more than when full."""
        self._full_at_s = max(self._full_at_s, now_s) + units * self.unit_s

    def reset_s(self, now_s: float) -> float:
        """Return the seconds until it is full."""
        return max(0.0, self._full_at_s - now_s)

    def left(self, now_s: float) -> int:
        """Return the whole units in it; negative where it was overdrawn."""
        return math.floor((self.burst_s - self.reset_s(now_s) + _SLACK_S) / self.unit_s)

    def headers(self, name: str, now_s: float) -> dict[str, str]:
        """Write what is left as OpenAI does."""
        return {
            f"x-ratelimit-limit-{name}": str(max(1, math.floor(self.per_min))),
            f"x-ratelimit-remaining-{name}": str(max(0, self.left(now_s))),
            f"x-ratelimit-reset-{name}": duration(self.reset_s(now_s)),
        }


class _Use:
    """What one key has drawn, in this process."""

    __slots__ = ("concurrent", "day", "day_spend", "day_tokens", "limits", "requests", "tokens")

    def __init__(self) -> None:
        self.limits: Limits | None = None
        self.requests: Rate | None = None
        self.tokens: Rate | None = None
        self.concurrent = 0
        self.day = 0
        self.day_tokens = 0
        self.day_spend = 0.0


class Entry:
    """One admitted request. `leave` settles what it used, once."""

    __slots__ = ("_day", "_estimate_spend", "_estimate_tokens", "_is_open", "_rate", "_use")

    def __init__(self, use: _Use, estimate_tokens: int, estimate_spend: float) -> None:
        self._use = use
        # The very meter it was drawn from: limits that change meanwhile begin with another.
        self._rate = use.tokens
        self._day = use.day
        self._estimate_tokens = estimate_tokens
        self._estimate_spend = estimate_spend
        self._is_open = True

    def headers(self, now_s: float) -> dict[str, str]:
        """Write the `x-ratelimit-*` headers, for the limits that there are."""
        return _headers(self._use, now_s)

    def leave(self, used_tokens: int, now_s: float, spent: float = 0.0) -> None:
        """Settle: what was estimated too much comes back, what was too little is drawn."""
        if not self._is_open:
            return
        self._is_open = False
        use = self._use
        use.concurrent -= 1
        if self._rate is not None:
            self._rate.draw(used_tokens - self._estimate_tokens, now_s)
        is_same_day = use.day == self._day
        use.day_tokens += used_tokens - is_same_day * self._estimate_tokens
        use.day_spend += spent - is_same_day * self._estimate_spend


class Gate:
    """The limits of every key in use. Memory is bounded by the keys of the table."""

    def __init__(self, processes: int = 1) -> None:
        """Grant one of `processes` equal shares of every rate, with every meter full."""
        self._processes = processes
        self._uses: dict[KeyId, _Use] = {}

    def __len__(self) -> int:
        """How many keys have state here."""
        return len(self._uses)

    def enter(
        self,
        key: KeyEntry,
        estimate_tokens: int,
        now_s: float,
        unix_s: float,
        estimate_spend: float = 0.0,
    ) -> Entry:
        """Admit a request, or raise Limited with the seconds after which it would be."""
        limits = key.limits
        use = self._uses.get(key.key_id)
        if use is None:
            use = self._uses[key.key_id] = _Use()
        if use.limits is not limits:
            self._adopt(use, limits, now_s)
        day = int(unix_s // DAY_S)
        if day != use.day:
            use.day, use.day_tokens, use.day_spend = day, 0, 0.0
        requests, tokens = use.requests, use.tokens
        if (
            (requests is not None and requests.wait_s(1, now_s))
            or (tokens is not None and tokens.wait_s(estimate_tokens, now_s))
            or (limits.concurrency and use.concurrent >= self._at_once(limits))
            or key.spent_until > unix_s
            or _is_spent(use, limits)
        ):
            raise self._refusal(key, use, estimate_tokens, now_s, unix_s)
        if requests is not None:
            requests.draw(1, now_s)
        if tokens is not None:
            tokens.draw(estimate_tokens, now_s)
        use.concurrent += 1
        use.day_tokens += estimate_tokens
        use.day_spend += estimate_spend
        return Entry(use, estimate_tokens, estimate_spend)

    def forget(self, kept: Set[KeyId]) -> None:
        """Drop what keys drew that are no longer in the table."""
        for key_id in [key_id for key_id in self._uses if key_id not in kept]:
            del self._uses[key_id]

    def _adopt(self, use: _Use, limits: Limits, now_s: float) -> None:
        # A new table decodes every key anew: equal limits keep their meters.
        if use.limits != limits:
            use.requests = self._rate(limits.requests_per_min, now_s)
            use.tokens = self._rate(limits.tokens_per_min, now_s)
        use.limits = limits

    def _rate(self, per_min: int, now_s: float) -> Rate | None:
        return Rate(per_min / self._processes, now_s) if per_min > 0 else None

    def _at_once(self, limits: Limits) -> int:
        return -(-limits.concurrency // self._processes)

    def _refusal(
        self, key: KeyEntry, use: _Use, estimate_tokens: int, now_s: float, unix_s: float
    ) -> Limited:
        """Say which limit refuses; of several, the one that holds longest."""
        limits, headers = key.limits, _headers(use, now_s)
        if key.spent_until > unix_s or _is_spent(use, limits):
            until_s = max(key.spent_until - unix_s, DAY_S - unix_s % DAY_S)
            return Limited(
                "quota",
                ErrorCode.QUOTA_EXCEEDED,
                "the key's quota of this day (UTC) is used up",
                min(until_s, DAY_S),
                # Clients repeat every 429 unless told that it does not help.
                {**headers, "x-should-retry": "false"},
            )
        limit, what, wait_s = "concurrency", f"{limits.concurrency} requests at once", 0.0
        for name, rate, units, per_min in (
            ("requests", use.requests, 1, limits.requests_per_min),
            ("tokens", use.tokens, estimate_tokens, limits.tokens_per_min),
        ):
            if rate is not None and rate.wait_s(units, now_s) > wait_s:
                limit, what = name, f"{per_min} {name} a minute"
                wait_s = rate.wait_s(units, now_s)
        return Limited(
            limit,
            ErrorCode.RATE_LIMITED,
            f"{what}, the key's limit",
            max(wait_s, BUSY_RETRY_AFTER_S),
            headers,
        )


def duration(seconds: float) -> str:
    """Write a time as OpenAI's headers do: `17ms`, `1.5s`, `6m0s`."""
    if seconds < 1:
        return f"{math.ceil(1000 * seconds)}ms"
    minutes, rest = divmod(math.ceil(1000 * seconds), 60_000)
    tail = f"{rest / 1000:g}s"
    return f"{minutes}m{tail}" if minutes else tail


def _is_spent(use: _Use, limits: Limits) -> bool:
    # Whatever is left lets one more in: how much it takes is known only when it ends.
    return (0 < limits.tokens_per_day <= use.day_tokens) or (
        0 < limits.spend_per_day <= use.day_spend
    )


def _headers(use: _Use, now_s: float) -> dict[str, str]:
    headers: dict[str, str] = {}
    if use.requests is not None:
        headers |= use.requests.headers("requests", now_s)
    if use.tokens is not None:
        headers |= use.tokens.headers("tokens", now_s)
    return headers
