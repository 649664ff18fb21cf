"""What every request of one deployment counts: plain numbers, until somebody looks."""

from collections.abc import Mapping, Sequence
from typing import Final

from prometheus_client import Counter, Histogram

from isochrone.wire.usage import RequestOutcome

KINDS: Final = ("prompt", "cached", "output")
"""Of tokens."""
DECLINED: Final = "declined"
"""How a request ended for what its client wrote; every other word is an `Outcome`."""
WORDS: Final = (*(str(outcome) for outcome in RequestOutcome), DECLINED)
"""Of how a request ended."""


class Counts:
    """One deployment's, and the metrics that they are added to."""

    def __init__(
        self,
        *,
        ttft: Histogram,
        ttft_error: Histogram,
        requests: Mapping[str, Counter],
        tokens: Sequence[Counter],
    ) -> None:
        """Begin with none; `requests` are the metrics of the WORDS, `tokens` those of the KINDS."""
        self.outcomes: dict[str, int] = dict.fromkeys(WORDS, 0)
        self.prompt = self.cached = self.output = 0
        self.ttft = ttft
        self.ttft_error = ttft_error
        self._requests = requests
        self._tokens = tokens

    def show(self) -> None:
        """Add to the metrics what was counted since."""
        for outcome, count in self.outcomes.items():
            self._requests[outcome].inc(count)
            self.outcomes[outcome] = 0
        counted = (self.prompt, self.cached, self.output)
        for tokens, count in zip(self._tokens, counted, strict=True):
            tokens.inc(count)
        self.prompt = self.cached = self.output = 0
