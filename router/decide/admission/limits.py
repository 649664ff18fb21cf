"""A key's limits: requests and tokens per minute, concurrent requests, and a quota per day.

Rule 1: state is kept only for keys of the route table, so that guessing keys costs no memory.
Rule 2: a refused request draws nothing: every limit is checked before any is drawn from.
Rule 3: tokens are drawn by estimate when a request is admitted and settled by real use when it
ends. A request that fails gives its tokens back, but still counts as a request, or a client
could retry an overloaded fleet without limit.
Rule 4: rates use monotonic seconds. A day is a UTC day, and so uses Unix time.

The processes of one router do not share limits, and a client's connections spread over them by
chance. So each process grants its share of a key's rates. Together they never exceed the limit,
while a client that keeps one connection may get less. The limit of concurrent requests is divided
too, rounded up: a key limited to one may have one in each process. A day's quota is not divided:
the use of all routers comes with the route table (`KeyEntry.spent_until`), and the use counted here
only covers the seconds until then, or the hours in which no scheduler can be reached.

A tenant's budget is an entry of the key table, limited in the same way, above the tenant's keys.

Each second, routers report to each other what a key has drawn from its rates, and each draws that
from its own meters, too. Until then a key may exceed its limit. The excess is a debt: over a longer
time the key gets no more than its rate. Of what other routers report the debt is an hour at most:
one that was broken into may report any use, and blocks a key for no longer than that.
"""

import math
from collections.abc import Iterable
from typing import Final

from isochrone.native_class import mypyc_attr
from isochrone.wire.client_keys.key_table import BUDGET_PREFIX
from isochrone.wire.client_keys.key_use import KeyUse
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.ids import KeyId
from isochrone.wire.peers.routes import KeyEntry, KeyLimits

BURST_S: Final = 60.0
"""A meter holds one minute's worth: unused capacity expires within a minute."""

ELSEWHERE_DEBT_MAX_S: Final = 3600.0
"""The debt up to which use at other routers is drawn: that of sixty routers at which a key has used
a minute's worth at once."""

BUSY_RETRY_AFTER_S: Final = 1.0
DAY_S: Final = 86_400.0
MONTH_S: Final = 31 * DAY_S
DAY_SLACK_S: Final = 3600.0
"""A quota that is spent until this long after midnight is a quota of the day: clocks differ."""
_SLACK_S: Final = 1e-6
"""Tolerance for rounding errors."""


class LimitExceeded(ApiError):
    """A key has reached its limit; `limit` names it, for the metrics."""

    def __init__(
        self,
        limit: str,
        code: ErrorCode,
        reason: str,
        retry_after_s: float,
        headers: dict[str, str],
    ) -> None:
        wait = f"try again in {max(1, math.ceil(retry_after_s))} s"
        super().__init__(
            code,
            f"cannot accept the request now: {reason}; {wait}",
            retry_after_s=max(1.0, retry_after_s),
            headers=headers,
        )
        self.limit = limit


