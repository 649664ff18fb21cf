"""Decides whether a prompt's prefix is fetched from another replica of the PoP, or computed here.

Both are predicted from measured rates: a fetch from what earlier ones took over this link, and
computing from the replica's prefill rate. A fetch that takes longer than computing would have is
given up, so that a wrong prediction costs no more than that once: the measured rate then refuses
the next ones.
"""

from collections.abc import Sequence
from enum import StrEnum
from math import inf
from typing import Final, NamedTuple

from isochrone.wire.headers import PeerReplica

RATE_UNKNOWN_BYTES_PER_S: Final = 100e6
"""Assumed before the first fetch: the slowest network that a PoP should have."""

OVERHEAD_S: Final = 0.005
"""What a fetch takes besides its bytes: two requests within the PoP, and two relays."""

COST_SHARE_MAX: Final = 0.8
"""A fetch must be predicted to take less than this share of the time to compute the same tokens."""

TIMEOUT_MIN_S: Final = 0.05
REFUSAL_GROWTH: Final = 1.02
"""The assumed rate grows with every refusal, so that a link is tried again in time."""

BURST_S: Final = 1.0
_SMOOTHING: Final = 0.3


class FetchChoice(StrEnum):
    """Why the prefix of a prompt is fetched, or not."""

    FETCH = "fetch"
    NOT_HELD = "not_held"
    """No other replica has more of it."""
    SLOW = "slow"
    """Computing it takes no longer, as measured."""
    BUDGET = "budget"
    """The link's budget for KV is spent."""


class MissingPrefix(NamedTuple):
    """A prompt at the replica that is to answer: what it has, and what computing costs there."""

    held_blocks: int
    blocks: int
    block_tokens: int
    block_bytes: int
    token_us: int


class FetchPlan(NamedTuple):
    """Where to fetch blocks from, how many, and how long that may take; no peer if refused."""

    choice: FetchChoice
    peer: PeerReplica | None = None
    blocks: int = 0
    timeout_s: float = 0.0


class FetchRate:
    """The rate at which blocks arrive from other replicas, as measured."""

    def __init__(self) -> None:
        self.bytes_per_s = RATE_UNKNOWN_BYTES_PER_S
        self._is_measured = False

    def record(self, transfer_bytes: int, seconds: float) -> None:
        """Learn from a fetch, also from one that was given up."""
        if seconds <= 0:
            return
        # At least one byte, so that a link over which nothing came is tried again some day.
        sample = max(1.0, transfer_bytes / seconds)
        known = self.bytes_per_s
        is_slower = sample < known
        # A link that got slow is believed at once: each fetch over it costs a request its time.
        weight = 1.0 if is_slower or not self._is_measured else _SMOOTHING
        self.bytes_per_s = known + weight * (sample - known)
        self._is_measured = True

    def record_refusal(self) -> None:
        """Note that a fetch was refused because of this rate."""
        self.bytes_per_s *= REFUSAL_GROWTH


class PrefixHolder(NamedTuple):
    """A replica of the PoP, how many blocks of the prompt's prefix it has, and its node's rate."""

    peer: PeerReplica
    blocks: int
    rate: FetchRate


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
        """Count bytes that are moved; what was taken too much is missing later."""
        self.available(now_s)
        self._left -= transfer_bytes


def plan_fetch(
    prompt: MissingPrefix, holders: Sequence[PrefixHolder], budget_bytes: float
) -> FetchPlan:
    """Return from which holder to fetch how many blocks: what saves the most time.

    The rate of each holder that is too slow is noted to have been refused.
    """
    if prompt.block_bytes <= 0:
        return FetchPlan(FetchChoice.NOT_HELD)
    block_s = prompt.block_tokens * prompt.token_us / 1e6
    best, best_saved_s, refused = None, 0.0, FetchChoice.NOT_HELD
    for holder in holders:
        wanted = min(holder.blocks, prompt.blocks) - prompt.held_blocks
        if wanted <= 0:
            continue
        allowed = int(min(float(wanted), budget_bytes // prompt.block_bytes))
        if not allowed:
            refused = FetchChoice.BUDGET
            continue
        compute_s = allowed * block_s
        fetch_s = OVERHEAD_S + allowed * prompt.block_bytes / holder.rate.bytes_per_s
        if fetch_s >= COST_SHARE_MAX * compute_s:
            refused = FetchChoice.SLOW
            holder.rate.record_refusal()
        elif compute_s - fetch_s > best_saved_s:
            best_saved_s = compute_s - fetch_s
            timeout_s = max(TIMEOUT_MIN_S, compute_s)
            best = FetchPlan(FetchChoice.FETCH, holder.peer, allowed, timeout_s)
    return best or FetchPlan(refused)
