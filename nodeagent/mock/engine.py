"""Generates numbered tokens ("t0 t1 t2 ...") at a set pace, with faults on request.

A prompt's tokens are its words. Options (`EngineConfig.options`): ttft_ms, itl_ms, kv_tokens,
sequences, fail_load, crash_at_token, hang_at_token, garbage_at_token, error_status, zombie,
memory_full. A request can set the same faults for itself in its field `mock`.
"""

import asyncio
import os
import signal
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from typing import Final, NamedTuple

from isochrone.wire.engine import EngineConfig, EngineStats
from isochrone.wire.errors import ApiError, ErrorCode, context_length_message

BLOCK_WORDS: Final = 16
CACHED_PREFIXES_MAX: Final = 10_000
GARBAGE: Final = "\ufffd\x00\ufffd"


class MockRequest(NamedTuple):
    """A request for `max_tokens` numbered tokens from `first_token` on, after a prompt."""

    prompt_words: Sequence[str]
    first_token: int
    max_tokens: int
    salt: str
    faults: dict[str, float]


class MockToken(NamedTuple):
    """One generated token. `cached` counts the prompt tokens found in the prefix cache."""

    text: str
    cached: int
    is_last: bool


class MockEngine:
    """An engine with a predictable output."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._options = config.options
        self._kv_tokens = int(self._options.get("kv_tokens", "100000"))
        self._slots = asyncio.Semaphore(int(self._options.get("sequences", "64")))
        self._cached_prefixes: OrderedDict[int, None] = OrderedDict()
        self._running = 0
        self._waiting = 0
        self._kv_used = 0
        self._prompt_total = 0
        self._cached_total = 0
        self.tokens_out = 0
        self.last_token_at = time.monotonic()

    async def generate(self, request: MockRequest) -> AsyncGenerator[MockToken, None]:
        """Yield numbered tokens. Raises ApiError if the request is too long or the engine full."""
        prompt_tokens = len(request.prompt_words)
        needed = prompt_tokens + request.max_tokens
        if needed > self._config.context_tokens_max:
            raise ApiError(
                ErrorCode.CONTEXT_LENGTH_EXCEEDED,
                context_length_message(
                    self._config.context_tokens_max,
                    f"you requested {needed} tokens ({prompt_tokens} in the prompt,"
                    f" {request.max_tokens} in the completion)",
                ),
            )
        if self._kv_used + needed > self._kv_tokens or self._waiting >= self._config.waiting_max:
            raise ApiError(
                ErrorCode.OUT_OF_CAPACITY,
                "cannot serve the request: the engine is full",
                retry_after_s=1,
            )
        if self._fault(request, "error_status"):
            raise ApiError(
                ErrorCode.INTERNAL, "cannot serve the request: option error_status is set"
            )
        self._waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self._waiting -= 1
        self._kv_used += needed
        self._running += 1
        try:
            async for token in self._tokens(request):
                yield token
        finally:
            self._running -= 1
            self._kv_used -= needed
            self._slots.release()

    def stats(self) -> EngineStats:
        """Return the engine's statistics."""
        return EngineStats(
            running=self._running,
            waiting=self._waiting,
            kv_blocks_used=-(-self._kv_used // BLOCK_WORDS),
            kv_blocks_total=self._kv_tokens // BLOCK_WORDS,
            prefill_tokens_per_s=10_000.0,
            decode_tokens_per_s=1000.0 / max(1.0, float(self._options.get("itl_ms", "0"))),
            tokens_out_total=self.tokens_out,
            prompt_tokens_total=self._prompt_total,
            prefix_hit_tokens_total=self._cached_total,
            steps_total=self.tokens_out,
            memory_full="memory_full" in self._options,
        )

    async def _tokens(self, request: MockRequest) -> AsyncGenerator[MockToken, None]:
        cached = self._look_up_prefix(request)
        self._prompt_total += len(request.prompt_words)
        self._cached_total += cached
        await asyncio.sleep(self._fault(request, "ttft_ms") / 1000)
        end = request.first_token + request.max_tokens
        for number in range(request.first_token, end):
            if number > request.first_token:
                await asyncio.sleep(self._fault(request, "itl_ms") / 1000)
            if self._fault(request, "crash_at_token", -1) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            if self._fault(request, "hang_at_token", -1) == number or "zombie" in self._options:
                await asyncio.Event().wait()
            self.tokens_out += 1
            self.last_token_at = time.monotonic()
            is_garbage = self._fault(request, "garbage_at_token", -1) == number
            yield MockToken(GARBAGE if is_garbage else f"t{number} ", cached, number == end - 1)

    def _fault(self, request: MockRequest, name: str, default: float = 0.0) -> float:
        """Return a fault's value: the request's, else the engine's, else the default."""
        return float(request.faults.get(name, self._options.get(name, default)))

    def _look_up_prefix(self, request: MockRequest) -> int:
        """Count the prompt words in the prefix cache of this salt, then add the prompt to it."""
        cached = 0
        chain = hash(request.salt)
        is_hit = True
        words = request.prompt_words
        for start in range(0, len(words) - len(words) % BLOCK_WORDS, BLOCK_WORDS):
            chain = hash((chain, *words[start : start + BLOCK_WORDS]))
            is_hit = is_hit and chain in self._cached_prefixes
            cached += BLOCK_WORDS if is_hit else 0
            self._cached_prefixes[chain] = None
            self._cached_prefixes.move_to_end(chain)
        while len(self._cached_prefixes) > CACHED_PREFIXES_MAX:
            self._cached_prefixes.popitem(last=False)
        return cached
