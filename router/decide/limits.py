"""How much a key may ask: requests and tokens a minute, requests at once, and a day's quota.

Rule 1: state is made for a key of the table only, so that guessing keys costs this router nothing.
Rule 2: a refused request costs its caller nothing: every limit is looked at before any is drawn.
Rule 3: tokens are drawn by estimate on the way in and settled by real use on the way out; what
came to nothing gives them back. A request stays drawn, or a client could hammer a sick fleet.
Rule 4: rates run on monotonic seconds. A day is a day of UTC, and so on Unix time.

Processes of one router share nothing, and a client's connections spread over them as they happen
to. So each process grants its share of a key's rates: together they never exceed the limit, while
a client that keeps to one connection may be held to less. Requests at once are shared alike, but
rounded up: a key of one at a time may have one in each process. A day's quota is not divided: what
all routers used together comes down with the table (`KeyEntry.spent_until`), and what is counted
here only bridges the seconds until then, and the hours when no scheduler can be heard.
"""

import math
from collections.abc import Set
from typing import Final

from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.ids import KeyId
from isochrone.wire.routes import KeyEntry, KeyLimits

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

    def __init__(self, name: str, per_min: float, now_s: float) -> None:
        limit = f"x-ratelimit-limit-{name}: {int(per_min) or 1}"
        self._lines = (
            f"{limit}\r\nx-ratelimit-remaining-{name}: ",
            f"\r\nx-ratelimit-reset-{name}: ",
        )
        self.unit_s = 60.0 / per_min
        # A share smaller than one a minute still lets one through when it is full.
        self.burst_s = max(BURST_S, self.unit_s)
        self.full_at_s = now_s

    def drawn(self, units: float, now_s: float) -> float:
        """Return when it would be full again with `units` taken out; -1 where it lacks them.

        What is larger than all it can hold is let in when it is full, and paid off afterwards.
        """
        full_at_s = self.full_at_s if self.full_at_s > now_s else now_s
        cost_s = units * self.unit_s
        if full_at_s > now_s + _SLACK_S and full_at_s + cost_s - self.burst_s > now_s + _SLACK_S:
            return -1.0
        return full_at_s + cost_s

    def wait_s(self, units: float, now_s: float) -> float:
        """Return the seconds until `units` may be drawn."""
        owed_s = max(0.0, self.full_at_s - now_s)
        return max(0.0, owed_s - max(0.0, self.burst_s - units * self.unit_s))

    def settle(self, units: float, now_s: float) -> None:
        """Draw `units` whatever is in it, or put back where negative; full is the most it holds."""
        full_at_s = self.full_at_s if self.full_at_s > now_s else now_s
        self.full_at_s = full_at_s + units * self.unit_s

    def lines(self, now_s: float) -> str:
        """Write what is left, as OpenAI does, in headers as they go over the wire."""
        before, between = self._lines
        owed_s = self.full_at_s - now_s if self.full_at_s > now_s else 0.0
        left = int((self.burst_s - owed_s + _SLACK_S) / self.unit_s)
        return f"{before}{left if left > 0 else 0}{between}{duration(owed_s)}\r\n"


class _Use:
    """What one key has drawn in this process, and what it may."""

    def __init__(self) -> None:
        self.limits: KeyLimits | None = None
        self.requests: Rate | None = None
        self.tokens: Rate | None = None
        self.concurrent = 0
        self.at_once_max = math.inf
        self.day_starts_s = self.day_ends_s = 0.0
        self.day_tokens = 0
        self.day_tokens_max = math.inf
        self.day_spend = 0.0
        self.day_spend_max = math.inf

    def adopt(self, limits: KeyLimits, processes: int, now_s: float) -> None:
        """Hold to `limits` from now on. A new table decodes all anew: equal ones keep their meters.

        What was drawn under others is no debt under these; what was used today still was.
        """
        if self.limits != limits:
            requests, tokens = limits.requests_per_min, limits.tokens_per_min
            self.requests = Rate("requests", requests / processes, now_s) if requests > 0 else None
            self.tokens = Rate("tokens", tokens / processes, now_s) if tokens > 0 else None
            share = math.ceil(limits.concurrency / processes)
            self.at_once_max = share if share > 0 else math.inf
            self.day_tokens_max = limits.tokens_per_day if limits.tokens_per_day > 0 else math.inf
            self.day_spend_max = limits.spend_per_day if limits.spend_per_day > 0 else math.inf
        self.limits = limits

    def begin_day(self, unix_s: float) -> None:
        """Count from nothing, until the next midnight of UTC."""
        self.day_starts_s = unix_s - unix_s % DAY_S
        self.day_ends_s = self.day_starts_s + DAY_S
        self.day_tokens, self.day_spend = 0, 0.0

    def is_spent(self) -> bool:
        """Say whether a quota is used up.

        Whatever is left lets one more in: how much it takes is known only when it ends.
        """
        return self.day_tokens >= self.day_tokens_max or self.day_spend >= self.day_spend_max

    def lines(self, now_s: float) -> str:
        """Write the `x-ratelimit-*` headers, for the limits that there are."""
        told = self.requests.lines(now_s) if self.requests is not None else ""
        return told + self.tokens.lines(now_s) if self.tokens is not None else told


