"""How much of the prompts at a replica its engine has still to read, as far as its node can know.

Prompts are assumed to be read in the order of their arrival, at the rate that the routers predict.
An engine says nothing of a prompt until its first token, and with several prompts in one step it
gives no token before the step ends. So a prompt begins when it arrives or with the last first
token, and only the first one is assumed to be read in part. To count the time also for those behind
it, as if they were in the same step, gains nothing (ops/sim/hard.md).
"""

from typing import Final, Protocol

PREFILL_SHARE_MAX: Final = 0.95
"""Largest share of a prompt assumed prefilled before its first token. A prompt that takes longer
than the router predicted still counts for a little."""


class UnansweredPrompt(Protocol):
    """A prompt at a replica without a first token. `admitted_s` is a monotonic time of the node."""

    admitted_s: float
    pending_prefill_tokens: int
    """Its tokens that are not cached, as its router predicts."""
    prefill_ms: float
    """The time to read them, as its router predicts; 0 if that is unknown."""


def tokens_read(first: UnansweredPrompt, last_prefill_end_s: float, now_s: float) -> int:
    """Return how many tokens of the first prompt are likely to be read now.

    `last_prefill_end_s` is the time of the replica's last first token.
    """
    if first.prefill_ms <= 0:
        return 0
    elapsed_ms = 1000 * (now_s - max(first.admitted_s, last_prefill_end_s))
    share = max(0.0, min(PREFILL_SHARE_MAX, elapsed_ms / first.prefill_ms))
    return round(first.pending_prefill_tokens * share)
