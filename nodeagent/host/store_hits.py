"""Counts the prompt tokens that an engine found in its PoP's store of KV, from its statistics."""

from isochrone.wire.engine import EngineStats
from nodeagent import metrics


class StoreHits:
    """What was counted of one replica's engines so far."""

    def __init__(self) -> None:
        self._counted_tokens = 0

    def count(self, stats: EngineStats) -> None:
        """Count what is new. A new engine begins at 0."""
        new = stats.store_hit_tokens_total - self._counted_tokens
        metrics.KV_FOUND_TOKENS.labels("store").inc(max(0, new))
        self._counted_tokens = stats.store_hit_tokens_total
