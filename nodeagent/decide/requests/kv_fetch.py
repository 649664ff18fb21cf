"""Decides whether a prompt's prefix is fetched from another replica of the PoP, or computed here.

Both times are predicted from measurements. A fetch is predicted from earlier ones from that node:
the time until the first block, and for each byte after it. Computing is predicted from the
replica's prefill rate.

Rule 1: the blocks of a fetch that is given up count with the time that it took. If none came, or if
it failed, nothing is learned of the rate: the node may be lost, and be as fast as before once it is
back. After both the node is not used for a while, twice as long after each further one that began
later.
Rule 2: the first block may take no longer than computing the prefix would. After that a fetch goes
on as long as the rest comes sooner than it would be computed, for the same time again at most. It
leaves a request with a deadline the time to compute after all.
Rule 3: few fetches run at a time, because each slows down the others.
"""

from collections.abc import Sequence
from enum import StrEnum
from math import inf
from typing import Final, NamedTuple

from isochrone.wire.http.headers import PeerReplica

RATE_UNKNOWN_BYTES_PER_S: Final = 100e6
"""Assumed before the first fetch: the slowest network that a PoP should have."""

LATENCY_UNKNOWN_S: Final = 0.005
"""Assumed before the first fetch: two requests within the PoP, and two relays. Both engines also
end a step first, which only a measurement can tell."""

COST_SHARE_MAX: Final = 0.8
"""A fetch must be predicted to take less than this share of the time to compute the same tokens."""

FETCHES_MAX: Final = 4
"""Fetches at a time for all replicas of a node."""

TIMEOUT_MIN_S: Final = 0.05

STORE_S_MAX: Final = 2.0
"""How long the engine here may take to store blocks that have all arrived. The engine may be in a
step, which takes no longer, and could not compute the blocks before the end of that step either."""

LOCATE_SHARE_MAX: Final = 0.1
"""The holders may take this share of the time to compute a prompt to say what they have of it."""

LOCATE_TIMEOUT_MIN_S: Final = 0.05
LOCATE_TIMEOUT_MAX_S: Final = 1.0

BACKOFF_S: Final = 1.0
BACKOFF_MAX_S: Final = 64.0
"""How long a node is left alone after its first failure in a row, and at most."""

AGING_S: Final = 30.0
"""A node whose measurements refuse a fetch is tried again once they are older than this."""

BURST_S: Final = 1.0
_SMOOTHING: Final = 0.3
_SMOOTHING_WORSE: Final = 0.6
"""The weight of a measurement that is worse than expected: a wrong fetch costs a request time."""


class FetchChoice(StrEnum):
    """The reason why the prefix of a prompt is fetched, or not."""

    FETCH = "fetch"
    NOT_HELD = "not_held"
    """No other replica has more of it: those that the router believed to have it, neither."""
    NO_COPY = "no_copy"
    """The router named only the replica that would keep a copy, which has none: mostly a new
    prompt."""
    SLOW = "slow"
    """Computing it takes no longer, as measured."""
    BUDGET = "budget"
    """The link's budget for KV is spent."""
    QUOTA = "quota"
    """The deployment's or the tenant's quota is spent."""
    BUSY = "busy"
    """The limit of concurrent fetches is reached."""
    DEADLINE = "deadline"
    """If it failed, there would be no time left to compute the prompt before its deadline."""


class MissingPrefix(NamedTuple):
    """A prompt at the replica that is to answer: its cached blocks, and the cost of computing."""

    held_blocks: int
    blocks: int
    block_tokens: int
    block_bytes: int
    token_us: int

    @property
    def block_s(self) -> float:
        """The time to compute one block."""
        return self.block_tokens * self.token_us / 1e6

    @property
    def locate_timeout_s(self) -> float:
        """How long holders may take to say what they have."""
        compute_s = (self.blocks - self.held_blocks) * self.block_s
        return min(LOCATE_TIMEOUT_MAX_S, max(LOCATE_TIMEOUT_MIN_S, LOCATE_SHARE_MAX * compute_s))


