"""Shares this engine's KV blocks with other replicas of the PoP, and keeps copies of theirs.

Rule 1: a block is named by its digest alone, which cannot be guessed without the tenant's salt and
the tokens. The size of a request is bounded, and so is the number of streams at a time.
Rule 2: blocks are held while they are copied to the host, SHARED_BYTES_MAX at a time, and as many
that come next; those of a receiver that takes nothing are let go of after `client_stall_s`. A block
that is evicted before it is held ends the stream.
Rule 3: neither a question nor a stream waits for a step, where any thread may read the device:
blocks are held and copied while steps run. Elsewhere they are read between two steps.
Rule 4: blocks to be kept are checked like those of a transfer, and stored below the device where
there are such tiers. They evict nothing that this engine computed.
"""

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Final

import msgspec
import torch
from aiohttp import web
from torch import Tensor

from isochrone.service.network.http_server import json_response
from isochrone.wire.digits import parse_digits
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.kv import kv_sharing, kv_transfer
from isochrone.wire.kv.transfer_frames import TransferEnd, TransferHead, WrongTransfer
from nodeagent.engine.core.generation_thread import GenerationThread
from nodeagent.engine.core.kv_transfers import KvTransfers
from nodeagent.engine.kvcache.file_tier import FileTier
from nodeagent.engine.kvcache.staging_memory import StagingMemory
from nodeagent.engine.kvcache.tier_setup import KvBlockForm
from nodeagent.engine.kvcache.transfer_reader import ReceivedBlock, TransferReader
from nodeagent.engine.server.kv.kv_reading import (
    SHARED_BYTES_MAX,
    STORE_BYTES_MAX,
    contents_of,
    read_blocks,
)
from nodeagent.engine.server.kv.kv_sending import check_format
from nodeagent.engine.server.kv.kv_windows import KvWindows
from nodeagent.engine.server.kv.kv_writing import BlockWriter

STREAMS_MAX: Final = 8
"""Streams of shared blocks at a time, in both directions together."""

_QUERY: Final = msgspec.msgpack.Decoder(kv_sharing.BlockQuery)


