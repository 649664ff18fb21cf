"""Has the PoP's store of KV keep the prompts that this node's engines have computed.

Rule 1: a prompt is stored after its answer, one at a time. One that does not fit the short queue is
dropped, which costs a recomputation at worst.
Rule 2: all copies count against the quotas of the node and the deployment; while one is spent,
nothing is stored.
"""

import asyncio
from collections.abc import Callable
from typing import Final, NamedTuple

import aiohttp
import msgspec

from isochrone.wire import codec
from isochrone.wire.kv import kv_sharing
from isochrone.wire.kv.kv_store import STORE_COPIES
from nodeagent import metrics
from nodeagent.decide.requests.kv_quota import KvQuota, KvUser
from nodeagent.host.engines.open_session import open_session, read_answer

QUEUED_MAX: Final = 16
TIMEOUT_S: Final = 60.0
PAUSE_S: Final = 10.0
"""How long nothing is stored after the engine has failed at it."""
BLOCKS_MIN: Final = 8
"""A shorter prompt is computed again as soon as it would be fetched."""

_LOCATED: Final = msgspec.json.Decoder(kv_sharing.LocatedBlocks)


class ComputedPrompt(NamedTuple):
    """A prompt that an engine has computed for `user`, by the digests of its blocks."""

    engine: aiohttp.ClientSession
    user: KvUser
    digests: tuple[bytes, ...]


class StoreCopies:
    """The prompts that wait to be stored, of all engines of this node."""

    def __init__(self, quota: KvQuota, clock: Callable[[], float]) -> None:
        """`quota` is the node's; `clock` returns monotonic seconds."""
        self._quota = quota
        self._clock = clock
        self._waiting: asyncio.Queue[ComputedPrompt] = asyncio.Queue(QUEUED_MAX)
        self._storing: asyncio.Task[None] | None = None
        self._paused_until_s = 0.0

    async def close(self) -> None:
        """Store nothing more."""
        if self._storing is not None:
            self._storing.cancel()
            await asyncio.wait({self._storing})

    def offer(self, prompt: ComputedPrompt) -> None:
        """Have a prompt stored, unless too many wait already, or a quota is spent."""
        if len(prompt.digests) < BLOCKS_MIN:
            return
        now_s = self._clock()
        left = min(self._quota.link_bytes(now_s), self._quota.user_bytes(prompt.user, now_s))
        if left <= 0 or now_s < self._paused_until_s or self._waiting.full():
            metrics.KV_COPIES.labels("dropped").inc()
            return
        self._waiting.put_nowait(prompt)
        if self._storing is None:
            self._storing = asyncio.create_task(self._store_all())

    async def _store_all(self) -> None:
        while True:
            prompt = await self._waiting.get()
            body = msgspec.msgpack.encode(kv_sharing.BlockQuery(digests=prompt.digests))
            try:
                async with (
                    asyncio.timeout(TIMEOUT_S),
                    open_session(prompt.engine).post(
                        kv_sharing.STORE_KEEP_PATH, data=body
                    ) as answer,
                ):
                    answer.raise_for_status()
                    stored = codec.decode_json(await read_answer(answer), _LOCATED)
            except (aiohttp.ClientError, OSError, TimeoutError, codec.MalformedFrame):
                metrics.KV_COPIES.labels("failed").inc()
                self._paused_until_s = self._clock() + PAUSE_S
                continue
            stored_bytes = STORE_COPIES * stored.blocks * stored.block_bytes
            self._quota.take(prompt.user, stored_bytes, self._clock())
            metrics.KV_COPIES.labels("kept").inc()