class FetchLimits(NamedTuple):
    """The limits of a fetch: bytes of the link, and of its deployment and tenant.

    `running` is how many fetches run already.
    """

    budget_bytes: float = inf
    quota_bytes: float = inf
    running: int = 0
    deadline_s: float = inf
    now_s: float = 0.0


class FetchPlan(NamedTuple):
    """The peer to fetch blocks from, and how many; no peer if refused.

    The first block must come within `timeout_s`, and the fetch ends within `limit_s`, for the
    request's deadline. Computing one block takes `block_s`.
    """

    choice: FetchChoice
    peer: PeerReplica | None = None
    blocks: int = 0
    timeout_s: float = 0.0
    block_s: float = 0.0
    limit_s: float = inf

    def give_up_at_s(self, arrived: int, first_s: float, now_s: float) -> float:
        """Return when the fetch is given up unless the next block comes.

        All times count from its beginning. `arrived` blocks have come, the first at `first_s`.
        """
        if not arrived:
            return self.timeout_s
        if arrived >= self.blocks:
            return min(now_s + STORE_S_MAX, self.limit_s)
        # Blocks that have arrived are kept, so only the rest is fetched or computed.
        rest_s = max(TIMEOUT_MIN_S, (self.blocks - arrived) * self.block_s)
        return min(now_s + rest_s, first_s + self.timeout_s, self.limit_s)


class FetchRate:
    """The measured rate at which a node sends blocks, and its failures."""

    def __init__(self) -> None:
        self.bytes_per_s = RATE_UNKNOWN_BYTES_PER_S
        self.latency_s = LATENCY_UNKNOWN_S
        self._measured_at_s = -inf
        self._failures = 0
        self._failed_at_s = -inf
        self._backoff_until_s = -inf

    def record(self, transfer_bytes: int, seconds: float, first_s: float, now_s: float) -> None:
        """Learn from a whole fetch: its first bytes came after `first_s`, its last at the end."""
        self._failures = 0
        self._learn(transfer_bytes, max(0.0, seconds - first_s), first_s, now_s)

    def record_late(
        self, transfer_bytes: int, seconds: float, first_s: float, now_s: float
    ) -> None:
        """Learn from a fetch that was given up after `seconds`."""
        if transfer_bytes:
            first_s = min(first_s, seconds)
            self._learn(transfer_bytes, seconds - first_s, first_s, now_s)
        self.record_failure(seconds, now_s)

    def record_failure(self, seconds: float, now_s: float) -> None:
        """Note that a fetch failed after `seconds`."""
        # A fetch that ran when the last one failed has the same cause: it is no further failure.
        if now_s - seconds >= self._failed_at_s or not self._failures:
            self._failures += 1
        self._failed_at_s = now_s
        self._backoff_until_s = now_s + min(
            BACKOFF_MAX_S, BACKOFF_S * 2.0 ** min(self._failures - 1, 16)
        )

    def may_ask(self, now_s: float) -> bool:
        """Return whether the node did not fail lately."""
        return now_s >= self._backoff_until_s

    def is_aged(self, now_s: float) -> bool:
        """Return whether what was measured is too old to refuse a fetch."""
        return now_s - self._measured_at_s >= AGING_S

    def predict_s(self, transfer_bytes: float) -> float:
        """Return how long a fetch of this many bytes will take."""
        return self.latency_s + transfer_bytes / self.bytes_per_s

    def _learn(self, transfer_bytes: int, moving_s: float, first_s: float, now_s: float) -> None:
        self.latency_s = self._mixed(self.latency_s, first_s, now_s)
        if transfer_bytes:
            # In the time per byte, so that a slow fetch weighs more than a fast one.
            mixed = self._mixed(1 / self.bytes_per_s, moving_s / transfer_bytes, now_s)
            self.bytes_per_s = 1 / max(1e-12, mixed)
        self._measured_at_s = now_s

    def _mixed(self, known: float, sample: float, now_s: float) -> float:
        """Return the time `known` with one more `sample` of it."""
        if sample > known and self._measured_at_s > -inf:
            return known + _SMOOTHING_WORSE * (sample - known)
        # A measurement that refused fetches until it was too old says nothing about the next one.
        return sample if self.is_aged(now_s) else known + _SMOOTHING * (sample - known)


