"""Fetches blocks of a waiting request's prompt from the PoP's store of KV, to which its engine
belongs.

The engine moves the blocks. The agent decides about it as about a replica that has them
(`kv_fetch.py`): by measured rates, quotas and the request's deadline.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

import aiohttp
import msgspec

from isochrone.wire import codec
from isochrone.wire.http.headers import PeerReplica
from isochrone.wire.ids import NodeId, ReplicaId
from isochrone.wire.kv import kv_sharing, kv_transfer
from nodeagent.decide.requests.kv_fetch import FetchPlan, FetchRate, PrefixHolder
from nodeagent.host.engines.open_session import open_session, read_answer

STORE: Final = PeerReplica(ReplicaId("kv store"), NodeId("kv store"), "", 0, 0, 0)
"""The store among the holders of a prefix."""

_LOCATED: Final = msgspec.json.Decoder(kv_sharing.LocatedBlocks)
_RECEIVED: Final = msgspec.json.Decoder(kv_transfer.ReceivedBlocks)


class StoreFetch:
    """The store, as one engine reaches it."""

    def __init__(
        self, engine: aiohttp.ClientSession, rate: FetchRate, clock: Callable[[], float]
    ) -> None:
        """`rate` is measured by all engines of the node. `clock` returns monotonic seconds."""
        self._engine = engine
        self._rate = rate
        self._clock = clock

    def may_ask(self) -> bool:
        """Return whether the store did not fail lately."""
        return self._rate.may_ask(self._clock())

    async def locate(
        self, missing: Sequence[bytes], held_blocks: int, timeout_s: float
    ) -> PrefixHolder:
        """Ask how much the store has of blocks that follow the `held_blocks` of a prompt.

        A store that does not answer in time has failed: its master, or an engine of it, is lost.
        """
        body = msgspec.msgpack.encode(kv_sharing.BlockQuery(digests=tuple(missing)))
        began_s, blocks = self._clock(), 0
        try:
            async with (
                asyncio.timeout(timeout_s),
                open_session(self._engine).post(kv_sharing.STORE_LOCATE_PATH, data=body) as answer,
            ):
                if answer.status == 200:
                    blocks = codec.decode_json(await read_answer(answer), _LOCATED).blocks
        except TimeoutError:
            now_s = self._clock()
            self._rate.record_failure(now_s - began_s, now_s)
        except (aiohttp.ClientError, OSError, codec.MalformedFrame):
            # The engine here failed, which says nothing about the store.
            blocks = 0
        return PrefixHolder(
            STORE, held_blocks + blocks if blocks > 0 else 0, self._rate, keeps_copy=True
        )

    async def move(self, transfer: str, block_bytes: int, plan: FetchPlan) -> int:
        """Have the engine fetch blocks of a waiting prompt; return how many came.

        If a fetch takes too long, the blocks that have come are used, and count as the engine's.
        """
        path = f"{kv_sharing.STORE_FETCH_PATH}{transfer}?blocks={plan.blocks}"
        began_s, blocks = self._clock(), 0
        try:
            async with (
                asyncio.timeout(plan.timeout_s),
                open_session(self._engine).post(path) as taken,
            ):
                if taken.status in kv_transfer.RECEIVER_STATUSES:
                    return 0
                if taken.status == 200:
                    blocks = codec.decode_json(await read_answer(taken), _RECEIVED).blocks
        except TimeoutError:
            blocks = 0
        except (aiohttp.ClientError, OSError, codec.MalformedFrame):
            # The engine here failed, which says nothing about the store.
            return 0
        now_s = self._clock()
        if blocks < plan.blocks:
            self._rate.record_failure(now_s - began_s, now_s)
            return blocks
        # The engine does not say when the first bytes came.
        first_s = min(self._rate.latency_s, now_s - began_s)
        self._rate.record(blocks * block_bytes, now_s - began_s, first_s, now_s)
        return blocks