class RateMeter:
    """A limit per minute as one number: when the meter would be full again.

    The generic cell rate algorithm (GCRA): one unit costs `unit_s`, and up to `burst_s` may be
    owed.
    """

    def __init__(self, name: str, per_min: float, now_s: float) -> None:
        limit = f"x-ratelimit-limit-{name}: {int(per_min) or 1}"
        self._header_texts = (
            f"{limit}\r\nx-ratelimit-remaining-{name}: ",
            f"\r\nx-ratelimit-reset-{name}: ",
        )
        self.unit_s = 60.0 / per_min
        # A limit below one per minute still admits one request when it is full.
        self.burst_s = max(BURST_S, self.unit_s)
        self.full_at_s = now_s

    def full_at_after(self, units: float, now_s: float) -> float:
        """Return when the meter would be full again after drawing `units`; -1 if it lacks them.

        A request for more units than the meter can hold is admitted when it is full, and owes the
        rest.
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
        """Draw `units` without a check, or put them back if negative, up to a full meter."""
        full_at_s = self.full_at_s if self.full_at_s > now_s else now_s
        self.full_at_s = full_at_s + units * self.unit_s

    def draw_elsewhere(self, units: float, now_s: float) -> None:
        """Draw what other routers report, up to a debt of ELSEWHERE_DEBT_MAX_S."""
        before_s = self.full_at_s
        self.settle(units, now_s)
        self.full_at_s = min(self.full_at_s, max(before_s, now_s + ELSEWHERE_DEBT_MAX_S))

    def header_lines(self, now_s: float) -> str:
        """Return the `x-ratelimit-*` header lines, as OpenAI writes them."""
        before, between = self._header_texts
        owed_s = self.full_at_s - now_s if self.full_at_s > now_s else 0.0
        remaining = int((self.burst_s - owed_s + _SLACK_S) / self.unit_s)
        remaining = remaining if remaining > 0 else 0
        return f"{before}{remaining}{between}{format_duration(owed_s)}\r\n"


class _KeyUsage:
    """One key's limits, and its use in this process."""

    def __init__(self) -> None:
        self.limits: KeyLimits | None = None
        self.requests: RateMeter | None = None
        self.tokens: RateMeter | None = None
        self.concurrent = 0
        self.concurrent_max = math.inf
        self.day_starts_s = self.day_ends_s = 0.0
        self.day_tokens = 0
        self.day_tokens_max = math.inf
        self.day_spend = 0.0
        self.day_spend_max = math.inf
        self.unshared_requests = self.unshared_tokens = 0
        """Drawn here, and not reported to other routers yet."""

    def set_limits(self, limits: KeyLimits, processes: int, now_s: float) -> None:
        """Apply `limits` from now on.

        Each new table decodes new `Limits`; equal ones keep their meters. New ones start with full
        meters, and keep the day's use.
        """
        if self.limits != limits:
            requests, tokens = limits.requests_per_min, limits.tokens_per_min
            per_process = requests / processes
            self.requests = RateMeter("requests", per_process, now_s) if requests > 0 else None
            self.tokens = RateMeter("tokens", tokens / processes, now_s) if tokens > 0 else None
            concurrent = math.ceil(limits.concurrency / processes)
            self.concurrent_max = concurrent if concurrent > 0 else math.inf
            self.day_tokens_max = limits.tokens_per_day if limits.tokens_per_day > 0 else math.inf
            self.day_spend_max = limits.spend_per_day if limits.spend_per_day > 0 else math.inf
        self.limits = limits

    def begin_day(self, unix_s: float) -> None:
        """Start counting from nothing, until the next midnight of UTC."""
        self.day_starts_s = unix_s - unix_s % DAY_S
        self.day_ends_s = self.day_starts_s + DAY_S
        self.day_tokens, self.day_spend = 0, 0.0

    def is_quota_spent(self) -> bool:
        """Return whether a quota is used up.

        Any remainder admits one more request: how much it takes is known only when it ends.
        """
        return self.day_tokens >= self.day_tokens_max or self.day_spend >= self.day_spend_max

    def can_admit(self, tokens: int, spent_until: float, now_s: float, unix_s: float) -> bool:
        """Return whether a request of this many tokens may be admitted now."""
        requests, meter = self.requests, self.tokens
        return not (
            (requests is not None and requests.full_at_after(1, now_s) < 0)
            or (meter is not None and meter.full_at_after(tokens, now_s) < 0)
            or self.concurrent >= self.concurrent_max
            or spent_until > unix_s
            or self.is_quota_spent()
        )

    def header_lines(self, now_s: float) -> str:
        """Return the `x-ratelimit-*` header lines of the limits that the key has."""
        lines = self.requests.header_lines(now_s) if self.requests is not None else ""
        return lines + self.tokens.header_lines(now_s) if self.tokens is not None else lines


