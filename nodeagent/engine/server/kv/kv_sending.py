"""The prefill leg: reads a prompt and answers with its KV blocks while later ones are computed.

Rule 1: blocks stay on the device until the receiver takes them. A receiver that disconnects, or
reads nothing for `client_stall_s`, ends the transfer and releases every hold.
Rule 2: blocks are copied off the device while those before them are sent. Copied bytes that are not
yet sent are bounded by twice PART_BYTES per transfer, or by the transfer's window.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from aiohttp import web
from torch import Tensor

from isochrone.service.threads import run_to_completion
from isochrone.wire.engines.engine import EngineConfig
from isochrone.wire.engines.engine_times import ENGINE_TIMES, EngineTimes, format_times
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.kv import kv_transfer
from nodeagent.engine.core.generation import GenerationDelta
from nodeagent.engine.core.generation_thread import GenerationThread, settled
from nodeagent.engine.core.kv_transfers import OutgoingBlocks
from nodeagent.engine.core.step import EngineCore
from nodeagent.engine.kvcache.block_pool import BLOCK_TOKENS
from nodeagent.engine.kvcache.tier_setup import KvBlockForm
from nodeagent.engine.kvcache.transfer_frames import TransferEnd, TransferHead
from nodeagent.engine.sampling.sampler import SamplingParams
from nodeagent.engine.scheduler.sequence import Sequence, StopConditions
from nodeagent.engine.server.kv.kv_windows import KvWindows
from nodeagent.engine.server.kv.kv_writing import BlockRoom, BlockWriter, ReadPart
from nodeagent.engine.server.open_requests import OpenRequest, OpenRequests
from nodeagent.engine.server.openai.generation_options import GenerationOptions
from nodeagent.engine.server.openai.request_errors import invalid_request
from nodeagent.engine.server.prepared_request import PreparedRequest, TokenisedPrompt
from nodeagent.engine.weights.lora_adapter import prefix_cache_salt

_READ_ONLY: Final = GenerationOptions(
    params=SamplingParams(temperature=0),
    max_tokens=1,
    stops=(),
    stop_ids=frozenset(),
    ignore_eos=True,
    stream=False,
    include_usage=False,
    speculate=False,
)
"""Read the prompt; the one token that a prompt always yields is dropped."""

RaiseFailure = Callable[[GenerationDelta], None]


class ComputedBlocks:
    """The count of computed blocks of a prompt, which the step thread reports to the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._is_over = False
        self._arrived_s = time.monotonic()
        self._began_s = self._first_s = 0.0
        self.ended_s = 0.0
        self.blocks = 0

    def record(self, blocks: int, began_s: float) -> None:
        """Note that `blocks` are computed of a prompt that was begun at `began_s`. Called on the
        step thread."""
        if not self._first_s:
            self._began_s, self._first_s = max(began_s, self._arrived_s), time.monotonic()
        self._loop.call_soon_threadsafe(self._set, blocks)

    def times(self) -> EngineTimes:
        """Return how the time until the first blocks was spent: those after them follow while the
        answer is sent."""
        return EngineTimes(
            queue=self._began_s - self._arrived_s, prefill=self._first_s - self._began_s
        )

    def end(self) -> None:
        """Note that no more will be computed."""
        self._is_over, self.ended_s = True, time.monotonic()
        self._changed.set()

    async def more_than(self, blocks: int) -> bool:
        """Wait until more than `blocks` are computed; False if they never will be."""
        while self.blocks <= blocks and not self._is_over:
            self._changed.clear()
            await self._changed.wait()
        return self.blocks > blocks

    def _set(self, blocks: int) -> None:
        self.blocks = blocks
        self._changed.set()