class Entry:
    """One admitted request. `leave` settles what it used, once."""

    __slots__ = ("_day_ends_s", "_estimate_spend", "_estimate_tokens", "_is_open", "_rate", "_use")

    def __init__(self, use: _Use, estimate_tokens: int, estimate_spend: float) -> None:
        self._use = use
        # The very meter it was drawn from: limits that change meanwhile begin with another.
        self._rate = use.tokens
        self._day_ends_s = use.day_ends_s
        self._estimate_tokens = estimate_tokens
        self._estimate_spend = estimate_spend
        self._is_open = True

    def lines(self, now_s: float) -> str:
        """Write the `x-ratelimit-*` headers as they go over the wire."""
        return self._use.lines(now_s)

    def leave(self, used_tokens: int, now_s: float, spent: float = 0.0) -> None:
        """Settle: what was estimated too much comes back, what was too little is drawn."""
        if not self._is_open:
            return
        self._is_open = False
        use = self._use
        use.concurrent -= 1
        if self._rate is not None:
            self._rate.settle(used_tokens - self._estimate_tokens, now_s)
        if use.day_ends_s == self._day_ends_s:
            use.day_tokens -= self._estimate_tokens
            use.day_spend -= self._estimate_spend
        use.day_tokens += used_tokens
        use.day_spend += spent


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
        use = self._uses.get(key.key_id)
        if use is None:
            use = self._uses[key.key_id] = _Use()
        if use.limits is not key.limits:
            use.adopt(key.limits, self._processes, now_s)
        if not use.day_starts_s <= unix_s < use.day_ends_s:
            use.begin_day(unix_s)
        requests, tokens = use.requests, use.tokens
        requests_at_s = requests.drawn(1, now_s) if requests is not None else 0.0
        tokens_at_s = tokens.drawn(estimate_tokens, now_s) if tokens is not None else 0.0
        if (
            requests_at_s < 0
            or tokens_at_s < 0
            or use.concurrent >= use.at_once_max
            or key.spent_until > unix_s
            or use.is_spent()
        ):
            raise _refusal(key, use, estimate_tokens, now_s, unix_s)
        if requests is not None:
            requests.full_at_s = requests_at_s
        if tokens is not None:
            tokens.full_at_s = tokens_at_s
        use.concurrent += 1
        use.day_tokens += estimate_tokens
        use.day_spend += estimate_spend
        return Entry(use, estimate_tokens, estimate_spend)

    def forget(self, kept: Set[KeyId]) -> None:
        """Drop what keys drew that are no longer in the table."""
        for key_id in [key_id for key_id in self._uses if key_id not in kept]:
            del self._uses[key_id]


def duration(seconds: float) -> str:
    """Write a time as OpenAI's headers do: `17ms`, `1.5s`, `6m0s`."""
    ms = math.ceil(1000 * seconds)
    if ms < 1000:
        return f"{ms}ms"
    if ms < 60_000:
        return f"{ms / 1000:g}s"
    minutes, ms = divmod(ms, 60_000)
    return f"{minutes}m{ms / 1000:g}s"


def _refusal(
    key: KeyEntry, use: _Use, estimate_tokens: int, now_s: float, unix_s: float
) -> Limited:
    """Say which limit refuses; of several, the one that holds longest."""
    limits = key.limits
    headers = dict(line.split(": ") for line in use.lines(now_s).splitlines())
    if key.spent_until > unix_s or use.is_spent():
        until_s = max(key.spent_until, use.day_ends_s if use.is_spent() else 0.0) - unix_s
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
        rate_wait_s = rate.wait_s(units, now_s) if rate is not None else 0.0
        if rate_wait_s > max(wait_s, _SLACK_S):
            limit, what, wait_s = name, f"{per_min} {name} a minute", rate_wait_s
    return Limited(
        limit,
        ErrorCode.RATE_LIMITED,
        f"{what}, the key's limit",
        max(wait_s, BUSY_RETRY_AFTER_S),
        headers,
    )
