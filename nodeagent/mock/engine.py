"""Generates numbered tokens ("t0 t1 t2 ...") at a set pace, with faults on request.

A prompt's tokens are its words. Only a request's limits, stop strings, number of answers and tools
(`scripted_calls.py`) change the output. Options (`EngineConfig.options`): ttft_ms, itl_ms,
kv_tokens, sequences, fail_load, out_of_memory_beside, crash_at_token, hang_at_token,
garbage_at_token, error_status (of all requests but the first, which the agent sends), zombie,
memory_full. A request can set the same faults for itself in its field `mock`.
"""

import asyncio
import os
import signal
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from typing import Final, NamedTuple

from isochrone.wire.engines.engine import EngineConfig, EngineStats
from isochrone.wire.errors import ApiError, ErrorCode, context_length_message
from isochrone.wire.http.headers import PRIORITY_DEFAULT
from nodeagent.mock.scripted_calls import MockPiece
from nodeagent.mock.slots import MockPlace, MockSlots
from nodeagent.mock.stop_strings import MockStopStrings

BLOCK_WORDS: Final = 16
CACHED_PREFIXES_MAX: Final = 10_000
GARBAGE: Final = "\ufffd\x00\ufffd"


class MockPrompt(NamedTuple):
    """A prompt as words, and the number of the token that answers to it begin with."""

    words: Sequence[str]
    first_token: int


class MockRequest(NamedTuple):
    """A request for `answers` texts of at most `max_tokens` tokens after each prompt.

    The tokens are numbered, or the pieces of `reply` if there is one.
    """

    prompts: Sequence[MockPrompt]
    answers: int
    max_tokens: int
    stop: Sequence[str]
    salt: str
    faults: dict[str, float]
    priority: int = PRIORITY_DEFAULT
    reply: Sequence[MockPiece] = ()

    @property
    def prompt_tokens(self) -> int:
        """The tokens of all prompts."""
        return sum(len(prompt.words) for prompt in self.prompts)

    @property
    def tokens_each(self) -> int:
        """The tokens of each answer, if no stop string ends it."""
        return min(self.max_tokens, len(self.reply) or self.max_tokens)

    @property
    def finish_reason(self) -> str:
        """Why an answer ends that no stop string ends."""
        if not self.reply or self.max_tokens < len(self.reply):
            return "length"
        return "tool_calls" if self.reply[-1].call else "stop"


class MockToken(NamedTuple):
    """One generated token, of the answer numbered `answer`.

    `visible` is the text to send now: later than the token if it may belong to a stop string.
    `cached` counts the request's prompt tokens found in the prefix cache.
    """

    answer: int
    text: str
    visible: str
    finish_reason: str | None
    cached: int
    piece: MockPiece | None = None


class MockAnswer:
    """One text in the making."""

    def __init__(self, number: int, first_token: int, stop: Sequence[str]) -> None:
        self.number = number
        self.first_token = first_token
        self._stops = MockStopStrings(stop)

    def token(self, text: str, cached: int, *, last_reason: str | None) -> MockToken:
        """Return its next token; the last one has the reason."""
        visible = self._stops.add(text, is_last=last_reason is not None)
        finish_reason = "stop" if self._stops.is_reached else last_reason
        return MockToken(self.number, text, visible, finish_reason, cached)

    def call_token(self, piece: MockPiece, cached: int, last_reason: str | None) -> MockToken:
        """Return its next token, which is a piece of a tool call."""
        return MockToken(self.number, piece.text, "", last_reason, cached, piece)


