"""A request that waits for its KV, as its engine knows it."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from isochrone.wire.errors import ApiError, ErrorCode
from nodeagent.engine.core.kv_transfers import HeldPrefix
from nodeagent.engine.kvcache.block_pool import BLOCK_TOKENS
from nodeagent.engine.scheduler.sequence import Sequence as TokenSequence
from nodeagent.engine.scheduler.sequence import StopConditions
from nodeagent.engine.server.prepared_request import PreparedRequest
from nodeagent.engine.weights.lora_adapter import prefix_cache_salt


class WaitingPrompt:
    """A request whose KV is being transferred.

    `digests` name its blocks in the prefix cache, `wire_digests` in the transfer.
    """

    def __init__(
        self, tokens: int, digests: Sequence[bytes], wire_digests: Sequence[bytes]
    ) -> None:
        self.tokens = tokens
        self.digests = digests
        self.wire_digests = wire_digests
        self.held = HeldPrefix(0, 0)
        self.shared: list[bytes] = []
        """The digests of the blocks that another replica of the PoP had."""
        self.receiving = asyncio.Lock()
        self.may_begin = asyncio.Event()

    @contextmanager
    def beginning_if_full(self) -> Iterator[None]:
        """Let the request begin if no block is free for one that arrived: none can arrive then."""
        try:
            yield
        except ApiError as error:
            if error.code is ErrorCode.OUT_OF_CAPACITY:
                self.may_begin.set()
            raise


def waiting_prompt(transfer: str, prepared: PreparedRequest) -> WaitingPrompt:
    """Return what is to arrive for a request: of one prompt, all full blocks before its last
    token; of several, nothing.
    """
    tokens = prepared.prompts[0].tokens
    blocks = (len(tokens) - 1) // BLOCK_TOKENS if len(prepared.prompts) == 1 else 0
    own, wire = (
        TokenSequence(
            0, tokens, StopConditions(1, frozenset()), prefix_cache_salt(salt, prepared.adapter)
        ).block_digests(blocks)
        for salt in (prepared.salt, transfer.encode())
    )
    return WaitingPrompt(len(tokens), own, wire)
