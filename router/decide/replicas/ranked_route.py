"""One replica a request may go to, with its predicted times and the reason for its rank."""

from isochrone.native_class import mypyc_attr
from isochrone.wire.peers.routes import Route


@mypyc_attr(acyclic=True, free_list_len=1)
class RankedRoute:
    """A route with its prediction.

    `pending_prefill_tokens` is the prefill work of the uncached tokens, in tokens at the beginning
    of a prompt. If more than `queue_tokens_max` tokens wait at the replica, the next best replica
    would answer sooner; 0 means no limit.
    """

    __slots__ = (
        "cached_tokens", "ms_per_token", "overhead_ms", "pending_prefill_tokens", "prefill_ms",
        "queue_ms", "queue_tokens_max", "reason", "route", "rtt_ms", "uncached_tokens",
    )  # fmt: skip

    def __init__(
        self,
        route: Route,
        reason: str,
        *,
        rtt_ms: float,
        overhead_ms: float,
        queue_ms: float,
        prefill_ms: float,
        ms_per_token: float,
        cached_tokens: int,
        uncached_tokens: int,
        pending_prefill_tokens: int,
        queue_tokens_max: int,
    ) -> None:
        self.route = route
        self.reason = reason
        self.rtt_ms = rtt_ms
        self.overhead_ms = overhead_ms
        self.queue_ms = queue_ms
        self.prefill_ms = prefill_ms
        self.ms_per_token = ms_per_token
        self.cached_tokens = cached_tokens
        self.uncached_tokens = uncached_tokens
        self.pending_prefill_tokens = pending_prefill_tokens
        self.queue_tokens_max = queue_tokens_max

    @property
    def ttft_ms(self) -> float:
        """Return the predicted time to first token."""
        return max(0.0, self.rtt_ms + self.overhead_ms + self.queue_ms + self.prefill_ms)

    @property
    def reason_header(self) -> str:
        """Return the header value that tells a client why this replica was chosen."""
        rtt_tenths, queue_ms = int(10 * self.rtt_ms + 0.5), int(self.queue_ms + 0.5)
        prefill_ms = int(self.prefill_ms + 0.5)
        return (
            f"{self.reason} rtt={rtt_tenths // 10}.{rtt_tenths % 10}ms queue={queue_ms}ms"
            f" prefill={prefill_ms}ms"
        )
