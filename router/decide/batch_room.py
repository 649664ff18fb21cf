"""Decides how many requests of batches may run: only what interactive requests leave free. Pure."""

from collections.abc import Sequence
from typing import Final

TOKENS_SHARE: Final = 0.7
"""The share of a replica's tokens in flight that batches may use, counting interactive requests.
The rest stays free for interactive requests."""

QUEUE_FACTOR: Final = 2
"""Items are leased ahead of their turn, so that the next one begins when one ends."""


UNORDERED_MAX: Final = 4
"""Items at once on a replica whose engine does not order its queue by priority: there a request of
a client waits behind each of them."""


class ReplicaRoom:
    """A replica: its limit of tokens in flight, and the tokens that are in flight there."""

    __slots__ = ("in_flight_tokens", "tokens_max")

    def __init__(self, tokens_max: int, in_flight_tokens: int) -> None:
        self.tokens_max = tokens_max
        self.in_flight_tokens = in_flight_tokens


def per_replica_limit(items_max: int, *, yields: bool) -> int:
    """Return how many items one replica takes: `items_max`, or less if they do not yield there.

    Items yield where the engine lets requests of a higher priority pass.
    """
    return items_max if yields else min(items_max, UNORDERED_MAX)


def requests_max(
    replicas: Sequence[ReplicaRoom], running: int, item_tokens: int, per_replica_max: int
) -> int:
    """Return how many items of a deployment may run now, `running` of which do.

    `item_tokens` is what an item is expected to take. A replica takes at most `per_replica_max`
    items, and none beyond TOKENS_SHARE of its tokens.
    """
    limit = per_replica_max * len(replicas)
    free_tokens = sum(
        [
            max(0, int(TOKENS_SHARE * replica.tokens_max) - replica.in_flight_tokens)
            for replica in replicas
        ]
    )
    return max(0, min(limit, running + free_tokens // max(1, item_tokens)))
