"""Decides whether a prompt is read on a prefill replica of the PoP, and on which.

Reading it here delays the sequences that decode here. Reading it there costs a transfer of its KV.
Delay and transfer are predicted from measured rates: there is no fixed threshold of tokens.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from math import inf
from typing import Final, NamedTuple

from isochrone.wire.http.headers import PeerReplica
from isochrone.wire.ids import ReplicaId

MARGIN_MS: Final = 5.0
"""Time that a prefill leg must save: it costs a probe, a LAN round trip and two relays."""

DELAY_WEIGHT: Final = 0.25
"""The delay of one decoding sequence counts as this share of an equal wait for the first token.
With DELAYED_SEQUENCES_MAX a prompt waits elsewhere for at most twice the time that reading it here
takes: longer queues at prefill replicas cost more time to first token than they save between tokens
(`ops.sim.roles_table`)."""

DELAYED_SEQUENCES_MAX: Final = 8
"""The delay of more decoding sequences than this counts no more."""

PROBE_SHARE_MAX: Final = 0.1
PROBE_S_MAX: Final = 0.5
"""A probe of prefill replicas may take this share of the time that reading the prompt here takes,
and at most this long: on a busy machine their nodes answer late, and are still worth asking."""

TIMEOUT_FACTOR: Final = 4.0
TIMEOUT_MIN_S: Final = 2.0
"""A leg may take this many times its predicted time, and at least this long."""

ONLY_READER_TIMEOUT_S: Final = 20.0
"""The least time for a leg without which the request cannot be answered here."""

AGING_S: Final = 60.0
"""A rate that is older than this refuses no leg."""

FIXED_MS: Final = 5.0
"""Assumed for a transfer of no tokens: a LAN round trip and two relays."""

FIXED_MS_MAX: Final = 25.0
"""The most of a transfer's time that may not depend on its tokens: 64 tokens took 22 ms on a busy
machine. Only the time beyond it shows how slow the link is for longer prompts."""

_SMOOTHING: Final = 0.3
_SMOOTHING_TRANSFERS: Final = 0.2
"""The weight of one transfer among those of its length; few of them are late by much."""


class LegChoice(StrEnum):
    """The reason why a prompt is read on a prefill replica, or here."""

    PREFILL = "prefill"
    NO_CANDIDATE = "no_candidate"
    """No prefill replica answered in time."""
    SHORT = "short"
    """Too little would be gained, even if a prefill replica were idle."""
    IDLE = "idle"
    """Too few sequences decode here for the prompt to delay."""
    CACHED = "cached"
    """Most of the prompt is cached here."""
    BUSY = "busy"
    """The prefill replicas have longer queues than this one."""


class WaitingPromptSize(NamedTuple):
    """A prompt at the decode replica: its full blocks that are cached, and those that are not."""

    cached_tokens: int
    uncached_tokens: int


class DecodeLoad(NamedTuple):
    """The load of the decode replica: prompt tokens before this prompt, and its sequences.

    `decoding` is how many sequences are expected to decode while the prompt is read.
    """

    queued_tokens: int
    decoding: float


class ExpectedDecoding:
    """How many sequences decode while a prompt is read: now, or usually, whichever is more.

    An idle replica in a busy time is idle for a moment only: those that arrive while it reads a
    prompt would wait for it.
    """

    def __init__(self) -> None:
        self._average = 0.0

    def record(self, decoding: int) -> float:
        """Learn from what an arriving request finds decoding; return what it may expect."""
        self._average += _SMOOTHING * (decoding - self._average)
        return max(float(decoding), self._average)


class PrefillPlan(NamedTuple):
    """The prefill replicas to try, in order, and the time that each may take; none to try.

    The slowest of them takes `expected_s`, and reading the prompt here `here_s`: inf if it cannot
    be read here.
    """

    choice: LegChoice
    candidates: Sequence[PeerReplica] = ()
    timeout_s: float = 0.0
    expected_s: float = 0.0
    here_s: float = 0.0

    def timeout_before_s(self, left_s: float) -> float:
        """Return how long a leg may take if the answer must begin within `left_s`.

        A late leg leaves the time to read the prompt here, if there is enough.
        """
        if self.here_s >= left_s:
            return self.timeout_s
        return min(self.timeout_s, max(self.expected_s, left_s - self.here_s))

    def counts_as_late(self, took_s: float) -> bool:
        """Return whether a leg that failed counts with its time: the next prompts would wait as
        long for nothing. A node that ends its leg just before its time is up gains nothing."""
        return took_s > self.expected_s


class MeasuredTransfers(NamedTuple):
    """Recent transfers of about one length: how much longer than their prompts they took."""

    tokens: float
    after_ms: float
    measured_at_s: float

    def mixed(self, tokens: int, after_ms: float, now_s: float) -> "MeasuredTransfers":
        """Return this with one more transfer. The earlier ones weigh less and less."""
        return MeasuredTransfers(
            self.tokens + _SMOOTHING_TRANSFERS * (tokens - self.tokens),
            self.after_ms + _SMOOTHING_TRANSFERS * (after_ms - self.after_ms),
            now_s,
        )


class TransferRate:
    """How much longer transfers take than their prompts, by the length of the transfer.

    Blocks move while later ones are computed. So on a fast link the time grows with the tokens of
    short prompts, and is the same for all that take more than one step. On a link that is slower
    than the prefill replica it grows further. No line has this form, so each power of two of
    tokens has an average of its own, and lengths between two of them lie on the line between them.

    A length beyond those measured is predicted as the fastest link that explains them: a leg that
    is chosen wrongly is measured and corrected, one that is refused wrongly is not.
    """

    def __init__(self) -> None:
        self._by_size: dict[int, MeasuredTransfers] = {}
        """By the number of bits of the tokens."""

    def record(self, tokens: int, after_prefill_s: float, now_s: float) -> None:
        """Learn from a transfer of `tokens` that took so much longer than the prompt."""
        if tokens <= 0:
            return
        after_ms, size = 1000 * max(0.0, after_prefill_s), tokens.bit_length()
        known = self._by_size.get(size)
        if known is None or now_s - known.measured_at_s >= AGING_S:
            self._by_size[size] = MeasuredTransfers(tokens, after_ms, now_s)
        else:
            self._by_size[size] = known.mixed(tokens, after_ms, now_s)

    def after_ms(self, tokens: int, token_us: int, now_s: float) -> float:
        """Return how much longer than its prompt the transfer of `tokens` takes, if it takes
        `token_us` to compute one.

        0 if unknown. Old measurements count no more: a rate that refuses all legs would never be
        measured again.
        """
        known = sorted(
            measured
            for measured in self._by_size.values()
            if now_s - measured.measured_at_s < AGING_S
        )
        if not known:
            return 0.0
        below = MeasuredTransfers(0.0, min(FIXED_MS, known[0].after_ms), now_s)
        for above in known:
            if tokens < above.tokens:
                share = (tokens - below.tokens) / (above.tokens - below.tokens)
                return below.after_ms + share * (above.after_ms - below.after_ms)
            below = above
        token_ms = max(0.0, below.after_ms - FIXED_MS_MAX) / below.tokens
        if below is not known[0]:
            slope = (below.after_ms - known[0].after_ms) / (below.tokens - known[0].tokens)
            token_ms = max(0.0, min(token_ms, slope))
        # The rest moves while it is computed.
        more_ms = max(0.0, token_ms - token_us / 1000) * (tokens - below.tokens)
        return below.after_ms + more_ms


def is_too_short(here: PeerReplica) -> bool:
    """Return True if reading the prompt here takes so little time that no leg can save any."""
    return here.prefill_ms * (1 + DELAY_WEIGHT * DELAYED_SEQUENCES_MAX) <= MARGIN_MS


def probe_timeout_s(here: PeerReplica, size: WaitingPromptSize) -> float:
    """Return how long the prefill replicas' nodes may take to say how long their queues are."""
    here_s = size.uncached_tokens * here.token_us / 1e6
    return min(PROBE_S_MAX, PROBE_SHARE_MAX * here_s)


