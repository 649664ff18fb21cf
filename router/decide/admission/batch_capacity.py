"""Decides how many requests of batches may run: only what interactive requests leave free. Pure.

A request of a client takes the place of an item at once: its node preempts the item, or its engine
does (the embedded one). So items may take all sequences of an engine, and a few wait in its queue,
for when a sequence ends.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

TOKENS_SHARE: Final = 0.7
"""The share of a replica's tokens in flight that batches may use, counting interactive requests.
The rest stays free for interactive requests."""

QUEUE_FACTOR: Final = 2
"""Items are leased ahead of their turn, so that the next one begins when one ends."""

SURPLUS_SHARE: Final = 0.125
"""Items that wait in the queue of a replica, as a share of its sequences: the next one begins
without a round trip to a router."""

UNKNOWN_ITEMS: Final = 4
"""Items at once on a replica that has not said how many sequences its engine runs."""


class PreemptedItem(NamedTuple):
    """An item that clients' requests have preempted so often, and that found no other place."""

    preemptions: int


class ReplicaOccupancy:
    """A replica: its limit of tokens in flight, and the tokens that are in flight there.

    Its engine runs `sequences_max` requests at once (0 if unknown); `requests` are there, of
    clients and of batches.
    """

    __slots__ = ("in_flight_tokens", "requests", "sequences_max", "tokens_max")

    def __init__(
        self, tokens_max: int, in_flight_tokens: int, sequences_max: int = 0, requests: int = 0
    ) -> None:
        self.tokens_max = tokens_max
        self.in_flight_tokens = in_flight_tokens
        self.sequences_max = sequences_max
        self.requests = requests


def free_items(replica: ReplicaOccupancy) -> int:
    """Return how many more items a replica takes."""
    allowed = replica.sequences_max + max(1, int(SURPLUS_SHARE * replica.sequences_max))
    return max(0, allowed - replica.requests)


def requests_max(
    replicas: Sequence[ReplicaOccupancy],
    running: int,
    item_tokens: int,
    *,
    per_replica_max: int | None = None,
) -> int:
    """Return how many items of a deployment may run now, `running` of which do.

    `item_tokens` is what an item is expected to take. The limit follows from the engines' sequences
    unless the operator sets one, `per_replica_max`. No item runs beyond TOKENS_SHARE of the tokens
    of a replica.
    """
    if per_replica_max is not None:
        limit = per_replica_max * len(replicas)
    elif all(replica.sequences_max for replica in replicas):
        limit = running + sum([free_items(replica) for replica in replicas])
    else:
        limit = UNKNOWN_ITEMS * len(replicas)
    free_tokens = sum(
        [
            max(0, int(TOKENS_SHARE * replica.tokens_max) - replica.in_flight_tokens)
            for replica in replicas
        ]
    )
    return max(0, min(limit, running + free_tokens // max(1, item_tokens)))
