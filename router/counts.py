"""What every request of one deployment counts: plain numbers, until somebody looks."""

from collections.abc import Mapping, Sequence
from typing import Final

from prometheus_client import Counter, Histogram

from isochrone.wire.usage import Outcome

KINDS: Final = ("prompt", "cached", "output")
"""Of tokens."""


class Counts:
    """One deployment's, and the metrics that they are added to."""

    __slots__ = (
        "_declined", "_requests", "_tokens", "cached", "declined", "outcomes", "output", "prompt",
        "ttft", "ttft_error",
    )  # fmt: skip

    def __init__(
        self,
        *,
        ttft: Histogram,
        ttft_error: Histogram,
        requests: Mapping[Outcome, Counter],
        declined: Counter,
        tokens: Sequence[Counter],
    ) -> None:
        """Begin with none; `tokens` are the metrics of the KINDS.

        `declined` are requests that no replica would have, for what their clients wrote.
        """
        self.outcomes: dict[Outcome, int] = dict.fromkeys(Outcome, 0)
        self.declined = 0
        self.prompt = self.cached = self.output = 0
        self.ttft = ttft
        self.ttft_error = ttft_error
        self._requests = requests
        self._declined = declined
        self._tokens = tokens

    def show(self) -> None:
        """Add to the metrics what was counted since."""
        for outcome, count in self.outcomes.items():
            self._requests[outcome].inc(count)
            self.outcomes[outcome] = 0
        self._declined.inc(self.declined)
        self.declined = 0
        counted = (self.prompt, self.cached, self.output)
        for tokens, count in zip(self._tokens, counted, strict=True):
            tokens.inc(count)
        self.prompt = self.cached = self.output = 0
