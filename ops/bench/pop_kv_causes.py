"""Why the replicas of a PoP have less of their prompts cached than one cache of the same memory.

For the live benchmark (pop_kv) and its model (pop_kv_model). What each replica has of a prompt is
read when the request is sent, and compared with one LRU cache that has seen the same requests in
the same order.
"""

from collections import OrderedDict
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Final, NamedTuple

CAUSES: Final = (
    "in no replica any more",
    "not named to the node",
    "named, not fetched",
    "gone when its turn came",
)


class OneCache:
    """One LRU cache with the memory of all replicas."""

    def __init__(self, blocks_max: int) -> None:
        self._blocks_max = blocks_max
        self._blocks: OrderedDict[Hashable, None] = OrderedDict()

    def use(self, chain: Sequence[Hashable]) -> int:
        """Return how many blocks of a chain's prefix are cached, then cache all of it."""
        found = next((n for n, key in enumerate(chain) if key not in self._blocks), len(chain))
        for key in reversed(chain):
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        while len(self._blocks) > self._blocks_max:
            self._blocks.popitem(last=False)
        return found


class SentPrefix(NamedTuple):
    """The blocks of a prompt's prefix when its request was sent."""

    in_one_cache: int
    anywhere: int
    """At the replica that has most."""
    here: int
    named: int
    """At the addressed replica or one that its node knows of, whichever has most."""

    def lost(self, fetched: int, cached: int) -> "LostPrefix":
        """Return where the blocks remained that one cache has beyond the `cached` ones."""
        not_fetched = max(0, self.named - self.here - fetched)
        return LostPrefix(
            self.in_one_cache - self.anywhere,
            self.anywhere - self.named,
            not_fetched,
            self.named - not_fetched - cached,
        )


class LostPrefix(NamedTuple):
    """Blocks that one cache has and the replica had not, by CAUSES.

    The first and the last one are negative where a replica has more: another request computed the
    same prefix meanwhile, or one cache evicted it earlier.
    """

    nowhere: int
    not_named: int
    not_fetched: int
    gone: int


def sent_prefix(
    in_one_cache: int, held: Mapping[str, int], here: str, named: Collection[str]
) -> SentPrefix:
    """Return the state of a prompt's prefix; `held` says how much of it each replica has."""
    most = max([held[here], *(held.get(name, 0) for name in named)])
    return SentPrefix(in_one_cache, max(held.values()), held[here], most)


def format_losses(losses: Sequence[LostPrefix], prompt_blocks: float) -> str:
    """Return the columns of a table: each cause in percent of the prompts."""
    sums = (sum(column) for column in zip(*losses, strict=True))
    return " | ".join(f"{100 * total / prompt_blocks:.1f}" for total in sums)
