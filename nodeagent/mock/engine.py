"""Numbered tokens ("t0 t1 t2 ...") at a set pace, with faults on request. A prompt's are its words.

Options (`EngineConfig.options`): ttft_ms, itl_ms, kv_tokens, sequences, fail_load, crash_at_token,
hang_at_token, garbage_at_token, error_status, zombie, memory_full. The same faults may come with a
request, in its field `mock`.
"""

import asyncio
import os
import signal
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from typing import Final, NamedTuple

from isochrone.wire.engine import EngineConfig, EngineStats
from isochrone.wire.errors import ApiError, ErrorCode

BLOCK_WORDS: Final = 16
CACHED_PREFIXES_MAX: Final = 10_000
GARBAGE: Final = "\ufffd\x00\ufffd"


class MockRequest(NamedTuple):
    """What the engine is asked for: so many tokens from `first` on, after these words."""

    words: Sequence[str]
    first: int
    max_tokens: int
    salt: str
    faults: dict[str, float]


class MockToken(NamedTuple):
    """One token of an answer, how many of its prompt were cached, and whether it is the last."""

    text: str
    cached: int
    is_last: bool


class MockEngine:
    """An engine whose every token is known beforehand."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._options = config.options
        self._kv_tokens = int(self._options.get("kv_tokens", "100000"))
        self._slots = asyncio.Semaphore(int(self._options.get("sequences", "64")))
        self._prefixes: OrderedDict[int, None] = OrderedDict()
        self._running = 0
        self._waiting = 0
        self._kv_used = 0
        self._prompt_total = 0
        self._cached_total = 0
        self.tokens_out = 0
        self.last_token_at = time.monotonic()

    async def generate(self, asked: MockRequest) -> AsyncGenerator[MockToken, None]:
        """Yield numbered tokens."""
        needed = len(asked.words) + asked.max_tokens
        if needed > self._config.context_tokens_max:
            raise ApiError(
                ErrorCode.CONTEXT_LENGTH_EXCEEDED,
                f"cannot serve: {len(asked.words)} prompt tokens and {asked.max_tokens} more are "
                f"over the context of {self._config.context_tokens_max}",
            )
        if self._kv_used + needed > self._kv_tokens or self._waiting >= self._config.waiting_max:
            raise ApiError(ErrorCode.OUT_OF_CAPACITY, "cannot serve: full", retry_after_s=1)
        if self._fault(asked, "error_status"):
            raise ApiError(ErrorCode.INTERNAL, "cannot serve: told to fail")
        self._waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self._waiting -= 1
        self._kv_used += needed
        self._running += 1
        try:
            async for piece in self._tokens(asked):
                yield piece
        finally:
            self._running -= 1
            self._kv_used -= needed
            self._slots.release()

    def stats(self) -> EngineStats:
        """Say how busy it is."""
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

    async def _tokens(self, asked: MockRequest) -> AsyncGenerator[MockToken, None]:
        cached = self._cached(asked)
        self._prompt_total += len(asked.words)
        self._cached_total += cached
        await asyncio.sleep(self._fault(asked, "ttft_ms") / 1000)
        end = asked.first + asked.max_tokens
        for number in range(asked.first, end):
            if number > asked.first:
                await asyncio.sleep(self._fault(asked, "itl_ms") / 1000)
            if self._fault(asked, "crash_at_token", -1) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            if self._fault(asked, "hang_at_token", -1) == number or "zombie" in self._options:
                await asyncio.Event().wait()
            self.tokens_out += 1
            self.last_token_at = time.monotonic()
            is_garbage = self._fault(asked, "garbage_at_token", -1) == number
            yield MockToken(GARBAGE if is_garbage else f"t{number} ", cached, number == end - 1)

    def _fault(self, asked: MockRequest, name: str, none: float = 0.0) -> float:
        return float(asked.faults.get(name, self._options.get(name, none)))

    def _cached(self, asked: MockRequest) -> int:
        """Return the words whose blocks were seen with this salt before, and remember them all."""
        cached = 0
        chain = hash(asked.salt)
        hit = True
        for start in range(0, len(asked.words) - len(asked.words) % BLOCK_WORDS, BLOCK_WORDS):
            chain = hash((chain, *asked.words[start : start + BLOCK_WORDS]))
            hit = hit and chain in self._prefixes
            cached += BLOCK_WORDS if hit else 0
            self._prefixes[chain] = None
            self._prefixes.move_to_end(chain)
        while len(self._prefixes) > CACHED_PREFIXES_MAX:
            self._prefixes.popitem(last=False)
        return cached
