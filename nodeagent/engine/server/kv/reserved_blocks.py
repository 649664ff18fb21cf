"""Blocks of the device that are reserved for the contents of a transfer before they arrive.

Reserving blocks waits for another thread. So the next run is reserved while one is written.
"""

from collections.abc import Sequence
from concurrent.futures import Future

from torch import Tensor

from nodeagent.engine.core.generation_thread import GenerationThread
from nodeagent.engine.core.kv_transfers import BlocksToWrite, KvTransfers


class ReservedBlocks:
    """Blocks that a thread other than the step thread fills, beside steps. For one thread."""

    def __init__(
        self,
        worker: GenerationThread,
        transfers: KvTransfers,
        transfer: str,
        digests: Sequence[bytes],
        run_blocks: int,
    ) -> None:
        """`digests` are those of all contents that may arrive. Blocks are reserved in runs of
        `run_blocks`: those that are written now, and those that come next."""
        self._worker = worker
        self._transfers = transfers
        self._transfer = transfer
        self._digests = digests
        self._run_blocks = run_blocks
        self._begun = 0
        """For how many digests blocks are reserved, or soon will be."""
        self._run: BlocksToWrite | None = None
        self._written = 0
        """How many blocks of the run are on the device."""
        self._next = self._reserve_next()

    def write(self, contents: Tensor) -> bool:
        """Copy the next contents [blocks, ...]; return False if no block is free for them."""
        while len(contents):
            run = self._run or self._begin_run()
            if run is None:
                return False
            part = contents[: len(run.digests) - self._written]
            self._transfers.write_held(run, part, self._written)
            self._written += len(part)
            contents = contents[len(part) :]
            if self._written == len(run.digests):
                self._end_run()
        return True

    def close(self) -> None:
        """Let sequences find what is written, and release all other blocks."""
        if self._run is not None:
            self._end_run()
        self._close_writing(0)

    def _begin_run(self) -> BlocksToWrite | None:
        self._run, self._written = self._next.result() if self._next is not None else None, 0
        self._next = self._reserve_next() if self._run is not None else None
        return self._run

    def _end_run(self) -> None:
        self._run = None
        self._close_writing(self._written)

    def _reserve_next(self) -> "Future[BlocksToWrite | None] | None":
        digests = self._digests[self._begun : self._begun + self._run_blocks]
        self._begun += len(digests)
        transfer = self._transfer
        if not digests:
            return None
        return self._worker.call_beside_steps(
            lambda core: core.kv_transfers.open_writing(transfer, digests)
        )

    def _close_writing(self, written: int) -> None:
        # Calls keep their order: the request finds the blocks when it begins.
        transfer = self._transfer
        self._worker.call_beside_steps(
            lambda core: core.kv_transfers.close_writing(transfer, written)
        )
