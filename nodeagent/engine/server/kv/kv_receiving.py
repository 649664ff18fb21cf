"""The decode leg: a request waits until the KV of its prompt has arrived from another engine.

Rule 1: the request knows its own tokens before anything is accepted, and takes no other blocks.
Rule 2: the request begins after any failure: blocks that did not arrive are computed here. After
wrong blocks, or if no block is free, all blocks of that transfer are computed here, at once.
Rule 3: blocks that the PoP shares come first, as a part of the prompt: the request goes on waiting.
If they fill the host tier, those that are there are kept, and the request begins.
Rule 4: blocks are copied to the device while later ones arrive, on the transfer's own thread. Those
in memory and not yet there are bounded (kv_reading.py). In a window they are the sender's, and half
of it at most is copied at once.
Rule 5: copies run beside steps, to blocks that are held before (reserved_blocks.py), and that no
sequence finds before they are complete. Where only the step thread may copy, one copy is made
between two steps, for all transfers together.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Final

import torch
from aiohttp import web

from isochrone.service.network.http_server import json_response
from isochrone.service.windows.received_window import ReceivedWindow, WindowLost, received_window
from isochrone.service.windows.shared_window import MappedWindows
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.kv import kv_sharing, kv_transfer
from isochrone.wire.kv.transfer_frames import WrongTransfer
from nodeagent.engine.core.generation_thread import GenerationThread
from nodeagent.engine.core.kv_transfers import HeldPrefix, KvTransfers
from nodeagent.engine.kvcache.block_pool import BLOCK_TOKENS
from nodeagent.engine.kvcache.staging_memory import StagingMemory
from nodeagent.engine.kvcache.tier_setup import KvBlockForm
from nodeagent.engine.kvcache.transfer_reader import ReceivedBlock, TransferReader
from nodeagent.engine.server.kv.kv_reading import (
    SHARED_BYTES_MAX,
    STORE_BYTES_MAX,
    contents_of,
    read_blocks,
)
from nodeagent.engine.server.kv.reserved_blocks import ReservedBlocks
from nodeagent.engine.server.kv.waiting_prompt import WaitingPrompt, waiting_prompt
from nodeagent.engine.server.openai.request_errors import invalid_request
from nodeagent.engine.server.prepared_request import PreparedRequest

WINDOWS_KEPT_MAX: Final = 8
"""The windows that stay mapped: those of another engine, and of the agent."""

EXPECT_TIMEOUT_S: Final = 30.0
"""How long a description waits for the request that it describes."""


class KvReceiver:
    """The requests that wait for KV, by the id of their transfer."""

    def __init__(
        self,
        form: KvBlockForm,
        worker: GenerationThread,
        transfers: KvTransfers,
        waiting_max: int,
        *,
        staging: StagingMemory,
        host_blocks: int | None = None,
    ) -> None:
        """Blocks arrive in `staging`. Those that the PoP shares are stored in the host tier, if
        there is one, of `host_blocks` blocks."""
        self._staging = staging
        self._windows = MappedWindows(WINDOWS_KEPT_MAX)
        self._form = form
        self._transfers = transfers
        self._host_blocks = host_blocks
        self._worker = worker
        self._waiting_max = waiting_max
        self._waiting: dict[str, WaitingPrompt] = {}
        self._changed = asyncio.Condition()
        self._store_blocks_max = max(1, STORE_BYTES_MAX // form.block_bytes)
        self._shared_blocks_max = max(1, SHARED_BYTES_MAX // form.block_bytes)
        # To hold blocks saves those that are evicted for them, if there is a tier below.
        has_tier = host_blocks is not None
        self._held_blocks_max = self._store_blocks_max if has_tier else self._shared_blocks_max
        self._storing = threading.Lock()
        self.complete_total = 0
        self.wrong_total = 0

    def attach(self, app: web.Application) -> None:
        """Add the routes of transfers."""
        path = kv_transfer.TRANSFERS_PATH + "{transfer}"
        app.router.add_get(path, self._describe, allow_head=False)
        app.router.add_post(path, self._receive)
        app.router.add_delete(path, self._give_up)

    @asynccontextmanager
    async def hold(self, transfer: str, prepared: PreparedRequest) -> AsyncIterator[WaitingPrompt]:
        """Wait for the KV of a request, and hold it on the device while the context is open.

        Raises ApiError if the request cannot wait.
        """
        if not kv_transfer.is_transfer_id(transfer) or transfer in self._waiting:
            raise invalid_request(kv_transfer.TRANSFER, f"cannot use transfer id {transfer[:40]!r}")
        if len(self._waiting) >= self._waiting_max:
            raise ApiError(
                ErrorCode.OUT_OF_CAPACITY,
                f"cannot wait for KV: {len(self._waiting)} requests do, the limit is"
                f" {self._waiting_max}",
                retry_after_s=1.0,
            )
        waiting = waiting_prompt(transfer, prepared)
        try:
            # Calls keep their order, so the transfer is opened before anything is stored. The
            # description need not wait for that.
            self._worker.call_beside_steps(
                lambda core: core.kv_transfers.open_incoming(transfer, waiting.digests)
            )
            waiting.held = self._held(waiting.digests)
            # Before anything is awaited: another request may come with the same id.
            self._waiting[transfer] = waiting
            async with self._changed:
                self._changed.notify_all()
            await waiting.may_begin.wait()
            yield waiting
        finally:
            self._waiting.pop(transfer, None)
            waiting.may_begin.set()
            self.release(transfer)

    @property
    def is_waiting(self) -> bool:
        """Whether any request has yet to get its KV."""
        return any(not waiting.may_begin.is_set() for waiting in self._waiting.values())

    def release(self, transfer: str) -> None:
        """Let go of the blocks: the sequence has been admitted, or is gone."""
        self._worker.call_beside_steps(lambda core: core.kv_transfers.close_incoming(transfer))

    def counts(self) -> dict[str, float]:
        """Return the metrics, by name."""
        return {
            "kv_transfers_waiting": len(self._waiting),
            "kv_transfers_complete_total": self.complete_total,
            "kv_transfers_wrong_total": self.wrong_total,
        }

    async def _describe(self, request: web.Request) -> web.Response:
        """Describe the prompt of a request, as soon as it has been tokenised."""
        transfer = request.match_info["transfer"]
        try:
            async with asyncio.timeout(EXPECT_TIMEOUT_S), self._changed:
                await self._changed.wait_for(lambda: transfer in self._waiting)
        except TimeoutError:
            raise _unknown_transfer() from None
        fingerprint = await self._form.read_fingerprint()
        named = kv_sharing.CHAIN_BLOCKS_MAX if "digests" in request.query else 0
        # The end of a broken transfer may be noticed before this returns: what it brought counts.
        async with self.receiving(transfer) as waiting:
            return json_response(
                kv_transfer.ExpectedPrompt(
                    prompt_tokens=waiting.tokens,
                    blocks=len(waiting.digests),
                    cached_blocks=waiting.held.on_device,
                    held_blocks=waiting.held.in_all_tiers,
                    block_tokens=BLOCK_TOKENS,
                    block_bytes=self._form.block_bytes,
                    digests=tuple(waiting.digests[:named]),
                    kv_format=fingerprint.hex(),
                )
            )

    async def _give_up(self, request: web.Request) -> web.Response:
        """Let a request begin with what has arrived."""
        self.get(request.match_info["transfer"]).may_begin.set()
        return web.Response(status=204)

    async def _receive(self, request: web.Request) -> web.Response:
        """Store the blocks in the body; the request begins once the transfer is complete."""
        transfer = request.match_info["transfer"]
        is_shared = "shared" in request.query
        async with self.receiving(transfer) as waiting:
            try:
                read = self._read_shared if is_shared else self._read
                async with _window_of(request, self._windows) as window:
                    with waiting.beginning_if_full():
                        received = await read(transfer, waiting, request, window)
            except WindowLost as error:
                raise ApiError(ErrorCode.UPSTREAM, str(error)) from error
            except WrongTransfer as error:
                self.wrong_total += 1
                shared = waiting.shared
                self._worker.call_beside_steps(
                    lambda core: core.kv_transfers.close_incoming(
                        transfer, is_wrong=True, shared=shared
                    )
                )
                waiting.may_begin.set()
                raise ApiError(
                    ErrorCode.INVALID_REQUEST, f"cannot use these KV blocks: {error}"
                ) from error
        if not is_shared:
            self.complete_total += 1
            waiting.may_begin.set()
        return json_response(received)

    async def _read(
        self,
        transfer: str,
        waiting: WaitingPrompt,
        request: web.Request,
        window: ReceivedWindow | None,
    ) -> kv_transfer.ReceivedBlocks:
        fingerprint = await self._form.read_fingerprint()
        first = waiting.held.on_device
        reader = TransferReader(
            fingerprint,
            self._form.block_bytes,
            waiting.wire_digests,
            first,
            part_blocks=self._store_blocks_max,
            new_part=self._staging.take,
            window=window.memory if window is not None else None,
        )

        with self.reserve_blocks(transfer, waiting.digests[first:], is_shared=False) as reserved:

            def store(blocks: Sequence[ReceivedBlock]) -> None:
                self._store(transfer, waiting, blocks, reserved)
                _release(window, blocks)

            part_blocks = self._part_blocks(self._store_blocks_max, window)
            least = 0 if window is None else 1
            end = await read_blocks(request.content, reader, part_blocks, store, least, window)
        blocks = len(waiting.digests) - first
        return kv_transfer.ReceivedBlocks(
            blocks=blocks,
            transfer_bytes=blocks * self._form.block_bytes,
            cached_tokens=end.cached_tokens,
            after_prefill_ms=end.after_prefill_ms,
        )

    async def _read_shared(
        self,
        transfer: str,
        waiting: WaitingPrompt,
        request: web.Request,
        window: ReceivedWindow | None,
    ) -> kv_transfer.ReceivedBlocks:
        """Store the blocks that another replica has after those that this engine has."""
        fingerprint = await self._form.read_fingerprint()
        digests, first = waiting.digests, waiting.held.in_all_tiers
        if first >= len(digests):
            raise ApiError(ErrorCode.INVALID_REQUEST, "cannot use KV blocks: none is missing")
        reader = TransferReader(
            fingerprint,
            self._form.block_bytes,
            digests,
            first,
            may_be_shorter=True,
            part_blocks=self._shared_blocks_max,
            new_part=self._staging.take,
            window=window.memory if window is not None else None,
        )

        with self.reserve_blocks(transfer, digests[first:]) as reserved:

            def store(blocks: Sequence[ReceivedBlock]) -> None:
                self._store(transfer, waiting, blocks, reserved, is_shared=True)
                _release(window, blocks)

            part_blocks = self._part_blocks(self._shared_blocks_max, window)
            least = min(part_blocks, self._store_blocks_max) if window is None else 1
            await read_blocks(request.content, reader, part_blocks, store, least, window)
        blocks = reader.next_block - first
        return kv_transfer.ReceivedBlocks(
            blocks=blocks, transfer_bytes=blocks * self._form.block_bytes, cached_tokens=0
        )

    def _store(
        self,
        transfer: str,
        waiting: WaitingPrompt,
        blocks: Sequence[ReceivedBlock],
        reserved: ReservedBlocks | None = None,
        *,
        is_shared: bool = False,
    ) -> None:
        contents = contents_of(blocks, self._form)
        digests = [waiting.digests[block.number] for block in blocks]
        self.store_blocks(transfer, waiting, digests, contents, reserved, is_shared=is_shared)

    def store_blocks(
        self,
        transfer: str,
        waiting: WaitingPrompt,
        digests: Sequence[bytes],
        contents: torch.Tensor,
        reserved: ReservedBlocks | None,
        *,
        is_shared: bool = True,
    ) -> None:
        """Store the next blocks of a waiting prompt, in those `reserved` for them, if any are.
        For any thread but the event loop's.

        Raises ApiError if the prompt is gone, or no block is free: in the host tier, the end of a
        prompt would evict its beginning.
        """
        on_device, held = waiting.held
        sent = len(digests)
        if is_shared and self._host_blocks is not None:
            left = max(0, self._host_blocks - (held - on_device))
            digests, contents = digests[:left], contents[:left]
        if reserved is not None:
            is_stored = reserved.write(contents)
        else:
            transfers = self._transfers
            store = transfers.store_shared if is_shared else transfers.store_incoming
            with self._storing:
                is_stored = self._worker.call(lambda _: store(transfer, digests, contents)).result()
        if is_stored and is_shared:
            waiting.shared += digests
            # Stored on the device, they follow what is cached there.
            stored_on_device = 0 if self._host_blocks is not None else len(digests)
            waiting.held = HeldPrefix(on_device + stored_on_device, held + len(digests))
        if not is_stored or len(digests) < sent:
            raise ApiError(
                ErrorCode.OUT_OF_CAPACITY, "cannot take KV blocks: none is free", retry_after_s=1.0
            )

    @contextmanager
    def reserve_blocks(
        self, transfer: str, digests: Sequence[bytes], *, is_shared: bool = True
    ) -> Iterator[ReservedBlocks | None]:
        """Reserve blocks of the device that this thread may write; None where only the step thread
        may, or where contents go to a tier below."""
        goes_to_device = not (is_shared and self._host_blocks is not None)
        transfers = self._transfers
        if not (goes_to_device and transfers.can_copy_beside_steps):
            yield None
            return
        reserved = ReservedBlocks(self._worker, transfers, transfer, digests, self._held_blocks_max)
        try:
            yield reserved
        finally:
            reserved.close()

    def _part_blocks(self, blocks_max: int, window: ReceivedWindow | None) -> int:
        """Return how many blocks are copied at once: the sender fills the rest of the window."""
        if window is None:
            return blocks_max
        slots = len(window.memory) // self._form.block_bytes
        return max(1, min(self._store_blocks_max, slots // 2))

    def _held(self, digests: Sequence[bytes]) -> HeldPrefix:
        transfers = self._transfers
        return HeldPrefix(transfers.count_on_device(digests), transfers.count_prefix(digests))

    def get(self, transfer: str) -> WaitingPrompt:
        """Return the prompt that waits for a transfer. Raises ApiError 404 if none does."""
        waiting = self._waiting.get(transfer)
        if waiting is None:
            raise _unknown_transfer()
        return waiting

    @asynccontextmanager
    async def receiving(self, transfer: str) -> AsyncIterator[WaitingPrompt]:
        """Yield the prompt that waits for a transfer, while nothing else brings blocks of it.

        Raises ApiError 404 if none waits any more.
        """
        waiting = self.get(transfer)
        # The end of a broken transfer may be noticed after the next one begins.
        async with waiting.receiving:
            if waiting.may_begin.is_set():
                raise _unknown_transfer()
            yield waiting


@asynccontextmanager
async def _window_of(
    request: web.Request, mapped: MappedWindows
) -> AsyncIterator[ReceivedWindow | None]:
    """Yield the window that the agent names, None if it names none. Raises WindowLost."""
    lease = request.headers.get(kv_transfer.WINDOW, "")
    if not lease:
        yield None
        return
    path = request.headers.get(kv_transfer.WINDOW_SOCKET, "")
    async with received_window(path, lease, mapped) as window:
        yield window


def _release(window: ReceivedWindow | None, blocks: Sequence[ReceivedBlock]) -> None:
    """Release the slots of blocks that are on the device."""
    if window is not None:
        window.release(len(blocks))


def _unknown_transfer() -> ApiError:
    return ApiError(ErrorCode.NOT_FOUND, "cannot find this transfer: no request waits for it")
