"""Has copies made of the prompts that this node's engines have computed.

With a KV store in the PoP the engine writes the copy there. Without one the replica that the router
names, the keeper, is asked to fetch it.

Rule 1: a prompt is copied after its answer, one at a time. One that does not fit the short queue is
dropped, which costs a recomputation at worst.
Rule 2: copies in the store count against the quotas of the node and the deployment; while one is
spent, nothing is stored. Other copies are counted by both nodes (`api/kv_sharing.py`).
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final, Generic, NamedTuple, TypeVar

import aiohttp
import msgspec

from isochrone.wire import codec
from isochrone.wire.http import headers
from isochrone.wire.http.headers import PeerReplica
from isochrone.wire.ids import NodeId
from isochrone.wire.kv import kv_sharing
from isochrone.wire.kv.kv_store import STORE_COPIES
from nodeagent import metrics
from nodeagent.decide.pauses import Pauses
from nodeagent.decide.requests.handoff import PeerReplicaLost
from nodeagent.decide.requests.kv_quota import KvQuota, KvUser
from nodeagent.disaggregation.kv_fetch import RelayToPeer
from nodeagent.host.engines.open_session import open_session, read_answer

QUEUED_MAX: Final = 16
COPY_TIMEOUT_S: Final = 60.0
PAUSE_S: Final = 10.0
"""How long no copy is sent where one has failed or was refused."""
NODES_MAX: Final = 256
BLOCKS_MIN: Final = 8
"""A shorter prompt is computed again as soon as it would be fetched."""

_LOCATED: Final = msgspec.json.Decoder(kv_sharing.LocatedBlocks)


class PromptForStore(NamedTuple):
    """A prompt that an engine has computed for `user`, by the digests of its blocks."""

    engine: aiohttp.ClientSession
    user: KvUser
    digests: tuple[bytes, ...]


class PromptForKeeper(NamedTuple):
    """A prompt that the replica `here` has, of which `keeper` should keep a copy."""

    here: PeerReplica
    keeper: PeerReplica
    digests: tuple[bytes, ...]


PromptT = TypeVar("PromptT", PromptForStore, PromptForKeeper)


class PromptCopies(ABC, Generic[PromptT]):
    """The prompts that wait to be copied."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` returns monotonic seconds."""
        self._clock = clock
        self._waiting: asyncio.Queue[PromptT] = asyncio.Queue(QUEUED_MAX)
        self._copying: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Make no more copies."""
        if self._copying is not None:
            self._copying.cancel()
            await asyncio.wait({self._copying})

    def offer(self, prompt: PromptT) -> None:
        """Have a prompt copied, unless too many wait already, or it may not be copied now."""
        if len(prompt.digests) < BLOCKS_MIN:
            return
        if self._waiting.full() or not self._may_copy(prompt):
            metrics.KV_COPIES.labels("dropped").inc()
            return
        self._waiting.put_nowait(prompt)
        if self._copying is None:
            self._copying = asyncio.create_task(self._copy_all())

    async def _copy_all(self) -> None:
        while True:
            metrics.KV_COPIES.labels(await self._copy(await self._waiting.get())).inc()

    @abstractmethod
    def _may_copy(self, prompt: PromptT) -> bool:
        """Return whether a copy may be made now."""

    @abstractmethod
    async def _copy(self, prompt: PromptT) -> str:
        """Make one copy; return the outcome, for the metric."""


class StoreCopies(PromptCopies[PromptForStore]):
    """Copies to the PoP's store, by all engines of this node."""

    def __init__(self, quota: KvQuota, clock: Callable[[], float]) -> None:
        """`quota` is the node's; `clock` returns monotonic seconds."""
        super().__init__(clock)
        self._quota = quota
        self._paused_until_s = 0.0

    def _may_copy(self, prompt: PromptForStore) -> bool:
        now_s = self._clock()
        left = min(self._quota.link_bytes(now_s), self._quota.user_bytes(prompt.user, now_s))
        return left > 0 and now_s >= self._paused_until_s

    async def _copy(self, prompt: PromptForStore) -> str:
        body = msgspec.msgpack.encode(kv_sharing.BlockQuery(digests=prompt.digests))
        engine = open_session(prompt.engine)
        try:
            async with (
                asyncio.timeout(COPY_TIMEOUT_S),
                engine.post(kv_sharing.STORE_KEEP_PATH, data=body) as answer,
            ):
                answer.raise_for_status()
                stored = codec.decode_json(await read_answer(answer), _LOCATED)
        except (aiohttp.ClientError, OSError, codec.MalformedFrame):
            self._paused_until_s = self._clock() + PAUSE_S
            return "failed"
        stored_bytes = STORE_COPIES * stored.blocks * stored.block_bytes
        self._quota.take(prompt.user, stored_bytes, self._clock())
        return "kept"


class KeeperCopies(PromptCopies[PromptForKeeper]):
    """Copies by other replicas of the PoP."""

    def __init__(self, peers: RelayToPeer, clock: Callable[[], float]) -> None:
        """`peers` are connections to their nodes; `clock` returns monotonic seconds."""
        super().__init__(clock)
        self._peers = peers
        self._pauses: Pauses[NodeId] = Pauses(PAUSE_S, NODES_MAX)

    def _may_copy(self, prompt: PromptForKeeper) -> bool:
        return not self._pauses.is_paused(prompt.keeper.node_id, self._clock())

    async def _copy(self, prompt: PromptForKeeper) -> str:
        if not self._may_copy(prompt):
            return "dropped"
        query = kv_sharing.KeepQuery(source=prompt.here, digests=prompt.digests)
        body = msgspec.msgpack.encode(query)
        sent = {headers.REPLICA: prompt.keeper.replica_id}
        try:
            async with (
                asyncio.timeout(COPY_TIMEOUT_S),
                self._peers.relay(prompt.keeper, kv_sharing.KEEP_PATH, body, sent) as answer,
            ):
                outcome = "kept" if answer.status == 200 else "refused"
        except (PeerReplicaLost, aiohttp.ClientError, OSError):
            outcome = "failed"
        if outcome != "kept":
            self._pauses.begin(prompt.keeper.node_id, self._clock())
        return outcome
