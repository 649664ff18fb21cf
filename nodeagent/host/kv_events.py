"""Reads a vLLM's KV events, to know how far back its prefix cache reaches.

A message has a topic, a sequence number and a batch: `[time, [event, ...], rank]`. Events are maps
with a `type`, or arrays that begin with it in releases before 0.13. Their tokens are skipped.

Rule 1: the engine never waits for this agent. Events that are not read in time are lost; then the
reach is a little too early until later evictions correct it.
Rule 2: only blocks of full attention count. The others are evicted while their prefix is still of
use.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Final

import msgspec

from isochrone.wire.engines.engine import EngineStats
from nodeagent.decide.cache_reach import CacheReach
from nodeagent.host.zmq_events import WrongFrames, subscribed

log = logging.getLogger(__name__)

BATCH_BYTES_MAX: Final = 8 * 1024 * 1024
EVENTS_MAX: Final = 65_536
"""Events of a batch, and blocks of an event: more than a step of an engine makes. An engine whose
batches have more is read no longer."""

SLICE_BLOCKS: Final = 4096
"""Events and their blocks that are noted before the agent's other work has its turn."""

CONNECT_AGAIN_S: Final = 1.0
_FULL_ATTENTION: Final = ("", "full_attention", "mla_attention")


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=EVENTS_MAX)]


Hashes = Annotated[list[int | bytes], msgspec.Meta(max_length=EVENTS_MAX)]


class _Event(msgspec.Struct, gc=False):
    """The fields of an event that count."""

    type: str
    block_hashes: Hashes = []
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    ownership: str | None = None
    """Set for a tier below the device."""


class _EventArray(msgspec.Struct, array_like=True, gc=False):
    """An event of a release that sends arrays."""

    type: str
    block_hashes: Hashes = []


_ARRAYS: Final = (*range(0x90, 0xA0), 0xDC, 0xDD)
"""The first bytes of arrays."""
_ARRAY: Final = msgspec.msgpack.Decoder(_EventArray)
_BATCH: Final = msgspec.msgpack.Decoder(_Batch)
_EVENT: Final = msgspec.msgpack.Decoder(_Event)


async def apply_batch(batch: bytes, reach: CacheReach, now_s: float) -> None:
    """Note what a batch of events says. Raises msgspec.DecodeError if it is none."""
    noted = 0
    for raw in _BATCH.decode(batch).events:
        event = _decoded(raw)
        noted += 1 + len(event.block_hashes)
        if noted >= SLICE_BLOCKS:
            noted = 0
            await asyncio.sleep(0)
        blocks: list[Hashable] = [(event.group_idx or 0, block) for block in event.block_hashes]
        if event.type == "AllBlocksCleared":
            reach.clear(now_s)
        elif event.ownership:
            continue
        elif event.type == "BlockStored" and (event.kv_cache_spec_kind or "") in _FULL_ATTENTION:
            reach.store(blocks, now_s)
        elif event.type == "BlockRemoved":
            reach.remove(blocks)


def _decoded(raw: msgspec.Raw) -> _Event:
    if memoryview(raw)[0] in _ARRAYS:
        fields = _ARRAY.decode(raw)
        return _Event(type=fields.type, block_hashes=fields.block_hashes)
    return _EVENT.decode(raw)


class KvEventReader:
    """Follows the events of one engine."""

    def __init__(self, socket: Path, clock: Callable[[], float]) -> None:
        """`socket` is where the engine publishes. `clock` returns monotonic seconds."""
        self._socket = socket
        self._clock = clock
        self._reach = CacheReach(None)
        self._task: asyncio.Task[None] | None = None
        self.bytes_total = 0
        self.is_connected = False

    def start(self, *, is_new: bool) -> None:
        """Begin to read. With `is_new` the engine's cache is empty now."""
        self._reach = CacheReach(self._clock() if is_new else None)
        self._task = asyncio.create_task(self._run())

    def with_reach(self, stats: EngineStats) -> EngineStats:
        """Return an engine's statistics with how far back its cache reaches, if events say it."""
        if self._task is None:
            return stats
        return msgspec.structs.replace(stats, prefix_evicted_age_s=self.age_s())

    async def stop(self) -> None:
        """Read nothing more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    def age_s(self) -> float:
        """Return how far back the cache reaches; -1 if that is not known."""
        if not self.is_connected or self._reach.since_s is None:
            return -1.0
        return max(0.0, self._clock() - self._reach.since_s)

    async def _run(self) -> None:
        """Read events until the task is cancelled; connect again whenever that is needed."""
        while True:
            try:
                # The engine may not publish yet, or may have ended.
                with suppress(OSError, EOFError):
                    await self._follow()
            except (WrongFrames, msgspec.DecodeError) as error:
                fields = {"socket": str(self._socket), "reason": str(error)}
                log.warning("cannot read an engine's KV events", extra={"fields": fields})
                return
            finally:
                self.is_connected = False
            await asyncio.sleep(CONNECT_AGAIN_S)

    async def _follow(self) -> None:
        async with subscribed(self._socket, BATCH_BYTES_MAX) as subscription:
            self.is_connected = True
            while True:
                await self._take(await subscription.receive())

    async def _take(self, frames: list[bytes]) -> None:
        batch = frames[-1]
        self.bytes_total += len(batch)
        await apply_batch(batch, self._reach, self._clock())


def follow_kv_events(socket: str, *, is_new: bool) -> KvEventReader:
    """Begin to read the events of an engine that publishes them at `socket`; "" if it does not."""
    reader = KvEventReader(Path(socket), time.monotonic)
    if socket:
        reader.start(is_new=is_new)
    return reader
