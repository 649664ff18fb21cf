"""Numbered tokens ("t0 t1 t2 ...") at a set pace, with faults on request.

The token after a text that ends in "t41" is t42 where the last message is the assistant's, or the
text a prompt: a continued answer then shows whether a token was lost or repeated. Prompt tokens are
words.

Options (`EngineConfig.options`): ttft_ms, itl_ms, kv_tokens, sequences, fail_load, crash_at_token,
hang_at_token, zombie, memory_full. The same faults may come with a request, in its field `mock`.
"""

import asyncio
import os
import signal
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator
from typing import Final

from isochrone.wire.engine import EngineConfig, EngineHealth, EngineStats
from isochrone.wire.errors import ApiError, ErrorCode
from nodeagent.mock.openai import MAX_TOKENS_DEFAULT, GenerateRequest, Piece, Usage

BLOCK_WORDS: Final = 16
CACHED_PREFIXES_MAX: Final = 10_000
GARBAGE: Final = "\ufffd\x00\ufffd"


class MockEngine:
    """An engine whose every token is known beforehand."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        options = config.options
        self._ttft_s = float(options.get("ttft_ms", "0")) / 1000
        self._itl_s = float(options.get("itl_ms", "0")) / 1000
        self._kv_tokens = int(options.get("kv_tokens", "100000"))
        self._slots = asyncio.Semaphore(int(options.get("sequences", "64")))
        self._prefixes: OrderedDict[int, None] = OrderedDict()
        self._running = 0
        self._waiting = 0
        self._kv_used = 0
        self._tokens_out = 0
        self._prompt_total = 0
        self._cached_total = 0
        self._last_token_at = time.monotonic()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Piece, None]:
        """Yield numbered tokens."""
        words = _words(request)
        wanted = request.max_tokens or MAX_TOKENS_DEFAULT
        needed = len(words) + wanted
        if needed > self._config.context_tokens_max:
            raise ApiError(
                ErrorCode.CONTEXT_LENGTH_EXCEEDED,
                f"cannot serve: {len(words)} prompt tokens and {wanted} more are over the context "
                f"of {self._config.context_tokens_max}",
            )
        if self._kv_used + needed > self._kv_tokens or self._waiting >= self._config.waiting_max:
            raise ApiError(ErrorCode.OUT_OF_CAPACITY, "cannot serve: full", retry_after_s=1)
        status = int(self._fault(request, "error_status"))
        if status:
            raise ApiError(ErrorCode.INTERNAL, "cannot serve: told to fail")
        self._waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self._waiting -= 1
        self._kv_used += needed
        self._running += 1
        try:
            async for piece in self._tokens(request, words, wanted):
                yield piece
        finally:
            self._running -= 1
            self._kv_used -= needed
            self._slots.release()

    def health(self) -> EngineHealth:
        """Say that all is well; a zombie says so too."""
        return EngineHealth(
            status="ok",
            model=self._config.served_name,
            steps=self._tokens_out,
            tokens_out=self._tokens_out,
            last_step_age_s=time.monotonic() - self._last_token_at,
        )

    def stats(self) -> EngineStats:
        """Say how busy it is."""
        return EngineStats(
            running=self._running,
            waiting=self._waiting,
            kv_blocks_used=-(-self._kv_used // BLOCK_WORDS),
            kv_blocks_total=self._kv_tokens // BLOCK_WORDS,
            prefill_tokens_per_s=10_000.0,
            decode_tokens_per_s=1000.0 / max(1.0, self._itl_s * 1000),
            tokens_out_total=self._tokens_out,
            prompt_tokens_total=self._prompt_total,
            prefix_hit_tokens_total=self._cached_total,
            steps_total=self._tokens_out,
            memory_full="memory_full" in self._config.options,
        )

    async def _tokens(
        self, request: GenerateRequest, words: list[str], wanted: int
    ) -> AsyncGenerator[Piece, None]:
        cached = self._cached(request.salt, words)
        self._prompt_total += len(words)
        self._cached_total += cached
        await asyncio.sleep(self._fault(request, "ttft_ms") / 1000 or self._ttft_s)
        first = _next_number(request)
        itl_s = self._fault(request, "itl_ms") / 1000 or self._itl_s
        for index in range(wanted):
            if index:
                await asyncio.sleep(itl_s)
            number = first + index
            await self._misbehave(request, number)
            self._tokens_out += 1
            self._last_token_at = time.monotonic()
            text = f"t{number} "
            if self._has_fault(request, "garbage_at_token", number):
                text = GARBAGE
            is_last = index == wanted - 1
            yield Piece(
                text=text,
                finish_reason="length" if is_last else None,
                usage=Usage(
                    prompt_tokens=len(words), completion_tokens=index + 1, cached_tokens=cached
                ),
            )

    async def _misbehave(self, request: GenerateRequest, number: int) -> None:
        if self._has_fault(request, "crash_at_token", number):
            os.kill(os.getpid(), signal.SIGKILL)
        hangs = self._has_fault(request, "hang_at_token", number)
        if hangs or "zombie" in self._config.options:
            await asyncio.Event().wait()

    def _fault(self, request: GenerateRequest, name: str) -> float:
        return float(request.mock.get(name, self._config.options.get(name, 0.0)))

    def _has_fault(self, request: GenerateRequest, name: str, number: int) -> bool:
        if name in request.mock:
            return request.mock[name] == number
        return self._config.options.get(name) == str(number)

    def _cached(self, salt: bytes, words: list[str]) -> int:
        """Return the words whose blocks were seen before under `salt`, and remember them all."""
        cached = 0
        chain = hash(salt)
        hit = True
        for start in range(0, len(words) - len(words) % BLOCK_WORDS, BLOCK_WORDS):
            chain = hash((chain, *words[start : start + BLOCK_WORDS]))
            hit = hit and chain in self._prefixes
            cached += BLOCK_WORDS if hit else 0
            self._prefixes[chain] = None
            self._prefixes.move_to_end(chain)
        while len(self._prefixes) > CACHED_PREFIXES_MAX:
            self._prefixes.popitem(last=False)
        return cached


def _words(request: GenerateRequest) -> list[str]:
    if request.messages:
        return [word for role, text in request.messages for word in (role, *text.split())]
    if isinstance(request.prompt, tuple):
        return [str(token) for token in request.prompt]
    return request.prompt.split() or [""]


def _next_number(request: GenerateRequest) -> int:
    if request.messages and request.messages[-1][0] != "assistant":
        return 0
    text = request.messages[-1][1] if request.messages else request.prompt
    if not isinstance(text, str):
        return 0
    last = text.split()
    if not last or not last[-1].startswith("t") or not last[-1][1:].isdigit():
        return 0
    return int(last[-1][1:]) + 1