class MockEngine:
    """An engine with a predictable output."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._options = config.options
        self._kv_tokens = int(self._options.get("kv_tokens", "100000"))
        self._slots = MockSlots(int(self._options.get("sequences", "64")))
        self._cached_prefixes: OrderedDict[int, None] = OrderedDict()
        self._kv_used = 0
        self._is_used = False
        self._prompt_total = 0
        self._cached_total = 0
        self.tokens_out = 0
        self.last_token_at = time.monotonic()

    async def generate(self, request: MockRequest) -> AsyncGenerator[MockToken, None]:
        """Yield numbered tokens. Raises ApiError if the request is too long or the engine full."""
        prompt_tokens = max(len(prompt.words) for prompt in request.prompts)
        longest = prompt_tokens + request.max_tokens
        outputs = len(request.prompts) * request.answers * request.max_tokens
        needed = request.prompt_tokens + outputs
        if longest > self._config.context_tokens_max:
            raise ApiError(
                ErrorCode.CONTEXT_LENGTH_EXCEEDED,
                context_length_message(
                    self._config.context_tokens_max,
                    f"you requested {longest} tokens ({prompt_tokens} in the prompt,"
                    f" {request.max_tokens} in the completion)",
                ),
            )
        is_full = self._slots.waiting >= self._config.waiting_max
        if self._kv_used + needed > self._kv_tokens or is_full:
            raise ApiError(
                ErrorCode.OUT_OF_CAPACITY,
                "cannot serve the request: the engine is full",
                retry_after_s=1,
            )
        if (self._is_used or request.faults) and self._fault(request, "error_status"):
            raise ApiError(
                ErrorCode.INTERNAL, "cannot serve the request: option error_status is set"
            )
        self._is_used = True
        with self._slots.join(request.priority) as place:
            await place.granted.wait()
            self._kv_used += needed
            try:
                async for token in self._tokens(request, place):
                    yield token
            finally:
                self._kv_used -= needed

    def stats(self) -> EngineStats:
        """Return the engine's statistics."""
        return EngineStats(
            running=self._slots.running,
            waiting=self._slots.waiting,
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

    async def _tokens(
        self, request: MockRequest, place: MockPlace
    ) -> AsyncGenerator[MockToken, None]:
        """Yield the tokens of all answers in turn, while the request has its place."""
        cached = sum(self._look_up_prefix(prompt, request.salt) for prompt in request.prompts)
        self._prompt_total += request.prompt_tokens
        self._cached_total += cached
        prompts = [prompt for prompt in request.prompts for _ in range(request.answers)]
        answers = [
            MockAnswer(number, prompt.first_token, request.stop)
            for number, prompt in enumerate(prompts)
        ]
        await asyncio.sleep(self._fault(request, "ttft_ms") / 1000)
        for step in range(request.tokens_each):
            if step:
                await asyncio.sleep(self._fault(request, "itl_ms") / 1000)
            await place.granted.wait()
            reason = request.finish_reason if step == request.tokens_each - 1 else None
            for answer in list(answers):
                text = await self._text(request, answer.first_token + step)
                piece = request.reply[step] if request.reply else None
                if piece and piece.call:
                    token = answer.call_token(piece, cached, reason)
                else:
                    text = piece.text if piece else text
                    token = answer.token(text, cached, last_reason=reason)
                if token.finish_reason:
                    answers.remove(answer)
                yield token
            if not answers:
                return

    async def _text(self, request: MockRequest, number: int) -> str:
        """Return the text of a token, or show the fault that is set for its number."""
        if self._fault(request, "crash_at_token", -1) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._fault(request, "hang_at_token", -1) == number or "zombie" in self._options:
            await asyncio.Event().wait()
        self.tokens_out += 1
        self.last_token_at = time.monotonic()
        is_garbage = self._fault(request, "garbage_at_token", -1) == number
        return GARBAGE if is_garbage else f"t{number} "

    def _fault(self, request: MockRequest, name: str, default: float = 0.0) -> float:
        """Return a fault's value: the request's, else the engine's, else the default."""
        return float(request.faults.get(name, self._options.get(name, default)))

    def _look_up_prefix(self, prompt: MockPrompt, salt: str) -> int:
        """Count the prompt words in the prefix cache of this salt, then add the prompt to it."""
        cached = 0
        chain = hash(salt)
        is_hit = True
        words = prompt.words
        for start in range(0, len(words) - len(words) % BLOCK_WORDS, BLOCK_WORDS):
            chain = hash((chain, *words[start : start + BLOCK_WORDS]))
            is_hit = is_hit and chain in self._cached_prefixes
            cached += BLOCK_WORDS if is_hit else 0
            self._cached_prefixes[chain] = None
            self._cached_prefixes.move_to_end(chain)
        while len(self._cached_prefixes) > CACHED_PREFIXES_MAX:
            self._cached_prefixes.popitem(last=False)
        return cached