@mypyc_attr(acyclic=True, free_list_len=1)
class AdmittedRequest:
    """One admitted request. `settle` replaces the estimate by the real use, once."""

    __slots__ = (
        "_day_ends_s",
        "_estimate_spend",
        "_estimate_tokens",
        "_is_open",
        "_of_tenant",
        "_token_meter",
        "_usage",
    )

    def __init__(
        self,
        usage: _KeyUsage,
        estimate_tokens: int,
        estimate_spend: float,
        of_tenant: "AdmittedRequest | None",
    ) -> None:
        self._usage = usage
        self._of_tenant = of_tenant
        # The meter it was drawn from: limits that change in the meantime start with another one.
        self._token_meter = usage.tokens
        self._day_ends_s = usage.day_ends_s
        self._estimate_tokens = estimate_tokens
        self._estimate_spend = estimate_spend
        self._is_open = True

    def header_lines(self, now_s: float) -> str:
        """Return the `x-ratelimit-*` header lines."""
        return self._usage.header_lines(now_s)

    def settle(self, used_tokens: int, now_s: float, spent: float = 0.0) -> None:
        """Give back or draw the difference between the estimate and the use."""
        if not self._is_open:
            return
        self._is_open = False
        if self._of_tenant is not None:
            self._of_tenant.settle(used_tokens, now_s, spent)
        usage = self._usage
        usage.concurrent -= 1
        if self._token_meter is not None:
            self._token_meter.settle(used_tokens - self._estimate_tokens, now_s)
            usage.unshared_tokens += used_tokens - self._estimate_tokens
        if usage.day_ends_s == self._day_ends_s:
            usage.day_tokens -= self._estimate_tokens
            usage.day_spend -= self._estimate_spend
        usage.day_tokens += used_tokens
        usage.day_spend += spent


class KeyLimiter:
    """The limits of all keys in use. Memory is bounded by the keys of the route table."""

    def __init__(self, processes: int = 1) -> None:
        """Grant one of `processes` equal shares of every rate, starting with full meters."""
        self._processes = processes
        self._usages: dict[KeyId, _KeyUsage] = {}
        self._drawn: dict[KeyId, _KeyUsage] = {}
        """The keys from whose rates was drawn since the last `take_unshared`."""

    def __len__(self) -> int:
        """Return how many keys have state here."""
        return len(self._usages)

    def admit(
        self,
        key: KeyEntry,
        estimate_tokens: int,
        now_s: float,
        unix_s: float,
        estimate_spend: float = 0.0,
        budget: KeyEntry | None = None,
    ) -> AdmittedRequest:
        """Admit a request, or raise LimitExceeded with the seconds after which it would be.

        If the tenant has a `budget`, the request must fit both it and the key's limits, and draws
        from both.
        """
        usage = self._current_usage(key, now_s, unix_s)
        if not usage.can_admit(estimate_tokens, key.spent_until, now_s, unix_s):
            raise _limit_exceeded(key, usage, estimate_tokens, now_s, unix_s)
        of_tenant: AdmittedRequest | None = None
        if budget is not None:
            total = self._current_usage(budget, now_s, unix_s)
            if not total.can_admit(estimate_tokens, budget.spent_until, now_s, unix_s):
                raise _limit_exceeded(budget, total, estimate_tokens, now_s, unix_s)
            of_tenant = self._draw(budget, total, estimate_tokens, estimate_spend, now_s, None)
        return self._draw(key, usage, estimate_tokens, estimate_spend, now_s, of_tenant)

    def check(
        self, key: KeyEntry, now_s: float, unix_s: float, budget: KeyEntry | None = None
    ) -> None:
        """Raise LimitExceeded if even a request without tokens would be refused; draw nothing."""
        for entry in (key, budget):
            if entry is None:
                continue
            usage = self._current_usage(entry, now_s, unix_s)
            if not usage.can_admit(0, entry.spent_until, now_s, unix_s):
                raise _limit_exceeded(entry, usage, 0, now_s, unix_s)

    def _draw(
        self,
        key: KeyEntry,
        usage: _KeyUsage,
        tokens: int,
        spend: float,
        now_s: float,
        of_tenant: AdmittedRequest | None,
    ) -> AdmittedRequest:
        """Draw an admitted request from a key's limits or a tenant's budget."""
        if usage.requests is not None:
            usage.requests.settle(1, now_s)
            usage.unshared_requests += 1
            self._drawn[key.key_id] = usage
        if usage.tokens is not None:
            usage.tokens.settle(tokens, now_s)
            usage.unshared_tokens += tokens
            self._drawn[key.key_id] = usage
        usage.concurrent += 1
        usage.day_tokens += tokens
        usage.day_spend += spend
        return AdmittedRequest(usage, tokens, spend, of_tenant)

    def _current_usage(self, key: KeyEntry, now_s: float, unix_s: float) -> _KeyUsage:
        """Return the key's usage, with the limits and the day of now."""
        usage = self._usages.get(key.key_id)
        if usage is None:
            usage = self._usages[key.key_id] = _KeyUsage()
        if usage.limits is not key.limits:
            usage.set_limits(key.limits, self._processes, now_s)
        if not usage.day_starts_s <= unix_s < usage.day_ends_s:
            usage.begin_day(unix_s)
        return usage

    def take_unshared(self) -> list[KeyUse]:
        """Return the units drawn from rates since the last call."""
        rows: list[KeyUse] = []
        for key_id, usage in list(self._drawn.items()):
            if usage.unshared_requests or usage.unshared_tokens:
                rows.append(KeyUse(key_id, usage.unshared_requests, usage.unshared_tokens))
                usage.unshared_requests = usage.unshared_tokens = 0
            if not usage.concurrent:
                del self._drawn[key_id]
        return rows

    def draw_elsewhere(self, key: KeyEntry, use: KeyUse, now_s: float, unix_s: float) -> None:
        """Draw what a key has used at other routers; each process draws its share."""
        usage = self._current_usage(key, now_s, unix_s)
        if usage.requests is not None:
            usage.requests.draw_elsewhere(use.requests / self._processes, now_s)
        if usage.tokens is not None:
            usage.tokens.draw_elsewhere(use.tokens / self._processes, now_s)

    def key_ids(self) -> list[KeyId]:
        """Return the keys that have state here."""
        return list(self._usages)

    def forget(self, key_ids: Iterable[KeyId]) -> None:
        """Drop the state of keys that are no longer in the route table."""
        for key_id in key_ids:
            self._usages.pop(key_id, None)
            self._drawn.pop(key_id, None)