def plan_prefill(
    replicas: Sequence[PeerReplica],
    queued_tokens: Mapping[ReplicaId, int],
    size: WaitingPromptSize,
    local: DecodeLoad,
    rate: TransferRate,
    now_s: float,
) -> PrefillPlan:
    """Return where to read a prompt.

    `replicas` begins with the decode replica itself; the others are prefill replicas.
    `queued_tokens` has those of them that answered a probe. `now_s` is on the clock of `rate`.
    """
    here, others = replicas[0], replicas[1:]
    here_ms = size.uncached_tokens * here.token_us / 1000
    delayed = min(local.decoding, DELAYED_SEQUENCES_MAX)
    # Each decoding sequence waits while the prompt is read, in chunks of its steps.
    cost_here_ms = here_ms * (1 + DELAY_WEIGHT * delayed)
    cost_here_ms += local.queued_tokens * here.token_us / 1000
    idle_ms = [
        _read_ms(peer, size) + rate.after_ms(size.uncached_tokens, peer.token_us, now_s) + MARGIN_MS
        for peer in others
    ]
    if not idle_ms:
        return PrefillPlan(LegChoice.NO_CANDIDATE)
    if min(idle_ms) >= cost_here_ms:
        return PrefillPlan(_why_here(size, min(idle_ms), here_ms))
    known = [
        (peer, leg_ms)
        for peer, leg_ms in zip(others, idle_ms, strict=True)
        if peer.replica_id in queued_tokens
    ]
    if not known:
        return PrefillPlan(LegChoice.NO_CANDIDATE)
    times_ms = {
        peer.replica_id: leg_ms + queued_tokens[peer.replica_id] * peer.token_us / 1000
        for peer, leg_ms in known
    }
    chosen = [peer for peer, _ in known if times_ms[peer.replica_id] < cost_here_ms]
    if not chosen:
        return PrefillPlan(LegChoice.BUSY)
    chosen.sort(key=lambda peer: times_ms[peer.replica_id])
    expected_s = max(times_ms[peer.replica_id] for peer in chosen) / 1000
    timeout_s = max(TIMEOUT_MIN_S, TIMEOUT_FACTOR * expected_s)
    here_s = here_ms / 1000 + local.queued_tokens * here.token_us / 1e6
    return PrefillPlan(LegChoice.PREFILL, chosen, timeout_s, expected_s, here_s)