class KvSharing:
    """The routes with which the node's agent shares this engine's KV."""

    def __init__(
        self,
        form: KvBlockForm,
        worker: GenerationThread,
        transfers: KvTransfers,
        files: FileTier | None,
        windows: KvWindows,
        staging: StagingMemory,
        stall_s: float,
    ) -> None:
        """Blocks to be kept arrive in `staging`."""
        self._staging = staging
        self._form = form
        self._windows = windows
        self._worker = worker
        self._transfers = transfers
        self._part_blocks = max(1, SHARED_BYTES_MAX // form.block_bytes)
        # Whole parts: a rest of a block or two would be a part of its own.
        rest = self._part_blocks % windows.part_blocks
        self._held_blocks = max(windows.part_blocks, self._part_blocks - rest)
        self._readers = itertools.count()
        self._files = files
        self._stall_s = stall_s
        self._streams = 0
        self.shared_blocks_total = 0
        self.kept_blocks_total = 0

    def attach(self, app: web.Application) -> None:
        """Add the routes."""
        app.router.add_post(kv_sharing.LOCATE_PATH, self._locate)
        app.router.add_post(kv_sharing.BLOCKS_PATH, self._send)
        app.router.add_post(kv_sharing.KEEP_PATH, self._keep)

    def counts(self) -> dict[str, float]:
        """Return the metrics, by name."""
        return {
            "kv_shared_blocks_total": self.shared_blocks_total,
            "kv_kept_blocks_total": self.kept_blocks_total,
        }

    async def _locate(self, request: web.Request) -> web.Response:
        """Answer how much of a chain's prefix this engine has."""
        digests = await read_query(request)
        fingerprint = await self._form.read_fingerprint()
        located = kv_sharing.LocatedBlocks(
            blocks=self._transfers.count_prefix(digests),
            block_bytes=self._form.block_bytes,
            keep_blocks_max=self._transfers.keep_blocks_max,
            kv_format=fingerprint.hex(),
        )
        return json_response(located)

    async def _send(self, request: web.Request) -> web.StreamResponse:
        """Stream the blocks of a chain's prefix, from the first that the receiver lacks."""
        digests = await read_query(request)
        sent = request.headers.get(kv_transfer.FIRST_BLOCK, "0")
        first = parse_digits(sent)
        if first is None:
            raise ApiError(ErrorCode.INVALID_REQUEST, f"cannot use first block {sent[:40]!r}")
        fingerprint = await self._form.read_fingerprint()
        check_format(request.headers, fingerprint)
        blocks = self._transfers.count_prefix(digests)
        if not blocks:
            raise ApiError(ErrorCode.NOT_FOUND, "cannot share these KV blocks: none is here")
        self._take_stream()
        try:
            head = TransferHead(
                fingerprint=fingerprint,
                block_bytes=self._form.block_bytes,
                first_block=first,
                blocks=blocks,
            )
            async with self._windows.lease(request.headers.get(kv_transfer.WINDOW, "")) as lease:
                writer = BlockWriter(request, self._windows, lease, self._stall_s)
                await writer.begin(head)
                await writer.write_all(partial(self._read_all, writer, digests[:blocks]))
                await writer.end(TransferEnd(cached_tokens=0))
            if kv_sharing.COPY not in request.headers:
                self._worker.call_beside_steps(
                    lambda core: core.kv_transfers.demote(digests[:blocks])
                )
            return writer.response
        finally:
            self._streams -= 1

    def _read_all(self, writer: BlockWriter, digests: Sequence[bytes]) -> None:
        """Read blocks for a stream, on its thread."""
        left = list(digests)
        with ExitStack() as ahead:
            hold = self._hold(left, ahead)
            while left:
                held = hold.result() if hold is not None else []
                earlier, ahead_of = ahead.pop_all(), left[len(held) :]
                with earlier:
                    # The next part is held meanwhile.
                    hold = self._hold(ahead_of, ahead) if held else None
                    sent = self._read_held(writer, left, held) or self._read_next(writer, left)
                self.shared_blocks_total += sent
                del left[:sent]
                if not held:
                    hold = self._hold(left, ahead)

    def _hold(self, digests: Sequence[bytes], until: ExitStack) -> "Future[list[int]] | None":
        """Have the first of these blocks held that any thread may read; None if there are none."""
        if not self._transfers.count_on_device(digests[:1]):
            return None
        return until.enter_context(self._held(digests[: self._held_blocks]))

    def _read_held(self, writer: BlockWriter, digests: Sequence[bytes], held: list[int]) -> int:
        """Read blocks that are held, while steps run; return how many that were."""
        read = 0
        while read < len(held):
            destination = writer.next_destination(len(held) - read)
            blocks = held[read : read + destination.blocks]
            contents = self._transfers.read_held(blocks, destination.out)
            writer.put(digests[read:], contents, destination)
            read += len(blocks)
        return read

    def _read_next(self, writer: BlockWriter, digests: Sequence[bytes]) -> int:
        """Read the first of these blocks between two steps; return how many that were."""
        destination = writer.next_destination(len(digests))
        contents = self._read_between_steps(digests[: destination.blocks])
        writer.put(digests, contents, destination)
        return len(contents)

    def read_part(self, digests: Sequence[bytes]) -> Tensor:
        """Return the first of these blocks [blocks, ...], at least one. For any thread but the
        event loop's.

        Raises ConnectionResetError if the first is in no tier any more.
        """
        if self._transfers.count_on_device(digests[:1]):
            with self._held(digests) as holding:
                if held := holding.result():
                    return self._transfers.read_held(held)
        return self._read_between_steps(digests)

    @contextmanager
    def _held(self, digests: Sequence[bytes]) -> "Iterator[Future[list[int]]]":
        """Hold the blocks of a chain's prefix that any thread may read; yield their numbers, once
        the step thread has them."""
        reader = next(self._readers)
        try:
            yield self._worker.call_beside_steps(
                lambda core: core.kv_transfers.open_reading(reader, digests)
            )
        finally:
            # Calls keep their order: this one comes after the one above.
            self._worker.call_beside_steps(lambda core: core.kv_transfers.close_reading(reader))

    def _read_between_steps(self, digests: Sequence[bytes]) -> Tensor:
        """Return the first of these blocks [blocks, ...], at least one."""
        contents = self._worker.call(lambda core: core.kv_transfers.read_prefix(digests)).result()
        if contents is not None:
            return contents
        content = self._files.read(digests[0]) if self._files is not None else None
        if content is None:
            raise ConnectionResetError("a shared KV block was evicted")
        return torch.frombuffer(content, dtype=self._form.dtype).view(1, *self._form.shape)

    async def _keep(self, request: web.Request) -> web.Response:
        """Store the blocks in the body, which begins with their digests."""
        count = request.headers.get(kv_sharing.DIGEST_COUNT, "")
        blocks = parse_digits(count) or 0
        if not 0 < blocks <= kv_sharing.CHAIN_BLOCKS_MAX:
            raise ApiError(ErrorCode.INVALID_REQUEST, f"cannot keep {count[:40]!r} KV blocks")
        self._take_stream()
        try:
            kept = await self._store(request, blocks)
        except (WrongTransfer, asyncio.IncompleteReadError) as error:
            raise ApiError(
                ErrorCode.INVALID_REQUEST, f"cannot use these KV blocks: {error}"
            ) from error
        finally:
            self._streams -= 1
        return json_response(
            kv_sharing.LocatedBlocks(blocks=kept, block_bytes=self._form.block_bytes)
        )

    async def _store(self, request: web.Request, blocks: int) -> int:
        """Store the blocks of a stream; return how many came."""
        size = kv_sharing.DIGEST_BYTES
        names = await request.content.readexactly(blocks * size)
        digests = [names[start : start + size] for start in range(0, len(names), size)]
        fingerprint = await self._form.read_fingerprint()
        reader = TransferReader(
            fingerprint,
            self._form.block_bytes,
            digests,
            0,
            may_be_shorter=True,
            part_blocks=self._part_blocks,
            new_part=self._staging.take,
        )

        def store(arrived: Sequence[ReceivedBlock]) -> None:
            contents = contents_of(arrived, self._form)
            named = [digests[block.number] for block in arrived]
            self._worker.call(lambda core: core.kv_transfers.keep(named, contents)).result()
            self.kept_blocks_total += len(named)

        least = max(1, STORE_BYTES_MAX // self._form.block_bytes)
        await read_blocks(request.content, reader, self._part_blocks, store, least)
        return reader.next_block

    def _take_stream(self) -> None:
        """Count a stream. Raises ApiError 429 if there are too many."""
        if self._streams >= STREAMS_MAX:
            raise ApiError(
                ErrorCode.OUT_OF_CAPACITY,
                f"cannot share KV: {STREAMS_MAX} streams are open",
                retry_after_s=1.0,
            )
        self._streams += 1


async def read_query(request: web.Request) -> tuple[bytes, ...]:
    """Read a query. Raises ApiError 400."""
    if (request.content_length or 0) > kv_sharing.QUERY_BYTES_MAX:
        raise ApiError(ErrorCode.INVALID_REQUEST, "cannot use this query: it is too long")
    try:
        return _QUERY.decode(await request.read()).digests
    except msgspec.DecodeError as error:
        raise ApiError(ErrorCode.INVALID_REQUEST, f"cannot use this query: {error}") from error