class PrefixHolder(NamedTuple):
    """A replica of the PoP, how many blocks of the prompt's prefix it has, and its node's rate.

    `keeps_copy`: the router named it as the keeper of a copy, whether it has one or not.
    """

    peer: PeerReplica
    blocks: int
    rate: FetchRate
    keeps_copy: bool = False


class LinkBudget:
    """The bytes of KV that may be moved over a node's link; no limit with `bytes_per_s` 0."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._left = bytes_per_s * BURST_S
        self._at_s = 0.0

    def available(self, now_s: float) -> float:
        """Return how many bytes may be moved now."""
        if self._bytes_per_s <= 0:
            return inf
        earned = self._bytes_per_s * max(0.0, now_s - self._at_s)
        self._left = min(self._bytes_per_s * BURST_S, self._left + earned)
        self._at_s = max(self._at_s, now_s)
        return max(0.0, self._left)

    def take(self, transfer_bytes: int, now_s: float) -> None:
        """Count moved bytes; bytes beyond the budget are missing from it later."""
        self.available(now_s)
        self._left -= transfer_bytes


def plan_fetch(
    prompt: MissingPrefix, holders: Sequence[PrefixHolder], limits: FetchLimits
) -> FetchPlan:
    """Return from which holder to fetch how many blocks: what saves the most time."""
    if prompt.block_bytes <= 0:
        return FetchPlan(FetchChoice.NOT_HELD)
    if limits.running >= FETCHES_MAX:
        return FetchPlan(FetchChoice.BUSY)
    # If the fetch fails, all that is missing must be computed before the deadline.
    prompt_s = (prompt.blocks - prompt.held_blocks) * prompt.block_s
    left_s = limits.deadline_s - prompt_s
    is_unknown = all(holder.keeps_copy for holder in holders)
    best, best_saved_s = None, 0.0
    refused = FetchChoice.NO_COPY if is_unknown else FetchChoice.NOT_HELD
    for holder in holders:
        wanted = min(holder.blocks, prompt.blocks) - prompt.held_blocks
        if wanted <= 0:
            continue
        may_move = min(limits.budget_bytes, limits.quota_bytes)
        # Not `//`: without a limit that would be no number.
        allowed = int(min(float(wanted), may_move / prompt.block_bytes))
        if not allowed:
            is_link = limits.budget_bytes <= limits.quota_bytes
            refused = FetchChoice.BUDGET if is_link else FetchChoice.QUOTA
            continue
        compute_s, rate = allowed * prompt.block_s, holder.rate
        fetch_s = rate.predict_s(allowed * prompt.block_bytes)
        if fetch_s >= COST_SHARE_MAX * compute_s:
            if not rate.is_aged(limits.now_s):
                refused = FetchChoice.SLOW
                continue
            # Old measurements may be wrong. This one is tried, if there is nothing better.
            fetch_s = COST_SHARE_MAX * compute_s
        timeout_s = min(max(TIMEOUT_MIN_S, compute_s), left_s)
        if fetch_s > timeout_s:
            refused = FetchChoice.DEADLINE
        elif compute_s - fetch_s > best_saved_s:
            best_saved_s = compute_s - fetch_s
            best = FetchPlan(
                FetchChoice.FETCH, holder.peer, allowed, timeout_s, prompt.block_s, left_s
            )
    return best or FetchPlan(refused)
