"""Counts of one deployment's requests: plain numbers, added to the metrics when they are read."""

from collections.abc import Mapping, Sequence
from typing import Final

from prometheus_client import Counter, Histogram

from isochrone.wire.peers.usage import RequestOutcome

TOKEN_KINDS: Final = ("prompt", "cached", "output")
DECLINED: Final = "declined"
"""Outcome of a request that was refused because of its content; all others are an `Outcome`."""

OUTCOMES: Final = (*(str(outcome) for outcome in RequestOutcome), DECLINED)


class DeploymentCounts:
    """One deployment's counts since the last flush, and the metrics that they belong to."""

    def __init__(
        self,
        *,
        ttft: Histogram,
        ttft_error: Histogram,
        requests: Mapping[str, Counter],
        tokens: Sequence[Counter],
        decode_seconds: Counter,
        decode_tokens: Counter,
    ) -> None:
        """`requests` has a metric for each of OUTCOMES, `tokens` one for each of TOKEN_KINDS."""
        self.outcomes: dict[str, int] = dict.fromkeys(OUTCOMES, 0)
        self.prompt = self.cached = self.output = 0
        self.decode_s = 0.0
        self.decode_tokens = 0
        self.ttft = ttft
        self.ttft_error = ttft_error
        self._requests = requests
        self._tokens = tokens
        self._decode_seconds_total = decode_seconds
        self._decode_tokens_total = decode_tokens

    def flush(self) -> None:
        """Add the counts to the metrics and start again from 0."""
        for outcome, count in self.outcomes.items():
            self._requests[outcome].inc(count)
            self.outcomes[outcome] = 0
        counted = (self.prompt, self.cached, self.output)
        for tokens, count in zip(self._tokens, counted, strict=True):
            tokens.inc(count)
        self.prompt = self.cached = self.output = 0
        self._decode_seconds_total.inc(self.decode_s)
        self._decode_tokens_total.inc(self.decode_tokens)
        self.decode_s, self.decode_tokens = 0.0, 0
