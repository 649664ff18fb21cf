"""Compiles grammars into constraints, in threads of its own, within limits of work and time.

The compiler is llguidance. On SmolLM2's 49,152 tokens its masks and those of xgrammar both cost
well under a hundredth of a step, but xgrammar compiles for 5 to 460 ms what llguidance compiles in
1 to 5 ms, and every request may bring a new schema (ops/bench/constrain.md). xgrammar also needs
transformers and Triton; llguidance needs nothing else.

Rule 1: the work of compiling and of each mask is limited by fuel, not by a clock, so a hostile
grammar fails at the same point on every machine.
Rule 2: the first mask is computed here, so a grammar that allows no output is refused before the
request runs.
"""

import asyncio
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from isochrone.service.rust_panic import is_rust_panic
from isochrone.wire.errors import ApiError, ErrorCode
from nodeagent.engine.structured.constraint import Constraint, first_line
from nodeagent.engine.structured.grammar import Grammar, GrammarError
from nodeagent.engine.tokenizer.vocabulary import Vocabulary

COMPILE_TIMEOUT_S: Final = 5.0
_THREADS: Final = 2


class GrammarCompiler:
    """Compiles grammars for one vocabulary."""

    def __init__(self, vocabulary: Vocabulary, timeout_s: float = COMPILE_TIMEOUT_S) -> None:
        self._vocabulary = vocabulary
        self._timeout_s = timeout_s
        self._tokenizer: LLTokenizer | None = None
        self._tokenizer_lock = threading.Lock()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="compile")

    async def compile(self, grammar: Grammar) -> Constraint:
        """Compile `grammar`, or raise ApiError with the reason why it cannot be used."""
        if self._tokenizer is None:
            # No part of any grammar's time: on a busy machine it takes seconds.
            await asyncio.wrap_future(self._threads.submit(self._shared_tokenizer))
        work = self._threads.submit(self.compile_now, grammar)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.wrap_future(work)
        except GrammarError as error:
            raise ApiError(ErrorCode.INVALID_REQUEST, str(error), param=grammar.param) from error
        except TimeoutError as error:
            if work.running():
                raise ApiError(
                    ErrorCode.INVALID_REQUEST,
                    f"cannot use field '{grammar.param}': it does not compile within"
                    f" {self._timeout_s:g} s",
                    param=grammar.param,
                ) from error
            raise ApiError(
                ErrorCode.UNAVAILABLE,
                f"cannot compile field '{grammar.param}' now: other grammars are being compiled,"
                " retry later",
                retry_after_s=1.0,
            ) from error

    def compile_now(self, grammar: Grammar) -> Constraint:
        """Compile `grammar` in the calling thread, or raise GrammarError."""
        if not self._vocabulary.stop_ids:
            raise GrammarError(
                f"cannot use field '{grammar.param}': this model has no token that ends an output"
            )
        tokenizer = self._shared_tokenizer()
        try:
            matcher = _matcher(tokenizer, grammar)
        except BaseException as error:
            if is_rust_panic(error):
                reason = f"its compiler failed: {first_line(str(error))}"
                raise GrammarError(f"cannot use field '{grammar.param}': {reason}") from error
            raise
        if matcher.is_error():
            raise GrammarError(
                f"cannot use field '{grammar.param}': {_reason(matcher.get_error())}"
            )
        return Constraint(matcher, self._vocabulary.size, tokenizer.eos_token)

    def close(self) -> None:
        """Start no further compilation."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _shared_tokenizer(self) -> LLTokenizer:
        """Return the vocabulary as llguidance's trie, which takes a third of a second to build."""
        with self._tokenizer_lock:
            if self._tokenizer is None:
                adapter = _TokenizerAdapter(self._vocabulary)
                self._tokenizer = LLTokenizer(
                    TokenizerWrapper(adapter),
                    n_vocab=self._vocabulary.size,
                    eos_token=adapter.stop_ids,
                )
            return self._tokenizer


def _matcher(tokenizer: LLTokenizer, grammar: Grammar) -> LLMatcher:
    """Return the matcher of a grammar with its first mask; it keeps the error of either step."""
    matcher = LLMatcher(tokenizer, grammar.lark, log_level=0, limits=_limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher


class _TokenizerAdapter:
    """The vocabulary with the attributes that llguidance's TokenizerWrapper reads."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        eos_id = vocabulary.tokenizer.token_to_id(vocabulary.eos_token)
        # The model's own EOS comes first: drafts end a finished output with it.
        self.stop_ids = sorted(vocabulary.stop_ids, key=lambda token: (token != eos_id, token))
        self.eos_token_id = self.stop_ids[0]
        self.special_token_ids = sorted(vocabulary.special_ids)
        spelling = vocabulary.tokenizer.id_to_token
        self.tokens = [
            (spelling(token) or "").encode()
            if token in vocabulary.special_ids
            else vocabulary.token_bytes(token)
            for token in range(vocabulary.size)
        ]
        plain = [token for token in range(vocabulary.size) if token not in vocabulary.special_ids]
        self._token_of_byte = {
            self.tokens[token][0]: token for token in plain if len(self.tokens[token]) == 1
        }

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokenise a text that a grammar forces, in the way the model would have written it."""
        raw = text if isinstance(text, bytes) else text.encode()
        # SentencePiece adds a space before the first word of a text, but not after this mark.
        mark = "" if self._vocabulary.byte_level else "\x02"
        tokens = self._vocabulary.encode(mark + raw.decode(errors="replace"), special=False)
        pieces = [self.tokens[token] for token in tokens]
        while pieces and mark and b"".join(pieces) != raw:
            pieces.pop(0)
        if b"".join(pieces) == raw:
            return tokens[len(tokens) - len(pieces) :]
        # A normaliser changed the text, or it ends inside a character: single bytes are exact.
        return [self._token_of_byte[byte] for byte in raw if byte in self._token_of_byte]


def _limits() -> LLParserLimits:
    # 200,000 units of lexer work take 15 to 30 ms for a mask, and a tenth of a second for building
    # the lexer. A lexer state takes 2 kB.
    return LLParserLimits(
        max_items_in_row=5_000,
        initial_lexer_fuel=200_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=20_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def _reason(error: str) -> str:
    """Return the part of a matcher's error that a client can act on."""
    if error.startswith("NoExtension"):
        return "no output can satisfy it"
    # An error in a regex is drawn over several lines; the line "error: ..." gives the reason.
    found = re.search(r"^error: (.{1,300})", error, re.MULTILINE)
    if found:
        return found.group(1)
    plain = error.replace("failed to compile JSON schema: ", "")
    return first_line(re.sub(r"^at \d+\(\d+\): ", "", plain))
