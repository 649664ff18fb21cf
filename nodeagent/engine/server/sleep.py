"""Sleep of an idle engine: it releases the memory of the model and of its KV, the process stays.

Weights that the C kernels packed are copied to a file beside the engine's socket once, and read
back from it. If the config says that the engine sleeps, this copy is made at the start. All other
weights are dropped, and loaded from the model's files again. Both stay in the page cache as long as
the machine has memory for them.

The paths are vLLM's: `POST /sleep`, `POST /wake_up`, `GET /is_sleeping`.

The blocks of prefixes that several prompts had in common, such as a system prompt, are kept, up to
KEPT_BYTES_MAX: the first prompt after a wake is likely to begin with them.

Rule 1: an engine with a request in flight does not fall asleep.
Rule 2: a request wakes a sleeping engine and waits for it. So an engine that was not woken before
also answers. The agent still wakes it first, because only the agent knows what else is on the
device.
"""

import asyncio
import gc
import logging
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from isochrone.wire.engines.engine import EngineConfig
from isochrone.wire.errors import ApiError, ErrorCode
from nodeagent.engine.architecture.errors import CheckpointError, MemoryShortage
from nodeagent.engine.core.generation_thread import GenerationThread
from nodeagent.engine.core.model_runner import ModelRunner
from nodeagent.engine.core.step import DroppedModel
from nodeagent.engine.kernels.huge_pages import trim_heap
from nodeagent.engine.kvcache.block_pool import CachedBlock
from nodeagent.engine.kvcache.staging_memory import StagingMemory
from nodeagent.engine.loading import LoadedEngine, can_sleep, reload_runner
from nodeagent.engine.server.inflight_limit import InflightLimit

log = logging.getLogger(__name__)

SAVE_S: Final = 2.0
"""Time to save the prefix cache to the tiers below before the KV is dropped."""

KEPT_BYTES_MAX: Final = 16 << 20
"""The KV blocks that a sleeping engine keeps in host memory. Small beside its process, and several
hundred tokens of a model that wakes in less time than it reads them."""


class KeptBlocks(NamedTuple):
    """KV blocks that are kept while the model sleeps, and their contents [blocks, ...]."""

    blocks: Sequence[CachedBlock]
    contents: Tensor


class EngineSleep:
    """Puts the engine of this process to sleep and wakes it. Used on the event loop only."""

    def __init__(
        self,
        config: EngineConfig,
        loaded: LoadedEngine,
        worker: GenerationThread,
        inflight: InflightLimit,
        staging: StagingMemory,
    ) -> None:
        self._staging = staging
        self._config = config
        self._known = loaded.known
        self._parked = loaded.parked
        self._first_touch = loaded.first_touch
        self._worker = worker
        self._inflight = inflight
        self._kept_max = KEPT_BYTES_MAX // loaded.kv_blocks.block_bytes
        self._kept: KeptBlocks | None = None
        self._waking: asyncio.Task[None] | None = None
        self._falling: asyncio.Task[None] | None = None
        self.is_asleep = False
        """Whether requests wait for a wake: from the order to sleep until the model is loaded."""
        self.wakes_total = 0
        self.wake_s = 0.0
        """How long the last wake took."""

    @property
    def is_dropped(self) -> bool:
        """Whether the model takes no memory: it has been dropped, and no wake has begun."""
        is_falling = self._falling is not None and not self._falling.done()
        return self.is_asleep and not is_falling and self._waking is None

    async def fall_asleep(self) -> None:
        """Drop the model. Raises ApiError if a request is in flight, or if it cannot sleep."""
        if not can_sleep(self._config):
            raise ApiError(
                ErrorCode.INVALID_REQUEST,
                "cannot sleep: a model over several ranks, or with a draft model, stays loaded",
            )
        if self.is_asleep:
            return
        if self._inflight.in_flight:
            raise ApiError(
                ErrorCode.CONFLICT, f"cannot sleep: {self._inflight.in_flight} requests are open"
            )
        # Requests wait for a wake from here on.
        self.is_asleep = True
        self._falling = asyncio.create_task(self._drop())
        await asyncio.shield(self._falling)

    async def wake(self) -> None:
        """Load the model again, if it was dropped. Raises ApiError if that fails."""
        if not self.is_asleep:
            return
        if self._waking is None:
            self._waking = asyncio.create_task(self._wake_up())
            self._waking.add_done_callback(self._end_wake)
        await asyncio.shield(self._waking)

    async def ensure_awake(self) -> None:
        """Return once the model is loaded. Raises ApiError if it cannot be."""
        while self.is_asleep:
            await self.wake()

    async def _drop(self) -> None:
        started_s = time.monotonic()
        await asyncio.to_thread(self._first_touch.stop)
        until_s = time.monotonic() + SAVE_S
        dropped = await asyncio.wrap_future(
            self._worker.call(lambda engine: engine.fall_asleep(until_s, self._kept_max))
        )
        if dropped is None:
            self.is_asleep = False
            raise ApiError(ErrorCode.CONFLICT, "cannot sleep: a transfer of KV is open")
        is_parked = await asyncio.to_thread(self._park, dropped)
        # The model goes with its last reference, before its memory is given back.
        del dropped
        self._staging.forget()
        if not is_parked:
            await asyncio.to_thread(_give_memory_back)
        log.info("asleep", extra={"fields": {"seconds": round(time.monotonic() - started_s, 3)}})

    async def _wake_up(self) -> None:
        if self._falling is not None:
            await asyncio.wait((self._falling,))
        if not self.is_asleep:
            return
        started_s = time.monotonic()
        try:
            runner = await asyncio.to_thread(self._load)
        except (MemoryShortage, MemoryError, torch.OutOfMemoryError) as error:
            raise ApiError(
                ErrorCode.OUT_OF_CAPACITY, f"cannot wake up: {error}", retry_after_s=1.0
            ) from error
        except (CheckpointError, OSError) as error:
            raise ApiError(
                ErrorCode.UNAVAILABLE, f"cannot wake up: {error}", retry_after_s=1.0
            ) from error
        kept = self._kept.blocks if self._kept is not None else ()
        await asyncio.wrap_future(self._worker.call(lambda engine: engine.wake_up(runner, kept)))
        self.is_asleep, self._kept = False, None
        self.wakes_total += 1
        self.wake_s = time.monotonic() - started_s
        log.info("awake", extra={"fields": {"seconds": round(self.wake_s, 3)}})

    def _park(self, dropped: DroppedModel) -> bool:
        """Keep the blocks worth keeping, then park the model; return False where it has to go."""
        runner = dropped.executor
        if not isinstance(runner, ModelRunner):
            return False
        if dropped.kept:
            contents = runner.read_blocks([block for block, _ in dropped.kept])
            self._kept = KeptBlocks(dropped.kept, contents)
        return self._parked.park(runner)

    def _load(self) -> ModelRunner:
        runner = self._parked.restore() or reload_runner(self._config, self._known)
        if self._kept is not None:
            runner.write_blocks([block for block, _ in self._kept.blocks], self._kept.contents)
        return runner

    def _end_wake(self, task: "asyncio.Task[None]") -> None:
        self._waking = None
        if not task.cancelled():
            task.exception()  # each waiting request has raised it


def _give_memory_back() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    trim_heap()
