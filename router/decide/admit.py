"""Who may ask, and how much: keys and their limits, from the table the router holds.

Time is passed in: Unix time for expiry, monotonic seconds for rates. A refused request costs its
caller nothing: both buckets are looked at before either is drawn from.
"""

from collections.abc import Mapping, Set
from typing import Final, NamedTuple

from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.ids import KeyId
from isochrone.wire.keys import is_same_secret, parse_key
from isochrone.wire.routes import KeyEntry, Limits

_NOBODY: Final = "0" * 64
KEY_CHARS_MAX: Final = 256


def authenticate(
    keys: Mapping[KeyId, KeyEntry], authorization: str | None, now_unix_s: float
) -> KeyEntry:
    """Return whose key this is, or raise ApiError 401 saying what is wrong with it."""
    scheme, _, text = (authorization or "").strip().partition(" ")
    if scheme.lower() != "bearer" or not text.strip():
        raise _invalid("no API key: send `Authorization: Bearer iso_...`")
    parsed = parse_key(text.strip()) if len(text) <= KEY_CHARS_MAX else None
    if parsed is None:
        raise _invalid("the API key is not of the form iso_..., copy it whole")
    key_id, secret = parsed
    entry = keys.get(key_id)
    # Compared also where there is no such key, so that time does not tell.
    is_right = is_same_secret(entry.secret_sha256 if entry else _NOBODY, secret)
    if entry is None or not is_right:
        raise _invalid("the API key is unknown or revoked")
    if entry.expires_at and entry.expires_at <= now_unix_s:
        raise _invalid("the API key has expired")
    return entry


def may_use(entry: KeyEntry, deployment: str) -> bool:
    """Say whether the key may ask for `deployment`, by name."""
    return not entry.deployments or deployment in entry.deployments


def _invalid(reason: str) -> ApiError:
    return ApiError(ErrorCode.INVALID_KEY, f"cannot accept the request: {reason}")


class Bucket:
    """A bucket that holds a minute's worth. What was underestimated may overdraw it."""

    __slots__ = ("_at_s", "_level")

    def __init__(self, capacity: float, now_s: float) -> None:
        self._level = capacity
        self._at_s = now_s

    def level(self, capacity: float, now_s: float) -> float:
        """Return what is in it now."""
        elapsed_s = max(0.0, now_s - self._at_s)
        self._level = min(capacity, self._level + capacity * elapsed_s / 60)
        self._at_s = max(self._at_s, now_s)
        return self._level

    def draw(self, amount: float) -> None:
        """Take out `amount`, or put back where it is negative. Call `level` first."""
        self._level -= amount


class Allowance(NamedTuple):
    """What is left to a key after this request, for the `x-ratelimit-*` headers."""

    limits: Limits
    requests_left: int
    tokens_left: int
    requests_reset_s: float
    tokens_reset_s: float

    def headers(self) -> dict[str, str]:
        """Write the headers as OpenAI does, for the limits that there are."""
        headers = {}
        for name, limit, left, reset_s in (
            ("requests", self.limits.requests_per_min, self.requests_left, self.requests_reset_s),
            ("tokens", self.limits.tokens_per_min, self.tokens_left, self.tokens_reset_s),
        ):
            if limit:
                headers[f"x-ratelimit-limit-{name}"] = str(limit)
                headers[f"x-ratelimit-remaining-{name}"] = str(max(0, left))
                headers[f"x-ratelimit-reset-{name}"] = f"{reset_s:.3f}s"
        return headers


class _Use:
    __slots__ = ("concurrent", "limits", "requests", "tokens")

    def __init__(self, limits: Limits, now_s: float, concurrent: int = 0) -> None:
        self.concurrent = concurrent
        self.limits = limits
        self.requests = Bucket(limits.requests_per_min, now_s)
        self.tokens = Bucket(limits.tokens_per_min, now_s)


class Entry:
    """One admitted request. `leave` settles its tokens, once."""

    __slots__ = ("_gate", "_is_open", "allowance", "estimate_tokens", "key")

    def __init__(self, gate: "Gate", key: KeyEntry, estimate: int, allowance: Allowance) -> None:
        self._gate = gate
        self._is_open = True
        self.key = key
        self.estimate_tokens = estimate
        self.allowance = allowance

    def leave(self, used_tokens: int, now_s: float) -> None:
        """Settle: what was estimated too much comes back, what was too little is drawn."""
        if self._is_open:
            self._is_open = False
            self._gate.settle(self, used_tokens, now_s)


class Gate:
    """The limits of every key in use. Memory is bounded by the keys of the table."""

    def __init__(self) -> None:
        """Start with every bucket full."""
        self._uses: dict[KeyId, _Use] = {}

    def enter(self, key: KeyEntry, estimate_tokens: int, now_s: float) -> Entry:
        """Admit a request, or raise ApiError 429 with the seconds after which it would be."""
        limits = key.limits
        use = self._uses.get(key.key_id)
        if use is None or use.limits != limits:
            # New limits begin with full buckets: what was drawn under others is no debt.
            concurrent = use.concurrent if use else 0
            use = self._uses[key.key_id] = _Use(limits, now_s, concurrent)
        if limits.concurrency and use.concurrent >= limits.concurrency:
            raise _limited(f"{use.concurrent} requests at once, the key's limit", 1.0)
        requests = use.requests.level(limits.requests_per_min, now_s)
        tokens = use.tokens.level(limits.tokens_per_min, now_s)
        if limits.requests_per_min and requests < 1:
            wait_s = (1 - requests) * 60 / limits.requests_per_min
            raise _limited(f"{limits.requests_per_min} requests a minute, the key's limit", wait_s)
        # A request larger than the whole limit is let in by a full bucket, which it overdraws.
        wanted = min(estimate_tokens, limits.tokens_per_min)
        if limits.tokens_per_min and tokens < wanted:
            wait_s = (wanted - tokens) * 60 / limits.tokens_per_min
            raise _limited(f"{limits.tokens_per_min} tokens a minute, the key's limit", wait_s)
        use.requests.draw(1)
        use.tokens.draw(estimate_tokens)
        use.concurrent += 1
        return Entry(
            self, key, estimate_tokens, _allowance(limits, requests - 1, tokens - estimate_tokens)
        )

    def settle(self, entry: Entry, used_tokens: int, now_s: float) -> None:
        """Close an entry. For Entry."""
        use = self._uses.get(entry.key.key_id)
        if use is None:
            return
        use.concurrent = max(0, use.concurrent - 1)
        if use.limits == entry.key.limits:
            use.tokens.level(use.limits.tokens_per_min, now_s)
            use.tokens.draw(used_tokens - entry.estimate_tokens)

    def forget(self, kept: Set[KeyId]) -> None:
        """Drop the buckets of keys that are no longer in the table."""
        for key_id in [key_id for key_id in self._uses if key_id not in kept]:
            del self._uses[key_id]


def _allowance(limits: Limits, requests: float, tokens: float) -> Allowance:
    def reset_s(limit: int, left: float) -> float:
        return (limit - left) * 60 / limit if limit else 0.0

    return Allowance(
        limits,
        int(requests),
        int(tokens),
        reset_s(limits.requests_per_min, requests),
        reset_s(limits.tokens_per_min, tokens),
    )


def _limited(what: str, retry_after_s: float) -> ApiError:
    return ApiError(
        ErrorCode.RATE_LIMITED,
        f"cannot accept the request now: {what}; try again in {max(1, round(retry_after_s))} s",
        retry_after_s=max(1.0, retry_after_s),
    )