def format_duration(seconds: float) -> str:
    """Write a time as OpenAI's headers do: `17ms`, `1.5s`, `6m0s`."""
    ms = math.ceil(1000 * seconds)
    if ms < 1000:
        return f"{ms}ms"
    if ms < 60_000:
        return f"{ms / 1000:g}s"
    minutes, ms = divmod(ms, 60_000)
    return f"{minutes}m{ms / 1000:g}s"


def _limit_exceeded(
    key: KeyEntry, usage: _KeyUsage, estimate_tokens: int, now_s: float, unix_s: float
) -> LimitExceeded:
    """Return the error for the exceeded limit; of several, the one with the longest wait."""
    limits, is_budget = key.limits, key.key_id.startswith(BUDGET_PREFIX)
    headers = dict(line.split(": ") for line in usage.header_lines(now_s).splitlines())
    if key.spent_until > unix_s or usage.is_quota_spent():
        day_ends_s = usage.day_ends_s if usage.is_quota_spent() else 0.0
        until_s = max(key.spent_until, day_ends_s) - unix_s
        ends_today = until_s <= DAY_S - unix_s % DAY_S + DAY_SLACK_S
        # On its last day the month ends with the day.
        is_of_day = ends_today and (limits.tokens_per_day > 0 or limits.spend_per_day > 0)
        return LimitExceeded(
            "quota",
            ErrorCode.QUOTA_EXCEEDED,
            f"the {'tenant' if is_budget else 'key'}'s quota of this"
            f" {'day' if is_of_day else 'month'} (UTC) is used up",
            min(until_s, MONTH_S),
            # OpenAI's SDKs retry every 429 without this header.
            {**headers, "x-should-retry": "false"},
        )
    limit, reason, wait_s = "concurrency", f"{limits.concurrency} requests at once", 0.0
    for name, meter, units, per_min in (
        ("requests", usage.requests, 1, limits.requests_per_min),
        ("tokens", usage.tokens, estimate_tokens, limits.tokens_per_min),
    ):
        meter_wait_s = meter.wait_s(units, now_s) if meter is not None else 0.0
        if meter_wait_s > max(wait_s, _SLACK_S):
            limit, reason, wait_s = name, f"{per_min} {name} a minute", meter_wait_s
    return LimitExceeded(
        limit,
        ErrorCode.RATE_LIMITED,
        f"{reason}, the {'tenant' if is_budget else 'key'}'s limit",
        max(wait_s, BUSY_RETRY_AFTER_S),
        headers,
    )