class KvSender:
    """Answers prefill legs."""

    def __init__(
        self,
        config: EngineConfig,
        form: KvBlockForm,
        worker: GenerationThread,
        open_requests: OpenRequests,
        windows: KvWindows,
    ) -> None:
        self._form = form
        self._windows = windows
        self._worker = worker
        self._open_requests = open_requests
        self._stall_s = config.client_stall_s
        self.open_count = 0
        """How many legs are being answered."""

    async def send(
        self, request: web.Request, prepared: PreparedRequest, raise_failure: RaiseFailure
    ) -> web.StreamResponse:
        """Read the prompt, and stream its blocks from the first that the receiver lacks."""
        transfer, first_block = _transfer_of(request.headers)
        fingerprint = await self._form.read_fingerprint()
        check_format(request.headers, fingerprint)
        if len(prepared.prompts) != 1:
            raise invalid_request("prompt", "cannot send the KV of several prompts")
        # The receiver computes the last token, so its block need not be full.
        tokens = prepared.prompts[0].tokens
        tokens = tokens[: (len(tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS]
        blocks = len(tokens) // BLOCK_TOKENS
        if first_block >= blocks:
            raise invalid_request(
                kv_transfer.FIRST_BLOCK, f"cannot send block {first_block}: there are {blocks}"
            )
        salt = prefix_cache_salt(transfer.encode(), prepared.adapter)
        digests = Sequence(0, tokens, StopConditions(1, frozenset()), salt).block_digests(blocks)
        head = TransferHead(
            fingerprint=fingerprint,
            block_bytes=self._form.block_bytes,
            first_block=first_block,
            blocks=blocks - first_block,
        )
        computed = ComputedBlocks()
        reading = replace(
            prepared,
            options=_READ_ONLY,
            prompts=[TokenisedPrompt(tokens, StopConditions(1, frozenset()))],
            constraint=None,
            tool_use=None,
            outgoing=OutgoingBlocks(first_block, blocks, computed.record),
        )
        async with self._windows.lease(request.headers.get(kv_transfer.WINDOW, "")) as lease:
            writer = BlockWriter(request, self._windows, lease, self._stall_s)
            opened = self._open_requests.open(self._worker, reading, lambda: None)
            self.open_count += 1
            try:
                return await self._stream(writer, opened, computed, digests, head, raise_failure)
            finally:
                self.open_count -= 1
                self._open_requests.close(self._worker, opened)
                number = opened.numbers[0]
                self._worker.call(lambda core: _close_outgoing(core, number))

    async def _stream(
        self,
        writer: BlockWriter,
        opened: OpenRequest,
        computed: ComputedBlocks,
        digests: list[bytes],
        head: TransferHead,
        raise_failure: RaiseFailure,
    ) -> web.StreamResponse:
        ended = asyncio.create_task(_last_delta(opened, computed))
        number, total = opened.numbers[0], len(digests)

        def read_from(first: int) -> asyncio.Task[ReadPart | None]:
            return asyncio.create_task(self._read_next(writer, number, computed, digests, first))

        reading = read_from(head.first_block)
        try:
            sent = head.first_block
            while sent < total:
                part = await reading
                if part is None:
                    raise_failure(ended.result())
                    raise ConnectionResetError("the prompt was not computed")
                if sent == head.first_block:
                    writer.response.headers[ENGINE_TIMES] = format_times(computed.times())
                    await writer.begin(head)
                sent += part.blocks
                reading = read_from(sent)
                await writer.write(part)
            last = await ended
            raise_failure(last)
            opened.ended = last.finish is not None
            after_ms = 1000 * (time.monotonic() - computed.ended_s)
            await writer.end(
                TransferEnd(cached_tokens=last.cached_tokens, after_prefill_ms=after_ms)
            )
            return writer.response
        finally:
            ended.cancel()
            reading.cancel()
            await asyncio.wait({reading})

    async def _read_next(
        self,
        writer: BlockWriter,
        number: int,
        computed: ComputedBlocks,
        digests: list[bytes],
        first: int,
    ) -> ReadPart | None:
        """Wait for blocks from number `first` on, and copy them off the device.

        None if there are no more, or will not be.
        """
        if first >= len(digests) or not await computed.more_than(first):
            return None
        room = await writer.room(computed.blocks - first)
        call = self._worker.call(lambda core: _read_outgoing(core, number, room))
        contents = await settled(call)
        if contents is None:
            raise ConnectionResetError("the transfer was closed")
        return await run_to_completion(writer.encode, digests[first:], contents, room)


def _transfer_of(headers: Mapping[str, str]) -> tuple[str, int]:
    """Return the id of the transfer and its first block. Raises ApiError 400."""
    transfer = headers.get(kv_transfer.TRANSFER, "")
    if not kv_transfer.is_transfer_id(transfer):
        raise invalid_request(kv_transfer.TRANSFER, f"cannot use transfer id {transfer[:40]!r}")
    first = headers.get(kv_transfer.FIRST_BLOCK, "0")
    if not (first.isascii() and first.isdigit() and len(first) <= 9):
        raise invalid_request(kv_transfer.FIRST_BLOCK, f"cannot use first block {first[:40]!r}")
    return transfer, int(first)


def check_format(headers: Mapping[str, str], fingerprint: bytes) -> None:
    """Raise ApiError 409 if the receiver says that it has another model or KV format."""
    wanted = headers.get(kv_transfer.KV_FORMAT, "")
    if wanted and wanted != fingerprint.hex():
        raise ApiError(
            ErrorCode.CONFLICT,
            f"cannot send KV blocks: the receiver's model or KV format is {wanted[:40]!r}, here it"
            f" is {fingerprint.hex()!r}",
        )


async def _last_delta(opened: OpenRequest, computed: ComputedBlocks) -> GenerationDelta:
    """Return the only delta of a prompt that is read, at its end."""
    delta = await opened.deltas.get()
    computed.end()
    return delta


def _close_outgoing(core: EngineCore, number: int) -> None:
    if core.kv_transfers is not None:
        core.kv_transfers.close_outgoing(number)


def _read_outgoing(core: EngineCore, number: int, room: BlockRoom) -> Tensor | None:
    transfers = core.kv_transfers
    return transfers.read_outgoing(number, room.blocks, room.out) if transfers is not None else None
