"""The windows of one engine: memory through which its blocks go to other processes of its node.

A thread at the sender meets a thread at a receiving engine: only the transfer's head and end go
through event loops and the agent. The agent issues the lease of each transfer, to another engine of
the deployment on its node, or to itself if the blocks go to another node.
"""

from contextlib import AbstractAsyncContextManager
from pathlib import Path

import torch
from torch import Tensor

from isochrone.service.config import ConfigError
from isochrone.service.windows.slot_ring import SlotRun
from isochrone.service.windows.window_pool import SenderWindow, WindowPool, part_blocks, warn
from nodeagent.engine.kvcache.page_lock import lock_pages
from nodeagent.engine.kvcache.staging_memory import StagingMemory
from nodeagent.engine.kvcache.tier_setup import KvBlockForm
from nodeagent.engine.server.listen_socket import clear_socket


class KvWindows:
    """The windows of one engine, and the memory for blocks that go through none."""

    def __init__(
        self, form: KvBlockForm, path: Path, staging: StagingMemory, device: str = "cpu"
    ) -> None:
        """`path` is that of the socket. Blocks that go through no window are read to `staging`.
        Windows are page-locked for `device`."""
        self._form = form
        self._staging = staging
        self.part_blocks = part_blocks(form.block_bytes)
        self.pool = WindowPool(path, lock=lambda memory: lock_pages(memory, device))

    async def start(self) -> None:
        """Listen. Without a socket, blocks are sent through the agent."""
        try:
            clear_socket(self.pool.path)
        except (OSError, ConfigError) as error:
            warn(f"listen on {self.pool.path}", error)
            return
        await self.pool.start()

    async def close(self) -> None:
        """Stop listening, and give up the windows."""
        await self.pool.close()

    def lease(self, name: str) -> AbstractAsyncContextManager[SenderWindow | None]:
        """Lease a window to a transfer; None if there is none, or the name cannot be used."""
        return self.pool.lease(name, self._form.block_bytes)

    def slots(self, lease: SenderWindow, run: SlotRun) -> Tensor:
        """Return the memory of slots [slots, ...]."""
        return self._shaped(torch.frombuffer(lease.memory_of(run), dtype=torch.uint8), run.slots)

    def staged(self, blocks: int) -> Tensor:
        """Return memory for the contents of blocks that are sent without a window [blocks, ...]."""
        part = self._staging.take(blocks * self._form.block_bytes)
        return self._shaped(torch.from_numpy(part), blocks)

    def _shaped(self, flat: Tensor, blocks: int) -> Tensor:
        return flat.view(self._form.dtype).view(blocks, *self._form.shape)
