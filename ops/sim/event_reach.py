"""A replica whose node knows its cache from events alone, as an agent knows a vLLM's.

Events name the blocks that are stored and evicted, and not when they were last used.
"""

from nodeagent.decide.cache_reach import CacheReach
from ops.sim.replica import QueueOrder, SimulatedReplica
from ops.sim.replica_memory import KvPool, PrefixCache
from ops.sim.traces import TraceRequest
from ops.sim.world import ReplicaSite


class _KnownByEvents(PrefixCache):
    """A cache whose reach is computed from its events."""

    def __init__(self, tokens_max: int) -> None:
        super().__init__(tokens_max)
        self._reach = CacheReach(0.0)

    def hold(self, request: TraceRequest, more_tokens: int) -> None:
        """Take memory for a prompt: its blocks are stored as it is read."""
        self._reach.store(request.blocks, self.now_s)
        super().hold(request, more_tokens)

    def clear(self) -> None:
        """Forget everything."""
        super().clear()
        self._reach.clear(self.now_s)

    def _note_evicted(self, block: int) -> None:
        super()._note_evicted(block)
        self._reach.remove((block,))
        assert self._reach.since_s is not None
        self.evicted_used_at_s = self._reach.since_s


class _PoolKnownByEvents(_KnownByEvents, KvPool):
    """The same for a pool that running sequences share."""


class EventReplica(SimulatedReplica):
    """A replica that reports what its events say of its cache."""

    def __init__(self, site: ReplicaSite, queue_order: QueueOrder | None = None) -> None:
        super().__init__(site, queue_order)
        pool, cache = site.profile.pool_tokens, site.profile.cache_tokens
        self._memory = _PoolKnownByEvents(pool) if pool else _KnownByEvents(cache)