def _why_here(size: WaitingPromptSize, idle_ms: float, here_ms: float) -> LegChoice:
    """Return why not even an idle prefill replica, which takes `idle_ms`, is worth its delay."""
    if size.cached_tokens > size.uncached_tokens:
        return LegChoice.CACHED
    would_pay = idle_ms < here_ms * (1 + DELAY_WEIGHT * DELAYED_SEQUENCES_MAX)
    return LegChoice.IDLE if would_pay else LegChoice.SHORT


def order_all(
    replicas: Sequence[PeerReplica], queued_tokens: Mapping[ReplicaId, int], size: WaitingPromptSize
) -> PrefillPlan:
    """Return all prefill replicas, for a decode replica that cannot read prompts.

    Those that answered a probe come first, the soonest of them before the others.
    """
    times_ms = {
        peer.replica_id: _read_ms(peer, size)
        + queued_tokens.get(peer.replica_id, 0) * peer.token_us / 1000
        for peer in replicas[1:]
    }
    if not times_ms:
        return PrefillPlan(LegChoice.NO_CANDIDATE)
    chosen = sorted(
        replicas[1:],
        key=lambda peer: (peer.replica_id not in queued_tokens, times_ms[peer.replica_id]),
    )
    timeout_s = TIMEOUT_FACTOR * max(times_ms.values()) / 1000
    timeout_s = max(ONLY_READER_TIMEOUT_S, timeout_s)
    return PrefillPlan(LegChoice.PREFILL, chosen, timeout_s, here_s=inf)


def _read_ms(peer: PeerReplica, size: WaitingPromptSize) -> float:
    """Return how long an idle prefill replica takes; it may have a prefix cached."""
    tokens = min(size.cached_tokens + size.uncached_tokens, peer.pending_prefill_tokens)
    return tokens * peer.token_us / 1000
