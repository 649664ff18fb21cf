"""The routes with which the node's agent uses the PoP's store of KV for this engine.

The agent decides what is fetched and stored, because it counts the node's and the tenants' quotas.
The blocks themselves go between this engine and the store.

Rule 1: calls of the store block, and so run on threads of their own, never on the step thread. One
that hangs does not hold up the exit of the process.
Rule 2: blocks are stored after their answer, one chain at a time.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeVar

from aiohttp import web

from isochrone.service.network.http_server import json_response
from isochrone.service.threads import run_to_completion, start_daemon_thread
from isochrone.wire.digits import parse_digits
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.kv import kv_sharing, kv_transfer
from nodeagent.engine.kvcache.store_tier import CALLS_MAX, StoreTier
from nodeagent.engine.kvcache.tier_setup import KvBlockForm
from nodeagent.engine.server.kv.kv_reading import SHARED_BYTES_MAX
from nodeagent.engine.server.kv.kv_receiving import KvReceiver
from nodeagent.engine.server.kv.kv_sharing import KvSharing, read_query

CLOSE_S: Final = 2.0

Result = TypeVar("Result")


class KvStoreRoutes:
    """Looks up, fetches and stores blocks in the PoP's store."""

    def __init__(
        self, form: KvBlockForm, store: StoreTier, receiver: KvReceiver, sharing: KvSharing
    ) -> None:
        self._form = form
        self._store = store
        self._receiver = receiver
        self._sharing = sharing
        self._part_blocks = max(1, SHARED_BYTES_MAX // form.block_bytes)
        # One call more than the store takes at once: it then finds the store empty.
        self._calls = asyncio.Semaphore(CALLS_MAX + 1)
        self._keeping = asyncio.Lock()

    def attach(self, app: web.Application) -> None:
        """Add the routes, and join the store when the server starts."""
        app.on_startup.append(self._start)
        app.on_cleanup.append(self._close)
        app.router.add_post(kv_sharing.STORE_LOCATE_PATH, self._locate)
        app.router.add_post(kv_sharing.STORE_KEEP_PATH, self._keep)
        app.router.add_post(kv_sharing.STORE_FETCH_PATH + "{transfer}", self._fetch)

    async def _start(self, app: web.Application) -> None:
        self._store.start()

    async def _close(self, app: web.Application) -> None:
        await asyncio.to_thread(self._store.close, CLOSE_S)

    async def _locate(self, request: web.Request) -> web.Response:
        """Answer how much of a chain's prefix the store has."""
        digests = await read_query(request)
        blocks = await self._run(self._store.count_prefix, digests)
        return json_response(
            kv_sharing.LocatedBlocks(blocks=blocks, block_bytes=self._form.block_bytes)
        )

    async def _fetch(self, request: web.Request) -> web.Response:
        """Fetch blocks of a waiting prompt, until one is missing or wrong in the store."""
        transfer, text = request.match_info["transfer"], request.query.get("blocks", "")
        wanted = parse_digits(text, 5)
        if wanted is None:
            raise ApiError(ErrorCode.INVALID_REQUEST, f"cannot fetch {text[:40]!r} KV blocks")
        # Blocks that another transfer brings meanwhile would be stored twice.
        async with self._receiver.receiving(transfer) as waiting:
            first = waiting.held.in_all_tiers
            left = waiting.digests[first : first + wanted]
            blocks = 0
            while left:
                contents = await self._run(self._store.read, left[: self._part_blocks])
                count = len(contents)
                if not count:
                    break
                contents = contents.view(self._form.dtype).view(-1, *self._form.shape)
                with (
                    self._receiver.reserve_blocks(transfer, left[:count]) as reserved,
                    waiting.beginning_if_full(),
                ):
                    await run_to_completion(
                        self._receiver.store_blocks,
                        *(transfer, waiting, left[:count], contents, reserved),
                    )
                blocks, left = blocks + count, left[count:]
        received = kv_transfer.ReceivedBlocks(
            blocks=blocks, transfer_bytes=blocks * self._form.block_bytes, cached_tokens=0
        )
        return json_response(received)

    async def _keep(self, request: web.Request) -> web.Response:
        """Store what the store lacks of a chain that this engine has."""
        digests = await read_query(request)
        if self._keeping.locked():
            raise ApiError(
                ErrorCode.OUT_OF_CAPACITY,
                "cannot store KV: another chain is being stored",
                retry_after_s=1.0,
            )
        async with self._keeping:
            stored = await self._store_missing(digests)
        return json_response(
            kv_sharing.LocatedBlocks(blocks=stored, block_bytes=self._form.block_bytes)
        )

    async def _store_missing(self, digests: Sequence[bytes]) -> int:
        """Store blocks, as long as the store takes them and this engine has them; count them."""
        missing: list[bytes] = await self._run(self._store.missing, digests)
        stored = 0
        while missing:
            part = missing[: self._store.part_blocks]
            try:
                contents = await run_to_completion(self._sharing.read_part, part)
            except ConnectionResetError:
                # Evicted since; blocks after a gap are of no use.
                break
            sent = min(len(contents), len(part))
            taken = await self._run(self._store.write, part[:sent], contents[:sent])
            stored += taken
            if taken < sent:
                break
            del missing[:sent]
        return stored

    async def _run(self, function: Callable[..., Result], *arguments: object) -> Result:
        async with self._calls:
            return await start_daemon_thread("kv-store", partial(function, *arguments))
