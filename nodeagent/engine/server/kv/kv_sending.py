"""The prefill leg: reads a prompt and answers with its KV blocks while later ones are computed.

Rule 1: blocks stay on the device until the receiver takes them. A receiver that disconnects, or
reads nothing for `client_stall_s`, ends the transfer and releases every hold.
Rule 2: a thread of the transfer copies blocks off the device while those before them are sent, and
beside steps where the device allows that (kv_writing.py).
"""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from aiohttp import web
from torch import Tensor

from isochrone.wire.digits import parse_digits
from isochrone.wire.engines.engine import EngineConfig
from isochrone.wire.engines.engine_times import ENGINE_TIMES, EngineTimes, format_times
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.kv import kv_transfer
from isochrone.wire.kv.transfer_frames import TransferEnd, TransferHead
from nodeagent.engine.core.generation import GenerationDelta
from nodeagent.engine.core.generation_thread import GenerationThread
from nodeagent.engine.core.kv_transfers import KvTransfers, OutgoingBlocks
from nodeagent.engine.kvcache.block_pool import BLOCK_TOKENS
from nodeagent.engine.kvcache.tier_setup import KvBlockForm
from nodeagent.engine.sampling.sampler import SamplingParams
from nodeagent.engine.scheduler.sequence import Sequence as TokenSequence
from nodeagent.engine.scheduler.sequence import StopConditions
from nodeagent.engine.server.kv.kv_windows import KvWindows
from nodeagent.engine.server.kv.kv_writing import BlockDestination, BlockWriter
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
    """The count of computed blocks of a prompt, which the step thread reports."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._loop = asyncio.get_running_loop()
        self._clock = clock
        self._changed = threading.Condition()
        self._first = asyncio.Event()
        self._is_over = False
        self._arrived_s = clock()
        self._began_s = self._first_s = 0.0
        self._ended_s = 0.0
        self.blocks = 0

    def record(self, blocks: int, began_s: float) -> None:
        """Note that `blocks` are computed of a prompt that was begun at `began_s`. Called on the
        step thread."""
        is_first = not self.blocks
        if is_first:
            self._began_s, self._first_s = max(began_s, self._arrived_s), self._clock()
        with self._changed:
            self.blocks = blocks
            self._changed.notify()
        if is_first:
            self._loop.call_soon_threadsafe(self._first.set)

    def times(self) -> EngineTimes:
        """Return how the time until the first blocks was spent: those after them follow while the
        answer is sent."""
        return EngineTimes(
            queue=self._began_s - self._arrived_s, prefill=self._first_s - self._began_s
        )

    def end(self) -> None:
        """Note that no more will be computed. The end of the transfer is no later end of that."""
        with self._changed:
            if not self._is_over:
                self._is_over, self._ended_s = True, self._clock()
            self._changed.notify()
        self._first.set()

    def ended_before_s(self) -> float:
        """Return how long ago the prompt was computed."""
        return self._clock() - self._ended_s

    async def has_begun(self) -> bool:
        """Wait until some blocks are computed; False if none will be."""
        await self._first.wait()
        return self.blocks > 0

    def more_than(self, blocks: int) -> bool:
        """Wait until more than `blocks` are computed; False if they never will be. For a thread
        that may wait."""
        with self._changed:
            self._changed.wait_for(lambda: self.blocks > blocks or self._is_over)
            return self.blocks > blocks


@dataclass(eq=False)
class OutgoingReader:
    """Reads the blocks of one prompt, on the thread of its transfer.

    `number` is that of the generation that computes them.
    """

    worker: GenerationThread
    transfers: KvTransfers
    number: int
    outgoing: OutgoingBlocks
    computed: ComputedBlocks

    def read_all(self, writer: BlockWriter, digests: Sequence[bytes]) -> None:
        """Read blocks as they are computed, and have them written. Ends early if the rest will not
        be computed."""
        sent = self.outgoing.first_block
        while sent < len(digests) and self.computed.more_than(sent):
            destination = writer.next_destination(self.computed.blocks - sent)
            writer.put(digests[sent:], self._read(sent, destination), destination)
            sent += destination.blocks

    def _read(self, first: int, destination: BlockDestination) -> Tensor:
        number, transfers = self.number, self.transfers
        if transfers.can_copy_beside_steps:
            blocks = self.outgoing.numbers(first, destination.blocks)
            contents = transfers.read_held(blocks, destination.out)
            if self.outgoing.is_closed:
                raise ConnectionResetError("the transfer was closed")
            self.worker.call(
                lambda core: core.kv_transfers.release_outgoing(number, destination.blocks)
            )
            return contents
        read = self.worker.call(
            lambda core: core.kv_transfers.read_outgoing(
                number, destination.blocks, destination.out
            )
        ).result()
        if read is None:
            raise ConnectionResetError("the transfer was closed")
        return read


class KvSender:
    """Answers prefill legs."""

    def __init__(
        self,
        config: EngineConfig,
        form: KvBlockForm,
        worker: GenerationThread,
        transfers: KvTransfers,
        open_requests: OpenRequests,
        windows: KvWindows,
        ensure_awake: Callable[[], Awaitable[None]],
    ) -> None:
        self._form = form
        self._ensure_awake = ensure_awake
        self._windows = windows
        self._worker = worker
        self._transfers = transfers
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
        digests = TokenSequence(0, tokens, StopConditions(1, frozenset()), salt).block_digests(
            blocks
        )
        head = TransferHead(
            fingerprint=fingerprint,
            block_bytes=self._form.block_bytes,
            first_block=first_block,
            blocks=blocks - first_block,
        )
        computed = ComputedBlocks()
        outgoing = OutgoingBlocks(first_block, blocks, computed.record)
        reading = replace(
            prepared,
            options=_READ_ONLY,
            prompts=[TokenisedPrompt(tokens, StopConditions(1, frozenset()))],
            constraint=None,
            tool_use=None,
            outgoing=outgoing,
        )
        async with self._windows.lease(request.headers.get(kv_transfer.WINDOW, "")) as lease:
            writer = BlockWriter(request, self._windows, lease, self._stall_s)
            # The engine may have gone to sleep while files were read: nothing was in flight.
            await self._ensure_awake()
            opened = self._open_requests.open(self._worker, reading, lambda: None)
            self.open_count += 1
            try:
                number = opened.numbers[0]
                reader = OutgoingReader(self._worker, self._transfers, number, outgoing, computed)
                read = partial(reader.read_all, writer, digests)
                return await self._stream(writer, opened, computed, read, head, raise_failure)
            finally:
                self.open_count -= 1
                self._open_requests.close(self._worker, opened)
                self._worker.call(lambda core: core.kv_transfers.close_outgoing(number))

    async def _stream(
        self,
        writer: BlockWriter,
        opened: OpenRequest,
        computed: ComputedBlocks,
        read: Callable[[], None],
        head: TransferHead,
        raise_failure: RaiseFailure,
    ) -> web.StreamResponse:
        ended = asyncio.create_task(_last_delta(opened, computed))
        try:
            if not await computed.has_begun():
                raise_failure(ended.result())
                raise ConnectionResetError("the prompt was not computed")
            writer.response.headers[ENGINE_TIMES] = format_times(computed.times())
            await writer.begin(head)
            await writer.write_all(read, stop=computed.end)
            last = await ended
            raise_failure(last)
            if computed.blocks < head.first_block + head.blocks:
                raise ConnectionResetError("the prompt was not computed")
            opened.ended = last.finish is not None
            await writer.end(
                TransferEnd(
                    cached_tokens=last.cached_tokens,
                    after_prefill_ms=1000 * computed.ended_before_s(),
                )
            )
            return writer.response
        finally:
            ended.cancel()


def _transfer_of(headers: Mapping[str, str]) -> tuple[str, int]:
    """Return the id of the transfer and its first block. Raises ApiError 400."""
    transfer = headers.get(kv_transfer.TRANSFER, "")
    if not kv_transfer.is_transfer_id(transfer):
        raise invalid_request(kv_transfer.TRANSFER, f"cannot use transfer id {transfer[:40]!r}")
    sent = headers.get(kv_transfer.FIRST_BLOCK, "0")
    first = parse_digits(sent)
    if first is None:
        raise invalid_request(kv_transfer.FIRST_BLOCK, f"cannot use first block {sent[:40]!r}")
    return transfer, first


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
